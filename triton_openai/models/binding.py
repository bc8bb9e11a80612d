"""Binds the models of Triton to adapters, tokenizers and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import structlog
from msgspec.structs import replace

from triton_openai.adapters._common.base import Adapter
from triton_openai.adapters._common.registry import Registry, helper_role
from triton_openai.adapters._common.tensor_mapping import FLOATS
from triton_openai.config.tree import ModelSettings, Settings
from triton_openai.errors import ServiceError
from triton_openai.generation import AudioFormat, TensorMapping
from triton_openai.models.loading import Prompters
from triton_openai.models.served import ServedModel, Unserved
from triton_openai.models.suggestions import suggested_settings
from triton_openai.models.voices import Voices
from triton_openai.prompts.prompter import may_have_tokenizer
from triton_openai.triton.catalog import Snapshot
from triton_openai.triton.tensors import ModelConfig, TensorSpec

_log = structlog.get_logger(__name__)

# The largest file of settings in a model's folder that is read.
_LARGEST = 1 << 20


class Binder:
    """Binds models by *settings*, with the tokenizers and templates of *prompters*. Immutable."""

    def __init__(self, settings: Settings, prompters: Prompters) -> None:
        self.settings = settings
        self.prompters = prompters
        self.aliases = settings.aliases()
        self._registry = Registry()
        self._files = partial(_read_file, settings.triton.readable_repositories)

    def bind_with_variants(self, name: str, snapshot: Snapshot, *, over_grpc: bool = False) -> ServedModel | Unserved:
        """
        Return the model *name* of *snapshot*, with its variants on other Tritons. Blocks: it reads files.

        *over_grpc* is whether every Triton has a gRPC address.

        Where the context lengths differ, the smallest counts: the same request may go to any of them.
        """
        variants = snapshot.variants.get(name)
        if not variants:
            return self.bind(snapshot.configs[name], snapshot.configs, over_grpc=over_grpc)
        every = [
            (variant, self.bind(variant.repository[name], variant.repository, over_grpc=over_grpc))
            for variant in variants
        ]
        served = [
            replace(bound, endpoints=variant.endpoints) for variant, bound in every if isinstance(bound, ServedModel)
        ]
        if not served:
            return every[0][1]
        limit = min(filter(None, (model.settings.max_model_len for model in served)), default=None)
        served = [replace(variant, settings=replace(variant.settings, max_model_len=limit)) for variant in served]
        return replace(served[0], variants=tuple(served[1:]))

    def bind(
        self, config: ModelConfig, repository: Mapping[str, ModelConfig], *, over_grpc: bool = False
    ) -> ServedModel | Unserved:
        """Return the model with this *config* among those of *repository*. Blocks: it reads files."""
        name = config.name
        settings = self.settings.model(config.name)
        own = self.settings.models.get(config.name)
        role = helper_role(config, repository)
        # A default adapter for all models is for those that could be served: a helper stays a helper.
        if role is not None and (own is None or own.adapter is None):
            return Unserved(name=name, why=f"it is the {role}", role=role)
        try:
            registry = self._registry
            if settings.adapter is None:
                claim = registry.claim(config)
            else:
                claim = registry.adapter_named(settings.adapter)
            if claim is None:
                return Unserved(name=name, why=_why_unclaimed(config), settings=suggested_settings(config, registry))
            mapping = _mapping(settings)
            adapter = claim.adapter.described(config, repository, mapping)
            reason = claim.reason
            metadata = adapter.metadata_with(self._files)
            text_level = None
            synthesis = adapter.capabilities.synthesis
            if synthesis is None:
                voices = None
            else:
                voices = Voices(name, settings.audio, synthesis)
            direct = None
            if settings.adapter is None:
                direct = self._token_level(adapter, repository, mapping)
            if direct is not None and may_have_tokenizer(settings.tokenizer, metadata.tokenizer_dir):
                reason = f"{adapter.name}, answered by its engine '{direct.config.name}', see --prefer-token-level"
                text_level = adapter
                adapter = direct
        except ServiceError as error:
            _log.error("model cannot be served", model=name, reason=error.message)
            return Unserved(name=name, why=error.message, failed=True)
        except Exception as error:  # noqa: BLE001 - a third party's mistake must not keep the others from their models
            _log.exception("an adapter failed to take a model", model=name)
            return Unserved(name=name, why=f"its adapter failed: {type(error).__name__}", failed=True)
        if settings.multimodal is not None:
            metadata = replace(metadata, images=settings.multimodal)
        if settings.max_model_len is None:
            settings = replace(settings, max_model_len=metadata.max_model_len)
        return ServedModel(
            name=name,
            triton_model=name,
            adapter=adapter,
            reason=reason,
            settings=settings,
            lazy_prompter=self.prompters.of(name, settings, metadata.tokenizer_dir, metadata.tokenizer),
            text_level=text_level,
            priorities=max(
                _priorities(candidate, repository) for candidate in (adapter, text_level) if candidate is not None
            ),
            fingerprint=config.fingerprint,
            metadata=metadata,
            voices=voices,
            over_grpc=over_grpc,
            common_tokenizer=own is None or own.tokenizer is None,
        )

    def _token_level(
        self, adapter: Adapter, repository: Mapping[str, ModelConfig], mapping: TensorMapping | None
    ) -> Adapter | None:
        """Return the adapter for the engine behind *adapter*'s model, if there is one and the settings select it."""
        mode = self.settings.triton.prefer_token_level
        if mode == "never" or (mode == "auto" and not (adapter.splits_characters or adapter.token_level_adds_times)):
            return None
        engine = adapter.token_level
        if engine is None:
            claim = None
        else:
            claim = self._registry.claim(engine)
        if engine is None or claim is None:
            return None
        if mapping is None or mapping.audio is None:
            audio = None
        else:
            audio = TensorMapping(audio=mapping.audio)
        direct = claim.adapter.described(engine, repository, audio)
        if direct.capabilities.tokens:
            return direct
        return None


