"""
Settings: one typed tree, fed by flags, the environment, a YAML file and defaults, in that order of precedence.

``tree`` declares and documents the settings, ``options`` derives flags and variables from the tree, ``sources`` reads
them, and ``reload`` reads them again and finds what a running service can take over.
"""

from __future__ import annotations

from triton_openai.config.options import ENVIRONMENT_PREFIX, Option, options
from triton_openai.config.sources import config_file, load_settings
from triton_openai.config.tree import (
    AccessSettings,
    ApiSettings,
    DefaultParameters,
    Group,
    LimitSettings,
    LoraSettings,
    MediaSettings,
    MetricsSettings,
    ModelDefaults,
    ModelSettings,
    ResponsesSettings,
    RestrictedApi,
    ServerSettings,
    Settings,
    TlsSettings,
    TracesSettings,
    TritonAccess,
    TritonSettings,
)

__all__ = [
    "ENVIRONMENT_PREFIX", "AccessSettings", "ApiSettings", "DefaultParameters", "Group", "LimitSettings",
    "LoraSettings", "MediaSettings", "MetricsSettings", "ModelDefaults", "ModelSettings", "Option", "ResponsesSettings",
    "RestrictedApi", "ServerSettings", "Settings", "TlsSettings", "TracesSettings", "TritonAccess", "TritonSettings",
    "config_file", "load_settings", "options",
]  # fmt: skip
