"""Transcriptions by the companion's model file: token ids of a Whisper, texts of models that write their prompts."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from tests.cases import every_case

RATE = 16_000


class Scored:
    """A token's log probability."""

    def __init__(self, logprob: float) -> None:
        self.logprob = logprob


class Hearing:
    """An engine that writes down what it hears, one token after the other."""

    def __init__(self, text: str = "heard", finish: str = "stop") -> None:
        self.asked: list[Any] = []
        self._text = text
        self._finish = finish

    async def generate(self, prompt: Any, params: Any, name: str) -> Any:
        self.asked.append((prompt, params))
        for token, value in ((5, -0.5), (6, -1.0)):
            choice = types.SimpleNamespace(
                token_ids=[token], logprobs=[{token: Scored(value)}], text=self._text, finish_reason=self._finish
            )
            yield types.SimpleNamespace(outputs=[choice], prompt_token_ids=[1, 2, 3])


class Object:
    """What vLLM 0.24 and newer hand over to a model's class."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


class Model:
    """A model's class in vLLM that writes down speech, with the interface of release 0.24."""

    supports_transcription = True

    @classmethod
    def get_speech_to_text_config(cls, model_config: Any, task_type: str) -> Any:
        return types.SimpleNamespace(sample_rate=RATE, max_audio_clip_s=2, task=task_type)

    @classmethod
    def validate_language(cls, language: str | None) -> str | None:
        if language == "xx":
            raise ValueError("Unsupported language: 'xx'.")
        return language

    @classmethod
    def get_generation_prompt(cls, stt_params: Any) -> Any:
        return vars(stt_params)

    @classmethod
    def post_process_output(cls, text: str) -> str:
        return text.rpartition("<text>")[2]


class Older(Model):
    """One with the interface of release 0.11."""

    post_process_output = None  # type: ignore[assignment]

    @classmethod
    def get_generation_prompt(  # type: ignore[override]
        cls, audio: Any, stt_config: Any, model_config: Any, language: Any, task_type: Any, request_prompt: Any,
        to_language: Any,
    ) -> Any:  # fmt: skip
        return dict(locals())


class Another(Model):
    """One with an interface that is not known."""

    @classmethod
    def get_generation_prompt(cls, request: Any) -> Any:
        raise AssertionError("It is not called.")


class NeedsLanguage(Model):
    """One that does not find the language out."""

    @classmethod
    def get_generation_prompt(cls, stt_params: Any) -> Any:
        raise ValueError("Language must be specified when creating the prompt")


class Writer:
    """A model that writes no speech down."""


def installed(monkeypatch: pytest.MonkeyPatch, kind: Any, params: Any = Object) -> None:
    """Put what is used of vLLM in its place: the model's class is *kind*."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {},
        "vllm.config.speech_to_text": {"SpeechToTextParams": params},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {"get_model_cls": lambda config: kind},
    }
    if kind is None:
        contents["vllm.model_executor.model_loader"] = {}
    for name, values in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


def hearing(model: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, *, encodes: bool = False) -> Any:
    """Return an engine of the model file over vLLM's *engine*."""
    monkeypatch.setattr(model, "READERS", {"audio": lambda raw: (raw, RATE), "image": bytes})
    made = model.Engine.__new__(model.Engine)
    made._engine = engine
    made._vocabulary = 100
    made._encodes = encodes
    made._pooling = 0
    made._speech = None
    made._library = types.SimpleNamespace(RequestOutputKind=types.SimpleNamespace(FINAL_ONLY="last"))
    made._model_config = types.SimpleNamespace(max_model_len=8)
    made._sampling = lambda message, **more: {**message, **more}
    return made


_AUDIO = [{"type": "audio", "at": 0}]


