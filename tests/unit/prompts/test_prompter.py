"""The prompter: which tokenizer, which template, and what they make."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import every_case
from tests.extended import examples
from tests.unit.prompts.test_template_support import LLAMA3_TOKENS, make_backend, save
from triton_openai.config.tree import ModelDefaults, ModelSettings, Settings
from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.models.loading import LazyPrompter, Prompters
from triton_openai.prompts import prompter as builtin
from triton_openai.prompts.messages import AssistantMessage, Message, MessageFunctionCall, MessageToolCall, UserMessage
from triton_openai.prompts.prompt_template import Rendering
from triton_openai.prompts.prompter import Prompter
from triton_openai.prompts.template import ChatTemplate

HI: list[Message] = [UserMessage(content="Hi")]
OWN = {"bos_token": "<s>", "chat_template": "{{ bos_token }}own {{ messages[0].content }}"}


def test_the_operators_template_comes_first(tmp_path: Path) -> None:
    """--chat-template wins over the tokenizer's own template: a file, or a built-in by name."""
    folder = save(tmp_path, tokenizer_config=OWN)
    mine = tmp_path / "mine.jinja"
    mine.write_text("mine {{ bos_token }}", encoding="utf-8")

    file = Prompter.resolve(ModelSettings(tokenizer=folder, chat_template=str(mine)))
    named = Prompter.resolve(ModelSettings(tokenizer=folder, chat_template="plain"))

    assert file.render(HI) == "mine <s>"
    assert file.provenance.chat_template == f"{mine} (--chat-template)"
    assert named.render(HI) == "User: Hi\nAssistant:"
    assert named.provenance.chat_template == "built-in plain (--chat-template)"


def test_then_the_tokenizers_own(tmp_path: Path) -> None:
    """Without --chat-template the tokenizer's own template is used."""
    folder = save(tmp_path, tokenizer_config=OWN)
    prompter = Prompter.resolve(ModelSettings(tokenizer=folder))

    assert prompter.render(HI) == "<s>own Hi"
    assert prompter.can_chat
    assert dict(prompter.template_variables) == {"bos_token": "<s>"}
    assert msgspec.to_builtins(prompter.provenance) == {
        "tokenizer": f"{folder} (--tokenizer)",
        "chat_template": "the tokenizer's own",
        "notes": [],
        "generation_config": None,
    }


@pytest.mark.parametrize(
    "tokens,expected",
    [
        (LLAMA3_TOKENS, "llama3"),
        (("<|im_start|>", "<|im_end|>"), "chatml"),
        (("<start_of_turn>", "<end_of_turn>"), "gemma"),
        (("[INST]", "[/INST]", "[SYSTEM_PROMPT]"), None),
        (("<|im_start|>",), None),
        ((), None),
    ],
)
def test_then_a_built_in_that_the_tokens_call_for(
    tmp_path: Path, tokens: tuple[str, ...], expected: str | None
) -> None:
    """A tokenizer without a template is recognised by its special tokens, or not at all."""
    prompter = Prompter.resolve(ModelSettings(tokenizer=save(tmp_path, make_backend(tokens or ("<s>",)))))

    if expected is None:
        assert not prompter.can_chat
        assert prompter.provenance.chat_template is None
    else:
        assert prompter.template_for().name == expected
        assert str(prompter.provenance.chat_template).startswith(f"built-in {expected} (the tokenizer has ")


def test_mistral_is_recognised_with_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    """[INST] means the built-in format only where the vocabulary is not byte-level (Tekken writes no spaces)."""
    backend = make_backend(("[INST]", "[/INST]"))
    tekken = Prompter.resolve(ModelSettings(tokenizer=save(tmp_path / "tekken", backend)))
    folder = save(tmp_path / "sentencepiece", backend)
    path = tmp_path / "sentencepiece" / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace("Ġ", "▁"), encoding="utf-8")

    assert not tekken.can_chat
    assert Prompter.resolve(ModelSettings(tokenizer=folder)).template_for().name == "mistral"


