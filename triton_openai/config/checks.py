"""What has to hold between settings, checked once all of them are read: each error names where a value came from."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from triton_openai.config.models import LoraSettings
from triton_openai.config.traces import check_endpoint
from triton_openai.errors import ConfigurationError

#: A value with the place it comes from, for error messages.
Found = tuple[Any, str]
#: What was found, by its path in the tree.
Layer = dict[tuple[str, ...], Found]


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
