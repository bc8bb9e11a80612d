"""Checks addresses of Tritons and collectors, and reads the list of several Tritons."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import msgspec

from triton_openai.config.files import read_yaml
from triton_openai.config.tree import ENDPOINT_NAME, EndpointSettings, TritonSettings
from triton_openai.config.validation import explained, path_of
from triton_openai.errors import ConfigurationError

_DNS = "dns+"
_SEVERAL = "Several Tritons are entries of their own: --endpoint for each, or triton.endpoints"
_Entry = str | EndpointSettings


def check_urls(urls: Sequence[str], origin: str) -> None:
    """Raise :class:`ConfigurationError` unless *urls* are an HTTP address, a gRPC address or one of each."""
    if not urls:
        raise ConfigurationError(f"{origin}: at least one address is needed.")
    beginnings = "http://, https://, grpc:// or grpcs://"
    if len(urls) > 1:
        beginnings += f". {_SEVERAL}"
    taken: dict[str, str] = {}
    for url in urls:
        parts = check_address(url, origin, ("http", "https", "grpc", "grpcs"), beginnings)
        if not re.fullmatch(r"[!-~]+", url):
            raise ConfigurationError(
                f"{origin}: {url!r} has spaces or characters that are not ASCII: write its path percent-encoded, and "
                "its host as xn--…."
            )
        if parts.scheme.startswith("http"):
            kind = "HTTP"
        else:
            kind = "gRPC"
        if kind == "gRPC" and parts.port is None:
            raise ConfigurationError(f"{origin}: {url!r} names no port; Triton's gRPC port is usually 8001.")
        if kind == "gRPC" and parts.path.strip("/"):
            raise ConfigurationError(f"{origin}: {url!r} has a path, which a gRPC address cannot have.")
        if kind in taken:
            raise ConfigurationError(
                f"{origin}: {taken[kind]} and {url} are two {kind} addresses; at most one is possible. {_SEVERAL}."
            )
        taken[kind] = url


def check_address(url: str, origin: str, schemes: tuple[str, ...], beginnings: str) -> SplitResult:
    """
    Return the parts of *url*. Raises :class:`ConfigurationError`: it needs a scheme and a host, and has no secret that
    would be printed.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigurationError(f"{origin}: {url!r} is not an address: {error}.") from error
    if parts.scheme not in schemes or "://" not in url:
        if "://" in url:
            hint = ""
        else:
            hint = f" Did you mean http://{url}?"
        raise ConfigurationError(f"{origin}: {url!r} is not accepted: it has to begin with {beginnings}.{hint}")
    if not parts.hostname:
        raise ConfigurationError(f"{origin}: {url!r} names no host.")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigurationError(
            f"{origin}: {parts.scheme}://{parts.hostname} takes no user, password, query or fragment. Tokens go into "
            "--triton-header, and OTEL_EXPORTER_OTLP_HEADERS for a collector."
        )
    return parts


def check_endpoints(entries: Sequence[_Entry], origin: str) -> list[EndpointSettings]:
    """
    Return *entries* with their names, those in short form ``[NAME=]URL[+URL]`` too.

    Raises :class:`ConfigurationError` for duplicate names and for wrong addresses.
    """
    endpoints: dict[str | None, EndpointSettings] = {}
    for entry in entries:
        endpoint = _named(_from_text(entry) if isinstance(entry, str) else entry, origin)
        if endpoint.name in endpoints:
            raise ConfigurationError(f"{origin}: two endpoints have the name {endpoint.name!r}.")
        endpoints[endpoint.name] = endpoint
    return list(endpoints.values())


def _from_text(text: str) -> EndpointSettings:
    # A URL may have "=" in its path, and its scheme ends with "+" only where each address is meant.
    name: str | None
    name, equals, urls = text.partition("=")
    if not equals or "://" in name:
        name = None
        urls = text
    dns = urls.startswith(_DNS)
    addresses = re.split(r"\+(?=\w+://)", urls.removeprefix(_DNS))
    return EndpointSettings(url=tuple(addresses), name=name, dns=dns)


def _named(endpoint: EndpointSettings, origin: str) -> EndpointSettings:
    check_urls(endpoint.url, origin)
    hosts = {urlsplit(url).hostname or "" for url in endpoint.url}
    if endpoint.dns and len(hosts) > 1:
        raise ConfigurationError(f"{origin}: the addresses of an endpoint with dns have one host, not {sorted(hosts)}.")
    if endpoint.name is not None:
        # A name in short form has not been checked.
        if not re.match(ENDPOINT_NAME, endpoint.name):
            raise ConfigurationError(
                f"{origin}: an endpoint's name has up to 64 of the characters A-Z a-z 0-9 . _ : [ ] -, unlike "
                f"{endpoint.name[:100]!r}."
            )
        return endpoint
    return msgspec.structs.replace(endpoint, name=urlsplit(endpoint.url[0]).netloc)


def read_endpoints(file: Path) -> list[EndpointSettings]:
    """Return the endpoints in *file*, a YAML list. Blocks. Raises :class:`ConfigurationError`."""
    what = "file of endpoints"
    content = read_yaml(file, what)
    try:
        entries = msgspec.convert(content, list[_Entry], dec_hook=path_of)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"The {what} {file} is not accepted: {explained(error, list[_Entry])}") from None
    return check_endpoints(entries, f"The {what} {file}")


def endpoints(triton: TritonSettings) -> list[EndpointSettings]:
    """Return the Tritons that the settings and their file name: one where no list is given. Blocks."""
    if not triton.endpoints and triton.endpoints_file is None:
        return [EndpointSettings(url=triton.url, name=urlsplit(triton.url[0]).netloc)]
    listed: list[_Entry] = [*triton.endpoints]
    if triton.endpoints_file is not None:
        listed += read_endpoints(triton.endpoints_file)
    return check_endpoints(listed, "triton.endpoints")
