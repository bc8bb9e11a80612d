"""Reading settings: flags before environment variables before the YAML file before the defaults."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import yaml

from triton_openai.config.checks import Found, Layer, check
from triton_openai.config.options import ENVIRONMENT_PREFIX, Option, bare_type, metadata, options_by_name
from triton_openai.config.traces import StandardVariables, TracesSettings
from triton_openai.config.tree import Settings
from triton_openai.errors import ConfigurationError

# Not part of the tree: it says where the rest of the tree is.
_CONFIG_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"

# msgspec's words for types, as a person would say them.
_PLAIN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
}

# What a template's text cannot begin with by accident: characters of a folder's name, up to the first equals sign.
_MODEL_NAME = re.compile(r"[\w.-]+")


def load_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str], defaults: Mapping[str, Any] | None = None
) -> Settings:
    """
    Return the settings that *flags*, *environ* and the YAML file named in either of them ask for.

    *flags* holds what was given on the command line, as it was written, under the name of the flag without its dashes
    (``config`` names the YAML file). An empty environment variable counts as one that is not set. *defaults*, written
    like *flags*, take the place of the tree's own.

    :raises ConfigurationError: for an unknown name or a value that is not accepted; the message names it.
    """
    config = config_file(flags, environ)
    layers = (
        _read_flags(defaults or {}),
        _read_file(config) if config is not None else {},
        _read_environment(environ),
        _read_flags(flags),
    )
    found: Layer = {}
    for layer in layers:
        found.update(layer)
    _add_standard_variables(found, environ)
    check(found)
    tree: dict[str, Any] = {}
    for path, (value, _) in found.items():
        branch = tree
        for part in path[:-1]:
            branch = branch.setdefault(part, {})
        branch[path[-1]] = value
    return msgspec.convert(tree, Settings, dec_hook=_decode)


def config_file(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Path | None:
    """Return the YAML file that *flags* or *environ* name, if either does."""
    named = flags.get("config") or environ.get(_CONFIG_VARIABLE)
    return Path(named) if named else None


def closest(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean X?`` when one of the *known* names is close to *name*, else nothing."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {matches[0]}?" if matches else ""


# Flags and environment variables


def _read_flags(flags: Mapping[str, Any]) -> Layer:
    known = options_by_name()
    found: Layer = {}
    for name, value in flags.items():
        if name == "config":
            continue
        if name not in known:
            raise ConfigurationError(f"--{name} is not a setting.{closest(name, known)}")
        found.update(_read_text(known[name], value, f"--{name}"))
    return found


def _read_environment(environ: Mapping[str, str]) -> Layer:
    known = {option.variable: option for option in options_by_name().values()}
    found: Layer = {}
    for variable, value in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == _CONFIG_VARIABLE:
            continue
        if variable not in known:
            hint = closest(variable, [*known, _CONFIG_VARIABLE])
            raise ConfigurationError(f"The environment variable {variable} is not a setting.{hint}")
        if value:
            found.update(_read_text(known[variable], value, variable))
    return found


def _add_standard_variables(found: Layer, environ: Mapping[str, str]) -> None:
    """Let OpenTelemetry's variables say what no setting does, and switch everything off."""
    endpoint, protocol = ("traces", "otlp_endpoint"), ("traces", "otlp_protocol")
    standard = StandardVariables.of(environ)
    if standard.disabled:
        found[endpoint] = (None, "OTEL_SDK_DISABLED")
        return
    if standard.endpoint is not None:
        found.setdefault(endpoint, standard.endpoint)
    if standard.content is not None:
        found.setdefault(("traces", "content"), standard.content)
    if standard.protocol is not None and found.get(endpoint, (None, ""))[0] is not None:
        value, origin = standard.protocol
        annotation = msgspec.structs.fields(TracesSettings)[1].type
        found.setdefault(protocol, (_convert(value, annotation, origin, strict=True), origin))


def _read_text(option: Option, value: Any, origin: str) -> Layer:
    """Read *value* as a person writes it in a shell: everything is text, lists are repeated or separated by commas."""
    if option.is_alias or option.per_model:
        values = [value] if option.verbatim and isinstance(value, str) else value if option.verbatim else _split(value)
        return _read_assignments(option, values, origin)
    if option.words:
        value = [_object(words, option, origin) for words in _in_words(value)]
    elif option.is_list:
        value = _lines(value) if option.verbatim else _split(value)
    return {option.path: (_convert(value, option.type, origin, strict=False, secret=option.secret), origin)}


def _in_words(value: Any) -> Iterator[list[str]]:
    """Yield the words of each object: a flag has them apart, a variable as ``A B C; D E F``."""
    for item in [value] if isinstance(value, str) else value:
        if isinstance(item, str):
            yield from (part.split(None, 2) for part in item.split(";") if part.strip())
        else:
            yield list(item)


def _object(words: list[str], option: Option, origin: str) -> dict[str, Any]:
    names = option.words
    if len(words) != len(names):
        raise ConfigurationError(f"{origin}: write {' '.join(option.metavar or names)}.")
    # The first word may be several.
    return {**dict(zip(names, words, strict=True)), names[0]: _split(words[0])}


