"""API keys of the settings and of a file, and the headers that open restricted APIs."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
import structlog
from aiohttp import web
from msgspec import Meta
from multidict import CIMultiDictProxy

from triton_openai.access.rate_limits import RateLimit
from triton_openai.config.files import FileWatch, read_yaml, warn_if_readable_by_all
from triton_openai.config.tree import AccessSettings, ApiGroup, RestrictedApi
from triton_openai.config.validation import explained
from triton_openai.errors import ApiRestricted, ConfigurationError, InvalidApiKey, KeyNotSufficient, ManagementDisabled

_log = structlog.get_logger(__name__)

# Names appear in logs and messages.
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._@ -]{1,64}$")]
_KeyText = Annotated[str, Meta(pattern=r"^[!-~]{1,4096}$")]
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$")]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key and its rights."""

    name: str
    #: Names or patterns with ``*``; ``None`` for all models.
    models: tuple[str, ...] | None = None
    #: Whether it may load and unload models, if the service allows that.
    manage: bool = True
    #: Whether it may use files and batches.
    batch: bool = True
    limit: RateLimit = RateLimit()
    #: The SHA-256 digest of its text; empty for the tenants of a gateway that asks for no keys.
    digest: bytes = b""

    def allows(self, model: str) -> bool:
        """Return whether the key opens the model that clients call *model*."""
        return self.models is None or any(fnmatchcase(model, pattern) for pattern in self.models)

    def check_may_manage(self) -> None:
        """Raise :class:`ManagementDisabled` if the key may not load and unload models."""
        if not self.manage:
            raise ManagementDisabled(f"The key '{self.name}' may not load and unload models.")

    def check_may_batch(self) -> None:
        """Raise :class:`KeyNotSufficient` if the key may not use files and batches."""
        if not self.batch:
            raise KeyNotSufficient(
                f"The key '{self.name}' may not use files and batches: its entry in the file of API keys does not say "
                "'batch: true'."
            )

    def check_opens_everything(self) -> None:
        """Raise :class:`KeyNotSufficient` if the key opens only certain models: others do not exist for it."""
        if self.models is not None:
            raise KeyNotSufficient("This concerns all models or the server, and the key is limited to certain models.")


class _Entry(RateLimit, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: _Name
    key: _KeyText | tuple[_KeyText, ...] = ()
    sha256: _Digest | tuple[_Digest, ...] = ()
    models: tuple[Annotated[str, Meta(min_length=1)], ...] | None = None
    manage: bool = True
    #: Without a value, only a limit for batches opens them, because the file may be older than batches.
    batch: bool | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[_Entry, ...]


#: Keys by the SHA-256 digests of their texts. The time of a look-up reveals nothing about a key: digests are compared.
Keyring: TypeAlias = Mapping[bytes, ApiKey]


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
    ring: dict[bytes, ApiKey] = {}
    for digest, key in (*_from_settings(settings.api_key), *_from_file(settings.api_keys_file)):
        if digest in ring:
            raise ConfigurationError(f"The API keys '{ring[digest].name}' and '{key.name}' are the same key.")
        ring[digest] = key
    if not ring:
        raise ConfigurationError(f"{settings.api_keys_file} has no API key, so every request would be refused.")
    return ring


def _from_settings(texts: Iterable[str]) -> Iterator[tuple[bytes, ApiKey]]:
    for text in texts:
        name, colon, key = text.rpartition(":")
        digest = sha256(key)
        if not colon:
            # Enough to distinguish keys, too little to guess one.
            name = f"key-{digest.hex()[:8]}"
        yield digest, ApiKey(name=name, digest=digest)


def _from_file(file: Path | None) -> Iterator[tuple[bytes, ApiKey]]:
    if file is None:
        return
    names = set[str]()
    for entry in _read(file).keys:
        where = f"The API key '{entry.name}' in {file}"
        if entry.name in names:
            raise ConfigurationError(f"{where} appears twice; give one name several keys in a list.")
        names.add(entry.name)
        digests = [sha256(key) for key in _several(entry.key)]
        digests += [bytes.fromhex(digest) for digest in _several(entry.sha256)]
        if not digests:
            raise ConfigurationError(f"{where} has neither a key nor a sha256.")
        limit = msgspec.convert(entry, RateLimit, from_attributes=True)
        batch = entry.batch
        if batch is None:
            batch = entry.batch_tokens_per_minute is not None
        for digest in digests:
            yield (
                digest,
                ApiKey(
                    name=entry.name, models=entry.models, manage=entry.manage, batch=batch, limit=limit, digest=digest
                ),
            )


def _several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return value


def _read(file: Path) -> _File:
    try:
        return msgspec.convert(read_yaml(file, "file of API keys", secret=True), _File)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"The file of API keys {file} is not accepted: {explained(error, _File)}") from None


