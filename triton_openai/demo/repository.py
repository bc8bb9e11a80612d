"""Builds a model repository of stand-ins with the tensors and the behaviour of the real backends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, TypeAlias

from triton_openai.demo.configs import Contract, contracts, render

_BATCH = 8
# One request occupies one instance of a BLS model, so it serves this many requests at a time.
_BLS_INSTANCES = 4
CONTEXT_LENGTH = 2048
_LORAS = ("alpha", "beta")

# Triton loads this file for each model; everything else is shared.
_MODEL_FILE = '''"""Loads the shared code of the stand-ins."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[{levels}]))
from standins.{module} import {name} as TritonPythonModel  # noqa: E402, F401
'''


@dataclass(frozen=True, slots=True)
class DemoRepository:
    """A built repository: the model repository, the folder with extra backends, the tokenizer, the record if any."""

    path: Path
    backends: Path
    tokenizer: Path
    record: Path | None


@dataclass(frozen=True, slots=True)
class Site:
    """The paths and options that all builders share."""

    repository: DemoRepository
    contracts: dict[str, Contract]
    engine: Path | None

    def build(self, name: str, module: str | None, *, contract: Contract | None = None, **options: Any) -> Path:
        """Write a model that runs *module*, with its own contract or another; *options* are those of `render`."""
        options = {"backend": "python", "instances": 1, **options}
        return self.write(name, render(name, contract or self.contracts[name], **options), module)

    def write(self, name: str, config: str, module: str | None = None) -> Path:
        """Write a model's config, its code if *module* names it, and settings that are not in the config."""
        version = self.repository.path / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config)
        if module is not None:
            (version / "model.py").write_text(_MODEL_FILE.format(levels=3, module=module, name="TritonPythonModel"))
        settings = {
            "tokenizer": str(self.repository.tokenizer),
            "record": str(self.repository.record) if self.repository.record else None,
            "engine": str(self.engine) if self.engine else None,
        }
        _write_json(version / "standin.json", settings)
        return version

    @property
    def tokenizer_parameters(self) -> dict[str, str]:
        """The parameter of the models that read a tokenizer."""
        return {"tokenizer_dir": str(self.repository.tokenizer)}


#: What builds the model of a name, and the models that it calls.
Builder: TypeAlias = tuple[Callable[[Site, str], None], tuple[str, ...]]


def build_repository(
    destination: Path,
    *,
    models: Collection[str] | None = None,
    tokenizer: Path | None = None,
    record: Path | None = None,
    engine: Path | None = None,
    builders: Mapping[str, Builder] | None = None,
    standins: Sequence[Path] = (),
) -> DemoRepository:
    """
    Write the stand-ins into *destination* and return where things are.

    *models* are the names to build, with the models that they call (default: those of :data:`BUILDERS`). *tokenizer* is
    a folder to use instead of the demo's own. The models append their requests and results to the file *record*.
    *engine* is the socket of a language model (`triton_openai.demo.engine`); without it, the answers are scripted.
    *builders* take the place of :data:`BUILDERS`, *standins* are modules for them beside the demo's own. An older
    repository in *destination* is replaced.
    """
    destination = destination.resolve()
    builders = builders or BUILDERS
    names = _with_needs(BUILDERS if models is None else models, builders)
    repository = DemoRepository(
        path=destination / "models",
        backends=destination / "backends",
        tokenizer=destination / "tokenizer",
        record=record.resolve() if record is not None else None,
    )
    for folder in (repository.path, repository.backends, repository.tokenizer, destination / "standins"):
        shutil.rmtree(folder, ignore_errors=True)
    repository.path.mkdir(parents=True)
    with as_file(files("triton_openai.demo").joinpath("standins")) as source:
        shutil.copytree(source, destination / "standins")
    for path in standins:
        shutil.copy(path, destination / "standins")
    with as_file(files("triton_openai.demo").joinpath("tokenizer")) as source:
        shutil.copytree(tokenizer or source, repository.tokenizer)
    for backend, module, name in (
        ("vllm", "vllm", "TritonPythonModel"),
        ("tensorrtllm", "tensorrt_llm", "CppTritonPythonModel"),
    ):
        folder = repository.backends / backend
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(_MODEL_FILE.format(levels=2, module=module, name=name))
    site = Site(repository, contracts(), engine)
    for name in names:
        builders[name][0](site, name)
    return repository


def _with_needs(models: Collection[str], builders: Mapping[str, Builder]) -> list[str]:
    if unknown := set(models) - set(builders):
        raise ValueError(f"unknown models {sorted(unknown)}; known are {', '.join(builders)}")
    needed = {need for name in models for need in builders[name][1]}
    return [name for name in builders if name in needed or name in models]


def _preprocessing(site: Site, name: str) -> None:
    parameters = site.tokenizer_parameters
    if name == "preprocessing":
        # The demo's chat template writes the BOS, so the tokenizer must not add another one. The older release adds
        # none by default.
        parameters["add_special_tokens"] = "false"
    site.build(name, "preprocessing", max_batch_size=_BATCH, dynamic_batching=True, parameters=parameters)


def _postprocessing(site: Site, name: str) -> None:
    # One instance, because several would mix up the order of a stream's pieces.
    parameters = {**site.tokenizer_parameters, "skip_special_tokens": "true"}
    site.build(name, "postprocessing", max_batch_size=_BATCH, dynamic_batching=True, parameters=parameters)


def _engine(site: Site, name: str) -> None:
    legacy = name == "tensorrt_llm_legacy"
    parameters = {
        "max_beam_width": "1",
        "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
        "gpt_model_type": "inflight_fused_batching",
        "batch_scheduler_policy": "max_utilization",
        "exclude_input_in_output": "false",
        "normalize_log_probs": "true",
    }
    if not legacy:
        parameters |= {"cancellation_check_period_ms": "100", "guided_decoding_backend": "xgrammar"}
        parameters |= site.tokenizer_parameters
    streams = name != "tensorrt_llm_nonstreaming"
    site.build(
        name,
        None if legacy else "tensorrt_llm",
        contract=site.contracts[name if legacy else "tensorrt_llm"],
        backend="tensorrtllm" if legacy else "python",
        max_batch_size=_BATCH,
        dynamic_batching=True,
        # One of them has priorities, which operators add themselves.
        priority_levels=0 if streams else 2,
        decoupled=streams,
        parameters=parameters,
    )


def _ensemble(site: Site, name: str) -> None:
    legacy = name == "ensemble_legacy"
    renamed = {}
    if legacy:
        renamed = {model: f"{model}_legacy" for model in ("preprocessing", "tensorrt_llm", "postprocessing")}
    elif name == "ensemble_nonstreaming":
        renamed = {"tensorrt_llm": "tensorrt_llm_nonstreaming"}
    contract = site.contracts["ensemble_legacy" if legacy else "ensemble"]
    site.write(name, render(name, contract, max_batch_size=_BATCH, renamed=renamed))


def _bls(site: Site, name: str) -> None:
    accumulates = str(name == "tensorrt_llm_bls").lower()
    site.build(
        name,
        "tensorrt_llm_bls",
        contract=site.contracts["tensorrt_llm_bls"],
        max_batch_size=_BATCH,
        decoupled=True,
        instances=_BLS_INSTANCES,
        parameters={"accumulate_tokens": accumulates, "tensorrt_llm_model_name": "tensorrt_llm"},
    )


def vllm(site: Site, name: str, parameters: str = "") -> None:
    """Build a model of the vLLM backend, whose config has *parameters*."""
    # The backend itself declares the tensors when it is loaded.
    embeds = name == "vllm_embedding"
    folder = site.write(name, f'backend: "vllm"\ninstance_group [ {{ count: 1 kind: KIND_MODEL }} ]\n{parameters}')
    engine = {"model": str(site.repository.tokenizer), "max_model_len": CONTEXT_LENGTH, "disable_log_stats": True}
    if embeds:
        engine["task"] = "embed"
    else:
        engine["task"] = "generate"
    if site.engine is None and not embeds:
        engine["enable_lora"] = True
        _write_json(folder / "multi_lora.json", {lora: f"/loras/{lora}" for lora in _LORAS})
    _write_json(folder / "model.json", engine)


def llmapi(site: Site, name: str, contract: Contract | None = None, *, loras: bool = True, sees: bool = False) -> None:
    """Build TensorRT-LLM's LLM API model, which takes LoRA adapters, and images if it *sees*."""
    # No batches, as in the original's model.yaml, whose parameters Triton does not see.
    folder = site.build(name, "llmapi", contract=contract, decoupled=True)
    arguments = f"""\
model: {json.dumps(str(site.repository.tokenizer))}
max_num_tokens: {CONTEXT_LENGTH}
enable_lora: {str(loras).lower()}
triton_config:
  decoupled: true
  multimodal: {str(sees).lower()}
"""
    (folder / "model.yaml").write_text(arguments)


def _text_embedding(site: Site, name: str) -> None:
    contract = Contract(["text STRING [1]"], [f"embedding FP32 [{384 if site.engine else 64}]"])
    site.build(name, "text_embedding", contract=contract, max_batch_size=64, dynamic_batching=True)


def _text_rerank(site: Site, name: str) -> None:
    contract = Contract(
        ["query STRING [1]", "passage STRING [1]"], ["index INT32 [1]", "logit FP32 [1]", "token_count INT32 [1]"]
    )
    site.build(name, "text_rerank", contract=contract, max_batch_size=16, dynamic_batching=True)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


#: The steps of an ensemble and of a BLS model, and those of older releases.
PIPELINE = ("preprocessing", "tensorrt_llm", "postprocessing")
LEGACY_PIPELINE = tuple(f"{name}_legacy" for name in PIPELINE)

#: The models that ``demo --all`` serves.
BUILDERS: Mapping[str, Builder] = {
    "preprocessing": (_preprocessing, ()),
    "tensorrt_llm": (_engine, ()),
    "postprocessing": (_postprocessing, ()),
    "ensemble": (_ensemble, PIPELINE),
    "tensorrt_llm_bls": (_bls, PIPELINE),
    "tensorrt_llm_bls_delta": (_bls, PIPELINE),
    "preprocessing_legacy": (_preprocessing, ()),
    "tensorrt_llm_legacy": (_engine, ()),
    "postprocessing_legacy": (_postprocessing, ()),
    "ensemble_legacy": (_ensemble, LEGACY_PIPELINE),
    "tensorrt_llm_nonstreaming": (_engine, ()),
    "ensemble_nonstreaming": (_ensemble, ("preprocessing", "tensorrt_llm_nonstreaming", "postprocessing")),
    "tensorrt_llm_llmapi": (llmapi, ()),
    "vllm_model": (vllm, ()),
    "vllm_embedding": (vllm, ()),
    "text_embedding": (_text_embedding, ()),
    "text_rerank": (_text_rerank, ()),
}