def test_nothing_is_guessed(tmp_path: Path) -> None:
    """Without a template a chat fails with the flags' names; the tokenizer works all the same."""
    unknown = Prompter.resolve(ModelSettings(tokenizer=save(tmp_path)))
    nothing = Prompter.resolve(ModelSettings())

    assert unknown.tokenizer is not None
    assert unknown.tokenizer.count("abc") == 3
    with pytest.raises(ConfigurationError, match=r"has no chat template: give one with --chat-template \(a file, or"):
        unknown.render(HI)
    assert nothing.tokenizer is None
    with pytest.raises(ConfigurationError, match=r"not known: give one with --tokenizer .* --chat-template"):
        nothing.render(HI)
    assert dict(nothing.template_variables) == {}
    assert len(nothing.provenance.notes) == 2


async def test_errors_are_the_same_in_async_form() -> None:
    """A chat that cannot be is refused before any thread."""
    with pytest.raises(ConfigurationError, match="--chat-template"):
        await Prompter.resolve(ModelSettings()).render_async(HI)


def test_a_template_without_a_tokenizer() -> None:
    """A named template works without a tokenizer; it writes no special tokens, since none are known."""
    prompter = Prompter.resolve(ModelSettings(chat_template="llama3"))

    expected = (
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert expected == prompter.render(HI)


@every_case("unset", [None, "", "  ", "${tokenizer_dir}"])
def test_an_unset_hint(unset: str | None) -> None:
    """What TensorRT-LLM's configs hold before they are filled means nothing."""
    prompter = Prompter.resolve(ModelSettings(tokenizer=unset, chat_template=unset), hint=unset)

    assert prompter.tokenizer is None
    assert prompter.provenance.notes[0].startswith("no tokenizer: --tokenizer is not given")


def test_a_hint_is_used_where_it_exists(tmp_path: Path) -> None:
    """tokenizer_dir of Triton's config is used when it is here, and never looked for on the hub."""
    folder = save(tmp_path / "here", tokenizer_config=OWN)
    here = Prompter.resolve(ModelSettings(), hint=folder)
    elsewhere = Prompter.resolve(ModelSettings(), hint="org/name")
    impossible = Prompter.resolve(ModelSettings(), hint="x\x00y")

    assert here.render(HI) == "<s>own Hi"
    assert here.provenance.tokenizer == f"{folder} (tokenizer_dir of the model's config)"
    assert elsewhere.tokenizer is None
    assert (
        elsewhere.provenance.notes[0]
        == "no tokenizer: org/name (tokenizer_dir of the model's config) is not on this machine"
    )
    assert impossible.tokenizer is None


def test_a_hint_that_is_unusable_is_passed_over(tmp_path: Path) -> None:
    """Nobody asked for the hinted tokenizer, so that it is broken is a note and no error."""
    prompter = Prompter.resolve(ModelSettings(), hint=str(tmp_path))

    assert prompter.tokenizer is None
    assert "is unusable: " in prompter.provenance.notes[0]


def test_the_flag_wins_over_the_hint(tmp_path: Path) -> None:
    """--tokenizer is taken where both are there, and must work."""
    flag = save(tmp_path / "flag")
    hint = save(tmp_path / "hint")

    assert Prompter.resolve(ModelSettings(tokenizer=flag), hint=hint).provenance.tokenizer == f"{flag} (--tokenizer)"
    with pytest.raises(ConfigurationError, match="--tokenizer"):
        Prompter.resolve(ModelSettings(tokenizer=str(tmp_path / "none")), hint=hint)


def test_templates_that_cannot_be_read(tmp_path: Path) -> None:
    """What --chat-template names must be there, readable, and compile."""
    (tmp_path / "binary.jinja").write_bytes(b"\xff")
    (tmp_path / "broken.jinja").write_text("\n{% if %}", encoding="utf-8")

    with pytest.raises(ConfigurationError, match=r"not a built-in template \(llama3, chatml"):
        Prompter.resolve(ModelSettings(chat_template="lama3"))
    with pytest.raises(ConfigurationError, match="not a built-in template"):
        Prompter.resolve(ModelSettings(chat_template="x\x00y"))
    with pytest.raises(ConfigurationError, match="can't decode"):
        Prompter.resolve(ModelSettings(chat_template=str(tmp_path / "binary.jinja")))
    with pytest.raises(ConfigurationError, match="not a readable file"):
        Prompter.resolve(ModelSettings(chat_template=str(tmp_path)))
    with pytest.raises(ConfigurationError, match=r"'broken\.jinja' is wrong in line 2"):
        Prompter.resolve(ModelSettings(chat_template=str(tmp_path / "broken.jinja")))


def test_named_templates(tmp_path: Path) -> None:
    """tool_use is taken for tools and rag for documents, where they are; else the default."""
    entries = [
        {"name": "default", "template": "default"},
        {"name": "tool_use", "template": "tools"},
        {"name": "rag", "template": "documents"},
    ]
    prompter = Prompter.resolve(ModelSettings(tokenizer=save(tmp_path, tokenizer_config={"chat_template": entries})))

    assert prompter.render(HI) == "default"
    assert prompter.render(HI, Rendering(tools=[{}])) == "tools"
    assert prompter.render(HI, Rendering(documents=[{}])) == "documents"
    assert prompter.render(HI, Rendering(tools=[{}], documents=[{}])) == "tools"
    assert prompter.render(HI, Rendering(tools=[], documents=[])) == "default"


def test_named_templates_without_a_default(tmp_path: Path) -> None:
    """Templates of other names are not taken for the default one."""
    entries = [{"name": "tool_use", "template": "tools"}]
    prompter = Prompter.resolve(ModelSettings(tokenizer=save(tmp_path, tokenizer_config={"chat_template": entries})))

    assert prompter.render(HI, Rendering(tools=[{}])) == "tools"
    with pytest.raises(ConfigurationError, match=r"no default chat template \(it has tool_use\).*--chat-template"):
        prompter.render(HI)


def test_a_broken_template_of_the_tokenizer(tmp_path: Path) -> None:
    """A tokenizer's broken template is noted at once, and an error only when a chat asks for it."""
    prompter = Prompter.resolve(ModelSettings(tokenizer=save(tmp_path, tokenizer_config={"chat_template": "{% if %}"})))

    assert not prompter.can_chat
    assert "is wrong in line 1" in prompter.provenance.notes[0]
    with pytest.raises(ConfigurationError, match="is wrong in line 1") as caught:
        prompter.render(HI)
    assert str(tmp_path) not in caught.value.message


def test_variables_of_the_client(tmp_path: Path) -> None:
    """chat_template_kwargs reach the template, but cannot replace what the request is made of."""
    config = {"chat_template": "{{ enable_thinking }}|{{ tools }}"}
    prompter = Prompter.resolve(ModelSettings(tokenizer=save(tmp_path, tokenizer_config=config)))

    assert prompter.render(HI, Rendering(variables={"enable_thinking": False})) == "False|None"
    with pytest.raises(InvalidRequest) as caught:
        prompter.render(HI, Rendering(variables={"messages": []}))
    assert caught.value.param == "chat_template_kwargs.messages"


def test_double_bos(tmp_path: Path) -> None:
    """A prompt that begins with BOS can be freed of it, once."""
    prompter = Prompter.resolve(ModelSettings(tokenizer=save(tmp_path, tokenizer_config=OWN)))

    tokenizer = prompter.tokenizer
    assert tokenizer is not None
    assert ["own Hi", "<s>x", "own Hi"] == [tokenizer.strip_bos(text) for text in ("<s>own Hi", "<s><s>x", "own Hi")]


async def test_long_chats_are_rendered_in_a_thread(tmp_path: Path) -> None:
    """The event loop's thread renders small requests only; size is text, number of messages, tools, and variables."""
    threads: list[int] = []

    class Spy(str):
        """A text that notes who looks at it."""

        __slots__ = ()

        def __str__(self) -> str:
            threads.append(threading.get_ident())
            return "spy"

    config = {"chat_template": "{{ spy | string }} {{ messages | length }}"}
    prompter = Prompter.resolve(ModelSettings(tokenizer=save(tmp_path, tokenizer_config=config)))

    assert await prompter.render_async(HI, Rendering(variables={"spy": Spy()})) == "spy 1"
    assert await prompter.render_async(HI * 1000, Rendering(variables={"spy": Spy()})) == "spy 1000"
    assert threads[0] == threading.get_ident()
    assert threads[-1] != threading.get_ident()

    threads.clear()
    words = "x" * 200_000
    assert await prompter.render_async([UserMessage(content=words)], Rendering(variables={"spy": Spy()})) == "spy 1"
    assert await prompter.render_async(HI, Rendering(tools=[{"text": words}], variables={"spy": Spy()})) == "spy 1"
    assert await prompter.render_async(HI, Rendering(documents=[{"text": words}], variables={"spy": Spy()})) == "spy 1"
    assert await prompter.render_async(HI, Rendering(variables={"spy": Spy(), "x": [0] * 1000})) == "spy 1"
    function = MessageFunctionCall(name="f", arguments='{"a": ' + "x" * 500)
    called = AssistantMessage(tool_calls=[MessageToolCall(function=function)])
    assert await prompter.render_async([called], Rendering(variables={"spy": Spy()})) == "spy 1"
    foreign = prompter.with_template(ChatTemplate("{{ spy | string }}", name="test", param="chat_template"))
    assert await foreign.render_async(HI, Rendering(variables={"spy": Spy()})) == "spy"
    assert threads
    assert threading.get_ident() not in threads


def test_who_is_to_blame_for_a_failing_template(tmp_path: Path) -> None:
    """The operator for one that fails on every message, the client for its own and for a message that is refused."""
    broken = "{{ messages[0].content + 1 }}"
    config = {"chat_template": broken}
    prompter = Prompter.resolve(ModelSettings(tokenizer=save(tmp_path, tokenizer_config=config)))
    picky = "{{ messages[0].content + 1 if messages[0].content == 'Hi' else 'fine' }}"

    with pytest.raises(ConfigurationError, match="fails on a plain message") as caught:
        prompter.render(HI)
    assert "can only concatenate" in str(caught.value.detail)
    for source in (broken, picky):
        foreign = prompter.with_template(ChatTemplate(source, name="test", param="chat_template"))
        with pytest.raises(InvalidRequest, match="can only concatenate"):
            foreign.render(HI)
    own = Prompter.resolve(ModelSettings(tokenizer=save(tmp_path, tokenizer_config={"chat_template": picky})))
    with pytest.raises(InvalidRequest, match="can only concatenate"):
        own.render(HI)


async def test_what_could_not_be_loaded_is_tried_again(template: Path) -> None:
    """What could not be loaded is tried again at the next request, and never again once it is there."""
    lazy = LazyPrompter(ModelSettings(chat_template=str(template)), None)
    write(template, "{% broken")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="is wrong in line 1"):
            await lazy.get()
    write(template, "first")
    found = await lazy.get()

    assert "first" == found.render(HI)
    assert found is await lazy.get()


