"""Reading settings: flags before environment variables before the YAML file before the defaults."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
import yaml

from triton_openai.config.access import NAMED_KEY
from triton_openai.config.models import LoraSettings
from triton_openai.config.observability import StandardVariables, TracesSettings, check_endpoint
from triton_openai.config.options import ENVIRONMENT_PREFIX, Option, bare_type, extra_of, options_by_name
from triton_openai.config.tree import Settings
from triton_openai.errors import ConfigurationError

#: A value with the place it comes from, for error messages.
Found = tuple[Any, str]
#: What was found, by its path in the tree.
Layer = dict[tuple[str, ...], Found]


# What has to fit together


def check(found: Layer) -> None:
    urls, url_origin = found.get(("triton", "url"), ((), ""))
    if url_origin:
        _check_urls(urls, url_origin)
    repository = found.get(("triton", "model_repository"))
    if url_origin and urls and repository and repository[0]:
        raise ConfigurationError(
            f"{url_origin} and {repository[1]} exclude each other: use a Triton that runs already, or start one here."
        )
    _check_load(found, repository)
    collector, collector_origin = found.get(("traces", "otlp_endpoint"), (None, ""))
    if collector is not None:
        check_endpoint(collector, collector_origin)
    _check_aliases(found)
    _check_loras(found)
    _check_templates(found)
    _check_access(found)
    _check_log(found)
    _check_limits(found)


def _check_load(found: Layer, repository: Found | None) -> None:
    names, origin = found.get(("triton", "load_model"), ((), ""))
    if not names:
        return
    if not (repository and repository[0]):
        raise ConfigurationError(f"{origin} is for a Triton that is started here: it needs --model-repository.")
    if found.get(("triton", "model_control_mode"), ("none", ""))[0] != "explicit":
        raise ConfigurationError(f"{origin} needs --model-control-mode explicit.")
    if "*" in names and len(names) > 1:
        raise ConfigurationError(f"{origin}: '*' stands for all models, and takes no other name beside it.")


def _check_templates(found: Layer) -> None:
    """A prompt can be made in one way only; a single model's may differ from that of all others."""
    given: dict[tuple[str, ...], str] = {}
    for path, (_, origin) in found.items():
        if path[-1] in ("chat_template", "history_template", "history_template_file"):
            other = given.setdefault(path[:-1], origin)
            if other != origin:
                raise ConfigurationError(f"{other} and {origin} exclude each other: a prompt is made in one way.")


def _check_access(found: Layer) -> None:
    taken = set[str]()
    restricted, origin = found.get(("access", "openai_restricted_api"), ((), ""))
    for entry in restricted:
        for api in entry.apis:
            if api in taken:
                raise ConfigurationError(f"{origin}: the API {api!r} is restricted twice.")
            taken.add(api)
    origins, origin = found.get(("access", "cors_allow_origin"), ((), ""))
    credentials, _ = found.get(("access", "cors_allow_credentials"), (False, ""))
    if credentials and "*" in origins:
        raise ConfigurationError(f"{origin}: credentials are for origins that are named, and not for *.")


def _check_urls(urls: tuple[str, ...], origin: str) -> None:
    if not urls:
        raise ConfigurationError(f"{origin}: at least one address is needed.")
    taken: dict[str, str] = {}
    for url in urls:
        kind = _transport(url, origin)
        if kind in taken:
            raise ConfigurationError(
                f"{origin}: {taken[kind]} and {url} are two {kind} addresses; at most one is possible."
            )
        taken[kind] = url


def _transport(url: str, origin: str) -> str:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"{origin}: {url!r} is not an address: {error}.") from error
    if parts.scheme not in {"http", "https", "grpc", "grpcs"} or "://" not in url:
        hint = "" if "://" in url else f" Did you mean http://{url}?"
        raise ConfigurationError(
            f"{origin}: {url!r} is not accepted: it has to begin with http://, https://, grpc:// or grpcs://.{hint}"
        )
    if not host:
        raise ConfigurationError(f"{origin}: {url!r} names no host.")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigurationError(f"{origin}: {parts.scheme}://{host} takes no user, password, query or fragment.")
    if parts.scheme.startswith("http"):
        return "HTTP"
    if port is None:
        raise ConfigurationError(f"{origin}: {url!r} names no port; Triton's gRPC port is usually 8001.")
    if parts.path.strip("/"):
        raise ConfigurationError(f"{origin}: {url!r} has a path, which a gRPC address cannot have.")
    return "gRPC"


