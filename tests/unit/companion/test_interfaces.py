"""The comparison of a release of vLLM with what the companion model uses of it."""

from __future__ import annotations

from pathlib import Path

from tests.cases import every_case
from tests.engine.interfaces import main, missing, slower, tables

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


def test_a_folder_that_is_no_release(tmp_path: Path) -> None:
    """All that is needed is missing, and the comparison says so."""
    assert "AsyncLLM has no shutdown" in list(missing(tmp_path))
    assert main([str(tmp_path)])