async def test_a_whisper_goes_on_from_the_ids(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder gets the audio, the decoder goes on from the ids, up to the model's context."""
    engine = Hearing()
    message = {"ids": [1, 2], "media": _AUDIO, "sampling": {"temperature": 0.5}}
    spoken = await hearing(model, engine, monkeypatch, encodes=True).transcribe(message, [b"sound"], "x")
    ((prompt, params),) = engine.asked

    assert {"ids": [5, 6], "logprob": -1.5, "prompt": 2} == spoken
    assert {"prompt_token_ids": [1, 2]} == prompt["decoder_prompt"]
    assert (b"sound", RATE) == prompt["encoder_prompt"]["multi_modal_data"]["audio"]
    assert {"max_tokens": 6, "temperature": 0.5} == params["sampling"]


_UNHEARD: dict[str, tuple[dict[str, Any], bool, str]] = {
    "a model without an encoder": ({"ids": [1], "media": _AUDIO}, False, "leave 'ids' out"),
    "no ids": ({"ids": [], "media": _AUDIO}, True, "missing"),
    "ids that are none": ({"ids": None, "media": _AUDIO}, True, "missing"),
    "a token that there is not": ({"ids": [100], "media": _AUDIO}, True, "100"),
    "no audio": ({"ids": [1]}, True, "one audio file"),
    "an image": ({"ids": [1], "media": [{"type": "image", "at": 0}]}, True, "one audio file"),
    "two files": ({"ids": [1], "media": [*_AUDIO, *_AUDIO]}, True, "one audio file"),
    "no room": ({"ids": [1] * 8, "media": _AUDIO}, True, "no room"),
}


@every_case("name", list(_UNHEARD))
async def test_transcriptions_that_are_refused(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what is wrong, and the engine is not asked."""
    message, encodes, expected = _UNHEARD[name]
    engine = Hearing()
    made = hearing(model, engine, monkeypatch, encodes=encodes)

    with pytest.raises(model.Refused, match=expected):
        await made.transcribe(message, [b"?"], "x")
    assert not engine.asked
    assert 0 == made._pooling


_PROMPTS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "a transcription": (Model, {}, {"task_type": "transcribe", "language": None, "to_language": None}),
    "a language and a context": (
        Model,
        {"language": "de", "prompt": "Names: Ada."},
        {"language": "de", "request_prompt": "Names: Ada."},
    ),
    "a translation": (
        Model,
        {"task": "translate", "to_language": "en"},
        {"task_type": "translate", "to_language": "en", "language": None},
    ),
    "the interface of release 0.11": (
        Older,
        {"language": "de"},
        {"language": "de", "task_type": "transcribe", "request_prompt": "", "to_language": None},
    ),
}


@every_case("name", list(_PROMPTS))
async def test_a_model_writes_its_prompt(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class in vLLM gets the audio and what the client wants, and takes the marks off the answer."""
    kind, message, expected = _PROMPTS[name]
    installed(monkeypatch, kind)
    engine = Hearing(text="language German<text>Hallo.")
    made = hearing(model, engine, monkeypatch)
    spoken = await made.transcribe({"media": _AUDIO, "sampling": {"max_tokens": 7}, **message}, [b"sound"], "x")
    ((prompt, params),) = engine.asked

    text = "Hallo."
    if kind is Older:
        text = "language German<text>Hallo."
    assert {"text": text, "complete": True, "prompt": 3, "completion": 1} == spoken
    assert expected == {key: prompt[key] for key in expected}
    assert (b"sound", prompt["task_type"]) == (prompt["audio"], prompt["stt_config"].task)
    assert {"temperature": 0.0, "max_tokens": 7} == params["sampling"]
    assert (True, "last") == (params["detokenize"], params["output_kind"])


async def test_an_answer_that_was_cut(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client hears of it, and asks for less audio."""
    installed(monkeypatch, Model)
    engine = Hearing(finish="length")
    spoken = await hearing(model, engine, monkeypatch).transcribe({"media": _AUDIO}, [b"sound"], "x")

    assert not spoken["complete"]


_LONG = b"x" * (2 * RATE + 1)
_UNWRITTEN: dict[str, tuple[Any, dict[str, Any], bytes, str, str | None]] = {
    "a model of texts alone": (Writer, {}, b"x", "in a chat", "model"),
    "a release without the function": (None, {}, b"x", "no vllm.model_executor.model_loader.get_model_cls", None),
    "an interface that is not known": (Another, {}, b"x", "in another way", None),
    "another task": (Model, {"task": "summarize"}, b"x", "no task 'summarize'", "task"),
    "a task that is no text": (Model, {"task": ["translate"]}, b"x", "no task", "task"),
    "a language that is none": (Model, {"language": "xx"}, b"x", "Unsupported language", "language"),
    "a language to translate to": (Model, {"to_language": "xx"}, b"x", "Unsupported language", "to_language"),
    "no language where one is needed": (NeedsLanguage, {}, b"x", "Language must be specified", "language"),
    "a context that is no text": (Model, {"prompt": 5}, b"x", "no text", "prompt"),
    "a long recording": (Model, {}, _LONG, "up to 2 seconds", "media"),
}


@every_case("name", list(_UNWRITTEN))
async def test_prompts_that_are_not_written(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what is wrong and with what, and the engine is not asked."""
    kind, message, audio, expected, param = _UNWRITTEN[name]
    installed(monkeypatch, kind)
    engine = Hearing()

    with pytest.raises(model.Refused, match=expected) as caught:
        await hearing(model, engine, monkeypatch).transcribe({"media": _AUDIO, **message}, [audio], "x")
    assert param == caught.value.fields["param"]
    assert not engine.asked


async def test_audio_of_another_rate(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model would take it for speech at another speed."""
    installed(monkeypatch, Model)
    made = hearing(model, Hearing(), monkeypatch)
    monkeypatch.setattr(model, "READERS", {"audio": lambda raw: (raw, 8_000)})

    with pytest.raises(model.Refused, match="audio of 16000 Hz"):
        await made.transcribe({"media": _AUDIO}, [b"x"], "x")


async def test_a_release_without_the_object(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that wants the object of newer releases cannot be asked without it."""
    installed(monkeypatch, Model, params=None)

    with pytest.raises(model.Refused, match="in another way"):
        await hearing(model, Hearing(), monkeypatch).transcribe({"media": _AUDIO}, [b"x"], "x")


async def test_an_engine_without_an_answer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the engine's fault, not the client's."""

    class Silent(Hearing):
        async def generate(self, prompt: Any, params: Any, name: str) -> Any:
            return
            yield

    installed(monkeypatch, Model)
    with pytest.raises(model.Refused) as caught:
        await hearing(model, Silent(), monkeypatch).transcribe({"media": _AUDIO}, [b"x"], "x")
    assert "engine" == caught.value.fields["kind"]
