"""
API keys: who they belong to and what they open. Only their digests are kept.

Keys come from the settings and from a file::

    keys:
      - name: team-a
        key: sk-...                    # or several, while one replaces another
        models: [ensemble, "acme/*"]
        requests_per_minute: 600
        tokens_per_minute: 100000
        concurrent_requests: 20
        manage: false                   # may not load and unload models
      - name: team-b
        sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from triton_openai.config import AccessSettings
from triton_openai.errors import ConfigurationError, KeyNotSufficient, ManagementDisabled
from triton_openai.server.ratelimits import RateLimit
from triton_openai.server.shared_table import CAPACITY

# The characters of a name that stand in logs and messages.
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._@ -]{1,64}$")]
_KeyText = Annotated[str, Meta(pattern=r"^[!-~]{1,4096}$")]
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$")]
_Limit = Annotated[int, Meta(ge=1, le=2**53)]
# Compared with what is sent under no known key, so that this takes no other time.
_NOBODY = bytes(32)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """
    What the holder of a key may do; ``models`` are names with ``*`` in them or not, and ``None`` all models.

    ``manage`` is whether they may be loaded and unloaded, and Triton be managed in other ways, where the service lets
    anybody do that.
    """

    name: str
    models: tuple[str, ...] | None = None
    manage: bool = True
    limit: RateLimit = RateLimit()

    def allows(self, model: str) -> bool:
        """Return whether the key opens the model that clients call *model*."""
        return self.models is None or any(fnmatchcase(model, pattern) for pattern in self.models)

    def check_may_manage(self) -> None:
        """Raise :class:`ManagementDisabled` where the key is not for loading models and the like."""
        if not self.manage:
            raise ManagementDisabled(f"The key '{self.name}' may not load and unload models.")

    def check_opens_everything(self) -> None:
        """Raise :class:`KeyNotSufficient` where the key opens certain models: for it there are no others."""
        if self.models is not None:
            raise KeyNotSufficient("This is about all models or the whole server, and the key opens certain models.")


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: _Name
    key: _KeyText | tuple[_KeyText, ...] | None = None
    sha256: _Digest | tuple[_Digest, ...] | None = None
    models: tuple[Annotated[str, Meta(min_length=1)], ...] | None = None
    manage: bool = True
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    concurrent_requests: _Limit | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[_Entry, ...]


class Keyring:
    """All keys at one moment, by their SHA-256 digests."""

    def __init__(self, keys: Iterable[tuple[bytes, ApiKey]]) -> None:
        self._keys: dict[bytes, tuple[bytes, ApiKey]] = {}
        for digest, key in keys:
            other = self._keys.get(digest)
            if other is not None:
                raise ConfigurationError(f"The API keys '{other[1].name}' and '{key.name}' are the same key.")
            self._keys[digest] = digest, key

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def names(self) -> Sequence[str]:
        """The names of the keys, each once."""
        return list(dict.fromkeys(key.name for _, key in self._keys.values()))

    def encode(self) -> bytes:
        """Return the keys as :meth:`decode` takes them: their digests, not themselves."""
        return msgspec.msgpack.encode(list(self._keys.values()))

    @classmethod
    def decode(cls, data: bytes) -> Keyring:
        """Return the keys of *data*. Raises :class:`msgspec.MsgspecError`."""
        return cls(msgspec.msgpack.decode(data, type=list[tuple[bytes, ApiKey]]))

    def find(self, presented: str) -> ApiKey | None:
        """
        Return the key that *presented* is, if it is one.

        How long it takes does not depend on what it has in common with a key: digests have nothing to do with what
        is near to what, the table is keyed by the process's own secret, and the comparison takes constant time.
        """
        digest = sha256(presented)
        known, key = self._keys.get(digest, (_NOBODY, None))
        return key if hmac.compare_digest(known, digest) else None


def sha256(key: str) -> bytes:
    """Return the digest under which *key* is known."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(settings: AccessSettings) -> Keyring | None:
    """
    Return the keys of *settings* and of the file they name; ``None`` when they ask for none.

    Raises :class:`ConfigurationError`, whose message names the entry that is wrong and never a key.
    """
    if not settings.api_key and settings.api_keys_file is None:
        return None
    keys = list(_from_settings(settings.api_key))
    if settings.api_keys_file is not None:
        keys += _from_file(settings.api_keys_file)
    if not keys:
        raise ConfigurationError(f"{settings.api_keys_file} has no API key: nobody could ask.")
    ring = Keyring(keys)
    if len(ring.names) > CAPACITY:
        raise ConfigurationError(f"There are more than {CAPACITY} API keys.")
    return ring


def _from_settings(given: Iterable[str]) -> Iterable[tuple[bytes, ApiKey]]:
    for text in given:
        name, named, key = text.rpartition(":")
        digest = sha256(key)
        # Enough to tell keys apart, too little to know one from.
        yield digest, ApiKey(name=name if named else f"key-{digest.hex()[:8]}")


def _from_file(file: Path) -> Iterable[tuple[bytes, ApiKey]]:
    names = set[str]()
    for entry in _read(file).keys:
        where = f"The API key '{entry.name}' in {file}"
        if entry.name in names:
            raise ConfigurationError(f"{where} is there twice; one name may have several keys, in a list.")
        names.add(entry.name)
        digests = [*map(sha256, _several(entry.key)), *map(bytes.fromhex, _several(entry.sha256))]
        if not digests:
            raise ConfigurationError(f"{where} has neither a key nor a sha256.")
        limit = RateLimit(
            requests_per_minute=entry.requests_per_minute,
            tokens_per_minute=entry.tokens_per_minute,
            concurrent_requests=entry.concurrent_requests,
        )
        for digest in digests:
            yield digest, ApiKey(name=entry.name, models=entry.models, manage=entry.manage, limit=limit)


def _several(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value or ()


def _read(file: Path) -> _File:
    # Errors are raised without their causes: YAML's show the lines that they are about.
    try:
        content: Mapping[str, Any] = yaml.safe_load(file.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"The file of API keys {file} cannot be read: {error.strerror or error}.") from None
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ConfigurationError(f"The file of API keys {file} is not valid YAML{line}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError):
        raise ConfigurationError(f"The file of API keys {file} is not valid YAML.") from None
    try:
        return msgspec.convert(content, _File)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"The file of API keys {file} is not accepted: {error}.") from None
