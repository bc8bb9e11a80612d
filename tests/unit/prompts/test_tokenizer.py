"""The tokenizer and its files."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
import structlog
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from tests.cases import every_case
from tests.unit.prompts.test_template_support import make_backend, save
from triton_openai import offload
from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.prompts import tokenizer_files
from triton_openai.prompts.tokenizer import INLINE_CHARACTERS, Tokenizer
from triton_openai.prompts.tokenizer_files import HUB_FILES, fetch_from_hub

CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "model_max_length": 4096}


class Recorder(Tokenizer):
    """A tokenizer that notes in which thread it encodes."""

    threads: list[int]

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Note the thread, then encode."""
        self.threads = [*getattr(self, "threads", []), threading.get_ident()]
        return super().encode(text, add_special_tokens)

    def count(self, text: str, add_special_tokens: bool = False) -> int:
        """Note the thread, then count."""
        self.threads = [*getattr(self, "threads", []), threading.get_ident()]
        return super().count(text, add_special_tokens)


def test_loads_a_folder(tmp_path: Path) -> None:
    """A folder gives the tokenizer and what its files say."""
    tokenizer = Tokenizer.load(save(tmp_path, tokenizer_config=CONFIG))

    assert tokenizer.vocab_size == 258
    assert dict(tokenizer.special_tokens) == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_token_ids == (257,)
    assert tokenizer.model_max_length == 4096
    assert dict(tokenizer.chat_templates) == {}


def test_loads_a_file_of_any_name(tmp_path: Path) -> None:
    """A path of a file is a tokenizer.json; the other files are looked for beside it."""
    save(tmp_path, tokenizer_config=CONFIG)
    path = (tmp_path / "tokenizer.json").rename(tmp_path / "mine.json")

    assert Tokenizer.load(str(path)).special_tokens["bos_token"] == "<s>"


