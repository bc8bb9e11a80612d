"""The comparison of a release of vLLM with what the companion model uses of it."""

from __future__ import annotations

from pathlib import Path

from tests.cases import every_case
from tests.engine.interfaces import main, missing, slower, tables, without_speech
from triton_openai.companion.repository import SPEECH_MODELS

_ENGINE = """
class AsyncLLM:
    @classmethod
    def from_engine_args(cls, engine_args, stat_loggers=None): ...
    async def add_request(self, request_id, prompt, params, arrival_time=None, lora_request=None, priority=0): ...
    async def generate(self, prompt, sampling_params, request_id, *, lora_request=None, priority=0): ...
    async def encode(self, prompt, pooling_params, request_id, lora_request=None): ...
    async def abort(self, request_id, internal=False): ...
    def shutdown(self, timeout=None): ...
"""
_PROCESSOR = """
from vllm.v1 import RequestOutputCollector
class OutputProcessor:
    def process_outputs(self, outputs, timestamp=None, iteration_stats=None): ...
"""


def release(folder: Path, engine: str = _ENGINE, processor: str = _PROCESSOR, without: str = "") -> Path:
    """Write a package that has what is used, but for one name."""
    package = folder / "vllm"
    for table in ("USED", "SAVING"):
        for module, names in tables()[table].items():
            path = package.joinpath(*module.split(".")[1:], "__init__.py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{name} = None\n" for name in names if name != without))
    (package / "v1/engine/async_llm/__init__.py").write_text(engine)
    (package / "v1/engine/output_processor/__init__.py").write_text(processor)
    return package


_RELEASES: dict[str, tuple[dict[str, str], list[str], list[str]]] = {
    "one that has all": ({}, [], []),
    "a class has gone": ({"without": "LoRARequest"}, ["vllm.lora.request has no LoRARequest"], []),
    "what saves time has gone": ({"without": "EngineCoreOutput"}, [], ["vllm.v1.engine has no EngineCoreOutput"]),
    "a method has gone": ({"engine": _ENGINE.replace("def encode", "def pool")}, ["AsyncLLM has no encode"], []),
    "other arguments": (
        {"engine": _ENGINE.replace("request_id, prompt, params", "prompt, request_id, params")},
        ["AsyncLLM.add_request does not begin with ('request_id', 'prompt', 'params')"],
        [],
    ),
    "an argument has gone": (
        {"engine": _ENGINE.replace("request_id, *, lora_request=None, priority=0", "request_id, *, lora_request=None")},
        ["AsyncLLM.generate has no priority"],
        [],
    ),
    "outputs are processed otherwise": (
        {"processor": _PROCESSOR.replace("timestamp=None, ", "")},
        [],
        ["OutputProcessor.process_outputs has other arguments"],
    ),
}


@every_case("name", list(_RELEASES))
def test_what_a_release_lacks(name: str, tmp_path: Path) -> None:
    """What is needed fails the comparison; what saves time is only named."""
    different, lacks, slow = _RELEASES[name]
    package = release(tmp_path / name, **different)

    assert lacks == list(missing(package))
    assert slow == list(slower(package))
    assert bool(lacks) == main([str(package)])


_INTERFACE = """
class SupportsTranscription:
    @classmethod
    def get_generation_prompt(cls, stt_params): ...
    @classmethod
    def validate_language(cls, language): ...
    @classmethod
    def get_speech_to_text_config(cls, model_config, task_type): ...
"""
_OLDER = _INTERFACE.replace(
    "cls, stt_params", "cls, audio, stt_config, model_config, language, task_type, request_prompt, to_language"
)
_PARAMS = """
class SpeechToTextParams:
    audio: object
    stt_config: object
    model_config: object
    language: str | None = None
    task_type: str = ""
    request_prompt: str = ""
    to_language: str | None = None
"""
_MODELS = """
class VoxtralForConditionalGeneration(nn.Module, SupportsTranscription): ...
class VoxtralRealtimeGeneration(VoxtralForConditionalGeneration): ...
class LlamaForCausalLM(nn.Module): ...
class EarsForCausalLM(SupportsTranscription): ...
class Qwen3ASRForcedAlignerForTokenClassification(VoxtralForConditionalGeneration): ...
"""
_REGISTRY = """
MODELS = {
    "VoxtralForConditionalGeneration": ("voxtral", "VoxtralForConditionalGeneration"),
    "VoxtralRealtimeGeneration": (
        "voxtral",
        "VoxtralRealtimeGeneration",
    ),
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen3ASRForcedAlignerForTokenClassification": ("voxtral", "Qwen3ASRForcedAlignerForTokenClassification"),
}
"""
_NEW = '    "EarsForCausalLM": ("ears", "EarsForCausalLM"),\n}\n'

_SPOKEN: dict[str, tuple[dict[str, str], list[str]]] = {
    "one that has all": ({}, []),
    "an older one": ({"interface": _OLDER, "params": ""}, []),
    "the function has gone": ({"loader": ""}, ["vllm.model_executor.model_loader has no get_model_cls"]),
    "other arguments": (
        {"interface": _INTERFACE.replace("model_config, task_type", "task_type")},
        ["SupportsTranscription.get_speech_to_text_config has other arguments than ('model_config', 'task_type')"],
    ),
    "a field has gone": (
        {"params": _PARAMS.replace("request_prompt", "context")},
        ["SupportsTranscription.get_generation_prompt has no request_prompt"],
    ),
    "an argument has gone": (
        {"interface": _OLDER.replace("to_language", "target")},
        ["SupportsTranscription.get_generation_prompt has no to_language"],
    ),
    "a model that is not known": (
        {"registry": _REGISTRY.replace("}\n", _NEW)},
        ["EarsForCausalLM is not in SPEECH_MODELS"],
    ),
}


@every_case("name", list(_SPOKEN))
def test_why_there_are_no_transcriptions(name: str, tmp_path: Path) -> None:
    """A release is compared with what the model asks of the models' classes, and with the table of architectures."""
    different, expected = _SPOKEN[name]
    package = tmp_path / name / "vllm"
    files = {
        "model_executor/model_loader/__init__.py": different.get("loader", "from .utils import get_model_cls\n"),
        "model_executor/models/interfaces.py": different.get("interface", _INTERFACE),
        "model_executor/models/voxtral.py": _MODELS,
        "model_executor/models/registry.py": different.get("registry", _REGISTRY),
        "config/speech_to_text.py": different.get("params", _PARAMS),
    }
    for path, text in files.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)

    assert expected == list(without_speech(package))


def test_names_of_speech_models_differ() -> None:
    """A model's name on the hub leads to one kind of engine only, and is compared in small letters."""
    runners: dict[str, set[str]] = {}
    for kind in SPEECH_MODELS:
        assert kind.name == kind.name.lower()
        runners.setdefault(kind.name, set()).add(kind.runner)
    assert [] == [name for name, of_it in runners.items() if len(of_it) > 1]


def test_a_folder_that_is_no_release(tmp_path: Path) -> None:
    """All that is needed is missing, and the comparison says so."""
    assert "AsyncLLM has no shutdown" in list(missing(tmp_path))
    assert main([str(tmp_path)])
