"""What a request shows to be let in: its API key, in any of the headers that clients use."""

from __future__ import annotations

from collections.abc import Iterator

from multidict import CIMultiDictProxy

from triton_openai.errors import InvalidApiKey
from triton_openai.server.keys import ApiKey, Keyring

# Azure's and Anthropic's clients have headers of their own.
_PLAIN_HEADERS = ("api-key", "x-api-key")
#: Where a key can stand, in lower case.
KEY_HEADERS = ("authorization", *_PLAIN_HEADERS)


def presented(headers: CIMultiDictProxy[str]) -> Iterator[str]:
    """Yield the keys that a request shows, one for each header at most."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        yield token.strip()
    for name in _PLAIN_HEADERS:
        key = headers.get(name, "").strip()
        if key:
            yield key


def identify(headers: CIMultiDictProxy[str], ring: Keyring) -> ApiKey:
    """Return the first key of *ring* that is shown. Raises :class:`InvalidApiKey`."""
    shown = False
    for key in presented(headers):
        shown = True
        found = ring.find(key)
        if found is not None:
            return found
    if shown:
        raise InvalidApiKey("Incorrect API key provided.")
    raise InvalidApiKey(
        "You didn't provide an API key. Send it in the header Authorization, as 'Bearer KEY', or in api-key or "
        "x-api-key."
    )
