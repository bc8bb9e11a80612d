"""Settings that would serve a model whose tensors no adapter recognizes, and models that none could serve."""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from tests.cases import every_case
from tests.conformance.fake_triton import config_of
from triton_openai.adapters._common.registry import Registry
from triton_openai.config.sources import load_settings
from triton_openai.generation import AudioFormat, Generation, Sampling, TensorMapping
from triton_openai.models.suggestions import suggested_settings
from triton_openai.triton.config_reader import read_model_config
from triton_openai.triton.tensors import ModelConfig

TEXT = "text_in BYTES 1"
#: The inputs and the outputs of a model, and the adapter and the inputs that would serve it.
SERVABLE: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[str, dict[str, str]]] = {
    (("INPUT_0 BYTES 1", "max_length INT32 1", "num_beams INT32 1"), ("OUTPUT_0 BYTES 1",)): (
        "text", {"prompt": "INPUT_0", "max_tokens": "max_length"},
    ),
    (("system BYTES 1", "prompt BYTES 1"), ("answer BYTES 1",)): ("text", {"prompt": "prompt"}),
    (("query BYTES 1", "context BYTES 1", "top_k INT32 1"), ("answer BYTES 1", "sources BYTES -1")): (
        "text", {"prompt": "query", "top_k": "top_k"},
    ),
    (("text BYTES 1", "src_lang BYTES 1", "tgt_lang BYTES 1"), ("translation BYTES 1",)): ("text", {"prompt": "text"}),
    (("prompt BYTES 1",), ("generated_text BYTES 1", "tokens INT32 -1", "logprob_text BYTES 1")): (
        "text", {"prompt": "prompt"},
    ),
    (("audio_bytes BYTES 1", "task BYTES 1"), ("text BYTES 1",)): ("transcriber", {"audio": "audio_bytes"}),
    (("text BYTES 1", "noise FP32 1"), ("audio FP32 -1",)): ("synthesizer", {"text": "text"}),
    (("text BYTES 1", "task_id INT64 1"), ("embedding FP32 384",)): ("embeddings", {"text": "text"}),
}  # fmt: skip
#: Models whose inputs nothing here can fill: images, stages of others, numbers.
UNSERVABLE: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("image BYTES 1",), ("caption BYTES 1",)),
    (("IMAGE_BYTES BYTES 1",), ("text BYTES 1",)),
    (("rawImage BYTES 1",), ("OUTPUT BYTES 1",)),
    (("prompt BYTES 1", "image BYTES 1"), ("text BYTES 1",)),
    (("prompt BYTES 1",), ("generated_image BYTES 1",)),
    (("encoded_img BYTES 1",), ("label BYTES 1",)),
    (("video_url BYTES 1",), ("summary BYTES 1",)),
    (("x FP32 4",), ("y FP32 1",)),
    (("logits FP32 -1",), ("text BYTES 1",)),
    (("text BYTES 1",), ("input_ids INT64 -1", "attention_mask INT64 -1")),
    (("document_pdf BYTES 1",), ("text BYTES 1",)),
    (("text BYTES 1", "bias FP32 100 100"), ("answer BYTES 1",)),
)  # fmt: skip
REGISTRY = Registry()


def model(inputs: tuple[str, ...], outputs: tuple[str, ...]) -> ModelConfig:
    """Return the config of a model of the Python backend with these tensors."""
    config = config_of("m", inputs, outputs, backend="python", model_transaction_policy={"decoupled": False})
    return read_model_config({**config, "max_batch_size": 8}, "m")


@every_case("tensors, expected", SERVABLE.items())
def test_settings_that_serve_it(
    tensors: tuple[tuple[str, ...], tuple[str, ...]], expected: tuple[str, dict[str, str]], tmp_path: Any
) -> None:
    """They can be pasted: the service reads them, the adapter takes the model, and its request is whole."""
    config = model(*tensors)
    written = suggested_settings(config, REGISTRY)
    own: dict[str, Any] = yaml.safe_load(written)["models"]["m"]
    file = tmp_path / "settings.yaml"
    file.write_text(written)
    settings = load_settings({"config": str(file)}, {}).model("m")
    adapter, inputs = expected

    assert REGISTRY.claim(config) is None or adapter != "text" or len(tensors[1]) > 1
    assert (adapter, inputs) == (own["adapter"], own["inputs"])
    mapping = TensorMapping(
        inputs=settings.inputs,
        constants=settings.constants,
        outputs=settings.outputs,
        audio=AudioFormat(sample_rate=settings.audio.sample_rate),
    )
    bound = REGISTRY.adapter_named(adapter).adapter.described(config, {}, mapping)
    if adapter == "text":
        (request,) = bound.encode(Generation(id="1", prompt="Hi", sampling=Sampling(max_tokens=5)))
        assert {spec.name for spec in config.required} <= {tensor.name for tensor in request.inputs}
    if own.get("constants"):
        assert "# A guess" in written


@every_case("tensors", UNSERVABLE)
def test_models_that_no_settings_serve(tensors: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    """Files in BYTES are no texts: such a model is neither served as a text model nor offered as one."""
    config = model(*tensors)
    claim = REGISTRY.claim(config)

    assert claim is None or claim.adapter.name != "text"
    assert claim is not None or not suggested_settings(config, REGISTRY)


@every_case("name", ["image", "INPUT_IMAGE", "imgs", "rawImage", "audio_bytes", "wav", "WAVData", "jpg_file", "video"])
def test_names_of_media(name: str) -> None:
    """A BYTES input with such a name is no text."""
    config = model((f"{name} BYTES 1",), ("text BYTES 1",))
    claim = REGISTRY.claim(config)

    assert claim is None or claim.adapter.name != "text"


@every_case("name", ["prompt", "text", "INPUT", "speechless", "framework", "wave", "imagine", "question"])
def test_names_of_texts(name: str) -> None:
    """Words that only begin like those of media are texts."""
    config = model((f"{name} BYTES 1",), ("text BYTES 1",))
    claim = REGISTRY.claim(config)

    assert claim is not None
    assert "text" == claim.adapter.name
    assert msgspec.structs.asdict(config)
