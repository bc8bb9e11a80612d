"""The names of the settings outside of the tree: flags, environment variables and keys of the YAML file."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from triton_openai.config.tree import ModelSettings, Settings

ENVIRONMENT_PREFIX = "TRITON_OPENAI_"


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One setting with all its names. Its flags are as ``tree`` describes them."""

    name: str
    #: Leads to it in the tree and in the YAML file; a setting of a single model has ``models.NAME`` before it.
    path: tuple[str, ...]
    #: Its type with its limits.
    annotation: Any
    default: Any
    help: str
    metavar: str | tuple[str, ...] | None = None
    form: str = ""
    common: bool = False
    #: Whether its flag and its variable only lead to an error message.
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
    def type(self) -> Any:
        """Its type without limits."""
        return bare_type(self.annotation)

    @property
    def is_switch(self) -> bool:
        """Whether it is either on or off."""
        return self.type is bool

    @property
    def is_list(self) -> bool:
        """Whether it may be given several times."""
        return get_origin(self.type) is tuple

    @property
    def item(self) -> Any:
        """The type of one value."""
        if self.is_list:
            return bare_type(get_args(self.type)[0])
        return self.type

    @property
    def choices(self) -> tuple[str, ...]:
        """The accepted values, if there are only a few."""
        if get_origin(self.item) is Literal:
            return get_args(self.item)
        return ()

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of one value, for a list of objects: its flag takes one argument for each."""
        return self.item.__struct_fields__ if is_struct(self.item) else ()

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


def is_struct(kind: Any) -> bool:
    """Return whether *kind* is a type with named fields."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


@cache
def options() -> tuple[Option, ...]:
    """Return every setting that is not of single models, and the aliases, in the order of the tree."""
    collected = []
    for group in msgspec.structs.fields(Settings):
        if is_struct(kind := bare_type(group.type)):
            extra = _extra(group.type)
            fields = (field for field in msgspec.structs.fields(kind) if not is_struct(bare_type(field.type)))
            collected += [_option(field, (group.name, field.name), **extra) for field in fields]
    aliases = next(field for field in msgspec.structs.fields(ModelSettings) if field.name == "aliases")
    return (*collected, _option(aliases, ("models", "NAME", "aliases"), live=True))


def _option(field: msgspec.structs.FieldInfo, path: tuple[str, ...], prefix: str = "", **group: Any) -> Option:
    extra = {"name": field.name.replace("_", "-"), **group, **_extra(field.type)}
    # A setting with an empty name has that of its group.
    extra["name"] = (prefix + extra["name"]).rstrip("-")
    text = next(meta.description for meta in _metadata(field.type) if meta.description)
    option = Option(path=path, annotation=field.type, default=field.default, help=text, **extra)
    if option.is_list and not option.file_only:
        option = msgspec.structs.replace(option, help=f"{text} May be given several times.")
    return option


def _extra(annotation: Any) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for meta in _metadata(annotation):
        extra.update(meta.extra or {})
    return extra


def _metadata(annotation: Any) -> Iterator[msgspec.Meta]:
    """Yield the metadata of *annotation*, from the inside out."""
    if get_origin(annotation) is Annotated:
        inner, *metas = get_args(annotation)
        yield from _metadata(inner)
        yield from metas
    elif get_origin(annotation) in {Union, types.UnionType}:
        yield from _metadata(get_args(annotation)[0])