class Keys:
    """
    The keys in force, read again when their file changes; ``ring`` is ``None`` where the *settings* ask for none.

    Raises :class:`ConfigurationError`.
    """

    def __init__(self, settings: AccessSettings, *, again: bool = False) -> None:
        """*again* is whether the service has read its keys before: from then on, their file must not be a pipe."""
        self._settings = settings
        self._file = FileWatch([settings.api_keys_file], problem="the old API keys stay in force")
        if again:
            self.ring = self._read_again()
        else:
            self.ring = read_keys(settings)

    def _read_again(self) -> Keyring | None:
        self._file.check("file of API keys")
        return read_keys(self._settings)

    async def reload(self) -> bool:
        """
        Read the file again if it has changed, and return whether other keys are in force now.

        An error in it is logged, and the keys stay in force.
        """
        changed = False
        if await self._file.due_in_thread(settled=True):
            with self._file.reading():
                self.ring = await asyncio.to_thread(self._read_again)
                changed = True
                _log.info("API keys are read again", names=len({key.name for key in (self.ring or {}).values()}))
        return changed

    def warn_if_readable_by_all(self) -> None:
        """Log a warning if every user of this machine can read the file."""
        warn_if_readable_by_all(self._settings.api_keys_file, "file of API keys")


# Azure's and Anthropic's clients have headers of their own.
_PLAIN_HEADERS = ("api-key", "x-api-key")
# How a page gives its key to a WebSocket, for which it can set no header. Source: openai-node, realtime/websocket.ts.
_SUBPROTOCOLS = "Sec-WebSocket-Protocol"
_KEY_SUBPROTOCOL = "openai-insecure-api-key."


def identify(headers: CIMultiDictProxy[str], ring: Keyring) -> ApiKey:
    """Return the first key of *ring* that stands in *headers*. Raises :class:`InvalidApiKey`."""
    texts = [headers.get(name, "") for name in _PLAIN_HEADERS]
    if _SUBPROTOCOLS in headers:
        texts += _subprotocol_keys(headers)
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        texts.insert(0, token)
    presented = [text.strip() for text in texts if text.strip()]
    for text in presented:
        key = ring.get(sha256(text))
        if key is not None:
            return key
    if presented:
        raise InvalidApiKey("Incorrect API key provided.")
    raise InvalidApiKey(
        "You didn't provide an API key. Send it in the header Authorization, as 'Bearer KEY', or in api-key or "
        "x-api-key."
    )


def _subprotocol_keys(headers: CIMultiDictProxy[str]) -> list[str]:
    """Return the keys among the subprotocols that *headers* offer."""
    offered = ",".join(headers.getall(_SUBPROTOCOLS)).split(",")
    names = [name.strip() for name in offered]
    return [name.removeprefix(_KEY_SUBPROTOCOL) for name in names if name.startswith(_KEY_SUBPROTOCOL)]


#: The key of a request.
KEY: web.RequestKey[ApiKey] = web.RequestKey("api_key", ApiKey)
#: That of requests to a service that asks for none: it allows everything.
NO_KEY = ApiKey(name="")


#: Groups whose requests ask models, and count against the limits of a key.
INFERENCE_GROUPS: frozenset[ApiGroup] = frozenset({"inference", "embedding"})

#: What a route belongs to: a group, or the page, which is open to everybody.
RouteGroup: TypeAlias = ApiGroup | Literal["page"]
#: The group of each route.
ROUTE_GROUPS: web.AppKey[dict[web.AbstractRoute, RouteGroup]] = web.AppKey("route_groups", dict)


class Restrictions:
    """
    The restricted groups, each with the header that opens it, as NVIDIA's frontend has them.

    The route says to which group a path belongs, so all spellings and aliases of a path are restricted alike. A
    restriction of "inference" covers embeddings too, unless they have a header of their own: NVIDIA's frontend counts
    them as inference, and its documentation as a group of their own.
    """

    def __init__(self, entries: Iterable[RestrictedApi]) -> None:
        self._headers = {api: (entry.header, sha256(entry.value)) for entry in entries for api in entry.apis}
        if "inference" in self._headers:
            self._headers.setdefault("embedding", self._headers["inference"])
        #: The groups that are restricted.
        self.groups: Collection[ApiGroup] = self._headers.keys()

    def proofs(self, groups: Iterable[ApiGroup], headers: CIMultiDictProxy[str], salt: str) -> dict[str, str]:
        """
        Return a proof for :meth:`opens` that a request with *headers* was allowed to use *groups*.

        It reveals neither header nor value. Raises :class:`ApiRestricted` for a group that the headers do not open.
        """
        proofs: dict[str, str] = {}
        for group in groups:
            self.check(group, headers)
            if group in self._headers:
                proofs[group] = self._proof(group, salt)
        return proofs

    def opens(self, groups: Iterable[ApiGroup], proofs: Mapping[str, str], salt: str) -> bool:
        """Return whether the header that gave *proofs* still opens all *groups*."""
        restricted = [group for group in groups if group in self._headers]
        return all(hmac.compare_digest(proofs.get(group, ""), self._proof(group, salt)) for group in restricted)

    def _proof(self, group: ApiGroup, salt: str) -> str:
        name, digest = self._headers[group]
        return hmac.new(digest, f"{salt}\n{name.lower()}".encode(), hashlib.sha256).hexdigest()

    def check(self, group: ApiGroup, headers: CIMultiDictProxy[str]) -> None:
        """Raise :class:`ApiRestricted` for a request without the header that opens *group*."""
        wanted = self._headers.get(group)
        if wanted is None:
            return
        name, digest = wanted
        # Several headers of that name are refused: a proxy may have checked another one.
        values = headers.getall(name, [])
        if len(values) != 1 or not hmac.compare_digest(sha256(values[0].strip()), digest):
            raise ApiRestricted("This API is restricted: the request lacks the header with the value that opens it.")