def _check_aliases(found: Layer) -> None:
    models: dict[str, tuple[str, str]] = {}
    for path, (value, origin) in found.items():
        if path[-1] != "aliases":
            continue
        for alias in value:
            other, _ = models.setdefault(alias, (path[1], origin))
            if other != path[1]:
                raise ConfigurationError(
                    f"{origin}: the alias {alias!r} stands for two models, {other!r} and {path[1]!r}."
                )
    for alias, (model, origin) in models.items():
        if model in models:
            raise ConfigurationError(
                f"{origin}: the alias {alias!r} stands for {model!r}, which is itself an alias, of "
                f"{models[model][0]!r}; name that."
            )


def _check_loras(found: Layer) -> None:
    for path, (value, origin) in found.items():
        if path[-1] != "loras":
            continue
        entries = [entry for entry in value if isinstance(entry, LoraSettings)]
        names = [entry if isinstance(entry, str) else entry.name for entry in value]
        numbers = [entry.task_id for entry in entries if entry.task_id is not None]
        for what, given in (("name", names), ("task_id", numbers)):
            twice = next((item for place, item in enumerate(given) if item in given[:place]), None)
            if twice is not None:
                raise ConfigurationError(f"{origin}: two LoRA adapters have the {what} {twice!r}.")


def _check_log(found: Layer) -> None:
    """Whoever asks for contents is to find them in the log."""
    content, origin = found.get(("server", "log_content"), (None, ""))
    level, level_origin = found.get(("server", "log_level"), ("info", ""))
    if content is not None and level not in ("debug", "info"):
        raise ConfigurationError(f"{origin} and {level_origin} exclude each other: contents are logged at 'info'.")


def _check_limits(found: Layer) -> None:
    """Workers divide a limit of running requests; one whose share is none could not answer anything."""
    workers, _ = found.get(("server", "workers"), (1, ""))
    for name in ("max_running_requests", "max_running_requests_per_model"):
        limit, origin = found.get(("server", name), (None, ""))
        if limit is not None and limit < workers:
            raise ConfigurationError(
                f"{origin}: {limit} is too few for {workers} workers, which need at least one each."
            )


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
        refuse_if_file_only(known[name], f"--{name}")
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
            refuse_if_file_only(known[variable], variable)
            found.update(_read_text(known[variable], value, variable))
    return found


def refuse_if_file_only(option: Option, origin: str) -> None:
    """Raise :class:`ConfigurationError` where *origin*, a flag or a variable, sets what only the YAML file can set."""
    if option.file_only:
        keys = f"{option.key} or models.NAME.{option.path[-1]}" if option.per_model else option.key
        raise ConfigurationError(
            f"{origin} is not accepted: set {keys} in the YAML file that --config or {_CONFIG_VARIABLE} names."
        )


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
        return _read_assignments(option, _split(value), origin)
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
        if option.is_alias:
            # An alias is free to have one: clients call models "org/name".
            if not (equals and left and right):
                raise ConfigurationError(f"{origin}: {text!r} is not accepted: write NAME=MODEL.")
            path = ("models", right, "aliases")
            found[path] = ((*found.get(path, ((), origin))[0], left), origin)
        elif equals and "/" not in left:
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
            secret = extra_of(annotation).get("secret", False)
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
            form = "without spaces and commas"
            if repr(NAMED_KEY) in str(error):
                form += ", and with one colon at most (--api-keys-file takes keys that have a colon themselves)"
            reason = re.sub(r"matching regex .*?(?= - at|$)", lambda _: form, str(error))
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
