"""What all tests of this folder have."""

from __future__ import annotations

from tests.patient_stores import _patient_stores

__all__ = ["_patient_stores"]
