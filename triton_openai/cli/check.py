"""The command ``check``: whether the service could start with these settings. No Triton is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from triton_openai.access.keys import read_keys
from triton_openai.app import check_names, create_app, unusable_files
from triton_openai.cli.terminal import problems, table
from triton_openai.config.addresses import endpoints
from triton_openai.config.files import readable_by_all
from triton_openai.config.reload import Source
from triton_openai.config.tls import server_context
from triton_openai.config.tree import Settings
from triton_openai.errors import ConfigurationError
from triton_openai.prompts.prompter import check_files
from triton_openai.triton.connection import ConnectionSettings

_LOOPBACK = ("localhost", "::1")


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    #: What was checked.
    subject: str
    #: What it has, or the error.
    details: str
    works: bool = True


def check(settings: Settings, source: Source, *, strict: bool) -> int:
    """
    Print what *settings* have, what is wrong with them, and what an operator may have overlooked.

    Return 0 if a service could start, 2 if it could not, and 1 if there are warnings and the check is *strict*.
    """
    findings = all_findings(settings, source)
    print("\n".join(table(["CHECK", "RESULT", "DETAILS"], [_row(finding) for finding in findings])))
    wrong = [finding for finding in findings if not finding.works]
    if wrong:
        print("\n".join(problems([f"{finding.subject}: {finding.details}" for finding in wrong])))
        return 2
    overlooked = warnings_of(settings, source)
    for warning in overlooked:
        print(f"triton-openai: {warning}", file=sys.stderr)
    if strict and overlooked:
        return 1
    return 0


def _row(finding: Finding) -> Sequence[str]:
    if finding.works:
        return (finding.subject, "ok", finding.details)
    return (finding.subject, "wrong", "see below")


def all_findings(settings: Settings, source: Source) -> Sequence[Finding]:
    """Return the result of every check of *settings*, which came from *source*."""

    def of_settings() -> str:
        return str(source.file or "no file, only flags and variables")

    def of_service() -> str:
        # Whatever is left: stores, traces, limits, and the packages that each needs.
        create_app(settings)
        return "could start"

    checks: Mapping[str, Callable[[], str]] = {
        "settings": of_settings,
        "models": lambda: _models(settings),
        "API keys": lambda: _keys(settings),
        "TLS": lambda: _tls(settings),
        "Triton": lambda: _triton(settings),
    }
    findings = [_finding(subject, run) for subject, run in checks.items()]
    if all(finding.works for finding in findings):
        findings.append(_finding("service", of_service))
    return findings


def _finding(subject: str, run: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, run())
    except ConfigurationError as error:
        return Finding(subject, error.message, works=False)


def _models(settings: Settings) -> str:
    """Check what stands in the settings of models: names of adapters, parsers and templates, and files."""
    check_names(settings)
    check_files(settings)
    if not settings.models:
        return "as Triton describes them"
    return _counted(len(settings.models), "model has settings", "models have settings")


def _keys(settings: Settings) -> str:
    keys = read_keys(settings.access)
    if keys is None:
        return "none are asked for"
    return _counted(len(keys), "key", "keys")


def _tls(settings: Settings) -> str:
    if server_context(settings.tls) is None:
        return "off"
    return str(settings.tls.certificate)


def _triton(settings: Settings) -> str:
    """Check the addresses of Tritons, or the folders that one is started on."""
    triton = settings.triton
    for flag, folders in (("model-repository", triton.model_repository), ("triton-repository", triton.repository)):
        for folder in folders:
            if not folder.is_dir():
                raise ConfigurationError(f"There is no folder {folder} given by --{flag}.")
    if triton.model_repository:
        return f"is started on {', '.join(map(str, triton.model_repository))}"
    addresses: list[str] = []
    for endpoint in endpoints(triton):
        access = endpoint.access or settings.triton_access
        connection = ConnectionSettings(access=access)
        connection.check(endpoint.url)
        if access.ca is not None or access.certificate is not None:
            connection.ssl_context()
        addresses += endpoint.url
    return " and ".join(addresses)


def _counted(count: int, one: str, several: str) -> str:
    if count == 1:
        return f"1 {one}"
    return f"{count} {several}"


def warnings_of(settings: Settings, source: Source) -> Sequence[str]:
    """Return what an operator may have overlooked in *settings*, each as a sentence."""
    server = settings.server
    access = settings.access
    warnings = []
    reachable = server.host not in _LOOPBACK and not server.host.startswith("127.")
    asks_nothing = not access.api_key and access.api_keys_file is None and not access.trust_gateway
    if reachable and asks_nothing:
        warnings.append(f"It listens at {server.host} and asks for no API key: everybody who reaches it may use it.")
    secrets: Mapping[str, Path | None] = {
        "the file of API keys": access.api_keys_file,
        "the private key of --tls-key": settings.tls.key,
        "the private key of --triton-key": settings.triton_access.key,
        "the token of --triton-token-file": settings.triton_access.token_file,
    }
    if source.has_secrets():
        secrets = {**secrets, "the settings file, which holds secrets": source.file}
    for what, file in secrets.items():
        if readable_by_all(file):
            warnings.append(f"Every user of this machine can read {what}: chmod o-rwx {file}")
    if server.log_content is not None:
        warnings.append("Prompts and answers are logged (--log-content).")
    if settings.traces.content is not None and settings.traces.otlp_endpoint is not None:
        warnings.append("Prompts and answers are sent with traces (traces.content).")
    reason = unusable_files(settings)
    if reason is not None:
        warnings.append(f"Files and batches are off: {reason}.")
    return warnings
