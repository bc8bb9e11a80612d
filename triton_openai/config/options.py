"""What the tree's fields are called outside of it: flags, environment variables and keys of the YAML file."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from triton_openai.config.tree import ModelSettings, Settings

ENVIRONMENT_PREFIX = "TRITON_OPENAI_"


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """
    One setting with all its names.

    *path* leads to it in the tree and in the YAML file; a setting of a single model has ``models.NAME`` before it.
    *type* is the annotated type, limits included: what ``msgspec.convert`` checks a value against. A *live* setting is
    taken over while the service runs. A *secret* one's values are never repeated, in error
    messages neither.
    """

    name: str
    path: tuple[str, ...]
    type: Any
    default: Any
    help: str
    metavar: str | tuple[str, ...] | None
    per_model: bool = False
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
    """Return every setting that has a flag and an environment variable, in the order of the tree."""
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


def _walk(struct: type[msgspec.Struct], path: tuple[str, ...], *, live: bool = False) -> Iterator[Option]:
    for field in msgspec.structs.fields(struct):
        inner = bare_type(field.type)
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            if not path:
                yield from _walk(inner, (field.name,), live=is_live(field.type))
        elif path:
            yield _option(field, (*path, field.name), live=live)


def is_live(annotation: Any) -> bool:
    """Return whether a running service takes new values of what has this *annotation* over."""
    return any((meta.extra or {}).get("live", False) for meta in metadata(annotation))


def _option(field: msgspec.structs.FieldInfo, path: tuple[str, ...], *, live: bool = False) -> Option:
    description, extra = "", dict[str, Any]()
    for meta in metadata(field.type):
        description = meta.description or description
        extra.update(meta.extra or {})
    return Option(
        name=extra.get("name", field.name.replace("_", "-")),
        path=path,
        type=field.type,
        default=field.default,
        help=description,
        metavar=extra.get("metavar"),
        per_model=extra.get("per_model", False),
        verbatim=extra.get("verbatim", False),
        secret=extra.get("secret", False),
        live=live or extra.get("live", False),
    )


def metadata(annotation: Any) -> Iterator[msgspec.Meta]:
    """Yield what is said about *annotation*, from the inside out."""
    if get_origin(annotation) is Annotated:
        inner, *metas = get_args(annotation)
        yield from metadata(inner)
        yield from (meta for meta in metas if isinstance(meta, msgspec.Meta))