def _mapping(settings: ModelSettings) -> TensorMapping | None:
    """Return the model's tensors, where its settings describe them."""
    audio = AudioFormat(**{name: getattr(settings.audio, name) for name in AudioFormat.__struct_fields__})
    mapping = TensorMapping(
        inputs=settings.inputs, constants=settings.constants, outputs=settings.outputs, text=settings.text
    )
    if audio != AudioFormat():
        return replace(mapping, audio=audio)
    if mapping.describes:
        return mapping
    return None


def _priorities(adapter: Adapter, repository: Mapping[str, ModelConfig]) -> int:
    """
    Return the levels of priority of a model's queue, or of its engine's.

    An ensemble hands a request's priority to each of its steps.
    """
    config = adapter.config
    levels = [config.priority_levels, adapter.capabilities.priority_levels]
    levels += [repository[step.model].priority_levels for step in config.steps if step.model in repository]
    return max(levels)


def _why_unclaimed(config: ModelConfig) -> str:
    inputs = ", ".join(f"{spec.name}{'?' if spec.optional else ''} {spec.datatype}" for spec in config.inputs.values())
    outputs = ", ".join(f"{spec.name} {spec.datatype}" for spec in config.outputs.values())
    why = f"no adapter fits its tensors (inputs: {inputs or 'none'}; outputs: {outputs or 'none'})"
    audio = [spec.name for spec in config.required if _may_be_audio(spec)]
    texts = [spec.name for spec in config.outputs.values() if spec.datatype == "BYTES"]
    if not audio or not texts:
        return why
    return (
        f"{why}. If it recognizes speech, describe it in its settings: "
        f"adapter: transcriber, inputs: {{audio: {audio[0]}}}, outputs: {{text: {texts[0]}}}"
    )


def _may_be_audio(spec: TensorSpec) -> bool:
    """Return whether an input may take samples: numbers in one row."""
    rows = [dim for dim in spec.dims if dim != 1]
    return spec.datatype in (*FLOATS, "INT16") and rows == [-1]


def _read_file(repositories: Sequence[Path], model: str, name: str) -> bytes | None:
    """
    Return the file *name* of the newest version of *model*; ``None`` where there is none that can be read.

    The first of *repositories* that has the model counts, as it does for Triton. Blocks.
    """
    folder = next((path / model for path in repositories if (path / model).is_dir()), None)
    if folder is None:
        return None
    try:
        versions = [path for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()]
        path = max(versions, key=lambda path: int(path.name)) / name
        if path.stat().st_size <= _LARGEST:
            return path.read_bytes()
        return None
    except (OSError, ValueError):
        return None
