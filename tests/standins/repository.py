"""Builds the demo's model repository with the models of the tests in it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from triton_openai.companion.repository import config_text, model_code
from triton_openai.demo import repository
from triton_openai.demo.configs import Contract, render
from triton_openai.demo.repository import (
    BUILDERS,
    CONTEXT_LENGTH,
    LEGACY_PIPELINE,
    PIPELINE,
    Builder,
    DemoRepository,
    Site,
    llmapi,
    vllm,
)

_HERE = Path(__file__).parent
#: What the classifiers tell apart.
CLASSES = ("a question", "an answer", "a greeting")

# Token ids, as of an exported model.
_PADDED = ["input_ids INT64 [-1,-1]", "attention_mask INT64 [-1,-1]"]
# As somebody may write it, with an input for every parameter that the adapter `text` knows.
_TEXT_MODEL = Contract(
    [
        "PROMPT STRING [1]",
        *(f"{name}? INT32 [1]" for name in ("max_tokens", "min_tokens", "top_k")),
        *(f"{name}? FP32 [1]" for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")),
        *("repetition_penalty? FP32 [1]", "length_penalty? FP32 [1]", "seed? INT64 [1]"),
        *("stop_words? STRING [-1]", "bad_words? STRING [-1]", "ignore_eos? BOOL [1]", "skip_special_tokens? BOOL [1]"),
    ],
    ["TEXT STRING [1]", "finish_reason STRING [1]", "completion_tokens INT32 [1]", "prompt_tokens INT32 [1]"],
)


def contracts() -> dict[str, Contract]:
    """Return the contracts of the models of older releases, by name."""
    return {name: Contract(**entry) for name, entry in json.loads((_HERE / "contracts.json").read_text()).items()}


def build_repository(
    destination: Path, *, models: Collection[str] | None = None, record: Path | None = None
) -> DemoRepository:
    """Do as :func:`triton_openai.demo.repository.build_repository`, which knows the models of the demo only."""
    standins = sorted((_HERE / "models").glob("*.py"))
    return repository.build_repository(
        destination, models=models, record=record, builders={**BUILDERS, **FURTHER, **RECOGNIZERS}, standins=standins
    )


def _bls(site: Site, name: str, contract: Contract, **parameters: str) -> None:
    given = {"tensorrt_llm_model_name": "tensorrt_llm", **parameters}
    site.build(
        name, "tensorrt_llm_bls", contract=contract, max_batch_size=8, decoupled=True, instances=1, parameters=given
    )


def _bls_multimodal(site: Site, name: str) -> None:
    contract = site.contracts["tensorrt_llm_bls"]
    _bls(site, name, contract, accumulate_tokens="true", multimodal_encoders_name="multimodal_encoders")


def _bls_legacy(site: Site, name: str) -> None:
    _bls(site, name, contracts()[name], accumulate_tokens="false", tensorrt_llm_model_name="tensorrt_llm_legacy")


def _llmapi_multimodal(site: Site, name: str) -> None:
    usual = site.contracts["tensorrt_llm_llmapi"]
    llmapi(site, name, Contract([*usual.inputs, "image_url? STRING [-1]"], usual.outputs), loras=False, sees=True)


def _llmapi_r1_0(site: Site, name: str) -> None:
    llmapi(site, name, contracts()[name], loras=False)


def _reranker(site: Site, name: str, contract: Contract, batch: int = 0) -> None:
    site.build(name, "reranking", contract=contract, max_batch_size=batch, dynamic_batching=batch > 0)


def _classifier(site: Site, name: str, contract: Contract, batch: int = 0) -> None:
    folder = site.build(
        name, "text_classification", contract=contract, max_batch_size=batch, dynamic_batching=batch > 0
    )
    (folder.parent / "labels.txt").write_text("\n".join(CLASSES) + "\n")


def companion(site: Site, name: str, **more: Any) -> None:
    """Build the companion model over the stand-in for vLLM, with *more* arguments of its engine."""
    engine = {"model": str(site.repository.tokenizer), "max_model_len": CONTEXT_LENGTH, "enable_lora": True, **more}
    folder = site.write(name, config_text(engine).replace("KIND_MODEL", "KIND_CPU"), "companion")
    (folder / "engine.json").write_text(json.dumps(engine))
    (folder / "multi_lora.json").write_text(json.dumps({lora: f"/loras/{lora}" for lora in ("gamma", "delta")}))
    (site.repository.path.parent / "standins" / "shipped_companion.py").write_text(model_code())


def _hearing_companion(site: Site, name: str) -> None:
    """Build a companion model that chats and writes down speech, as of a language model that takes audio."""
    companion(site, name)
    path = site.repository.path / name / "config.pbtxt"
    path.write_text(path.read_text().replace('"generate"', '"generate, transcribe_text"'))


def _encoder(site: Site, name: str) -> None:
    site.build(name, "encoder", contract=_VECTORS_OF_IDS)


def _text_model(site: Site, name: str) -> None:
    site.build(name, "text_model", contract=_TEXT_MODEL, decoupled=True)


def _synthesizer(site: Site, name: str) -> None:
    inputs, output, options = SYNTHESIZERS[name]
    site.build(name, "synthesizer", contract=Contract(inputs, [output]), **options)


def _recognizer(
    site: Site,
    name: str,
    contract: Contract,
    *,
    module: str = "recognizing",
    batch: int = 0,
    decoupled: bool = False,
    **parameters: str,
) -> None:
    site.build(
        name,
        module,
        contract=contract,
        max_batch_size=batch,
        dynamic_batching=batch > 1,
        decoupled=decoupled,
        instances=1,
        parameters=parameters,
    )


#: What steps of streaming models are told of a request's sequence, as the public repositories declare it. Only the idle
#: time is longer: Triton ends no sequence because the machine stands still.
_SEQUENCES = """sequence_batching {
  max_sequence_idle_microseconds: 600000000
  oldest { max_candidate_sequences: 16 }
  control_input [ { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } ] } ]
  control_input [ { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY fp32_false_true: [0, 1] } ] } ]
  control_input [ { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ]
  control_input [ { name: "END" control [ { kind: CONTROL_SEQUENCE_END fp32_false_true: [0, 1] } ] } ]
}
"""
# With chunks of 0.32 s, 32 frames, the encoder sees 19 more.
_FRAMES = {"frame_length_ms": "25", "frame_shift_ms": "10", "sample_rate": "16000", "decode_chunk_size": "8"}


def _stateful(
    site: Site, name: str, contract: Contract, *, ids: str = "UINT64", batch: int = 8, parameters: Any = None
) -> None:
    config = render(name, contract, backend="python", max_batch_size=batch, instances=1, parameters=parameters)
    site.write(name, config + _SEQUENCES.replace("UINT64", ids), "transducing")


def _transducer(site: Site, name: str) -> None:
    inputs, sent = ["WAV FP32 [-1]", "WAV_LENS INT32 [1]"], ["x FP32 [51,80]", "x_lens INT64 [1]", "samples FP32 [-1]"]
    features = Contract(["wav FP32 [-1]", "wav_lens INT32 [1]"], sent)
    _stateful(site, f"{name}_features", features, parameters=_FRAMES)
    _stateful(site, f"{name}_scorer", Contract(sent, ["OUTPUT0 STRING [1]"]))
    names = [each.split()[0] for each in sent]
    steps = [
        {
            "model_name": f"{name}_features",
            "input_map": {"wav": "WAV", "wav_lens": "WAV_LENS"},
            "output_map": {each: each for each in names},
        },
        {
            "model_name": f"{name}_scorer",
            "input_map": {each: each for each in names},
            "output_map": {"OUTPUT0": "TRANSCRIPTS"},
        },
    ]
    site.write(name, render(name, Contract(inputs, ["TRANSCRIPTS STRING [1]"], steps=steps), max_batch_size=8))


def _of_speech(inputs: str, outputs: str, **options: Any) -> Builder:
    return partial(_recognizer, contract=Contract(inputs.split(", "), outputs.split(", ")), **options), ()


_WAV, _TRANSCRIPTS = "WAV FP32 [-1], WAV_LENS INT32 [1]", "TRANSCRIPTS STRING [1]"
_WHISPER = f"{_WAV}, TEXT_PREFIX STRING [1]"
_RICH = "OUTPUT_0 STRING [1], SEGMENTS STRING [1], SPOKEN STRING [1], WORDS STRING [1], SCORES STRING [1]"
#: Recognizers, for a Triton of their own: sherpa's two models for Whisper, TensorRT-LLM's, FunASR's, a transducer, a
#: streaming one, one that chats about what it hears, and models that have to be described.
RECOGNIZERS: Mapping[str, Builder] = {
    "infer_bls": _of_speech(_WHISPER, _TRANSCRIPTS, batch=8),
    "whisper": _of_speech(f"{_WAV}, DECODER_INPUT_IDS INT32 [-1]", "OUTPUT_IDS INT32 [-1]", batch=8),
    "whisper_bls": _of_speech(_WHISPER, _TRANSCRIPTS, batch=1, decoupled=True, engine_dir="/engine"),
    "sensevoice": _of_speech(f"{_WAV}, LANGUAGE INT32 [1], TEXT_NORM INT32 [1]", _TRANSCRIPTS, batch=16),
    "zipformer": _of_speech("WAV FP16 [-1], WAV_LENS? INT32 [1]", _TRANSCRIPTS, batch=1, elements="words"),
    "transducer": (_transducer, ()),
    "dictating": (
        partial(_stateful, contract=Contract(["SPEECH INT16 [-1]"], ["TEXT STRING [1]"]), ids="INT32", batch=0),
        (),
    ),
    "chatting": (
        partial(
            _recognizer,
            module="chatting",
            contract=Contract(
                ["text_input STRING [1]", "audio? STRING [-1]", "stream? BOOL [1]", "sampling_parameters? STRING [1]"],
                ["text_output STRING [-1]"],
            ),
            decoupled=True,
        ),
        (),
    ),
    "parakeet": _of_speech("INPUT_0 FP64 [-1]", "OUTPUT_0 STRING [1]"),
    "pcm": _of_speech("SPEECH INT16 [-1,-1], LANGUAGE STRING [1]", _RICH),
    "by_file": _of_speech("AUDIO STRING [1]", "decoded_texts STRING [1]"),
    "by_bytes": _of_speech("AUDIO UINT8 [-1]", "decoded_texts STRING [1]", batch=1),
}

_R24_12 = 'parameters { key: "BACKEND_RELEASE" value: { string_value: "r24.12" } }\n'
_PAIRS = Contract(["INPUT_PAIRS STRING [2]"], ["SCORES FP32 [-1]"])
_PAIRS_OF_IDS = Contract([*_PADDED, "token_type_ids INT64 [-1,-1]"], ["logits FP32 [-1,1]"])
_CLASSES_OF_TEXT = Contract(["text STRING [1]"], [f"logits FP32 [{len(CLASSES)}] l"])
_CLASSES_OF_IDS = Contract(_PADDED, ["probabilities FP32 [-1,-1]"])
_VECTORS_OF_IDS = Contract([*_PADDED], ["last_hidden_state FP32 [-1,-1,3]"])
_ZERO_SHOT = [
    *("reference_wav FP32 [-1]", "reference_wav_len INT32 [1]", "reference_text STRING [1]"),
    "target_text STRING [1]",
]
_CACHING = [each.replace(" ", "? ", 1) if each.startswith("reference") else each for each in _ZERO_SHOT]
# F5-TTS declares the recording as optional, but its code needs it.
_F5_INPUTS = ["reference_wav? FP32 [-1]", "reference_wav_len? INT32 [1]", *_ZERO_SHOT[2:]]
_DESCRIBED = ["text STRING [1]", "narrator INT64 [1]", "speed? FP32 [1]", "style? STRING [1]", "lang? STRING [1]"]
_COSYVOICE = {"llm_tokenizer_dir": "/models/llm", "model_dir": "/models/cosyvoice"}
_SPARK = {"audio_tokenizer_frame_rate": "50", "audio_chunk_overlap_duration": "0.1"}
_F5 = {"vocab_file": "/models/vocab.txt", "vocoder": "vocos", "reference_audio_sample_rate": "24000"}
#: Those that speak: inputs, output and the rest of the config.
SYNTHESIZERS: Mapping[str, tuple[list[str], str, dict[str, Any]]] = {
    "cosyvoice2": (
        _ZERO_SHOT, "waveform FP32 [-1]", {"max_batch_size": 4, "decoupled": True, "parameters": _COSYVOICE},
    ),
    "cosyvoice2_speaker": (
        _CACHING, "waveform FP32 [-1]", {"max_batch_size": 4, "decoupled": True, "parameters": _COSYVOICE},
    ),
    "spark_tts": (_ZERO_SHOT, "waveform FP32 [-1]", {"decoupled": True, "parameters": _SPARK}),
    "f5_tts": (_F5_INPUTS, "waveform FP32 [-1]", {"max_batch_size": 4, "decoupled": False, "parameters": _F5}),
    "described_tts": (_DESCRIBED, "pcm FP16 [-1]", {"decoupled": False}),
    "int16_tts": (["text STRING [1]"], "audio INT16 [-1]", {"decoupled": True}),
    "file_tts": (["text STRING [1]"], "audio STRING [1]", {"decoupled": False}),
    "bytes_tts": (["text STRING [1]"], "audio UINT8 [-1]", {"decoupled": True}),
}  # fmt: skip
#: Models that need a tokenizer, and whose configuration names none: the tests' settings do.
WITHOUT_TOKENIZER = (
    "tensorrt_llm_llmapi", "vllm_model", "companion", "text_model", "text_embedding", "text_rerank_ids",
    "text_classification_ids", "text_encoder",
)  # fmt: skip
#: The models that the demo does not serve.
FURTHER: Mapping[str, Builder] = {
    "tensorrt_llm_bls_multimodal": (_bls_multimodal, PIPELINE),
    "tensorrt_llm_bls_legacy": (_bls_legacy, LEGACY_PIPELINE),
    "tensorrt_llm_llmapi_r1_0": (_llmapi_r1_0, ()),
    "tensorrt_llm_llmapi_multimodal": (_llmapi_multimodal, ()),
    "vllm_model_r24_12": (partial(vllm, parameters=_R24_12), ()),
    "text_rerank_pairs": (partial(_reranker, contract=_PAIRS, batch=8), ()),
    "text_rerank_ids": (partial(_reranker, contract=_PAIRS_OF_IDS), ()),
    "text_classification": (partial(_classifier, contract=_CLASSES_OF_TEXT, batch=16), ()),
    "text_classification_ids": (partial(_classifier, contract=_CLASSES_OF_IDS), ()),
    "text_encoder": (_encoder, ()),
    "text_model": (_text_model, ()),
    "companion": (companion, ()),
    "companion_tokens": (partial(companion, pooler_config={"task": "token_embed"}), ()),
    "companion_speech": (partial(companion, task="transcription"), ()),
    "companion_hearing": (_hearing_companion, ()),
    **dict.fromkeys(SYNTHESIZERS, (_synthesizer, ())),
}
#: Other releases of what the fixture `triton` serves: tests serve them where they need them.
#: Most synthesizers need settings.
BY_THEMSELVES = {
    *("companion_tokens", "companion_speech", "companion_hearing"),
    *("tensorrt_llm_llmapi_r1_0", "tensorrt_llm_llmapi_multimodal", "vllm_model_r24_12"),
    *(SYNTHESIZERS.keys() - {"file_tts"}),
}
