"""What packs zstd for the tests."""

from __future__ import annotations

import sys
from typing import Any

import pytest


def zstd_module() -> Any:
    """Return the module for zstd: Python 3.14 has one. Skips the test where there is none."""
    if sys.version_info >= (3, 14):
        name = "compression.zstd"
    else:
        name = "backports.zstd"
    return pytest.importorskip(name)
