"""The command ``collect-env``: what a report of a fault needs to know of an installation, without its secrets."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from triton_openai import __version__
from triton_openai.config.options import ENVIRONMENT_PREFIX
from triton_openai.config.tree import Settings
from triton_openai.errors import ConfigurationError, printable

_PACKAGE = "triton-openai"
_MASK = "<redacted>"
# Settings whose values may be secrets, by a part of their names, unless they name a file.
_SECRET = re.compile(r"(?:^|[._])(?:api_key|keys?|tokens?|secrets?|passwords?|headers?|value|credentials?)$")
_NO_SECRET = re.compile(r"(?:^|\.)(?:tls|triton_access|access)\.key$")
# A user and a password, and the query, in which some stores take them too.
_USER = re.compile(r"(?<=//)[^/@\s]+@")
_QUERY = re.compile(r"(?<=\?)\S+")
_MAX_VALUE = 200
_PROGRAM_SECONDS = 10
_REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+")
# Other variables that change what the service does; of secrets and proxies it says only that they are set.
_VARIABLES = re.compile(rf"{ENVIRONMENT_PREFIX}.*|OTEL_.*|HF_.*|OPENAI_.*|[A-Za-z]+_(proxy|PROXY)|UVLOOP.*|PYTHON.*")


def collect_env(load: Callable[[], Settings], environ: Mapping[str, str]) -> int:
    """Print the report as Markdown. Settings that *load* cannot read are a part of it. Return the exit status."""
    print("\n".join(report(load, environ)))
    return 0


def report(load: Callable[[], Settings], environ: Mapping[str, str]) -> Sequence[str]:
    """Return the lines of the report: versions, machine, packages, variables and the settings that differ."""
    lines = ["### triton-openai", "", *_listed(_versions(environ)), "", "### Packages", "", *_listed(_packages())]
    lines += ["", "### Settings that are not the default", ""]
    try:
        lines += _listed(changed_settings(load())) or ["none"]
    except ConfigurationError as error:
        lines.append(f"They are not accepted: {_masked(error.message)}")
    names = sorted(name for name, value in environ.items() if value and _VARIABLES.fullmatch(name))
    lines += ["", "### Variables that are set", "", ", ".join(names) or "none"]
    return lines


def _listed(entries: Mapping[str, str]) -> list[str]:
    return [f"- {name}: {value}" for name, value in entries.items()]


def _versions(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the service, the Python and the machine, each with what matters of it."""
    entries = {
        "triton-openai": __version__,
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}, {_distribution()}",
        "C library": " ".join(platform.libc_ver()).strip() or "unknown",
        "CPUs": f"{_cores()} usable of {os.cpu_count()}",
        "memory": _memory(),
        "in a container": _yes_or_no(_in_container(environ)),
        "Triton on this machine": _triton(),
    }
    gpus = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    entries["GPUs"] = "; ".join(gpus.splitlines()) or "none that nvidia-smi shows"
    return entries


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> str:
    try:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return "unknown"
    return f"{pages / 2**30:.1f} GiB"


def _in_container(environ: Mapping[str, str]) -> bool:
    if "KUBERNETES_SERVICE_HOST" in environ:
        return True
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def _yes_or_no(value: bool) -> str:
    if value:
        return "yes"
    return "no"


def _triton() -> str:
    if shutil.which("tritonserver"):
        return "a tritonserver on PATH"
    try:
        return f"nvidia-pytriton {metadata.version('nvidia-pytriton')}"
    except metadata.PackageNotFoundError:
        return "none"


def _output(*command: str) -> str:
    """Return what a program prints, and nothing where it is missing or fails."""
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, check=False, timeout=_PROGRAM_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    if done.returncode:
        return ""
    return done.stdout.strip()


def _packages() -> Mapping[str, str]:
    """Return the version of each package that the service, or one of its extras, needs and that is installed."""
    try:
        requirements = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return {_PACKAGE: "is not installed, but run from its folder"}
    versions = {}
    for requirement in requirements:
        # Those of tests and of lint are in nobody's way.
        if re.search(r"extra == [\"'](test|lint|audit|lock|docs)[\"']", requirement):
            continue
        match = _REQUIREMENT.match(requirement)
        if match is None or match[0] == _PACKAGE:
            continue
        try:
            versions[match[0]] = metadata.version(match[0])
        except metadata.PackageNotFoundError:
            continue
    return dict(sorted(versions.items()))


def changed_settings(settings: Settings) -> Mapping[str, str]:
    """Return the settings that differ from the defaults, by their keys in the YAML file, with secrets masked."""
    default = dict(_leaves(msgspec.to_builtins(Settings(), enc_hook=str)))
    own = _leaves(msgspec.to_builtins(settings, enc_hook=str))
    return {key: _shown(key, value) for key, value in own if default.get(key, _MISSING) != value}


_MISSING = object()


def _leaves(tree: Mapping[str, Any], path: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield each value of *tree* with its dotted key; models' empty values are left out."""
    for name, value in tree.items():
        key = (*path, str(name))
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, key)
        elif path[:1] != ("models",) or value not in (None, [], (), {}, ""):
            yield ".".join(key), value


def _shown(key: str, value: Any) -> str:
    """Return *value* as text; a secret is masked."""
    if isinstance(value, list | tuple):
        return ", ".join(_shown(key, item) for item in value)
    if isinstance(value, Mapping):
        shown = [f"{name}={_shown(f'{key}.{name}', item)}" for name, item in value.items() if item is not None]
        return f"({', '.join(shown)})"
    if isinstance(value, str) and _SECRET.search(key) and not _NO_SECRET.search(key):
        return _MASK
    return _masked(str(value))


def _masked(text: str) -> str:
    """Return *text* in one line, without what looks like a secret."""
    text = _QUERY.sub(_MASK, _USER.sub(f"{_MASK}@", text))
    return printable(" ".join(text.split()), _MAX_VALUE)
