"""
What the public repositories of recognizers have in common: names of tensors, windows, and how they make features.

Sources: k2-fsa/sherpa (Whisper, transducers, the speech LLM), TensorRT-LLM's ``whisper_bls``, WeNet, and FunASR.
"""

from __future__ import annotations

from collections.abc import Mapping

from triton_openai.adapters._common.base import requires_only
from triton_openai.adapters._common.tensor_mapping import Kind
from triton_openai.errors import ConfigurationError
from triton_openai.triton.tensors import ModelConfig, TensorSpec

# The uses of tensors.
AUDIO = "audio"
LENGTH = "length"
PREFIX = "prefix"
LANGUAGE = "language"
NORM = "norm"
IDS = "ids"
PROMPT = "prompt"
TEMPERATURE = "temperature"
TEXT = "text"
SEGMENTS = "segments"
WORDS = "words"
LOGPROBS = "logprobs"
AVG_LOGPROB = "avg_logprob"
NO_SPEECH = "no_speech_prob"
# What the public repositories call them.
_INPUTS: Mapping[str, str] = {
    AUDIO: "WAV", LENGTH: "WAV_LENS", PREFIX: "TEXT_PREFIX", LANGUAGE: "LANGUAGE", NORM: "TEXT_NORM",
    IDS: "DECODER_INPUT_IDS",
}  # fmt: skip
_OUTPUTS: Mapping[str, str] = {TEXT: "TRANSCRIPTS", IDS: "OUTPUT_IDS"}
#: What the settings can name.
INPUTS: Mapping[str, Kind] = {
    AUDIO: "audio", LENGTH: "integer", LANGUAGE: "code", PROMPT: "text", TEMPERATURE: "number",
}  # fmt: skip
OUTPUTS: Mapping[str, Kind] = {
    TEXT: "text", LANGUAGE: "text", SEGMENTS: "text", WORDS: "text", LOGPROBS: "text", AVG_LOGPROB: "number",
    NO_SPEECH: "number",
}  # fmt: skip
# Seconds of audio. Whisper sees 30 at once. The code of sherpa and of TensorRT-LLM ends its answer after so many tokens
# (max_new_tokens in their model.py), which are enough for the speech of about 20 and 10 seconds. The others take what
# fits into memory; in this service, a request is copied a few times, 4 MB each.
_WINDOW = 30.0
_SHERPA = 20.0
_SHERPA_TOKENS = 96
_TENSORRT_LLM = 10.0
_TENSORRT_LLM_TOKENS = 50
_ANY = 60.0
# Parameters of sherpa's models and of TensorRT-LLM's: both have an engine, and only TensorRT-LLM's model in front of it
# has the number of bands too.
_ENGINE_FOLDER = "engine_dir"
_BANDS = "n_mels"
# Parameters of models that make features of a sequence, and what their code takes for one that is missing. A chunk of
# the decoder has frames of the encoder, each of four.
_FRAMING: Mapping[str, float] = {
    "sample_rate": 16_000, "frame_shift_ms": 10, "frame_length_ms": 25, "chunk_size_s": 0, "decode_chunk_size": 0,
}  # fmt: skip
_SUBSAMPLED = 4
# What sherpa's client pads audio to a multiple of, so that Triton can batch it.
_PADDED = 10.0
# What the encoder of sherpa's speech LLM returns.
_SPEECH_FEATURES = "speech_features"
# What the last step of a streaming Paraformer takes: by these weights it finds the words that are new.
_NEW_WORDS = "alphas"


def known_tensors(config: ModelConfig) -> tuple[dict[str, TensorSpec], dict[str, TensorSpec]]:
    """Return the inputs and the outputs of a recognizer by their uses; none if *config* is of another model."""
    inputs = {use: config.inputs[name] for use, name in _INPUTS.items() if name in config.inputs}
    outputs = {use: config.outputs[name] for use, name in _OUTPUTS.items() if name in config.outputs}
    audio = inputs.get(AUDIO)
    by_ids = IDS in inputs and IDS in outputs
    fits = audio is not None and audio.datatype in ("FP32", "FP16") and (by_ids or TEXT in outputs)
    if fits and requires_only(config, _INPUTS.values()):
        return (inputs, outputs)
    return ({}, {})