def test_loads_a_hub_name_through_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no path is a name on the hub."""
    asked: list[str] = []

    def fetch(name: str) -> Path:
        asked.append(name)
        return Path(save(tmp_path))

    monkeypatch.setattr(tokenizer_files, "fetch_from_hub", fetch)

    assert Tokenizer.load("org/name-1.0").vocab_size == 258
    assert asked == ["org/name-1.0"]


def test_encodes_decodes_and_counts(tmp_path: Path) -> None:
    """Text survives the way to ids and back; special tokens are added only when asked."""
    tokenizer = Tokenizer.load(
        save(tmp_path, make_backend(bos="<s>"), tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})
    )

    assert tokenizer.decode(tokenizer.encode("Grüße, 世界 🙂")) == "Grüße, 世界 🙂"
    assert tokenizer.encode("ab", add_special_tokens=True) == [256, *tokenizer.encode("ab")]
    assert tokenizer.count("ab") == 2
    assert tokenizer.count("ab", add_special_tokens=True) == 3
    assert [tokenizer.count_to("aé🙂b", end) for end in range(1, 5)] == [1, 3, 7, 8]
    assert tokenizer.decode([256, *tokenizer.encode("ab")]) == "ab"
    assert tokenizer.decode([256, *tokenizer.encode("ab")], skip_special_tokens=False) == "<s>ab"
    assert tokenizer.token_id("</s>") == 257
    assert tokenizer.token_id("absent") is None


def test_truncation_of_the_file_is_switched_off(tmp_path: Path) -> None:
    """Counts are true although sentence encoders ship with truncation and padding switched on."""
    backend = make_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    tokenizer = Tokenizer.load(save(tmp_path, backend))

    assert tokenizer.count("abcdefgh") == 8


@pytest.mark.parametrize(
    "config,bos,expected",
    [
        ({"bos_token": "<s>"}, "<s>", True),
        ({"bos_token": "<s>"}, None, False),
        ({"bos_token": "<s>", "add_bos_token": True}, None, True),
        ({"bos_token": "<s>", "add_bos_token": False}, "<s>", False),
        ({}, "<s>", False),
    ],
)
def test_knows_whether_bos_is_added(tmp_path: Path, config: dict[str, object], bos: str | None, expected: bool) -> None:
    """The flag of the config decides, else what the tokenizer does."""
    tokenizer = Tokenizer.load(save(tmp_path, make_backend(bos=bos), tokenizer_config=config))

    assert expected is tokenizer.adds_bos


def test_special_tokens_are_merged_as_in_transformers(tmp_path: Path) -> None:
    """tokenizer_config.json wins over special_tokens_map.json, and its null takes a token away."""
    tokenizer = Tokenizer.load(
        save(
            tmp_path,
            special_tokens_map={
                "bos_token": "<s>",
                "unk_token": "<unk>",
                "pad_token": {"content": "<pad>"},
                "additional_special_tokens": ["<a>"],
            },
            tokenizer_config={
                "bos_token": None,
                "unk_token": "<other>",
                "add_bos_token": True,
                "extra_special_tokens": {"image_token": "<image>"},
            },
        )
    )

    expected = {"unk_token": "<other>", "pad_token": "<pad>", "image_token": "<image>"}
    assert expected == dict(tokenizer.special_tokens)


@pytest.mark.parametrize(
    "generation,model,expected",
    [
        ({"eos_token_id": [5, 257, 7]}, {}, (257, 5, 7)),
        ({"eos_token_id": 9}, {"eos_token_id": 3}, (257, 9)),
        ({}, {"eos_token_id": 3}, (257, 3)),
        ({"eos_token_id": None}, {}, (257,)),
        ({"eos_token_id": [True, -1, "x"]}, {}, (257,)),
    ],
)
def test_eos_ids(tmp_path: Path, generation: object, model: object, expected: tuple[int, ...]) -> None:
    """The ids that end a generation come from the token, then generation_config.json, else config.json."""
    folder = save(tmp_path, tokenizer_config=CONFIG, generation_config=generation, config=model)

    assert expected == Tokenizer.load(folder).eos_token_ids


def test_an_eos_token_outside_the_vocabulary_has_no_id(tmp_path: Path) -> None:
    """A config that names a token which does not exist gives no id."""
    assert Tokenizer.load(save(tmp_path, tokenizer_config={"eos_token": "<none>"})).eos_token_ids == ()


@pytest.mark.parametrize(
    "written,expected",
    [(2048, 2048), (2048.0, 2048), (1e30, None), (10**30, None), (True, None), ("long", None), (0, None), (-1, None)],
)
def test_model_max_length(tmp_path: Path, written: object, expected: int | None) -> None:
    """An absurd length means that none is known."""
    folder = save(tmp_path, tokenizer_config={"model_max_length": written})

    assert expected == Tokenizer.load(folder).model_max_length


def test_templates_of_the_config(tmp_path: Path) -> None:
    """One string is the default template; a list names several, and broken entries are passed over."""
    one = Tokenizer.load(save(tmp_path / "one", tokenizer_config={"chat_template": "A"}))
    entries = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}, {"name": "x"}, "y", 3]
    several = Tokenizer.load(save(tmp_path / "several", tokenizer_config={"chat_template": entries}))
    odd = Tokenizer.load(save(tmp_path / "odd", tokenizer_config={"chat_template": 3}))

    assert dict(one.chat_templates) == {"default": "A"}
    assert dict(several.chat_templates) == {"default": "A", "tool_use": "B"}
    assert dict(odd.chat_templates) == {}


def test_template_files_win(tmp_path: Path) -> None:
    """chat_template.jinja and additional_chat_templates/ win over the config."""
    folder = save(
        tmp_path,
        tokenizer_config={
            "chat_template": [{"name": "default", "template": "old"}, {"name": "rag", "template": "kept"}]
        },
    )
    (tmp_path / "chat_template.jinja").write_text("new", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")

    expected = {"default": "new", "rag": "kept", "tool_use": "tools"}
    assert expected == dict(Tokenizer.load(folder).chat_templates)


@every_case("source", ["", "  ", "/no/such/folder", "./none", "a/b/c", "x\x00y", "~nobody-here/x", "x" * 5000])
def test_a_source_that_is_nothing(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no path and no possible hub name is an error that names the flag; the hub is not asked."""

    def fetch(name: str) -> Path:
        raise AssertionError(name)

    monkeypatch.setattr(tokenizer_files, "fetch_from_hub", fetch)
    if source == "x" * 5000:
        # The name is possible in form, but the file system refuses to look for it.
        source = "/" + source
    with pytest.raises(ConfigurationError, match="--tokenizer"):
        Tokenizer.load(source)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    """An empty folder is an error that says what is missing."""
    with pytest.raises(ConfigurationError, match=r"--tokenizer has no tokenizer\.json"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_slow_tokenizer(tmp_path: Path, name: str) -> None:
    """A tokenizer in the slow form only is an error that says how to convert it."""
    (tmp_path / name).write_bytes(b"\x00")

    with pytest.raises(ConfigurationError, match="only a slow form"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{}", "[1]", "\x00"])
def test_a_broken_tokenizer_json(tmp_path: Path, text: str) -> None:
    """An unreadable tokenizer.json is an error that names the flag."""
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")

    with pytest.raises(ConfigurationError, match=r"--tokenizer has an unreadable tokenizer\.json"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("tokenizer_config.json", b"{", "tokenizer_config.json .* is not valid JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json .* is not valid JSON"),
        ("generation_config.json", b"[]", "generation_config.json .* must hold a JSON object"),
        ("special_tokens_map.json", b"\xff", "special_tokens_map.json .* cannot be read"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja .* cannot be read"),
    ],
)
def test_broken_files_beside_it(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """A broken file beside tokenizer.json is an error that names the file and the flag."""
    folder = save(tmp_path)
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigurationError, match=message) as caught:
        Tokenizer.load(folder)
    assert "--tokenizer" in caught.value.message


@pytest.mark.parametrize(
    "error,message",
    [
        (GatedRepoError, "is gated"),
        (RepositoryNotFoundError, "neither a local folder nor a model"),
        (ConnectionError, "could not be reached"),
        (ValueError, "could not be reached"),
        (PermissionError(13, "Permission denied", "/.cache"), "HF_HOME"),
    ],
)
def test_hub_errors(monkeypatch: pytest.MonkeyPatch, error: type[Exception] | Exception, message: str) -> None:
    """Whatever the hub's client raises becomes an error that names the flag."""

    def fail(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        # Without its constructor: that wants a response of the hub's own HTTP library.
        raise error.__new__(error) if isinstance(error, type) else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)

    with pytest.raises(ConfigurationError, match=message) as caught:
        fetch_from_hub("org/name")
    assert "--tokenizer" in caught.value.message


def test_the_hub_is_asked_for_the_tokenizer_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No weights are downloaded."""
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    assert tmp_path == fetch_from_hub("org/name")
    assert tmp_path == fetch_from_hub("org/name@refs/pr/1")
    assert asked == [("org/name", None, list(HUB_FILES)), ("org/name", "refs/pr/1", list(HUB_FILES))]


COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@pytest.fixture
def offline_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the cache of a hub client in offline mode, in which two revisions of ``org/name`` lie."""
    model = tmp_path / "models--org--name"
    for revision, commit in COMMITS.items():
        snapshot = model / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / revision).write_text(commit)
        (snapshot / "tokenizer.json").write_text("{}")
    # As the environment sets them.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return model


def test_offline_mode_takes_a_revision_from_the_cache(offline_hub: Path) -> None:
    """Offline mode takes a revision from the cache by branch, tag or commit; the log tells which commit it is."""
    with structlog.testing.capture_logs() as lines:
        for source, revision in (("org/name", "main"), ("org/name@v1", "v1"), (f"org/name@{COMMITS['v1']}", "v1")):
            assert offline_hub / "snapshots" / COMMITS[revision] == fetch_from_hub(source)
    assert [COMMITS["main"], COMMITS["v1"], COMMITS["v1"]] == [line["revision"] for line in lines]


def test_offline_mode_takes_what_another_program_has_cached(offline_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client misses other files of the model; the tokenizer is there all the same."""

    def fail(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("the cached snapshot is incomplete")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)

    assert offline_hub / "snapshots" / COMMITS["main"] == fetch_from_hub("org/name")


@pytest.mark.parametrize("source", ["org/other", "org/name@v2"])
def test_offline_mode_says_what_is_missing(offline_hub: Path, source: str) -> None:
    """The error names the variable that keeps the service from asking the hub."""
    with pytest.raises(ConfigurationError, match=rf"'{source}' .* HF_HUB_OFFLINE is set"):
        fetch_from_hub(source)


def test_text_that_is_not_unicode(tmp_path: Path) -> None:
    """A lone surrogate is the client's mistake, never an exception of the bindings."""
    tokenizer = Tokenizer.load(save(tmp_path))

    with pytest.raises(InvalidRequest, match="lone surrogate"):
        tokenizer.encode("a\ud800")
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        tokenizer.count("a\ud800")


@pytest.mark.parametrize("ids", [[-1], [2**40]])
def test_ids_that_cannot_be(tmp_path: Path, ids: list[int]) -> None:
    """Numbers that are no ids are the client's mistake; ids that do not exist give no text."""
    tokenizer = Tokenizer.load(save(tmp_path))

    with pytest.raises(InvalidRequest, match="Token ids"):
        tokenizer.decode(ids)
    assert tokenizer.decode([10**6]) == ""


async def test_short_texts_stay_and_long_ones_go_to_a_thread(tmp_path: Path) -> None:
    """The event loop's thread encodes short texts only."""
    save(tmp_path)
    tokenizer = Recorder.load(str(tmp_path))
    assert isinstance(tokenizer, Recorder)
    tokenizer.threads = []

    await tokenizer.encode_async("a" * INLINE_CHARACTERS)
    await tokenizer.count_async("a" * INLINE_CHARACTERS)
    assert tokenizer.threads == [threading.get_ident()] * 2

    tokenizer.threads = []
    assert len(await tokenizer.encode_async("a" * (INLINE_CHARACTERS + 1))) == INLINE_CHARACTERS + 1
    assert await tokenizer.count_async("a" * (INLINE_CHARACTERS + 1)) == INLINE_CHARACTERS + 1
    assert len(tokenizer.threads) == 2
    assert threading.get_ident() not in tokenizer.threads


async def test_errors_come_back_from_the_thread(tmp_path: Path) -> None:
    """A long text that is not Unicode fails as a short one does."""
    tokenizer = Tokenizer.load(save(tmp_path))

    with pytest.raises(InvalidRequest, match="lone surrogate"):
        await tokenizer.encode_async("\ud800" * (INLINE_CHARACTERS + 1))


def test_the_cost_of_rendering_is_that_of_text_and_items() -> None:
    """Strings cost by their characters, items each the same, numbers nothing; and counting stops."""
    value = [{"a": "x" * 100, "b": ["12", 3]}]
    items, text = 5 * offload.ITEM, 102 * offload.BYTE

    assert offload.rendering_cost(value) == pytest.approx(items + text)
    assert offload.rendering_cost(json.loads("[" * 90 + "]" * 90)) == 89 * offload.ITEM
    # The hundred items are too much, whatever is in them.
    assert offload.rendering_cost(["x" * 10**6] * 1000) == 1000 * offload.ITEM
