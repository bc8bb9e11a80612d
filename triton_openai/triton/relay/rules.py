"""
What is relayed: the operations of Triton's protocol, in the groups in which Triton itself restricts them.

Source: Triton's ``--http-restricted-api`` and ``--grpc-restricted-protocol``, its HTTP paths and
``grpc_service.proto``. What is not listed here is not relayed: an operation that a later Triton adds may be one that
changes the server.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any
from urllib.parse import unquote

import msgspec
from tritonclient.grpc import service_pb2

from triton_openai.errors import EndpointNotFound, InvalidRequest, ManagementDisabled
from triton_openai.triton.client import check_name
from triton_openai.triton.relay.operation import Operation

_SERVICE = "/inference.GRPCInferenceService/"

_HEALTH = Operation(group="health", guards=("health",), about="nothing")
_READY = Operation(group="health", guards=("health",), about="nothing", readiness=True)
_MODEL_READY = Operation(group="health", guards=("health",), about="model", readiness=True)
_SERVER = Operation(group="metadata", guards=("info",), about="nothing")
_METADATA = Operation(group="metadata", guards=("model-repository",), about="model")
_CONFIG = Operation(group="model-config", guards=("model-repository",), about="model")
_STATISTICS = Operation(group="statistics", guards=("metrics",), about="model")
_ALL_STATISTICS = Operation(group="statistics", guards=("metrics",), about="everything")
# Whether a model embeds or generates is not in the request.
_INFERENCE = Operation(group="inference", guards=("inference", "embedding"), about="model")
_INDEX = Operation(group="model-repository", guards=("model-repository",), about="everything")
_LOADING = Operation(group="model-repository", guards=("model-repository",), about="model", manages=True, loads=True)
_SHARED_MEMORY = Operation(group="shared-memory", guards=("model-repository",), about="everything", manages=True)
_TRACE = Operation(group="trace", guards=("model-repository",), about="everything", manages=True)
_LOGGING = Operation(group="logging", guards=("model-repository",), about="everything", manages=True)

# A segment as it is on the wire: a model's name may be percent-encoded in it.
_ONE = r"[^/?#]+"
_NAME = rf"(?P<model>{_ONE})"
_MODEL = rf"/v2/models/{_NAME}(?:/versions/{_ONE})?"
_PATHS: tuple[tuple[re.Pattern[str], Operation], ...] = tuple(
    (re.compile(pattern), operation)
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
        # Last: a model may be called like one of the words above.
        (_MODEL, _METADATA),
    )
)
_METHODS = {
    "ServerLive": _HEALTH,
    "ServerReady": _READY,
    "ModelReady": _MODEL_READY,
    "ServerMetadata": _SERVER,
    "ModelMetadata": _METADATA,
    "ModelInfer": _INFERENCE,
    "ModelStreamInfer": _INFERENCE,
    "ModelConfig": _CONFIG,
    "ModelStatistics": _STATISTICS,
    "RepositoryIndex": _INDEX,
    "RepositoryModelLoad": _LOADING,
    "RepositoryModelUnload": _LOADING,
    **dict.fromkeys(
        (
            f"{kind}SharedMemory{action}"
            for kind in ("System", "Cuda")
            for action in ("Status", "Register", "Unregister")
        ),
        _SHARED_MEMORY,
    ),
    "TraceSetting": _TRACE,
    "LogSettings": _LOGGING,
}
_RPCS = {f"{_SERVICE}{name}": operation for name, operation in _METHODS.items()} | {
    f"/grpc.health.v1.Health/{name}": _READY for name in ("Check", "Watch")
}
# What a call's messages are, and the field in which they name a model.
_NAMING: dict[str, tuple[Any, str]] = {
    f"{_SERVICE}{call}": (kind, field)
    for call, kind, field in (
        ("ModelInfer", service_pb2.ModelInferRequest, "model_name"),
        ("ModelStreamInfer", service_pb2.ModelInferRequest, "model_name"),
        ("ModelReady", service_pb2.ModelReadyRequest, "name"),
        ("ModelMetadata", service_pb2.ModelMetadataRequest, "name"),
        ("ModelConfig", service_pb2.ModelConfigRequest, "name"),
        ("ModelStatistics", service_pb2.ModelStatisticsRequest, "name"),
        ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest, "model_name"),
        ("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest, "model_name"),
    )
}
# All that a load or unload may say of a model, unless more is allowed.
_HARMLESS = frozenset({"unload_dependents"})
_OVERRIDES = "model-overrides"
# Each reading is as long as the name: one that is encoded again and again would cost its square in time and memory.
_MOST_READINGS = 8


class _LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    parameters: dict[str, Any] = {}


class Rules:
    """What clients may do: all that does not manage the server, and the *allowed* groups of what does."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)

    def of_path(self, target: str) -> tuple[Operation | None, Collection[str]]:
        """
        Return the operation of an HTTP request for *target*, as it stands in the request line, if it is one that is
        relayed, and every name that the model in it may be meant to have.

        Whether and how often a name is decoded is Triton's affair, and differs between its releases. One that is
        encoded more often than anybody means is not relayed.
        """
        path = target.partition("?")[0]
        for pattern, operation in _PATHS:
            match = pattern.fullmatch(path)
            if match is None:
                continue
            if "model" not in pattern.groupindex:
                return operation, ()
            names = list(islice(_readings(match["model"]), _MOST_READINGS + 1))
            return (operation, names) if len(names) <= _MOST_READINGS else (None, ())
        return None, ()

    def of_rpc(self, method: str) -> Operation | None:
        """Return the operation of the call *method*, if it is one that is relayed."""
        return _RPCS.get(method)

    def check(self, operation: Operation | None, what: str, names: Collection[str] = ()) -> Operation:
        """
        Return *operation*, if it is there and allowed; *what* is how the client called it, and *names* as in its path.

        Raises :class:`EndpointNotFound`, :class:`ManagementDisabled`, and :class:`InvalidRequest` for a model's name
        that is none.
        """
        if operation is None:
            raise EndpointNotFound(f"There is no {what[:200]}, or it is not relayed.")
        if operation.manages and operation.group not in self._allowed:
            flag = "--model-control-mode explicit" if operation.loads else f"server.kserve_allow {operation.group}"
            raise ManagementDisabled(f"This changes the server ({operation.group}); the service allows it with {flag}.")
        encoded = len(names) > 1
        for name in names if operation.loads or encoded else ():
            check_name(name)
            # With what it has besides, it would be another path to a Triton that decodes before it looks.
            if encoded and ("?" in name or "#" in name):
                raise InvalidRequest("The model's name is not accepted.", param="model", code="invalid_value")
        return operation

    def read(self, method: str, message: bytes) -> str:
        """
        Return the model that *message*, of a call that is about one, names; empty for all models.

        Raises :class:`InvalidRequest` for what cannot be read, and for the name of a model to load that is none;
        :class:`ManagementDisabled` for a load that brings more than a name.
        """
        kind, field = _NAMING[method]
        try:
            found = kind.FromString(message)
        except Exception as error:  # protobuf's error has no public name that all its versions share
            raise InvalidRequest("The message cannot be read.") from error
        name: str = getattr(found, field)
        if _RPCS[method].loads:
            check_name(name)
            self._check_overrides(found.parameters)
        return name

    @property
    def overrides(self) -> bool:
        """Whether who loads a model may bring a configuration and files for it."""
        return _OVERRIDES in self._allowed

    def loading_body(self, body: bytes) -> bytes:
        """
        Return what a load or unload over HTTP with this *body* says to Triton: nothing that replaces the model.

        Written anew, because two parsers may read one text in two ways. Raises :class:`InvalidRequest`,
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
        self._check_overrides(said.parameters)
        return msgspec.json.encode(said)

    def _check_overrides(self, parameters: Collection[str]) -> None:
        if not self.overrides and not _HARMLESS.issuperset(parameters):
            raise ManagementDisabled(
                "This load replaces the model's configuration or files, which are programs that Triton runs; the "
                f"service allows it with server.kserve_allow {_OVERRIDES}."
            )


def _readings(segment: str) -> Iterator[str]:
    while True:
        yield segment
        decoded = unquote(segment, errors="surrogateescape")
        if decoded == segment:
            return
        segment = decoded
