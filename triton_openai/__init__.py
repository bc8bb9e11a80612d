"""The OpenAI API in front of NVIDIA Triton Inference Server."""

from __future__ import annotations

__version__ = "1.0.0"
