"""Types that several groups of settings share."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0, le=86_400, extra={"metavar": "SECONDS"})]
