"""Who may ask, as the description has it: what the settings ask for now, and nothing of what they do not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from triton_openai.api.groups import COUNTED
from triton_openai.config import AccessSettings, Group
from triton_openai.errors import ApiRestricted, InvalidApiKey, KeyNotSufficient, RateLimited, ServiceError
from triton_openai.server.restrictions import Restrictions

_SCHEMES: Mapping[str, Mapping[str, str]] = {
    "BearerKey": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send it."},
    "ApiKeyHeader": {"type": "apiKey", "in": "header", "name": "api-key", "description": "As Azure's clients send it."},
    "XApiKeyHeader": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "As Anthropic's clients send it.",
    },
}
_AMOUNTS = (("limit", "What the key may use in a minute"), ("remaining", "What is left of it"))
_RESETS = "Time until all of it is there again, as `1s` or `6m0s`"


class Access:
    """
    What *settings* ask of a request, by the group of its route.

    The headers that open restricted groups are not told: who may know them has them from the operator.
    """

    def __init__(self, settings: AccessSettings) -> None:
        self._keys = bool(settings.api_key) or settings.api_keys_file is not None
        self._restricted = Restrictions(settings.openai_restricted_api).groups

    @property
    def schemes(self) -> Mapping[str, Mapping[str, str]]:
        """The ways to show a key; none where nobody looks at it."""
        return _SCHEMES if self._keys else {}

    def security(self, group: Group) -> Sequence[Mapping[str, Sequence[str]]] | None:
        """Return what a request has to show, any one of it; ``None`` where no keys are asked for."""
        if not self._keys:
            return None
        return [] if group == "health" else [{name: []} for name in _SCHEMES]

    def errors(self, group: Group) -> Iterator[type[ServiceError]]:
        """Yield the errors of requests that are not let in."""
        if self._keys and group != "health":
            yield InvalidApiKey
        if self._keys and group == "metrics":
            yield KeyNotSufficient
        if group in self._restricted:
            yield ApiRestricted
        if self._counts(group):
            yield RateLimited

    def headers(self, group: Group) -> Mapping[str, Any]:
        """Return what answers say of the key, as headers by their names."""
        return _references() if self._counts(group) else {}

    def failure_headers(self, status: int) -> Mapping[str, Any]:
        """Return the headers of refusals with *status*."""
        if status == InvalidApiKey.status:
            return {"WWW-Authenticate": {"$ref": "#/components/headers/Authenticate"}}
        return _references() if status == RateLimited.status and self._keys else {}

    @property
    def header_components(self) -> Mapping[str, Any]:
        """What :meth:`headers` refers to."""
        found: dict[str, Any] = {}
        if self._keys or self._restricted:
            found["Authenticate"] = {"description": "How a key is given.", "schema": {"const": "Bearer"}}
        if not self._keys:
            return found
        for kind in ("requests", "tokens"):
            where = f"{kind}, for a key with such a limit."
            for what, description in _AMOUNTS:
                schema = {"type": "integer", "minimum": 0}
                found[_component(f"{what}-{kind}")] = {"description": f"{description}: {where}", "schema": schema}
            found[_component(f"reset-{kind}")] = {"description": f"{_RESETS}: {where}", "schema": {"type": "string"}}
        return found

    def _counts(self, group: Group) -> bool:
        return self._keys and group in COUNTED


def _references() -> dict[str, Any]:
    names = [f"{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")]
    return {f"x-ratelimit-{name}": {"$ref": f"#/components/headers/{_component(name)}"} for name in names}


def _component(name: str) -> str:
    return "RateLimit" + name.title().replace("-", "")