async def test_refusals_come_back_from_the_thread(tmp_path: Path) -> None:
    """A refusal of many messages is the same as of few."""
    config = {"chat_template": "{{ raise_exception('no') }}"}
    with pytest.raises(InvalidRequest, match="no"):
        await Prompter.resolve(ModelSettings(tokenizer=save(tmp_path, tokenizer_config=config))).render_async(HI * 1000)


def both(template: str, **models: ModelSettings) -> Settings:
    """Return settings with a *template* for all models but those that have their own."""
    return Settings(defaults=ModelDefaults(chat_template=template), models=models)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """Return the file of a template."""
    path = tmp_path / "template.jinja"
    path.write_text("first")
    return path


def write(path: Path, text: str) -> None:
    """Write a template anew."""
    path.write_text(text)


async def rendered(prompters: Prompters, given: Settings, name: str = "a") -> str:
    """Return what the model's template makes of no messages."""
    prompter = await prompters.of(name, given.model(name), None).get()
    return prompter.template_for().render([])


def test_the_same_model_keeps_its_own() -> None:
    """A second look at Triton's models reads nothing again."""
    prompters, model = Prompters(), ModelSettings(chat_template="chatml")
    first = prompters.of("a", model, "/x")

    assert first is prompters.of("a", model, "/x")
    assert first is not prompters.of("b", model, "/x")
    assert first is not prompters.of("a", model, "/y")


