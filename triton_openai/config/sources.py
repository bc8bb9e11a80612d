"""Reading settings: flags before environment variables before the YAML file before the defaults."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import msgspec

from triton_openai.config.addresses import check_address, check_endpoints, check_urls
from triton_openai.config.files import read_yaml
from triton_openai.config.options import ENVIRONMENT_PREFIX, Option, bare_type, is_struct, options
from triton_openai.config.tree import NAMED_KEY, OTLP_PATH, ApiGroup, LoraSettings, Protocol, Settings
from triton_openai.config.validation import did_you_mean, explained, path_of, plain_words
from triton_openai.errors import ConfigurationError

# The path of a setting in the tree.
_Path = tuple[str, ...]
# The settings of one source by their paths, each with its origin for error messages.
_Layer = dict[_Path, tuple[Any, str]]

# Names the YAML file, so it is not in the tree.
_CONFIG_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"


def load_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str], defaults: Mapping[str, Any] | None = None
) -> Settings:
    """
    Return the settings that *flags*, *environ* and the YAML file named in either of them ask for.

    *flags* has the values of the command line as they were written, by the name of the flag without its dashes
    (``config`` names the YAML file). An empty environment variable counts as one that is not set. *defaults*, written
    like *flags*, take the place of the tree's own. Raises :class:`ConfigurationError` for an unknown name or a value
    that is not accepted; the message names it.
    """
    config = config_file(flags, environ)
    layer = _read_flags(defaults or {})
    if config is not None:
        layer |= _read_file(config)
    layer |= _read_environment(environ)
    layer |= _read_flags(flags)
    _add_opentelemetry(layer, environ)
    _check(layer)
    return msgspec.convert(_tree(layer), Settings, dec_hook=path_of)


def config_file(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Path | None:
    """Return the YAML file that *flags* or *environ* name, if either does. Raises :class:`ConfigurationError`."""
    named = flags.get("config")
    if named == "":
        raise ConfigurationError("--config: '' is not accepted: expected a path.")
    named = named or environ.get(_CONFIG_VARIABLE)
    if named:
        return Path(named)
    return None


def refuse_if_file_only(option: Option, origin: str) -> None:
    """Raise :class:`ConfigurationError` where *origin*, a flag or a variable, sets what only the YAML file can set."""
    if option.file_only:
        if option.per_model:
            keys = f"{option.key} or models.NAME.{option.path[-1]}"
        else:
            keys = option.key
        raise ConfigurationError(
            f"{origin} is not accepted: set {keys} in the YAML file that --config or {_CONFIG_VARIABLE} names."
        )


# Flags and environment variables: everything is text, lists are repeated or separated by commas


def _read_flags(flags: Mapping[str, Any]) -> _Layer:
    flags_by_name = {f"--{name}": value for name, value in flags.items() if name != "config"}
    return _read_text(flags_by_name, {option.flag: option for option in options()})


def _read_environment(environ: Mapping[str, str]) -> _Layer:
    ours = {name: value for name, value in environ.items() if value and name.startswith(ENVIRONMENT_PREFIX)}
    ours.pop(_CONFIG_VARIABLE, None)
    return _read_text(ours, {option.variable: option for option in options()})


def _read_text(values: Mapping[str, Any], known: Mapping[str, Option]) -> _Layer:
    written: _Layer = {}
    for origin, value in values.items():
        option = known.get(origin)
        if option is None:
            raise ConfigurationError(f"{origin} is not a setting.{did_you_mean(origin, [*known, _CONFIG_VARIABLE])}")
        refuse_if_file_only(option, origin)
        if option.per_model and option.verbatim:
            written[option.path] = _single(value, origin), origin
        elif option.is_alias or option.per_model:
            _add_assignments(written, option, _split(value), origin)
        elif option.fields:
            written[option.path] = _objects(value, option, origin), origin
        elif option.is_list:
            written[option.path] = _split(value, "\n" if option.verbatim else ","), origin
        else:
            written[option.path] = value, origin
        if option.secret and written[option.path][0] == []:
            # Such as "$KEY" in a shell that has no KEY.
            raise ConfigurationError(f"{origin} is given and empty: leave it out to let every client in.")
    return {
        path: (_converted(value, known[origin].annotation, path, origin, strict=False), origin)
        for path, (value, origin) in written.items()
    }


def _objects(value: Any, option: Option, origin: str) -> list[dict[str, Any]]:
    """Return objects: a flag has each field as an argument of its own, a variable is written ``A B C; D E F``."""
    first, *others = option.fields
    if isinstance(value, str):
        value = [part.split(None, len(others)) for part in value.split(";") if part.strip()]
    if any(len(words) != len(option.fields) for words in value):
        raise ConfigurationError(f"{origin}: write {' '.join(option.metavar or option.fields)}.")
    # The first word may be several.
    return [{first: _split(words[0]), **dict(zip(others, words[1:], strict=True))} for words in value]


def _add_assignments(written: _Layer, option: Option, values: list[str], origin: str) -> None:
    for text in values:
        left, equals, right = text.partition("=")
        # A model's name has no slash (Triton makes it from a folder's name): else it is a path with "=" in it. An alias
        # is free to have one: clients call models "org/name".
        assigns = option.is_alias or (equals and "/" not in left)
        if assigns and not (left and right):
            if option.is_alias:
                form = "NAME=MODEL"
            else:
                form = "MODEL=VALUE or VALUE"
            raise ConfigurationError(f"{origin}: {text!r} is not accepted: write {form}.")
        if option.is_alias:
            path = ("models", right, "aliases")
            written[path] = ([*written.get(path, ([], ""))[0], left], origin)
        elif assigns:
            written["models", left, option.path[-1]] = (right, origin)
        elif option.path in written:
            raise ConfigurationError(
                f"{origin} is given twice for all models: {written[option.path][0]!r} and {text!r}."
            )
        else:
            written[option.path] = (text, origin)


def _single(value: str | Sequence[str], origin: str) -> str:
    """Return the one text of a flag or of a variable, as it is written."""
    if isinstance(value, str):
        return value
    if len(value) > 1:
        raise ConfigurationError(f"{origin} is given twice.")
    return value[0]


def _split(value: str | Iterable[str], separator: str = ",") -> list[str]:
    if isinstance(value, str):
        value = [value]
    items = []
    for text in value:
        items += [item.strip() for item in text.split(separator)]
    return list(filter(None, items))


# The YAML file


def _read_file(file: Path) -> _Layer:
    content = read_yaml(file, "settings file")
    if content is None:
        return {}
    return dict(_read_mapping(content, Settings, (), file))


def _read_mapping(content: Any, kind: Any, at: _Path, file: Path) -> Iterator[tuple[_Path, tuple[Any, str]]]:
    """Yield the settings in *content*, which stands for a value of *kind* at this path of the file."""

    def key(*names: str) -> str:
        if at or names:
            return f"{'.'.join((*at, *names))} in {file}"
        return f"The settings file {file}"

    if not isinstance(content, dict):
        raise ConfigurationError(f"{key()} has to be a mapping of names to values.")
    if is_struct(kind):
        known = {field.name: field.type for field in msgspec.structs.fields(kind)}
    else:
        known = dict.fromkeys(content, get_args(kind)[1])
    for name, value in content.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"{key(str(name))} is not a name; put it in quotes.")
        if name not in known:
            raise ConfigurationError(f"{key(name)} is not a setting.{did_you_mean(name, known)}")
        annotation = known[name]
        path = (*at, name)
        inner = bare_type(annotation)
        if is_struct(inner) or get_origin(inner) is Mapping:
            yield from _read_mapping({} if value is None else value, inner, path, file)
        elif value is not None:
            # A text stands for a list of one.
            if isinstance(value, str) and get_origin(inner) is tuple:
                listed = [value]
            else:
                listed = value
            yield path, (_converted(listed, annotation, path, key(name), strict=True), key(name))


# Values


def _tree(layer: _Layer) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, (value, _) in layer.items():
        branch = tree
        for part in path[:-1]:
            branch = branch.setdefault(part, {})
        branch[path[-1]] = value
    return tree


def _converted(value: Any, annotation: Any, path: _Path, origin: str, *, strict: bool) -> Any:
    """Return *value* as *annotation* has it. Raises :class:`ConfigurationError` with its *origin*."""
    try:
        return msgspec.convert(value, annotation, strict=strict, dec_hook=path_of)
    except msgspec.ValidationError as error:
        problem = str(error).partition(" - at `$")[0]
        inside = explained(error, annotation)
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        # Which part is wrong is hard to see in all of it, which may also have secrets.
        raise ConfigurationError(f"{origin} is not accepted: {inside}")
    # Raised here, without the cause, whose traceback could show a secret.
    like = ("defaults" if path[0] == "models" else path[0], path[-1])
    option = next((option for option in options() if option.path == like), None)
    if option is not None and option.form:
        problem = re.sub("`str` matching regex .*", lambda _: option.form, problem)
    if option is not None and option.secret:
        form = "text without spaces and commas"
        if repr(NAMED_KEY) in problem:
            form += ", and with one colon at most (--api-keys-file takes keys that have a colon themselves)"
        expected = f"Expected one of {', '.join(get_args(ApiGroup))}, not"
        reason = re.sub("`str` matching regex .*", lambda _: form, problem).replace("Invalid enum value", expected)
        raise ConfigurationError(f"{origin} is not accepted: {reason[0].lower()}{reason[1:]}.")
    choices = next((get_args(kind) for kind in (annotation, *get_args(annotation)) if get_origin(kind) is Literal), ())
    if choices:
        reason = f"expected {', '.join(choices[:-1])} or {choices[-1]}"
    else:
        reason = plain_words(problem)
    raise ConfigurationError(f"{origin}: {value!r} is not accepted: {reason[0].lower()}{reason[1:]}.")


# OpenTelemetry's own variables, and the addresses of collectors

#: Begins the message about an environment variable that only OpenTelemetry's SDK reads.
SDK_REFUSES = "OpenTelemetry's SDK does not accept one of its environment variables (OTEL_...)"
_CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
# Characters of each text if that variable asks for content, and no setting sets a limit.
_CONTENT_CHARACTERS = 1024


def _add_opentelemetry(layer: _Layer, environ: Mapping[str, str]) -> None:
    """
    Add the collector and the wish for content of OpenTelemetry's variables where no setting of ours says it.

    An empty variable counts as one that is not set. The SDK reads all other variables itself.

    Source: OpenTelemetry's specification, "Environment Variable Specification" and "OpenTelemetry Protocol Exporter".
    """

    def first(*names: str) -> tuple[str, str]:
        for name in names:
            value = environ.get(name, "").strip()
            if value:
                return value, name
        return "", ""

    def add(name: str, value: Any, annotation: Any, origin: str) -> None:
        path = ("traces", name)
        if value and path not in layer:
            layer[path] = _converted(value, annotation, path, origin, strict=True), origin

    content = first(_CONTENT_VARIABLE)[0].lower() or "false"
    # The service has no events, only spans.
    spans_have_content = content in ("true", "span_only", "span_and_event")
    if not spans_have_content and content not in ("false", "no_content", "event_only"):
        raise ConfigurationError(
            f"{_CONTENT_VARIABLE}: {content!r} is not accepted: expected SPAN_ONLY, SPAN_AND_EVENT, true, or "
            "NO_CONTENT, EVENT_ONLY, false."
        )
    add("content", spans_have_content and _CONTENT_CHARACTERS, int, _CONTENT_VARIABLE)
    exporter = first("OTEL_TRACES_EXPORTER")[0].lower()
    if exporter not in ("", "otlp", "none"):
        raise ConfigurationError(f"OTEL_TRACES_EXPORTER: {exporter!r} is not accepted: expected otlp or none.")
    protocol = first("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    url, origin = first("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if origin == "OTEL_EXPORTER_OTLP_ENDPOINT" and urlsplit(url).path.strip("/") and protocol[0] != "grpc":
        # The address of a whole collector: each kind of data has its path below it.
        url = url.rstrip("/") + OTLP_PATH
    if first("OTEL_SDK_DISABLED")[0].lower() == "true":
        layer["traces", "otlp_endpoint"] = None, "OTEL_SDK_DISABLED"
    elif exporter != "none":
        add("otlp_endpoint", url, str, origin)
    if layer.get(("traces", "otlp_endpoint"), (None, ""))[0] is not None:
        add("otlp_protocol", protocol[0], Protocol, protocol[1])


# Settings that depend on each other


def _check(layer: _Layer) -> None:
    """Raise :class:`ConfigurationError` for settings that exclude or need each other, and for wrong addresses."""

    def get(group: str, name: str, default: Any = None) -> tuple[Any, str]:
        return layer.get((group, name), (default, ""))

    urls, urls_origin = get("triton", "url")
    repository, repository_origin = get("triton", "model_repository")
    if urls is not None:
        check_urls(urls, urls_origin)
        if repository:
            raise ConfigurationError(
                f"{urls_origin} and {repository_origin} exclude each other: use a Triton that runs already, or start "
                "one here."
            )
    endpoints, endpoints_origin = get("triton", "endpoints")
    _, file_origin = get("triton", "endpoints_file")
    several = endpoints_origin or file_origin
    if several and (urls or repository):
        raise ConfigurationError(
            f"{urls_origin or repository_origin} and {several} exclude each other: name one Triton, or several."
        )
    if endpoints:
        check_endpoints(endpoints, endpoints_origin)
    names, origin = get("triton", "load_model")
    if names:
        if not repository:
            raise ConfigurationError(f"{origin} is for a Triton that is started here: it needs --model-repository.")
        if get("triton", "model_control_mode")[0] != "explicit":
            raise ConfigurationError(f"{origin} needs --model-control-mode explicit.")
        if "*" in names and len(names) > 1:
            raise ConfigurationError(f"{origin}: '*' stands for all models, and takes no other name beside it.")
    listens, origin = get("server", "enable_kserve_frontends")
    if listens and not repository:
        raise ConfigurationError(
            f"{origin} is for a Triton that is started here: it needs --model-repository. One that runs already "
            "listens for its clients itself."
        )
    collector, origin = get("traces", "otlp_endpoint")
    if collector is not None:
        check_address(collector, origin, ("http", "https"), "http:// or https://, for gRPC too")
    restricted, origin = get("access", "openai_restricted_api", ())
    apis: list[str] = []
    for entry in restricted:
        apis += entry.apis
    if api := _repeated(apis):
        raise ConfigurationError(f"{origin}: the API {api!r} is restricted twice.")
    gateway = next((origin for path, (_, origin) in layer.items() if path[:2] == ("access", "gateway")), None)
    if gateway is not None and not get("access", "trust_gateway")[0]:
        raise ConfigurationError(f"{gateway} needs access.trust_gateway.")
    content, origin = get("server", "log_content")
    level, level_origin = get("server", "log_level", "info")
    if content is not None and level not in ("debug", "info"):
        raise ConfigurationError(f"{origin} and {level_origin} exclude each other: contents are logged at 'info'.")
    workers, _ = get("server", "workers", 1)
    for name in ("max_running_requests", "max_running_requests_per_model", "max_running_requests_per_endpoint"):
        limit, origin = get("server", name)
        if limit is not None and limit < workers:
            raise ConfigurationError(f"{origin}: {limit} is too few for {workers} workers, which need one each.")
    _check_models(layer)


def _check_models(layer: _Layer) -> None:
    aliases: dict[str, tuple[str, str]] = {}
    for path, (value, origin) in layer.items():
        if path[-1] == "history_template":
            _, other = layer.get((*path[:-1], "chat_template"), (None, ""))
            if other:
                raise ConfigurationError(f"Use either {other} or {origin}, not both.")
        elif path[-1] == "aliases":
            for alias in value:
                other, _ = aliases.setdefault(alias, (path[1], origin))
                if other != path[1]:
                    raise ConfigurationError(
                        f"{origin}: the alias {alias!r} stands for two models, {other!r} and {path[1]!r}."
                    )
        elif path[-1] == "loras":
            entries = [entry if isinstance(entry, LoraSettings) else LoraSettings(entry) for entry in value]
            for what in ("name", "task_id"):
                twice = _repeated([getattr(entry, what) for entry in entries if getattr(entry, what) is not None])
                if twice is not None:
                    raise ConfigurationError(f"{origin}: two LoRA adapters have the {what} {twice!r}.")
        elif path[2:4] == ("moderation", "thresholds"):
            labels = (*path[:3], "labels")
            if path[-1] not in [category for other, (category, _) in layer.items() if other[:4] == labels]:
                raise ConfigurationError(f"{origin}: no label stands for this category.")
    for alias, (model, origin) in aliases.items():
        if model in aliases:
            raise ConfigurationError(
                f"{origin}: the alias {alias!r} stands for {model!r}, which is itself an alias, of "
                f"{aliases[model][0]!r}; name that."
            )


def _repeated(values: list[Any]) -> Any:
    """Return a value that is there twice, if any is."""
    return next((value for index, value in enumerate(values) if value in values[:index]), None)
