"""What all tests of stores have."""

from __future__ import annotations

from tests.patient_stores import _patient_stores

__all__ = ["_patient_stores"]
