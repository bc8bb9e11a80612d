"""What the service keeps: responses, files and batches."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from triton_openai.config.tree.fields import SECONDS, Bytes, Count, Days, Seconds, SettingsGroup, file_only, flag


class ResponsesSettings(SettingsGroup, frozen=True):
    """What is kept of the Responses API: responses that clients ask to store, and conversations."""

    store: Annotated[
        str,
        Meta(pattern=r"^(none|memory|sqlite(:.+)?|[a-z][a-z0-9+.-]*://.+)$"),
        flag(
            "Where responses and conversations are kept: none, memory, sqlite[:PATH] or postgresql://...; "
            "by default a SQLite file in the user's state folder.",
            metavar="STORE",
            form="none, memory, sqlite[:PATH] or postgresql://...",
            secret=True,
        ),
    ] = "sqlite"
    max_age: Annotated[Days, file_only("Days after which what was not used is dropped.")] = 30.0
    max_size: Annotated[
        Bytes, file_only("Bytes that are kept at most; what the key that has most used longest ago goes first.")
    ] = 1024**3
    max_size_per_key: Annotated[
        Bytes | None,
        file_only("Bytes that are kept of one key at most, by default max_size; what it used longest ago goes first."),
    ] = None
    max_conversation_size: Annotated[
        Bytes, file_only("Bytes of a conversation's items. One of more than server.max_body_size cannot be used.")
    ] = 48 * 1024 * 1024
    max_conversation_items: Annotated[Count, Meta(le=4096), file_only("Most items of a conversation.")] = 4096
    max_background: Annotated[
        Count,
        file_only(
            "Most responses that are made or wait in the background, divided among the workers; others get a 503.",
            live=True,
        ),
    ] = 1000
    max_lanes: Annotated[
        Count, file_only("Most responses that one WebSocket makes at once, each in a stream of its own.", live=True)
    ] = 8

    @property
    def max_age_seconds(self) -> float:
        """The same in seconds."""
        return self.max_age * 86_400


class FilesSettings(SettingsGroup, frozen=True):
    """Files that clients upload, and those with the results of batches."""

    store: Annotated[
        str,
        Meta(pattern=r"^(dir(:.+)?|s3://[^/]+(/.*)?)$"),
        flag(
            "Where files are kept: dir[:PATH] or s3://BUCKET[/PREFIX]; by default the folder 'files' in the user's "
            "state folder. Endpoint, region and credentials of S3 are the variables AWS_...",
            metavar="STORE",
            form="dir[:PATH] or s3://BUCKET[/PREFIX]",
        ),
    ] = "dir"
    max_size: Annotated[Bytes, file_only("Largest file that a client may upload.")] = 512 * 1024 * 1024
    max_batch_size: Annotated[Bytes, file_only("Largest file with the requests of a batch.")] = 200 * 1024 * 1024
    max_total: Annotated[
        Bytes, file_only("Bytes that the files of one key may have for a new upload or batch; each counts 4 KiB more.")
    ] = 10 * 1024**3
    max_age: Annotated[
        Days, file_only("Days after which batches are deleted, and their files unless a request says otherwise.")
    ] = 30.0


class BatchesSettings(SettingsGroup, frozen=True):
    """Batches of requests, which run below live traffic."""

    enabled: Annotated[
        bool | None, flag("Serve files and batches; by default if their folders can be written to.", name="")
    ] = None
    store: Annotated[
        str,
        Meta(pattern=r"^(sqlite(:.+)?|postgres(ql)?://.+)$"),
        flag(
            "Where the state of batches is kept: sqlite[:PATH], or postgresql://... for several replicas; by default a "
            "SQLite file in the user's state folder.",
            metavar="STORE",
            form="sqlite[:PATH] or postgresql://...",
            secret=True,
        ),
    ] = "sqlite"
    lease: Annotated[
        float,
        Meta(ge=5, le=86_400, extra=SECONDS),
        file_only("Time after which other processes take over the batches of one that does not answer."),
    ] = 60.0
    checkpoint: Annotated[
        Seconds,
        file_only("With S3: how often results are uploaded. What was answered since then runs again after a crash."),
    ] = 60.0
    max_requests: Annotated[Count, Meta(le=1_000_000), file_only("Most requests of a batch.")] = 50_000
    max_embedding_inputs: Annotated[
        Count,
        file_only("Most inputs of all embedding requests of a batch together; a request can have many.", live=True),
    ] = 50_000
    max_enqueued_tokens: Annotated[
        Count | None,
        file_only(
            "Most input tokens of one key and one model in batches that have not ended, a token for each 4 bytes of a "
            "request without its images; a batch beyond that fails. 'models' can have other numbers. By default any.",
            live=True,
        ),
    ] = None
    max_batches: Annotated[Count, file_only("Most batches of one key that have not ended.")] = 100
    max_running: Annotated[
        Count,
        file_only(
            "Most requests of batches that run for one model at one Triton, over all workers and replicas.", live=True
        ),
    ] = 256
    max_share: Annotated[
        float,
        Meta(gt=0, le=1),
        file_only(
            "Beside other requests, those of batches take at most this part of max_running_requests_per_model and of"
            " max_running_requests_per_endpoint, and of what other requests leave free. In any case, as much stays free"
            " as 19 of 20 other requests need to begin at once.",
            live=True,
        ),
    ] = 1.0
    live_first_token: Annotated[
        Seconds | None,
        file_only(
            "Run fewer requests of batches while 1 in 20 other requests waits longer than this for its first token; by "
            "default, longer than without requests of batches."
        ),
    ] = None
    request_timeout: Annotated[Seconds, file_only("Longest time for a request of a batch.", live=True)] = 3600.0
    hours: Annotated[
        Annotated[str, Meta(pattern=r"^([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d$")] | None,
        file_only(
            "Begin requests of batches only at these hours, in local time.",
            metavar="HH:MM-HH:MM",
            form="HH:MM-HH:MM",
            live=True,
        ),
    ] = None
    paused: Annotated[bool, file_only("Begin no requests of batches.", live=True)] = False