def test_who_is_gone_is_forgotten() -> None:
    """A model that comes back may have another tokenizer."""
    prompters, model = Prompters(), ModelSettings()
    first = prompters.of("a", model, None)
    prompters.keep({"b"})

    assert first is not prompters.of("a", model, None)


async def test_only_what_changes_is_found_anew(template: Path) -> None:
    """A model with settings of its own does not mind the defaults."""
    before = both("chatml", b=ModelSettings(chat_template="plain"))
    after = both(str(template), b=ModelSettings(chat_template="plain"))
    prompters = Prompters()
    old = {name: prompters.of(name, before.model(name), None) for name in "ab"}
    reloaded = await prompters.reloaded(after, reload=False)

    assert "first" == await rendered(reloaded, after)
    assert reloaded.of("b", after.model("b"), None) is old["b"]
    # Who asked before is served by what was right then.
    assert old["a"] is prompters.of("a", before.model("a"), None)


async def test_renewing_reads_the_same_file_again(template: Path) -> None:
    """A file whose text may be another is read again when that is asked for, and never without."""
    given, prompters = both(str(template)), Prompters()
    assert "first" == await rendered(prompters, given)
    write(template, "second")

    assert "first" == await rendered(await prompters.reloaded(given, reload=False), given)
    assert "second" == await rendered(await prompters.reloaded(given, reload=True), given)


