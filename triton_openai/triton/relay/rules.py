"""
What is relayed: the operations of Triton's protocol, in the groups in which Triton itself restricts them.

Source: Triton's ``--http-restricted-api`` and ``--grpc-restricted-protocol``, its HTTP paths and
``grpc_service.proto``. What is not listed here is not relayed: an operation that a later Triton adds may be one that
changes the server.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import unquote

import msgspec
from tritonclient.grpc import service_pb2

from triton_openai.errors import EndpointNotFound, InvalidRequest, ManagementDisabled
from triton_openai.triton.names import check_name

_SERVICE = "/inference.GRPCInferenceService/"


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """
    One operation: its *group*, whether it *manages* the server, and whether it changes which models are *loaded*.
    """

    group: str
    manages: bool = False
    loads: bool = False


_HEALTH = Operation(group="health")
_METADATA = Operation(group="metadata")
_CONFIG = Operation(group="model-config")
_STATISTICS = Operation(group="statistics")
_INFERENCE = Operation(group="inference")
_INDEX = Operation(group="model-repository")
_LOADING = Operation(group="model-repository", manages=True, loads=True)
_SHARED_MEMORY = Operation(group="shared-memory", manages=True)
_TRACE = Operation(group="trace", manages=True)
_LOGGING = Operation(group="logging", manages=True)

# A segment as it is on the wire: a model's name may be percent-encoded in it.
_ONE = r"[^/?#]+"
_MODEL = rf"/v2/models/{_ONE}(?:/versions/{_ONE})?"
_PATHS: tuple[tuple[re.Pattern[str], Operation], ...] = tuple(
    (re.compile(pattern), operation)
    for pattern, operation in (
        (rf"{_MODEL}/(?:infer|generate|generate_stream)", _INFERENCE),
        (r"/v2/health/(?:live|ready)", _HEALTH),
        (rf"{_MODEL}/ready", _HEALTH),
        (r"/v2/?", _METADATA),
        (rf"{_MODEL}/config", _CONFIG),
        (r"/v2/models/stats", _STATISTICS),
        (rf"{_MODEL}/stats", _STATISTICS),
        (r"/v2/repository/index", _INDEX),
        (rf"/v2/repository/models/(?P<model>{_ONE})/(?:load|unload)", _LOADING),
        (rf"/v2/(?:system|cuda)sharedmemory(?:/region/{_ONE})?/(?:status|register|unregister)", _SHARED_MEMORY),
        (rf"(?:/v2|/v2/models/{_ONE})/trace/setting", _TRACE),
        (r"/v2/logging", _LOGGING),
        # Last: a model may be called like one of the words above.
        (_MODEL, _METADATA),
    )
)
_METHODS = {
    "ServerLive": _HEALTH,
    "ServerReady": _HEALTH,
    "ModelReady": _HEALTH,
    "ServerMetadata": _METADATA,
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
    f"/grpc.health.v1.Health/{name}": _HEALTH for name in ("Check", "Watch")
}
#: Calls whose first message is looked at, because it names the model that is loaded or unloaded.
NAMING = {
    f"{_SERVICE}RepositoryModelLoad": service_pb2.RepositoryModelLoadRequest,
    f"{_SERVICE}RepositoryModelUnload": service_pb2.RepositoryModelUnloadRequest,
}


class Rules:
    """What clients may do: all that does not manage the server, and the *allowed* groups of what does."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)

    def of_path(self, target: str) -> Operation:
        """
        Return the operation of an HTTP request for *target*, as it stands in the request line.

        Raises :class:`EndpointNotFound`, :class:`ManagementDisabled`, and :class:`InvalidRequest` for a model's name
        that is none.
        """
        path = target.partition("?")[0]
        for pattern, operation in _PATHS:
            match = pattern.fullmatch(path)
            if match is not None:
                self._check(operation)
                if operation.loads:
                    self._check_encoded(match["model"])
                return operation
        raise EndpointNotFound(f"There is no endpoint {path[:200]}, or it is not relayed.")

    def of_rpc(self, method: str) -> Operation:
        """Return the operation of the call *method*. Raises :class:`EndpointNotFound`, :class:`ManagementDisabled`."""
        operation = _RPCS.get(method)
        if operation is None:
            raise EndpointNotFound(f"There is no method {method[:200]}, or it is not relayed.")
        self._check(operation)
        return operation

    def check_message(self, method: str, message: bytes) -> None:
        """Raise :class:`InvalidRequest` when *message*, the first of a call in :data:`NAMING`, names no model."""
        try:
            name = NAMING[method].FromString(message).model_name
        except Exception as error:  # protobuf's error has no public name that all its versions share
            raise InvalidRequest("The message cannot be read.") from error
        check_name(name)

    def _check(self, operation: Operation) -> None:
        if not operation.manages or operation.group in self._allowed:
            return
        flag = "--model-control-mode explicit" if operation.loads else f"--kserve-allow {operation.group}"
        raise ManagementDisabled(f"This changes the server ({operation.group}); the service allows it with {flag}.")

    @staticmethod
    def _check_encoded(segment: str) -> None:
        # Whether and how often a name is decoded is Triton's affair, and differs between its releases.
        while True:
            check_name(segment)
            decoded = unquote(segment, errors="surrogateescape")
            if decoded == segment:
                return
            segment = decoded
