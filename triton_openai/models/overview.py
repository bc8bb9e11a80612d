"""The state of each model and of each Triton, for the banner at the start and for ``GET /status``."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from triton_openai.models.lookup import Models
from triton_openai.models.served import ServedModel


class ModelLine(msgspec.Struct, frozen=True, kw_only=True):
    """One model of Triton."""

    name: str
    #: Its adapter; ``None`` where it is not ready or not served.
    adapter: str | None = None
    state: str
    tasks: tuple[str, ...] = ()
    #: What requests can use beyond text: streaming, tools, reasoning, JSON schemas, images and log probabilities.
    features: tuple[str, ...] = ()
    #: Whether chats work; ``None`` for a model that takes none, and while its tokenizer is being loaded.
    chat: bool | None = None
    #: Why chats do not work, or why the model is not served or of no use.
    problem: str | None = None
    #: Its further names.
    aliases: tuple[str, ...] = ()
    #: The names of its LoRA adapters.
    loras: tuple[str, ...] = ()


class EndpointLine(msgspec.Struct, frozen=True, kw_only=True):
    """One of several Tritons."""

    name: str
    #: ``ready``, ``does not answer``, ``ejected`` or ``drained`` (its weight is 0).
    state: str
    weight: float
    #: Its models that are ready and served, those for which it is ejected apart.
    models: tuple[str, ...] = ()
    ejected: tuple[str, ...] = ()
    #: Requests of the process that answers this.
    running: int = 0


def endpoint_lines(models: Models) -> list[EndpointLine]:
    """Return a line for each of several Tritons; none where there is only one."""
    fleet = models.fleet
    served = {model.triton_model for model in models.served.values()}
    lines = []
    for member in fleet.members.values() if fleet.leasing.single is None else ():
        targets = {name: target for name, target in sorted(member.targets.items()) if name in served}
        ejected = tuple(name for name, target in targets.items() if target.ejected_until is not None)
        if not member.snapshot.reachable:
            state = "does not answer"
        elif member.ejected:
            state = "ejected"
        elif member.settings.weight:
            state = "ready"
        else:
            state = "drained"
        lines.append(
            EndpointLine(
                name=member.name,
                state=state,
                weight=member.settings.weight,
                models=tuple(name for name in targets if name not in ejected),
                ejected=ejected,
                running=len(member.leases),
            )
        )
    return lines


def model_lines(models: Models, *, unserved: bool = False) -> list[ModelLine]:
    """Return a line for each served model and each that waits, and for *unserved* ones that help no other."""
    snapshot = models.fleet.snapshot
    aliases: defaultdict[str, list[str]] = defaultdict(list)
    loras: defaultdict[str, list[str]] = defaultdict(list)
    for name, model in sorted(models.served.items()):
        if model.lora is not None:
            loras[model.triton_model].append(name)
        elif name != model.triton_model:
            aliases[model.triton_model].append(name)
    lines = [
        ModelLine(
            name=name,
            adapter=model.adapter.name,
            state="ready",
            tasks=model.tasks,
            features=features_of(model),
            chat=model.can_chat,
            problem=None if model.lazy_prompter.problem is None else model.lazy_prompter.problem.message,
            aliases=tuple(aliases[name]),
            loras=tuple(loras[name]),
        )
        for name, model in sorted(models.served.items())
        if name == model.triton_model
    ]
    # Their adapters are known when they are ready. Of a traceback, the first line is the error.
    lines += [
        ModelLine(name=name, state=f"not ready: {why.partition(chr(10))[0]}" if why else "not loaded")
        for name, why in sorted(snapshot.waiting.items())
    ]
    if unserved:
        lines += [
            ModelLine(name=unserved.name, state="not served", problem=unserved.why)
            for unserved in models.unserved
            if unserved.role is None
        ]
    return lines


def features_of(model: ServedModel) -> tuple[str, ...]:
    """Return what requests to *model* can use beyond text, see :attr:`ModelLine.features`."""
    capabilities = model.adapter.capabilities
    if "generate" not in model.tasks:
        return ()
    features = {
        "streaming": capabilities.streaming,
        "tools": model.lazy_prompter.parsers.tools is not None,
        "reasoning": model.lazy_prompter.parsers.reasoning is not None,
        "json_schema": "json_schema" in capabilities.guides,
        "images": model.takes_images and model.marks_images,
        "logprobs": "logprobs" in model.adapter.supported,
    }
    return tuple(name for name, can in features.items() if can)
