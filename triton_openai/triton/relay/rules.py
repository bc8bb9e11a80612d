"""
The operations of Triton's protocol that are relayed, in the groups in which Triton itself restricts them.

Source: Triton's ``--http-restricted-api`` and ``--grpc-restricted-protocol``, its HTTP paths and
``grpc_service.proto``. No other operation is relayed, because one that a later Triton adds may change the server.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Literal
from urllib.parse import unquote

import msgspec

from triton_openai.config.tree import Group
from triton_openai.errors import EndpointNotFound, InvalidRequest, InvalidValue, ManagementDisabled
from triton_openai.triton.client import check_name


class Operation(msgspec.Struct, frozen=True):
    """
    One operation: its *group*, and whether it *loads* or unloads a model.

    *guards* are the groups of this service's own API that have to be open for it. *about* is what it reads, uses or
    changes: the model that it names, everything, or nothing. *readiness* is whether load balancers use it.
    """

    group: str
    guards: tuple[Group, ...]
    about: Literal["nothing", "model", "everything"]
    loads: bool = False
    readiness: bool = False


# A segment as it is on the wire: a model's name may be percent-encoded in it.
_ONE = r"[^/?#]+"
_NAME = rf"(?P<model>{_ONE})"
_MODEL = rf"/v2/models/{_NAME}(?:/versions/{_ONE})?"
# Each operation with its path over HTTP and its calls over gRPC. The first path that matches counts.
_OPERATIONS = (
    # The request does not show whether a model embeds or generates.
    (
        Operation("inference", ("inference", "embedding"), "model"),
        rf"{_MODEL}/(?:infer|generate|generate_stream)",
        ("ModelInfer", "ModelStreamInfer"),
    ),
    (Operation("health", ("health",), "nothing"), r"/v2/health/live", ("ServerLive",)),
    (Operation("health", ("health",), "nothing", readiness=True), r"/v2/health/ready", ("ServerReady",)),
    (Operation("health", ("health",), "model", readiness=True), rf"{_MODEL}/ready", ("ModelReady",)),
    (Operation("metadata", ("info",), "nothing"), r"/v2/?", ("ServerMetadata",)),
    (Operation("model-config", ("model-repository",), "model"), rf"{_MODEL}/config", ("ModelConfig",)),
    (Operation("statistics", ("metrics",), "everything"), r"/v2/models/stats", ()),
    (Operation("statistics", ("metrics",), "model"), rf"{_MODEL}/stats", ("ModelStatistics",)),
    (Operation("model-repository", ("model-repository",), "everything"), r"/v2/repository/index", ("RepositoryIndex",)),
    (
        Operation("model-repository", ("model-repository",), "model", loads=True),
        rf"/v2/repository/models/{_NAME}/(?:load|unload)",
        ("RepositoryModelLoad", "RepositoryModelUnload"),
    ),
    # Last: a model may be called "stats".
    (Operation("metadata", ("model-repository",), "model"), _MODEL, ("ModelMetadata",)),
)
_PATHS = [(re.compile(path), operation) for operation, path, _ in _OPERATIONS]
_RPCS = {f"/inference.GRPCInferenceService/{rpc}": operation for operation, _, rpcs in _OPERATIONS for rpc in rpcs} | {
    f"/grpc.health.v1.Health/{rpc}": Operation("health", ("health",), "nothing", readiness=True)
    for rpc in ("Check", "Watch")
}


def operation_of_path(path: str) -> tuple[Operation | None, Collection[str]]:
    """
    Return the operation of an HTTP request, and every model name that its *path* may mean.

    The operation is ``None`` if it is not relayed. Triton's releases differ in how often they decode a name, so a name
    that is encoded more than once is not relayed.
    """
    for pattern, operation in _PATHS:
        if match := pattern.fullmatch(path):
            name = match.groupdict().get("model")
            if name is None:
                return operation, ()
            decoded = unquote(name, errors="surrogateescape")
            return (None, ()) if "%" in decoded else (operation, {name, decoded})
    return None, ()


def operation_of_rpc(method: str) -> Operation | None:
    """Return the operation of the call *method*, if it is one that is relayed."""
    return _RPCS.get(method)


def check_operation(
    operation: Operation | None, what: str, names: Collection[str] = (), *, may_load: bool
) -> Operation:
    """Return *operation*, called *what* by clients, if they may call it for *names*. Raises :class:`InvalidRequest`."""
    if operation is None:
        raise EndpointNotFound(f"There is no {what[:200]}, or it is not relayed.")
    if operation.loads and not may_load:
        raise ManagementDisabled(
            "Loading and unloading models is off; the service allows it with --model-control-mode explicit."
        )
    for name in names:
        check_name(name)
        # A Triton that decodes the path first would see another path.
        if "?" in name or "#" in name:
            raise InvalidValue("The model's name is not accepted.", "model")
    return operation


def check_load(parameters: Collection[str]) -> None:
    """Raise :class:`ManagementDisabled` if the *parameters* of a load would replace the model."""
    if set(parameters) - {"unload_dependents"}:
        raise ManagementDisabled(
            "This load replaces the model's configuration or files, which are programs that Triton runs; the service "
            "does not relay that."
        )


class _LoadBody(msgspec.Struct, forbid_unknown_fields=True):
    parameters: dict[str, Any] = {}


def checked_load_body(body: bytes) -> bytes:
    """Return *body* encoded again: two parsers may read one text differently. Raises :class:`InvalidRequest`."""
    if not body:
        return b""
    try:
        load = msgspec.json.decode(body, type=_LoadBody)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest("The body of a load or unload has to be JSON, with 'parameters' or nothing.") from error
    check_load(load.parameters)
    return msgspec.json.encode(load)
