"""``GET /v1/batches/{id}/output``: the answers of a batch, also while it runs. OpenAI's API has no such path."""

from __future__ import annotations

from triton_openai import errors
from triton_openai.api.batches import find_batch
from triton_openai.api.service import Service
from triton_openai.api.uploaded_files import file_reply, files_of
from triton_openai.batches.partial_output import partial_output
from triton_openai.operations import Call, Reply

_MEDIA_TYPE = "application/x-jsonl"


async def output(service: Service, call: Call[None]) -> Reply:
    """
    Return the answers of a batch, a JSON object in each line, in the order of the input.

    Of a batch that runs, `partial=true` returns the answers until now: an extension of OpenAI's API. An answer that
    one request has got is in all later ones.
    """
    files = files_of(service)
    partial = call.query.get("partial", "false")
    if partial not in ("true", "false"):
        raise errors.InvalidValue("'partial' must be true or false.", "partial")
    batch = await find_batch(service, call, "openai")
    if batch.open:
        if partial == "false":
            message = "The batch has not ended. With 'partial=true' you get the answers until now."
            raise errors.ObjectNotFound(message, param="batch_id")
        parts = partial_output(files, batch)
        return await call.output.send_parts(parts, timeout=None, media_type=_MEDIA_TYPE)
    file = None
    if batch.output is not None:
        file = await files.store.files.find(batch.output, batch.owner)
    if file is None:
        raise errors.ObjectNotFound("The batch has no answers any more, or never had any.", param="batch_id")
    return await file_reply(service, file, file.filename, _MEDIA_TYPE)
