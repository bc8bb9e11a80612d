"""
The operations of Triton's protocol that are relayed, in the groups in which Triton itself restricts them.

Source: Triton's ``--http-restricted-api`` and ``--grpc-restricted-protocol``, its HTTP paths and
``grpc_service.proto``. What is not listed here is not relayed: an operation that a later Triton adds may be one that
changes the server.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Literal
from urllib.parse import unquote

import msgspec

from triton_openai.config import Group
from triton_openai.errors import EndpointNotFound, InvalidRequest, ManagementDisabled
from triton_openai.triton.client import check_name


class Operation(msgspec.Struct, frozen=True):
    """
    One operation: its *group*, whether it *manages* the server, and whether it changes which models are *loaded*.

    *guards* are the groups of this service's own API that it belongs to, all of which have to be open; *about* is what
    it reads, uses or changes: the model that it names, all models, or none. *readiness* is whether load balancers use
    it.
    """

    group: str
    guards: tuple[Group, ...]
    about: Literal["nothing", "model", "everything"]
    manages: bool = False
    loads: bool = False
    readiness: bool = False


_HEALTH = Operation("health", ("health",), "nothing")
_READY = Operation("health", ("health",), "nothing", readiness=True)
_MODEL_READY = Operation("health", ("health",), "model", readiness=True)
_SERVER = Operation("metadata", ("info",), "nothing")
_METADATA = Operation("metadata", ("model-repository",), "model")
_CONFIG = Operation("model-config", ("model-repository",), "model")
_STATISTICS = Operation("statistics", ("metrics",), "model")
_ALL_STATISTICS = Operation("statistics", ("metrics",), "everything")
# Whether a model embeds or generates is not in the request.
_INFERENCE = Operation("inference", ("inference", "embedding"), "model")
_INDEX = Operation("model-repository", ("model-repository",), "everything")
_LOADING = Operation("model-repository", ("model-repository",), "model", manages=True, loads=True)
_SHARED_MEMORY = Operation("shared-memory", ("model-repository",), "everything", manages=True)
_TRACE = Operation("trace", ("model-repository",), "everything", manages=True)
_LOGGING = Operation("logging", ("model-repository",), "everything", manages=True)

# A segment as it is on the wire: a model's name may be percent-encoded in it.
_ONE = r"[^/?#]+"
_NAME = rf"(?P<model>{_ONE})"
_MODEL = rf"/v2/models/{_NAME}(?:/versions/{_ONE})?"
_PATHS = {
    re.compile(pattern): operation
    for pattern, operation in (
        (rf"{_MODEL}/(?:infer|generate|generate_stream)", _INFERENCE),
        (r"/v2/health/live", _HEALTH),
        (r"/v2/health/ready", _READY),
        (rf"{_MODEL}/ready", _MODEL_READY),
        (r"/v2/?", _SERVER),
        (rf"{_MODEL}/config", _CONFIG),
        (r"/v2/models/stats", _ALL_STATISTICS),
        (rf"{_MODEL}/stats", _STATISTICS),
        (r"/v2/repository/index", _INDEX),
        (rf"/v2/repository/models/{_NAME}/(?:load|unload)", _LOADING),
        (rf"/v2/(?:system|cuda)sharedmemory(?:/region/{_ONE})?/(?:status|register|unregister)", _SHARED_MEMORY),
        (rf"(?:/v2|/v2/models/{_ONE})/trace/setting", _TRACE),
        (r"/v2/logging", _LOGGING),
        # Last: a model may have one of the names above.
        (_MODEL, _METADATA),
    )
}
_SERVICE = "/inference.GRPCInferenceService/"
_RPCS = {
    f"{_SERVICE}{name}": operation
    for operation, names in (
        (_HEALTH, ("ServerLive",)),
        (_READY, ("ServerReady",)),
        (_MODEL_READY, ("ModelReady",)),
        (_SERVER, ("ServerMetadata",)),
        (_METADATA, ("ModelMetadata",)),
        (_INFERENCE, ("ModelInfer", "ModelStreamInfer")),
        (_CONFIG, ("ModelConfig",)),
        (_STATISTICS, ("ModelStatistics",)),
        (_INDEX, ("RepositoryIndex",)),
        (_LOADING, ("RepositoryModelLoad", "RepositoryModelUnload")),
        (_SHARED_MEMORY, ("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister")),
        (_SHARED_MEMORY, ("CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister")),
        (_TRACE, ("TraceSetting",)),
        (_LOGGING, ("LogSettings",)),
    )
    for name in names
} | {f"/grpc.health.v1.Health/{name}": _READY for name in ("Check", "Watch")}
# The parameters of a load or unload that are always allowed.
_HARMLESS = frozenset({"unload_dependents"})
_OVERRIDES = "model-overrides"


class _LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    parameters: dict[str, Any] = {}


def operation_of_path(path: str) -> tuple[Operation | None, Collection[str]]:
    """
    Return the operation of an HTTP request for *path*, as it stands in the request line, ``None`` if it is not relayed;
    and every name that the model in it may be meant to have.

    Whether and how often a name is decoded differs between Triton's releases. One that is encoded
    more than once is not relayed.
    """
    for pattern, operation in _PATHS.items():
        match = pattern.fullmatch(path)
        if match is not None:
            name = match.groupdict().get("model")
            if name is None:
                return operation, ()
            decoded = unquote(name, errors="surrogateescape")
            return (None, ()) if "%" in decoded else (operation, {name, decoded})
    return None, ()


def operation_of_rpc(method: str) -> Operation | None:
    """Return the operation of the call *method*, if it is one that is relayed."""
    return _RPCS.get(method)


class Rules:
    """The operations that clients may use: all that do not manage the server, and those in the *allowed* groups."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)
        #: Whether a load may bring a configuration and files for the model.
        self.overrides = _OVERRIDES in self._allowed

    def check(self, operation: Operation | None, what: str, names: Collection[str] = ()) -> Operation:
        """
        Return *operation*, if it is there and allowed; *what* is how the client called it, and *names* as in its path.

        Raises :class:`EndpointNotFound`, :class:`ManagementDisabled`, and :class:`InvalidRequest` for an
        impossible name of a model.
        """
        if operation is None:
            raise EndpointNotFound(f"There is no {what[:200]}, or it is not relayed.")
        if operation.manages and operation.group not in self._allowed:
            flag = "--model-control-mode explicit" if operation.loads else f"server.kserve_allow {operation.group}"
            raise ManagementDisabled(f"This changes the server ({operation.group}); the service allows it with {flag}.")
        for name in names:
            check_name(name)
            # Another path to a Triton that decodes before it looks.
            if "?" in name or "#" in name:
                raise InvalidRequest("The model's name is not accepted.", param="model", code="invalid_value")
        return operation

    def loading_body(self, body: bytes) -> bytes:
        """
        Return the body for Triton of a load or unload over HTTP with this *body*, which must not replace the model.

        It is encoded again, because two parsers may read one text differently. Raises :class:`InvalidRequest`,
        :class:`ManagementDisabled`.
        """
        if not body:
            return b""
        try:
            said = msgspec.json.decode(body, type=_LoadBody)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(
                "The body of a load or unload has to be JSON, with 'parameters' or nothing."
            ) from error
        self.check_overrides(said.parameters)
        return msgspec.json.encode(said)

    def check_overrides(self, parameters: Collection[str]) -> None:
        """Raise :class:`ManagementDisabled` where the *parameters* of a load bring more than a name."""
        if not self.overrides and not _HARMLESS.issuperset(parameters):
            raise ManagementDisabled(
                "This load replaces the model's configuration or files, which are programs that Triton runs; the "
                f"service allows it with server.kserve_allow {_OVERRIDES}."
            )
