"""The tables of files, batches and lines: their migrations, and the columns that the statements use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from triton_openai.storage.sql import missing

# Each is a version of the schema; what is here is never changed, only added to.
_MIGRATIONS: Sequence[Sequence[str]] = (
    # No release has had the first three versions.
    *((), (), ()),
    (
        "CREATE TABLE file (id TEXT PRIMARY KEY, owner TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL,"
        " bytes BIGINT NOT NULL, created DOUBLE PRECISION NOT NULL, expires DOUBLE PRECISION, state TEXT NOT NULL)",
        "CREATE INDEX file_owner ON file (owner, created, id)",
        # The bytes of complete files and of batches. Uploads are counted in the table of files.
        "CREATE TABLE owner_bytes (owner TEXT PRIMARY KEY, bytes BIGINT NOT NULL)",
        "CREATE INDEX file_uploading ON file (owner) WHERE state = 'uploading'",
        # `open` is 1 until the batch has ended, and `parts` is the number of its last part. What only programs look at
        # is the JSON in `detail`. Nothing reads `holder` and `until`.
        "CREATE TABLE batch (id TEXT PRIMARY KEY, owner TEXT NOT NULL, kind TEXT NOT NULL, input TEXT NOT NULL, open"
        " INTEGER NOT NULL, created DOUBLE PRECISION NOT NULL, holder TEXT NOT NULL, generation BIGINT NOT NULL,"
        " until DOUBLE PRECISION NOT NULL, detail BYTEA NOT NULL, parts BIGINT NOT NULL DEFAULT 0)",
        "CREATE INDEX batch_owner ON batch (owner, kind, created, id)",
        "CREATE INDEX batch_open ON batch (created) WHERE open = 1",
        "CREATE INDEX batch_open_owner ON batch (owner) WHERE open = 1",
        # `running` is 1 while the line runs. `attempts` are process deaths.
        "CREATE TABLE line (batch TEXT NOT NULL, number INTEGER NOT NULL, place BIGINT NOT NULL, length INTEGER NOT"
        " NULL, model TEXT NOT NULL, prefix BIGINT NOT NULL, state INTEGER NOT NULL, attempts INTEGER NOT NULL,"
        " part INTEGER, part_place BIGINT, part_length INTEGER, running INTEGER NOT NULL DEFAULT 0, max_group INTEGER"
        " NOT NULL DEFAULT 0, triton_deaths INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (batch, number))",
        # An order that no other index has: over the primary key, the database would read all lines that have ended.
        "CREATE INDEX line_waiting ON line (batch, (number + 0)) WHERE state = 0",
        "CREATE INDEX line_running ON line (batch, number) WHERE state = 1",
        "CREATE INDEX line_quarantined ON line (batch, number) WHERE state = 0 AND max_group > 0",
        "CREATE TABLE place (number INTEGER PRIMARY KEY, id TEXT NOT NULL)",
        # The process that runs quarantined lines.
        "CREATE TABLE quarantine (number INTEGER PRIMARY KEY, holder TEXT NOT NULL, until DOUBLE PRECISION NOT NULL)",
        # Part 0 is the batch itself.
        "CREATE TABLE lease (batch TEXT NOT NULL, part BIGINT NOT NULL, holder TEXT NOT NULL,"
        " until DOUBLE PRECISION NOT NULL, PRIMARY KEY (batch, part))",
        "CREATE INDEX lease_holder ON lease (holder)",
        # How many lines for a model each process runs, and how many it could run.
        "CREATE TABLE slot (model TEXT NOT NULL, holder TEXT NOT NULL, wanted INTEGER NOT NULL, taken INTEGER NOT NULL,"
        " until DOUBLE PRECISION NOT NULL, PRIMARY KEY (model, holder))",
    ),
)

#: Returns the migrations that a schema of some version lacks.
lacking = partial(missing, "batches", _MIGRATIONS)
#: The columns of each table that the statements use.
TABLES: Mapping[str, str] = {
    "file": "id, owner, purpose, filename, bytes, created, expires, state",
    "batch": "id, owner, kind, input, open, created, holder, generation, until, detail, parts",
    "lease": "batch, part, holder, until",
    "slot": "model, holder, wanted, taken, until",
    "owner_bytes": "owner, bytes",
    "line": "batch, number, place, length, model, prefix, state, attempts, part, part_place, part_length, running,"
    " max_group, triton_deaths",
    "place": "number, id",
    "quarantine": "number, holder, until",
}
