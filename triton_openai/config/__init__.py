"""
Settings: one typed tree, fed by flags, the environment, a YAML file and defaults, in that order of precedence.

``tree`` says what can be set and explains it, ``options`` derives flags and variables from the tree, ``sources`` reads
them, and ``changes`` tells what of new settings a running service can take over.
"""

from __future__ import annotations

from triton_openai.config.access import AccessSettings, Group, LimitSettings, RestrictedApi
from triton_openai.config.observability import MetricsSettings
from triton_openai.config.options import ENVIRONMENT_PREFIX, Changes, Option, changes_between, options, options_by_name
from triton_openai.config.sources import config_file, load_settings
from triton_openai.config.tree import (
    ApiSettings,
    DefaultParameters,
    ModelDefaults,
    ModelSettings,
    ServerSettings,
    Settings,
    TritonSettings,
)

__all__ = [
    "ENVIRONMENT_PREFIX",
    "AccessSettings",
    "ApiSettings",
    "Changes",
    "DefaultParameters",
    "Group",
    "LimitSettings",
    "MetricsSettings",
    "ModelDefaults",
    "ModelSettings",
    "Option",
    "RestrictedApi",
    "ServerSettings",
    "Settings",
    "TritonSettings",
    "changes_between",
    "config_file",
    "load_settings",
    "options",
    "options_by_name",
]