def framing(config: ModelConfig, rate: int | None) -> tuple[int, tuple[int, int]] | None:
    """
    Return rate and parts of a recording, in samples, that a model takes in a sequence; ``None`` if its config does not
    have them.

    Source: the code for features of sherpa, WeNet and FunASR: the first part makes as many frames as the encoder
    reads at once, and each further part as many as it advances by.
    """
    parameters = {name: _number(config, name, usual) for name, usual in _FRAMING.items()}
    window = next((spec.dims[0] for spec in config.outputs.values() if len(spec.dims) == 2), 0)
    rate = rate or int(parameters["sample_rate"])
    shift = int(parameters["frame_shift_ms"] * rate / 1000)
    length = int(parameters["frame_length_ms"] * rate / 1000)
    part = int(parameters["chunk_size_s"] * rate)
    if not part:
        part = int(parameters["decode_chunk_size"]) * _SUBSAMPLED * shift
    missing = max(0, length + (window - 1) * shift - part)
    if part and window > 0:
        return (rate, (part + -(-missing // shift) * shift, part))
    return None


def _number(config: ModelConfig, name: str, usual: float) -> float:
    """Return the parameter *name*, *usual* without one. Raises :class:`ConfigurationError`."""
    value = config.parameter(name)
    if value is None:
        return usual
    try:
        return float(value)
    except ValueError as error:
        raise ConfigurationError(
            f"The parameter '{name}' of the model '{config.name}' is '{value}', which is not a number: fill in the "
            "template of its config.pbtxt."
        ) from error


def is_speech_llm(config: ModelConfig, repository: Mapping[str, ModelConfig]) -> bool:
    """
    Return whether a model is sherpa's front of a speech LLM, which has the tensors of the one of Whisper.

    Source: k2-fsa/sherpa, ``triton/speech_llm``. Its code reads no prefix, and calls an encoder of speech beside it.
    The front of Whisper has ``engine_dir``, from where it reads its tokenizer.
    """
    if _INPUTS[PREFIX] not in config.inputs or _ENGINE_FOLDER in config.parameters:
        return False
    return any(_SPEECH_FEATURES in other.outputs for other in repository.values())


def answers_in_new_words(config: ModelConfig) -> bool:
    """Return whether a streaming model answers with new words only, as Paraformer does (modelscope/FunASR)."""
    return any(_NEW_WORDS in step.input_map for step in config.steps)


def max_tokens(config: ModelConfig, *, whisper: bool, token_ids: bool) -> int | None:
    """Return the most tokens of an answer, where the code of a published repository limits them."""
    parameters = config.parameters
    if token_ids and _ENGINE_FOLDER in parameters:
        return _SHERPA_TOKENS
    if token_ids or not whisper:
        return None
    if _ENGINE_FOLDER in parameters and (_BANDS in parameters or config.decoupled):
        return _TENSORRT_LLM_TOKENS
    return _SHERPA_TOKENS


def max_seconds(inputs: Mapping[str, TensorSpec], tokens: int | None) -> float:
    """Return the longest audio of a request in seconds; *tokens* is the limit of an answer to it, if there is one."""
    if tokens == _TENSORRT_LLM_TOKENS:
        return _TENSORRT_LLM
    if tokens == _SHERPA_TOKENS:
        return _SHERPA
    if IDS in inputs:
        return _WINDOW
    if PREFIX in inputs:
        return _SHERPA
    if inputs[AUDIO].datatype == "FP64":
        return _ANY / 2
    return _ANY


def padding(config: ModelConfig, inputs: Mapping[str, TensorSpec]) -> float:
    """Return the seconds of which padded audio is a multiple; 0 for audio without padding."""
    if IDS in inputs:
        return _WINDOW
    if LENGTH in inputs and config.batching:
        return _PADDED
    return 0.0
