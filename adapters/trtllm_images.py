"""
Images for TensorRT-LLM's multimodal models: the ensemble with encoders in it, and the BLS that names its encoders.

Source of the facts: ``all_models/multimodal`` and ``preprocessing/1/model.py`` of tensorrtllm_backend 0.16 to 0.19 and
of TensorRT-LLM 0.20 to 1.1.
"""

from __future__ import annotations

from collections.abc import Sequence

from triton_openai.adapters.base import Adapter
from triton_openai.adapters.trtllm_common import truthy
from triton_openai.generation import Image
from triton_openai.triton.tensors import ModelConfig, Tensor

#: The parameter by which a BLS knows its encoders; without it, its image inputs lead nowhere.
ENCODERS_NAME = "multimodal_encoders_name"
# The other two take decoded pixels. This one takes addresses too, but those the backend would fetch from anywhere.
_INPUT = "image_url_input"
_EXTRA_ID = "prompt_table_extra_id"
# The only prefix that is not taken for an address; what the file really is, is found out from the file.
_PREFIX = "data:image/jpeg;base64,"


def takes_images(config: ModelConfig) -> bool:
    """Return whether image files can be sent to the model *config*, and go anywhere."""
    return _INPUT in config.inputs and (config.platform == "ensemble" or config.parameter(ENCODERS_NAME) is not None)


def max_images(config: ModelConfig) -> int | None:
    """Return how many images a prompt can have: one where the input holds one element, else unknown."""
    spec = config.inputs.get(_INPUT)
    return 1 if spec is not None and spec.dims == (1,) else None


def image_tensors(adapter: Adapter, engine: ModelConfig | None, images: Sequence[Image]) -> list[Tensor]:
    """
    Return the inputs for *images*.

    An engine that reuses its KV cache knows a prompt by its token ids, and those of all images are the same. Unless
    the images have an id, it answers about somebody else's. (Preprocessing for Qwen2-VL and Pixtral fails when it is
    given one: those cannot be served with reuse, and a refusal is better than another's image.)
    """
    if not images:
        return []
    tensors = [adapter.tensor(_INPUT, *(_PREFIX + image.base64 for image in images))]
    reuses = engine is not None and truthy(engine.parameter("enable_kv_cache_reuse"), default=False)
    if reuses and _EXTRA_ID in adapter.config.inputs:
        digest = 0
        for image in images:
            # One id for the row: the order of the images counts.
            digest = (digest * 31 + image.digest) % 2**63
        tensors.append(adapter.tensor(_EXTRA_ID, digest))
    return tensors
