"""Names of tensors that hold the bytes of an image, a sound or a film, and no text."""

from __future__ import annotations

import re

_ANYWHERE = re.compile(r"image|audio|video|waveform|jpeg|pixel", re.IGNORECASE)
#: Shorter words stand alone: between underlines, digits, or capital letters.
_WORDS = re.compile(
    r"(?:^|[^a-z])(?:imgs?|wavs?|speech|pcm|mp3|mp4|flac|jpg|png|gif|photos?|pictures?|pdf|frames?|spectrogram|sound|"
    r"raw_data|encoded_bytes|file_bytes|binary)(?:$|[^a-z])"
)
_CAPITALS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def is_media(name: str) -> bool:
    """Return whether the tensor *name* holds an image, a sound or a film, as its name shows."""
    if _ANYWHERE.search(name):
        return True
    return _WORDS.search(_CAPITALS.sub("_", name).lower()) is not None
