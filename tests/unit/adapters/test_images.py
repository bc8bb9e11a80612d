"""Images as the tensors of each backend, over every profile of models."""

from __future__ import annotations

import math

import msgspec

from tests.cases import every_case
from tests.unit.adapters.encoding import request_of
from tests.unit.adapters.test_profiles import MINIMAL, check, claimed, generation, neighbours, profiles, registry
from triton_openai.adapters._common.base import Adapter
from triton_openai.generation import Generation, Image
from triton_openai.triton.grpc import encode_request
from triton_openai.triton.http import generate_body

IMAGES = tuple(
    Image(media_type="image/png", base64=text, size=3, digest=digest) for text, digest in (("AAAA", 5), ("BBBB", 2**62))
)
#: What each model that takes images calls them, and how many it takes.
TAKES = {
    "multimodal/ensemble@P16": ("image_url_input", 1),
    "multimodal/ensemble@P19": ("image_url_input", 1),
    "multimodal/ensemble@P20": ("image_url_input", 1),
    "llmapi/tensorrt_llm@P121V": ("image_url", math.inf),
    "llmapi/tensorrt_llm@P130V": ("image_url", math.inf),
    "vllm@r24.12": ("image", math.inf),
    "vllm@r25.01": ("image", math.inf),
    "vllm@r25.11": ("image", math.inf),
    "vllm@26": ("image", math.inf),
}
BLS = ("inflight_batcher_llm/tensorrt_llm_bls@P16", "inflight_batcher_llm/tensorrt_llm_bls@P20")


def adapter_of(name: str, **parameters: str) -> Adapter:
    """Return the adapter of a profile whose config has *parameters*."""
    config = profiles()[name]
    config = msgspec.structs.replace(config, parameters={**config.parameters, **parameters})
    claim = registry().claim(config)
    assert claim is not None
    return claim.adapter(config, neighbours(name))


def test_which_models_take_images() -> None:
    """Those that declare an input for files; a BLS not without the name of its encoders."""
    taking = {name for name in claimed() if adapter_of(name).capabilities.images}

    assert {name for name in TAKES if name in profiles()} == taking
    for name in taking:
        assert TAKES[name][1] == adapter_of(name).capabilities.images
    for name in BLS:
        assert adapter_of(name, multimodal_encoders_name="multimodal_encoders").capabilities.images
        assert adapter_of(name, multimodal_encoders_name="x").token_level is None


@every_case("name", [*(name for name in TAKES if name in profiles()), *BLS])
def test_tensors(name: str) -> None:
    """Triton accepts the request, over both transports, and the image is in it once."""
    adapter = adapter_of(name, **({"multimodal_encoders_name": "e"} if name in BLS else {}))
    images = IMAGES if adapter.capabilities.images > 1 else IMAGES[:1]
    asked = msgspec.structs.replace(generation(MINIMAL, adapter), images=images)

    request = request_of(adapter, asked)

    check(request, adapter.config)
    assert request.json_expressible
    tensors = {tensor.name: tensor for tensor in request.inputs}
    if "image" in tensors:
        assert (("AAAA", "BBBB"), (2,)) == (tensors["image"].values, tensors["image"].shape)
    elif "image_url" in tensors:
        tensor = tensors["image_url"]
        assert (("data:image/png;base64,AAAA", "data:image/png;base64,BBBB"), (2,)) == (tensor.values, tensor.shape)
    else:
        tensor = tensors["image_url_input"]
        assert (("data:image/jpeg;base64,AAAA",), (1, 1)) == (tensor.values, tensor.shape)
    assert "prompt_table_extra_id" not in tensors
    assert 1 == generate_body(request).count(b"AAAA") == encode_request(request).count(b"AAAA")


@every_case("name", claimed())
def test_no_images(name: str) -> None:
    """Without images no model is sent any input of theirs."""
    adapter = adapter_of(name)
    if Generation in adapter.jobs:
        names = {tensor.name for tensor in request_of(adapter, generation(MINIMAL, adapter)).inputs}
        assert not {each for each in names if "image" in each}


def test_images_tell_prompts_apart_where_the_cache_is_reused() -> None:
    """An engine that reuses its cache would take one image's for another's: each gets an id, the same each time."""
    name = "multimodal/ensemble@P20"
    base = profiles()["inflight_batcher_llm/tensorrt_llm@P20"]
    engine = msgspec.structs.replace(base, name="tensorrt_llm", parameters={"enable_kv_cache_reuse": "true"})
    claim = registry().claim(profiles()[name])
    assert claim is not None
    adapter = claim.adapter(profiles()[name], {**neighbours(name), "tensorrt_llm": engine})

    ids = []
    for images in (IMAGES[:1], IMAGES[:1], IMAGES[1:]):
        request = request_of(adapter, msgspec.structs.replace(generation(MINIMAL, adapter), images=images))
        check(request, adapter.config)
        ids += [tensor.values for tensor in request.inputs if tensor.name == "prompt_table_extra_id"]
    assert [(5,), (5,), (2**62,)] == ids
