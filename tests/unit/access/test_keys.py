"""Keys from the settings and from their file; what is wrong is named, and never shown."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from triton_openai.access.authorizer import Authorizer
from triton_openai.access.keys import Keyring, Keys, identify, read_keys, sha256
from triton_openai.access.rate_limits import RateLimit
from triton_openai.config.sources import load_settings
from triton_openai.config.tree import AccessSettings, Settings
from triton_openai.errors import ConfigurationError, InvalidApiKey

SECRET = "sk-a-secret"


def ring_of(*keys: str, file: Path | None = None) -> Keyring:
    """Return the keys of these settings."""
    ring = read_keys(AccessSettings(api_key=keys, api_keys_file=file))
    assert ring is not None
    return ring


def written(tmp_path: Path, text: str) -> Path:
    """Write a file of keys."""
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    return file


def test_keys_of_the_settings() -> None:
    """Keys of the settings have the name they are given, or a short one of their own."""
    ring = ring_of(f"alice:{SECRET}", "sk-plain")
    alice, plain = ring.get(sha256(SECRET)), ring.get(sha256("sk-plain"))

    assert alice is not None
    assert ("alice", None, False) == (alice.name, alice.models, alice.limit.limits_live_requests)
    assert plain is not None
    assert plain.name == f"key-{hashlib.sha256(b'sk-plain').hexdigest()[:8]}"
    for wrong in ("", "sk-a-secre", f"{SECRET}x", SECRET.upper(), f"alice:{SECRET}", "é", "\udcff", "x" * 100_000):
        assert ring.get(sha256(wrong)) is None
    assert read_keys(AccessSettings()) is None


def test_a_key_with_a_colon(tmp_path: Path) -> None:
    """The file takes it as it is; in the settings, what stands before the colon is a name."""
    quoted = written(tmp_path, "keys: [{name: a, key: 'team:sk-secret'}]")
    whole = ring_of(file=quoted).get(sha256("team:sk-secret"))
    named = ring_of("team:sk-secret").get(sha256("sk-secret"))

    assert whole is not None
    assert named is not None
    assert ("a", "team") == (whole.name, named.name)
    assert ring_of(file=quoted).get(sha256("sk-secret")) is None
    # As its environment has it, without a name
    (key,) = load_settings({}, {"TRITON_OPENAI_API_KEY": "sk-secret"}).access.api_key
    assert ring_of(key).get(sha256("sk-secret")) is not None


@pytest.mark.parametrize("text", ["a:b:sk-secret", "sk secret"])
def test_keys_that_the_settings_do_not_take(text: str) -> None:
    """The error says what a key may not have, and where one with a colon goes; it does not show the key."""
    with pytest.raises(ConfigurationError, match=r"with one colon at most \(--api-keys-file") as caught:
        load_settings({"api-key": [text]}, {})
    assert text not in caught.value.message


@given(st.text())
def test_nothing_else_is_a_key(text: str) -> None:
    """Nothing else is a key, whatever a client presents."""
    assert ring_of(SECRET).get(sha256(text)) is None


def test_the_file(tmp_path: Path) -> None:
    """The file has keys or digests, several of a name, with models and limits."""
    digest = hashlib.sha256(b"sk-new").hexdigest()
    file = written(
        tmp_path,
        f"""
        keys:
          - name: team a
            key: [sk-old, sk-older]
            sha256: {digest.upper()}
            models: [ensemble, "acme/*"]
            requests_per_minute: 600
            tokens_per_minute: 100000
            concurrent_requests: 20
          - {{name: b, key: sk-b}}
        """,
    )
    ring = ring_of("c:sk-c", file=file)
    found = [ring.get(sha256(key)) for key in ("sk-old", "sk-older", "sk-new", "sk-b", "sk-c")]

    assert ["team a", "team a", "team a", "b", "c"] == [key.name for key in found if key is not None]
    team = found[2]
    assert team is not None
    assert RateLimit(requests_per_minute=600, tokens_per_minute=100_000, concurrent_requests=20) == team.limit
    assert [True, True, False, False] == [team.allows(name) for name in ("ensemble", "acme/x", "acme", "ENSEMBLE")]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "not accepted"),
        ("[", "not valid YAML"),
        (f"keys: [{{name: a, key: {SECRET}", "not valid YAML in line"),
        (f"keys: [{{name: a, key: {SECRET}, key: b}}]", "not valid YAML in line"),
        (f"? [{SECRET}]\n: b", "not valid YAML"),
        ("keys: []", "no API key"),
        ("keys: [{name: a}]", "neither a key nor a sha256"),
        ("keys: [{name: a, key: []}]", "neither a key nor a sha256"),
        (f"keys: [{{key: {SECRET}}}]", "keys\\[0\\] lacks the field 'name'"),
        (f"keys: [{{name: a, key: {SECRET}}}, {{name: a, key: b}}]", "'a' in .* appears twice"),
        (f"keys: [{{name: a, key: {SECRET}}}, {{name: b, key: {SECRET}}}]", "'a' and 'b' are the same key"),
        (f"keys: [{{name: a, key: '{SECRET} x'}}]", r"keys\[0\].key: expected text"),
        ("keys: [{name: a, key: 12345}]", "not a whole number"),
        (f"keys: [{{name: a, sha256: {SECRET}}}]", r"keys\[0\].sha256: expected text"),
        (
            f"keys: [{{name: a, key: {SECRET}, modles: []}}]",
            "keys\\[0\\] has no field 'modles'. Did you mean models\\?",
        ),
        (f"keys: [{{name: a, key: {SECRET}, requests_per_minute: 0}}]", ">= 1"),
        (f"keys: [{{name: 'a\\nb', key: {SECRET}}}]", r"keys\[0\].name: expected text"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    """The place is named, and no key."""
    with pytest.raises(ConfigurationError, match=f"(?i){message}") as caught:
        ring_of(file=written(tmp_path, text))

    assert SECRET not in caught.value.message
    # Nor in what a traceback would show.
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """A file that is not there is an error at the start, and not a service without keys."""
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Keys(AccessSettings(api_keys_file=tmp_path / "nothing"))


async def test_rotation(tmp_path: Path) -> None:
    """A new file is taken, a bad one is not, and one that is replaced as Kubernetes does it is noticed."""
    file = written(tmp_path, "keys: [{name: a, key: one}]")
    keys = Keys(AccessSettings(api_keys_file=file))

    def known() -> list[str]:
        assert keys.ring is not None
        return [key for key in ("one", "two", "three") if keys.ring.get(sha256(key)) is not None]

    async def after_looks() -> list[str]:
        # A change counts when the file has looked the same twice.
        await keys.reload()
        await keys.reload()
        return known()

    assert ["one"] == await after_looks()
    file.write_text("keys: [{name: a, key: [one, two]}]")
    assert ["one", "two"] == await after_looks()
    file.write_text("keys: [{name: a, key: ")
    assert ["one", "two"] == await after_looks()
    file.unlink()
    assert ["one", "two"] == await after_looks()
    (tmp_path / "next").write_text("keys: [{name: a, key: [three]}]")
    os.replace(tmp_path / "next", file)  # noqa: PTH105
    assert ["three"] == await after_looks()


async def test_new_settings(tmp_path: Path) -> None:
    """New settings are read at once and hold when they are taken; those that cannot be used change nothing."""
    authorizer = Authorizer(AccessSettings(api_key=("one",)))

    def known() -> list[str]:
        return [key for key in ("one", "two") if sha256(key) in (authorizer.keys.ring or ())]

    take = authorizer.prepare(AccessSettings(api_key=("two",)))
    assert ["one"] == known()
    take()
    assert ["two"] == known()
    with pytest.raises(ConfigurationError):
        authorizer.prepare(AccessSettings(api_keys_file=tmp_path / "nothing"))
    assert ["two"] == known()


async def test_a_file_that_could_not_be_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the file itself changes when descriptors are free again, or when its rights have been mended."""
    file = written(tmp_path, "keys: [{name: a, key: revoked}]")
    keys = Keys(AccessSettings(api_keys_file=file))
    attempts = 0
    opened = Path.open

    def failing(path: Path, mode: str) -> IO[Any]:
        nonlocal attempts
        attempts += path == file
        if path == file and attempts < 4:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, mode)

    # Of another size: the times of two files that are written in one tick of the kernel are the same.
    file.write_text("keys: [{name: a, key: another-one}]")
    monkeypatch.setattr(Path, "open", failing)
    for _ in range(5):
        await keys.reload()

    assert keys.ring is not None
    assert keys.ring.get(sha256("revoked")) is None
    assert 1 == capsys.readouterr().out.count("the old API keys stay in force")


