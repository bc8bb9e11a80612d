"""The rows of files, uploads and batches in the table of operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec

from triton_openai import errors
from triton_openai.api import batch_output, batches, uploaded_files, uploads
from triton_openai.api.messages import batch_body, message_batches
from triton_openai.api.responses.objects import Deleted
from triton_openai.config.tree import ApiGroup
from triton_openai.operations import BodyKind, Operation, OperationFunction, Query

_STRING = {"type": "string"}
#: The query of a page of a list.
PAGE: Query = {
    "limit": ("Most items that are wanted.", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    "order": ("Whether the first or the last item comes first.", {"enum": ["asc", "desc"], "default": "desc"}),
    "after": ("The id of the item that the list goes on from.", _STRING),
}
_FILE_PAGE = {
    **PAGE,
    "limit": ("Most files that are wanted.", {"type": "integer", "minimum": 1, "maximum": 10_000, "default": 10_000}),
    "purpose": ("What the files are for.", _STRING),
}
_BATCH_PAGE = {name: PAGE[name] for name in ("limit", "after")}
_MESSAGE_PAGE: Query = {
    "limit": ("Most batches that are wanted.", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20}),
    "after_id": ("The id of the batch that the page follows.", _STRING),
    "before_id": ("The id of the batch that the page precedes.", _STRING),
}
_PARTIAL: Query = {
    "partial": ("Whether the results until now are wanted, of a batch that runs.", {"enum": ["true", "false"]}),
}
# Files and batches may be off.
_STORED = (errors.EndpointNotFound, errors.ObjectNotFound, errors.StorageFull, errors.StoreUnavailable)
_FILE = "/files/{file:[^/]+}"
_UPLOAD = "/uploads/{upload:[^/]+}"
_BATCH = "/batches/{batch:[^/]+}"
_MESSAGES = f"/messages{_BATCH}"
_Type: TypeAlias = type[msgspec.Struct] | None


def openai_routes(*routes: str) -> tuple[str, ...]:
    """Return *routes* with and without ``/v1``, for clients whose ``base_url`` lacks it."""
    return tuple(route.replace(" ", f" {prefix}") for prefix in ("/v1", "") for route in routes)


def stored_row(
    group: ApiGroup,
    always: Sequence[type[errors.ServiceError]],
    function: OperationFunction,
    route: str,
    name: str,
    request: _Type = None,
    answer: _Type = None,
    *,
    errors: Sequence[type[errors.ServiceError]] = (),
    **more: Any,
) -> Operation:
    """Return the row of an operation on what is stored. Its errors are those that there are *always*, and its own."""
    raised = (*always, *errors)
    return Operation(function, openai_routes(route), name, group, request, answer, errors=raised, **more)


_batch = partial(stored_row, "batch", _STORED)
#: The rows.
BATCH_OPERATIONS = (
    _batch(uploaded_files.create, "POST /files", "create_file", uploaded_files.FileUpload, uploaded_files.FileObject,
           reads=BodyKind.FORM, check=uploaded_files.check_files),
    _batch(uploaded_files.list_files, "GET /files", "list_files", answer=uploaded_files.FileList, query=_FILE_PAGE,
           errors=(errors.InvalidRequest,)),
    _batch(uploaded_files.retrieve, f"GET {_FILE}", "get_file", answer=uploaded_files.FileObject),
    _batch(uploaded_files.content, f"GET {_FILE}/content", "get_file_content", media=("application/octet-stream",)),
    _batch(uploaded_files.delete, f"DELETE {_FILE}", "delete_file", answer=Deleted,
           errors=(errors.ObjectInUse,)),
    _batch(uploads.create, "POST /uploads", "create_upload", uploads.UploadRequest, uploads.UploadObject,
           check=uploaded_files.check_files, errors=(errors.PayloadTooLarge,)),
    _batch(uploads.add_part, f"POST {_UPLOAD}/parts", "add_upload_part", uploads.PartRequest, uploads.PartObject,
           reads=BodyKind.FORM, check=uploaded_files.check_files),
    _batch(uploads.complete, f"POST {_UPLOAD}/complete", "complete_upload", uploads.CompleteRequest,
           uploads.UploadObject, check=uploaded_files.check_files),
    _batch(uploads.cancel, f"POST {_UPLOAD}/cancel", "cancel_upload", answer=uploads.UploadObject,
           errors=(errors.InvalidRequest,)),
    _batch(batches.create, "POST /batches", "create_batch", batches.BatchRequest, batches.BatchObject,
           check=uploaded_files.check_files, errors=(errors.TooManyBatches,)),
    _batch(batches.list_batches, "GET /batches", "list_batches", answer=batches.BatchList, query=_BATCH_PAGE,
           errors=(errors.InvalidRequest,)),
    _batch(batches.retrieve, f"GET {_BATCH}", "get_batch", answer=batches.BatchObject),
    _batch(batches.cancel, f"POST {_BATCH}/cancel", "cancel_batch", answer=batches.BatchObject,
           errors=(errors.InvalidRequest,)),
    _batch(batch_output.output, f"GET {_BATCH}/output", "get_batch_output", media=("application/x-jsonl",),
           query=_PARTIAL, errors=(errors.InvalidRequest,)),
    _batch(message_batches.create, "POST /messages/batches", "create_message_batch",
           batch_body.MessageBatchRequest, message_batches.MessageBatch, reads=BodyKind.BYTES,
           check=uploaded_files.check_files,
           errors=(errors.ModelNotFound, errors.TooManyBatches, errors.ConfigurationError)),
    _batch(message_batches.list_batches, "GET /messages/batches", "list_message_batches",
           answer=message_batches.MessageBatchPage, query=_MESSAGE_PAGE, errors=(errors.InvalidRequest,)),
    _batch(message_batches.retrieve, f"GET {_MESSAGES}", "get_message_batch", answer=message_batches.MessageBatch),
    _batch(message_batches.cancel, f"POST {_MESSAGES}/cancel", "cancel_message_batch",
           answer=message_batches.MessageBatch),
    _batch(message_batches.delete, f"DELETE {_MESSAGES}", "delete_message_batch",
           answer=message_batches.DeletedMessageBatch, errors=(errors.ObjectInUse,)),
    _batch(message_batches.results, f"GET {_MESSAGES}/results", "get_message_batch_results",
           media=("application/x-jsonl",)),
)  # fmt: skip
#: What makes batches: it also needs the groups of its lines.
NEEDS_LINE_GROUPS = (batches.create, message_batches.create)