def _read_assignments(option: Option, values: list[str], origin: str) -> Layer:
    found: Layer = {}
    for text in values:
        left, equals, right = text.partition("=")
        # A model's name has no slash (Triton makes it from a folder's name), so such a text is a path with "=" in it.
        assigns = bool(equals) and (_MODEL_NAME.fullmatch(left) is not None if option.verbatim else "/" not in left)
        if option.is_alias:
            # An alias is free to have one: clients call models "org/name".
            if not (equals and left and right):
                raise ConfigurationError(f"{origin}: {text!r} is not accepted: write NAME=MODEL.")
            path = ("models", right, "aliases")
            found[path] = ((*found.get(path, ((), origin))[0], left), origin)
        elif assigns:
            if not (left and right):
                raise ConfigurationError(f"{origin}: {text!r} is not accepted: write MODEL=VALUE or VALUE.")
            found[("models", left, option.path[-1])] = (_convert(right, option.type, origin, strict=False), origin)
        elif option.path in found:
            raise ConfigurationError(f"{origin} is given twice for all models: {found[option.path][0]!r} and {text!r}.")
        else:
            found[option.path] = (_convert(text, option.type, origin, strict=False), origin)
    return found


def _split(value: Any) -> list[str]:
    given = [value] if isinstance(value, str) else list(value)
    return [item.strip() for text in given for item in str(text).split(",") if item.strip()]


def _lines(value: Any) -> list[str]:
    given = [value] if isinstance(value, str) else list(value)
    return [line.strip() for text in given for line in str(text).splitlines() if line.strip()]


# The YAML file


class _Loader(yaml.SafeLoader):
    """YAML without its habit of letting the last of two equal keys win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping, after a look for keys that are there twice."""
        seen = set[str]()
        for key, _ in node.value:
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_file(path: Path) -> Layer:
    try:
        with path.open("rb") as stream:
            content = yaml.load(stream, _Loader)  # a SafeLoader
    except OSError as error:
        raise ConfigurationError(f"The settings file {path} cannot be read: {error.strerror or error}.") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"The settings file {path} is not valid YAML: {' '.join(str(error).split())}."
        ) from error
    return dict(_read_mapping(content, Settings, (), path))


def _read_mapping(
    content: Any, struct: type[msgspec.Struct], at: tuple[str, ...], file: Path
) -> Iterator[tuple[Any, Found]]:
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    for name, value in _items(content, at, file):
        path = (*at, name)
        if name not in fields:
            raise ConfigurationError(f"{_place(file, path)} is not a setting.{closest(name, fields)}")
        annotation = fields[name].type
        inner = bare_type(annotation)
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            yield from _read_mapping(value, inner, path, file)
        elif get_origin(inner) is Mapping:
            for key, item in _items(value, path, file):
                yield from _read_mapping(item, get_args(inner)[1], (*path, key), file)
        else:
            # One value where several may stand is as good as a list of one.
            wrapped = [value] if get_origin(inner) is tuple and isinstance(value, str) else value
            origin = _place(file, path)
            secret = any((meta.extra or {}).get("secret") for meta in metadata(annotation))
            yield path, (_convert(wrapped, annotation, origin, strict=True, secret=secret), origin)


def _items(content: Any, at: tuple[str, ...], file: Path) -> Iterator[tuple[str, Any]]:
    if content is None:
        return
    if not isinstance(content, dict):
        raise ConfigurationError(f"{_place(file, at)} has to be a mapping of names to values.")
    for name, value in content.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"{_place(file, (*at, str(name)))} is not a name; put it in quotes.")
        yield name, value


def _place(file: Path, path: tuple[str, ...]) -> str:
    return f"{'.'.join(path)} in {file}" if path else f"The settings file {file}"


# Values


def _convert(value: Any, annotation: Any, origin: str, *, strict: bool, secret: bool = False) -> Any:
    try:
        return msgspec.convert(value, annotation, strict=strict, dec_hook=_decode)
    except msgspec.ValidationError as error:
        if secret:
            # Without the cause, whose traceback could show the value.
            reason = re.sub(r"matching regex .*?(?= - at|$)", "without spaces and commas", str(error))
            raise ConfigurationError(f"{origin} is not accepted: {reason[0].lower()}{reason[1:]}.") from None
        kind = bare_type(annotation)
        # Of several, what each may be.
        choices = get_args(bare_type(get_args(kind)[0]) if get_origin(kind) is tuple else kind)
        if all(isinstance(choice, str) for choice in choices) and choices:
            reason = f"expected {', '.join(choices[:-1])} or {choices[-1]}"
        else:
            reason = re.sub(r", got .*| - at .*|`| \| null", "", str(error)).replace(" | ", " or ")
            reason = re.sub(r"\b(int|float|bool|str|array)\b", lambda word: _PLAIN_WORDS[word[0]], reason)
            reason = reason[0].lower() + reason[1:]
        raise ConfigurationError(f"{origin}: {value!r} is not accepted: {reason}.") from error


def _decode(target: type, value: Any) -> Any:
    if target is Path:
        if isinstance(value, Path):
            return value
        if isinstance(value, str) and value:
            return Path(value).expanduser()
        raise ValueError("Expected a path")
    raise NotImplementedError(target)


# What has to fit together
