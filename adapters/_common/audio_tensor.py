"""Audio in the form that a model takes: samples, numbers of 16 bits, or a WAV file."""

from __future__ import annotations

import base64
import io
import wave
from array import array
from typing import Any, Literal

from triton_openai.errors import ConfigurationError
from triton_openai.triton.tensors import ARRAY_CODES, ModelConfig, Tensor, TensorSpec

_LOUDEST_PCM = 32_767


class AudioTensor:
    """The input *spec* of the model with *config*, which takes audio of *rate* samples a second."""

    def __init__(
        self, config: ModelConfig, spec: TensorSpec, form: Literal["samples", "file", "base64"] | None, rate: int
    ) -> None:
        """Without a *form*, the datatype decides. Raises :class:`ConfigurationError` if they do not fit."""
        self._config = config
        self._spec = spec
        self._rate = rate
        takes_files = spec.datatype in ("BYTES", "UINT8")
        if form is None and takes_files:
            form = "file"
        elif form is None:
            form = "samples"
        self._form = form
        if (form == "samples") == takes_files or (form == "base64" and spec.datatype != "BYTES"):
            raise ConfigurationError(
                f"The input '{spec.name}' of the model '{config.name}' is {spec.datatype} and cannot take audio in the "
                f"form '{form}'."
            )

    def tensor(self, samples: Any) -> Tensor:
        """Return the tensor of *samples*, an array of float32 from -1 to 1."""
        spec = self._spec
        values: Any
        if self._form == "samples":
            count = len(samples)
            if spec.datatype == "INT16":
                values = _pcm(samples).tobytes()
            else:
                values = samples.astype({"FP32": "<f4", "FP16": "<f2", "FP64": "<f8"}[spec.datatype]).tobytes()
            if self._config.decoupled and spec.datatype != "FP16":
                # HTTP's generate extension, where there is no gRPC, takes numbers.
                values = array(ARRAY_CODES[spec.datatype], values)
        elif spec.datatype == "UINT8":
            values = wav_file(samples, self._rate)
            count = len(values)
        else:
            values = _bytes_element(wav_file(samples, self._rate), encode=self._form == "base64")
            count = 1
        return Tensor(spec.name, spec.datatype, self._config.wire_shape(spec, count), values)


def _bytes_element(data: bytes, *, encode: bool) -> bytes:
    """Return the raw contents of a BYTES tensor with *data*, in base64 if asked to *encode* it."""
    if encode:
        data = base64.b64encode(data)
    return len(data).to_bytes(4, "little") + data


def wav_file(samples: Any, rate: int) -> bytes:
    """Return a WAV file with *samples*, an array from -1 to 1, of which a second has *rate*."""
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(_pcm(samples).tobytes())
    return target.getvalue()


def _pcm(samples: Any) -> Any:
    """Return samples of 16 bits; what is louder than they can be is as loud as they can."""
    return (samples.clip(-1, 1) * _LOUDEST_PCM).round().astype("<i2")
