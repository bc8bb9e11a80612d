"""What differs between two settings, and which of it a running service can take over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_origin

import msgspec

from triton_openai.config.options import bare_type, is_live
from triton_openai.config.tree import Settings


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """
    The names of what has changed, as the YAML file has them: *live* is taken over, *fixed* needs a restart.

    *settings* are the current ones with what is live taken from the new ones.
    """

    live: tuple[str, ...]
    fixed: tuple[str, ...]
    settings: Settings


def changes_between(current: Settings, new: Settings) -> Changes:
    """Return what *new* changes of *current*."""
    live: list[str] = []
    fixed: list[str] = []
    groups: dict[str, Any] = {}
    for group in msgspec.structs.fields(Settings):
        before, after = getattr(current, group.name), getattr(new, group.name)
        if get_origin(bare_type(group.type)) is Mapping:
            names = list(_changed_entries(group.name, before, after))
            (live if is_live(group.type) else fixed).extend(names)
            if is_live(group.type):
                groups[group.name] = after
            continue
        taken: dict[str, Any] = {}
        for field in msgspec.structs.fields(type(before)):
            value = getattr(after, field.name)
            if getattr(before, field.name) == value:
                continue
            if is_live(group.type) or is_live(field.type):
                live.append(f"{group.name}.{field.name}")
                taken[field.name] = value
            else:
                fixed.append(f"{group.name}.{field.name}")
        groups[group.name] = msgspec.structs.replace(before, **taken)
    return Changes(live=tuple(live), fixed=tuple(fixed), settings=msgspec.structs.replace(current, **groups))


def _changed_entries(at: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        kind = type((after if name in after else before)[name])
        # An entry that is not there says the same as one that leaves everything out.
        old, new = before.get(name, kind()), after.get(name, kind())
        for field in msgspec.structs.fields(kind):
            if getattr(old, field.name) != getattr(new, field.name):
                yield f"{at}.{name}.{field.name}"
