"""
The settings tree: what can be set, its type, its limits, its default and its explanation, each at one place.

Flags, environment variables, help texts and the reference table are derived from the fields (see ``options``), so a new
setting is one new field of a group. ``fields`` explains what a field says beyond its type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from triton_openai.config.tree.access import NAMED_KEY, AccessSettings, ApiGroup, GatewaySettings, RestrictedApi
from triton_openai.config.tree.fields import AUTO, NONE, SettingsGroup
from triton_openai.config.tree.models import (
    AudioSettings,
    Category,
    DefaultParameters,
    LoraSettings,
    ModelDefaults,
    ModelSettings,
    ModerationSettings,
)
from triton_openai.config.tree.requests import ApiSettings, AudioLimits, MediaSettings
from triton_openai.config.tree.server import LimitSettings, ServerSettings, TlsSettings
from triton_openai.config.tree.storage import BatchesSettings, FilesSettings, ResponsesSettings
from triton_openai.config.tree.telemetry import OTLP_PATH, OTLP_PORTS, MetricsSettings, Protocol, TracesSettings
from triton_openai.config.tree.triton import (
    ENDPOINT_NAME,
    EjectionSettings,
    EndpointSettings,
    FailoverSettings,
    Policy,
    RoutingSettings,
    TritonAccess,
    TritonSettings,
)

__all__ = [
    "AUTO",
    "ENDPOINT_NAME",
    "NAMED_KEY",
    "NONE",
    "OTLP_PATH",
    "OTLP_PORTS",
    "AccessSettings",
    "ApiGroup",
    "ApiSettings",
    "AudioLimits",
    "AudioSettings",
    "BatchesSettings",
    "Category",
    "DefaultParameters",
    "EjectionSettings",
    "EndpointSettings",
    "FailoverSettings",
    "FilesSettings",
    "GatewaySettings",
    "LimitSettings",
    "LoraSettings",
    "MediaSettings",
    "MetricsSettings",
    "ModelDefaults",
    "ModelSettings",
    "ModerationSettings",
    "Policy",
    "Protocol",
    "ResponsesSettings",
    "RestrictedApi",
    "RoutingSettings",
    "ServerSettings",
    "Settings",
    "TlsSettings",
    "TracesSettings",
    "TritonAccess",
    "TritonSettings",
]

_LIVE = Meta(extra={"live": True})


class Settings(SettingsGroup, frozen=True):
    """Everything that can be set. ``load_settings`` makes it; it never changes afterwards."""

    server: ServerSettings = ServerSettings()
    tls: Annotated[TlsSettings, Meta(extra={"prefix": "tls-"})] = TlsSettings()
    triton: TritonSettings = TritonSettings()
    triton_access: Annotated[TritonAccess, Meta(extra={"prefix": "triton-"})] = TritonAccess()
    api: Annotated[ApiSettings, _LIVE] = ApiSettings()
    responses: Annotated[ResponsesSettings, Meta(extra={"prefix": "responses-"})] = ResponsesSettings()
    files: Annotated[FilesSettings, Meta(extra={"prefix": "files-"})] = FilesSettings()
    batches: Annotated[BatchesSettings, Meta(extra={"prefix": "batches-"})] = BatchesSettings()
    media: MediaSettings = MediaSettings()
    audio: Annotated[AudioLimits, _LIVE] = AudioLimits()
    metrics: MetricsSettings = MetricsSettings()
    traces: TracesSettings = TracesSettings()
    access: Annotated[AccessSettings, _LIVE] = AccessSettings()
    limits: LimitSettings = LimitSettings()
    defaults: Annotated[ModelDefaults, _LIVE] = ModelDefaults()
    models: Annotated[Mapping[str, ModelSettings], _LIVE] = msgspec.field(default_factory=dict)

    def model(self, name: str) -> ModelSettings:
        """Return how the model *name* is used: its own settings, completed from the defaults."""
        own = self.models.get(name, ModelSettings())
        defaults = self.defaults
        used = {field: getattr(own, field) or getattr(defaults, field) for field in ModelDefaults.__struct_fields__}
        if own.chat_template or own.history_template:
            # A prompt is made in one way: what is said of a model takes the place of whatever is said of all.
            used.update(chat_template=own.chat_template, history_template=own.history_template)
        parameters = {**defaults.default_parameters.explicit(), **own.default_parameters.explicit()}
        used["default_parameters"] = DefaultParameters(**parameters)
        return msgspec.structs.replace(own, **used)

    def aliases(self) -> dict[str, str]:
        """Return every alias with its model."""
        aliases = {}
        for name, model in self.models.items():
            aliases.update(dict.fromkeys(model.aliases, name))
        return aliases

    def with_triton(self, *urls: str, metrics_url: str | None = None) -> Settings:
        """Return these settings for a Triton that was started here."""
        metrics = msgspec.structs.replace(self.metrics, triton_url=self.metrics.triton_url or metrics_url)
        return msgspec.structs.replace(self, triton=msgspec.structs.replace(self.triton, url=urls), metrics=metrics)

    @property
    def triton_for_batches(self) -> TritonSettings:
        """The settings of Triton for requests of batches, which have time."""
        seconds = self.batches.request_timeout
        triton = self.triton
        first = max(seconds, triton.first_token_timeout)
        return msgspec.structs.replace(triton, request_timeout=seconds, first_token_timeout=first)

    @property
    def triton_metrics_url(self) -> str:
        """The address of Triton's metrics: the one that is configured, else the usual port of its host."""
        return self.metrics.triton_url or metrics_url(self.triton.url[0])


def metrics_url(url: str) -> str:
    """Return where the Triton at *url* has its metrics by default."""
    host = urlsplit(url).hostname or "localhost"
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:8002/metrics"