async def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody may ever write into it: the event loop would stand still, and a thread keep the service from ending."""
    file = written(tmp_path, "keys: [{name: a, key: one}]")
    keys = Keys(AccessSettings(api_keys_file=file))
    file.unlink()
    os.mkfifo(file)
    # Whoever waits for it gets this; nobody reads it in time.
    writing = os.open(file, os.O_RDWR)
    os.write(writing, b"keys: [{name: a, key: two}]")
    await keys.reload()
    await keys.reload()
    with pytest.raises(ConfigurationError, match="pipe"):
        Keys(AccessSettings(api_keys_file=file), again=True)
    os.close(writing)

    assert keys.ring is not None
    assert keys.ring.get(sha256("one")) is not None


@pytest.mark.parametrize(
    "headers, name",
    [
        ([("Authorization", "Bearer one")], "a"),
        ([("authorization", "bearer   one ")], "a"),
        ([("api-key", "one")], "a"),
        ([("X-API-Key", "two")], "b"),
        # Some other header may have something that is meant for somebody else.
        ([("Authorization", "Basic eDp5"), ("x-api-key", "two")], "b"),
        ([("Authorization", "Bearer admin"), ("api-key", "one")], "a"),
    ],
)
def test_headers(headers: list[tuple[str, str]], name: str) -> None:
    """A key may come in any of the headers in use."""
    assert name == identify(CIMultiDictProxy(CIMultiDict(headers)), ring_of("a:one", "b:two")).name


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "one"}, {"Authorization": "Bearer"}, {"Authorization": "Basic one"}, {"api-key": "on"}],
)
def test_no_key(headers: dict[str, str]) -> None:
    """Everything else is refused, without a word of what was sent."""
    with pytest.raises(InvalidApiKey) as caught:
        identify(CIMultiDictProxy(CIMultiDict(headers)), ring_of("a:one"))

    assert (401, "invalid_api_key", {"WWW-Authenticate": "Bearer"}) == (
        caught.value.status,
        caught.value.code,
        caught.value.headers(),
    )


# The settings


def test_restricted_apis_in_all_places(tmp_path: Path) -> None:
    """The flag has three words, as that of NVIDIA's frontend; the variable has them too, and the file has names."""
    file = tmp_path / "settings.yaml"
    file.write_text(
        "access:\n  openai_restricted_api:\n    - {apis: [inference, metrics], header: admin-key, value: Bearer x}\n"
        "    - {apis: [health], header: other, value: y}\n"
    )
    flag = {"openai-restricted-api": [["inference,metrics", "admin-key", "Bearer x"], ["health", "other", "y"]]}
    variable = {"TRITON_OPENAI_OPENAI_RESTRICTED_API": "inference,metrics admin-key Bearer x; health other y"}

    read = [load_settings(flag, {}), load_settings({}, variable), load_settings({"config": str(file)}, {})]
    assert read[0].access == read[1].access == read[2].access != Settings().access
    first, second = read[0].access.openai_restricted_api
    assert (("inference", "metrics"), "admin-key", "Bearer x") == (first.apis, first.header, first.value)
    assert ("health",) == second.apis


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            {"openai-restricted-api": [["inference", "k", SECRET], ["health,inference", "k", SECRET]]},
            "restricted twice",
        ),
        ({"openai-restricted-api": [["nothing", "k", SECRET]]}, "is not accepted"),
        ({"openai-restricted-api": [["inference", "k:", SECRET]]}, "is not accepted"),
        ({"openai-restricted-api": [["inference", "k", ""]]}, "is not accepted"),
        ({"openai-restricted-api": f"inference {SECRET}"}, "write APIS KEY VALUE"),
        ({"api-key": [f"a b:{SECRET}"]}, "is not accepted"),
        ({"api-key": [f"{SECRET}é"]}, "is not accepted"),
        ({"cors-allow-origin": ["example.com"]}, "is not accepted"),
        ({"cors-allow-origin": ["https://a/b"]}, "is not accepted"),
    ],
)
def test_settings_that_are_wrong(flags: dict[str, object], message: str) -> None:
    """Settings that are wrong are named, and what is secret is not repeated."""
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_settings(flags, {})

    assert SECRET not in caught.value.message
