"""What the tree's fields are called outside of it: flags, environment variables and keys of the YAML file."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from triton_openai.config.tree import ModelSettings, Settings

ENVIRONMENT_PREFIX = "TRITON_OPENAI_"


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """
    One setting with all its names.

    *path* leads to it in the tree and in the YAML file; a setting of a single model has ``models.NAME`` before it.
    *type* is the annotated type, limits included: what ``msgspec.convert`` checks a value against. The flags are as
    ``tree`` describes them. A setting that is *file_only* has its flag and its variable only to say so to whoever uses
    them.
    """

    name: str
    path: tuple[str, ...]
    type: Any
    default: Any
    help: str
    metavar: str | tuple[str, ...] | None
    common: bool = False
    file_only: bool = False
    verbatim: bool = False
    secret: bool = False
    live: bool = False

    @property
    def flag(self) -> str:
        """The command line flag."""
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.name.replace("-", "_").upper()

    @property
    def key(self) -> str:
        """The key in the YAML file, in dotted form."""
        return ".".join(self.path)

    @property
    def section(self) -> str:
        """The first part of the path: the group under which the help lists it."""
        return self.path[0]

    @property
    def choices(self) -> tuple[str, ...]:
        """The accepted words, if there are only a few."""
        bare = bare_type(self.type)
        return get_args(bare) if get_origin(bare) is Literal else ()

    @property
    def is_switch(self) -> bool:
        """Whether it is either on or off."""
        return bare_type(self.type) is bool

    @property
    def is_list(self) -> bool:
        """Whether it may be given several times."""
        return get_origin(bare_type(self.type)) is tuple

    @property
    def words(self) -> tuple[str, ...]:
        """The fields of one value, for a list of objects: its flag takes one word for each."""
        item = bare_type(get_args(bare_type(self.type))[0]) if self.is_list else None
        if isinstance(item, type) and issubclass(item, msgspec.Struct):
            return item.__struct_fields__
        return ()

    @property
    def per_model(self) -> bool:
        """Whether single models have it too: its flag also takes ``MODEL=VALUE``."""
        return self.section == "defaults"

    @property
    def is_alias(self) -> bool:
        """Whether its flag names a model on the right side: ``NAME=MODEL``."""
        return self.path[-1] == "aliases"


def bare_type(annotation: Any) -> Any:
    """Return *annotation* without its limits, and without the ``None`` of an optional value."""
    if get_origin(annotation) is Annotated:
        return bare_type(get_args(annotation)[0])
    if get_origin(annotation) in {Union, types.UnionType}:
        members = [member for member in get_args(annotation) if member is not type(None)]
        if len(members) == 1:
            return bare_type(members[0])
    return annotation


@cache
def options() -> tuple[Option, ...]:
    """Return every setting that is not of single models, and the aliases, in the order of the tree."""
    found = list(_walk(Settings, ()))
    found.extend(
        _option(field, ("models", "NAME", field.name), live=True)
        for field in msgspec.structs.fields(ModelSettings)
        if field.name == "aliases"
    )
    return tuple(found)


@cache
def options_by_name() -> dict[str, Option]:
    """Return every setting under the name that its flag has without the dashes."""
    return {option.name: option for option in options()}


def _walk(struct: type[msgspec.Struct], path: tuple[str, ...], **group: bool) -> Iterator[Option]:
    for field in msgspec.structs.fields(struct):
        inner = bare_type(field.type)
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            if not path:
                yield from _walk(inner, (field.name,), **extra_of(field.type))
        elif path:
            yield _option(field, (*path, field.name), **group)


def _option(field: msgspec.structs.FieldInfo, path: tuple[str, ...], **group: bool) -> Option:
    described = [meta.description for meta in metadata(field.type) if meta.description]
    extra = {"name": field.name.replace("_", "-"), "metavar": None, **group, **extra_of(field.type)}
    return Option(path=path, type=field.type, default=field.default, help=described[-1] if described else "", **extra)


def is_live(annotation: Any) -> bool:
    """Return whether a running service takes new values of what has this *annotation* over."""
    return bool(extra_of(annotation).get("live", False))


def extra_of(annotation: Any) -> dict[str, Any]:
    """Return what the tree says about *annotation* in ``extra``."""
    return {name: value for meta in metadata(annotation) for name, value in (meta.extra or {}).items()}


def metadata(annotation: Any) -> Iterator[msgspec.Meta]:
    """Yield what is said about *annotation*, from the inside out."""
    if get_origin(annotation) is Annotated:
        inner, *metas = get_args(annotation)
        yield from metadata(inner)
        yield from (meta for meta in metas if isinstance(meta, msgspec.Meta))


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