async def test_what_cannot_be_renewed_stays(template: Path) -> None:
    """Nobody changed its settings, so it is no reason to refuse them."""
    given, prompters = both(str(template)), Prompters()
    assert "first" == await rendered(prompters, given)
    write(template, "{% broken")

    assert "first" == await rendered(await prompters.reloaded(given, reload=True), given)


async def test_what_was_changed_has_to_work(template: Path) -> None:
    """The message names the model and the setting."""
    given, prompters = both(str(template)), Prompters()
    assert "first" == await rendered(prompters, given)

    with pytest.raises(ConfigurationError, match=r"a: '/nowhere\.jinja' given by --chat-template"):
        await prompters.reloaded(both("/nowhere.jinja"), reload=False)


KEYS = st.sampled_from(
    ["role", "content", "name", "tool_calls", "function", "arguments", "type", "text", "refusal", "function_call", "id"]
)
WORDS = st.sampled_from(
    ["user", "assistant", "system", "tool", "function", "developer", "text", "image_url", "refusal", "{}", "{", "[1]"]
) | st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
CALLS = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": WORDS}, optional={"arguments": WORDS | JSON})})
    | JSON,
    max_size=2,
)
CONTENT = WORDS | st.none() | st.lists(st.fixed_dictionaries({"type": WORDS, "text": WORDS}) | WORDS, max_size=3) | JSON
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "function", "developer"])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": ROLES}, optional={"content": CONTENT, "name": WORDS, "tool_calls": CALLS}) | JSON,
    max_size=4,
)
PARTS_TEMPLATE = (
    "{% for m in messages %}{% if m.content is none %}-{% else %}{% for p in m.content %}{{ p['text'] + '' }}"
    "{% endfor %}{% endif %}{% for c in m.tool_calls %}{{ c.function.arguments.items() | list }}{% endfor %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def prompters(tmp_path_factory: pytest.TempPathFactory) -> list[Prompter]:
    """Return prompters of every built-in template, of a template that wants parts, and of none."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": PARTS_TEMPLATE}
    folder = save(tmp_path_factory.mktemp("tokenizer"), tokenizer_config=config)
    named = [Prompter.resolve(ModelSettings(tokenizer=folder, chat_template=name)) for name in builtin.NAMES]
    return [*named, Prompter.resolve(ModelSettings(tokenizer=folder)), Prompter.resolve(ModelSettings())]


@settings(deadline=None, max_examples=examples(300))
@given(messages=MESSAGES, index=st.integers(0, len(builtin.NAMES) + 1), more=st.booleans())
def test_any_messages_give_a_prompt_or_a_clear_error(
    prompters: list[Prompter], messages: Any, index: int, more: bool
) -> None:
    """Whatever JSON comes as messages, it ends as a prompt, a decoder's error, or one of ours."""
    try:
        decoded = msgspec.json.decode(json.dumps(messages), type=list[Message])
    except msgspec.ValidationError:
        return
    try:
        prompt = prompters[index].render(decoded, Rendering(add_generation_prompt=more))
    except (InvalidRequest, ConfigurationError):
        return
    tokenizer = prompters[0].tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode(prompt), skip_special_tokens=False) == prompt
