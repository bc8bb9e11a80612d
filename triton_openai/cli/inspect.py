"""``triton-openai inspect``: how each model would be served, or why it would not be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from triton_openai.adapters._common.base import BoundParameter, Capabilities, Rule
from triton_openai.api.chat import REFUSED as CHAT_REFUSED
from triton_openai.api.completions import REFUSED as COMPLETIONS_REFUSED
from triton_openai.config import Settings
from triton_openai.config.tree import DefaultParameters
from triton_openai.errors import ConfigurationError, UnsupportedParameter
from triton_openai.models.served import Models, ServedModel
from triton_openai.parsers.choose import Parsers
from triton_openai.prompts.infill import choose, recognise
from triton_openai.prompts.messages import marks
from triton_openai.prompts.prompter import Prompter
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.triton.endpoint import Endpoint

_LOSES = (
    "streamed text may lose characters outside ASCII (they show as U+FFFD), since the model decodes each token alone; "
    "its engine, asked at token level, does not: that needs the tokenizer (--tokenizer) and --prefer-token-level auto"
)


class ParameterReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a request parameter becomes on a model; ``target`` is the input, or the key inside one."""

    name: str
    treatment: str
    target: str | None = None
    datatype: str | None = None
    note: str = ""


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One model. Everything after ``reason`` is empty for a model that is not served."""

    name: str
    served_as: Sequence[str] = ()
    adapter: str | None = None
    reason: str = ""
    ready: bool = True
    tasks: Sequence[str] = ()
    streaming: str = ""
    usage: str = ""
    finish_reason: str = ""
    parameters: Sequence[ParameterReport] = ()
    refused: Sequence[str] = ()
    tokenizer: str | None = None
    chat_template: str | None = None
    tool_calls: str | None = None
    reasoning: str | None = None
    suffix: str | None = None
    scores: str | None = None
    guides: Sequence[str] = ()
    loras: Sequence[str] = ()
    images: str = ""
    logprobs: str = "none"
    sampling: str = ""
    notes: Sequence[str] = ()


async def inspect_models(settings: Settings) -> list[ModelReport]:
    """Ask Triton once and report on every model that it has. Raises :class:`ServiceError` when it does not answer."""
    client = Endpoint(
        settings.triton.url, connect_timeout=settings.triton.connect_timeout, access=settings.triton_access
    )
    try:
        models = Models(settings, client)
        await models.catalog.refresh()
        error = models.catalog.snapshot.error
        if error is not None:
            urls = " and ".join(client.urls)
            raise ConfigurationError(f"No Triton answers at {urls}: {error.detail or error.message}")
        return await report(models)
    finally:
        await client.close()


async def report(models: Models) -> list[ModelReport]:
    """Return the reports, by name."""
    names: dict[str, list[str]] = {}
    loras: dict[str, set[str]] = {}
    served: dict[str, ServedModel] = {}
    for public, model in models.served.items():
        names.setdefault(model.owner, []).append(public)
        served[model.owner] = model
        if model.lora is not None:
            loras.setdefault(model.owner, set()).add(model.lora.name)
    reports = [
        msgspec.structs.replace(
            item,
            loras=sorted(loras.get(item.name, ())),
            notes=[*item.notes, *models.lora_problems.get(item.name, ())],
        )
        for item in await asyncio.gather(*(_served(models, model, names[name]) for name, model in served.items()))
    ]
    reports += [ModelReport(name=entry.name, reason=entry.why) for entry in models.unserved]
    reports += [
        ModelReport(name=name, reason=f"not ready: {why}", ready=False)
        for name, why in models.catalog.snapshot.waiting.items()
    ]
    return sorted(reports, key=lambda item: item.name)


async def _served(models: Models, model: ServedModel, names: Sequence[str]) -> ModelReport:
    model = await models.settled(model)
    capabilities = model.adapter.capabilities
    tokenizer = template = suffix = None
    parsers = Parsers()
    images, sampling = "none", ""
    try:
        prompter = await model.lazy_prompter.get()
        provenance = prompter.provenance
        tokenizer, template, notes = provenance.tokenizer, provenance.chat_template, list(provenance.notes)
        images = _images(model, prompter)
        sampling = _sampling(model, await model.default_parameters(), provenance.generation_config)
        parsers = await model.parsers()
        suffix = _suffix(model, prompter.tokenizer)
    except ConfigurationError as error:
        notes = [error.message]
    if capabilities.splits_characters:
        notes.append(_LOSES)
    counted = "from the responses and the tokenizer" if tokenizer else "left out (nobody counts)"
    counts = "from the token counts" if capabilities.usage else "from the number of responses"
    return ModelReport(
        name=model.owner,
        served_as=names,
        adapter=model.adapter.name,
        reason=model.reason,
        tasks=model.tasks,
        streaming="token by token" if capabilities.streaming else "whole answer as one chunk",
        usage="from the backend" if capabilities.usage else counted,
        finish_reason="from the backend" if capabilities.finish_reason else counts,
        parameters=[_parameter(parameter) for parameter in model.adapter.parameters],
        refused=sorted(CHAT_REFUSED.keys() | COMPLETIONS_REFUSED.keys()) if capabilities.generate else (),
        tokenizer=tokenizer,
        chat_template=template if capabilities.generate else None,
        tool_calls=parsers.tools.__name__ if parsers.tools is not None else None,
        reasoning=parsers.reasoning.__name__ if parsers.reasoning is not None else None,
        suffix=suffix if capabilities.generate else None,
        scores=_scores(model) if capabilities.score else None,
        guides=sorted(capabilities.guides),
        images=images,
        logprobs=_logprobs(capabilities),
        sampling=sampling,
        # Of one that is given token ids, what is said of the tokenizer; it comes first.
        notes=notes if capabilities.generate else notes[:1] if capabilities.token_pairs and not tokenizer else (),
    )


def _images(model: ServedModel, prompter: Prompter) -> str:
    capabilities = model.adapter.capabilities
    if not capabilities.images or not prompter.can_chat:
        return "none"
    try:
        marks(prompter.template_for(), model.settings.image_placeholder, "messages")
    except UnsupportedParameter:
        return "none: the chat template takes none, and no image_placeholder is set"
    return "as many as the model takes" if capabilities.max_images is None else f"{capabilities.max_images} at most"


def _sampling(model: ServedModel, defaults: DefaultParameters, source: str | None) -> str:
    """Return how a request that says nothing of it is sampled."""
    own = model.settings.default_parameters.given()
    found = {name: value for name, value in defaults.given().items() if name not in own}
    told = [
        f"{', '.join(f'{name} {value}' for name, value in values.items())} ({where})"
        for values, where in ((own, "default_parameters"), (found, source))
        if values
    ]
    otherwise = "temperature 1, top_p 1" if model.adapter.capabilities.samples else "the engine's own (decoding_mode)"
    return "; ".join([*told, f"else {otherwise}" if told else otherwise])


def _logprobs(capabilities: Capabilities) -> str:
    if not capabilities.logprobs:
        return "none"
    told = "of the chosen tokens"
    if capabilities.top_logprobs:
        told += f", with up to {capabilities.top_logprobs} alternatives"
    return f"{told}, and of the prompt's" if capabilities.prompt_logprobs else told


def _suffix(model: ServedModel, tokenizer: Tokenizer | None) -> str | None:
    """Return how a suffix is written. Raises :class:`ConfigurationError`."""
    form = choose(model.settings.fim_template, tokenizer)
    if form is not None:
        return form.render("{prefix}", "{suffix}")
    known = None if tokenizer is None else recognise(tokenizer)
    return None if known is None else f"refused (fim_template; the tokenizer has the tokens of '{known}')"


def _scores(model: ServedModel) -> str:
    if model.settings.score_activation == "sigmoid":
        return "the sigmoid of what the model gives"
    return "as the model gives them (score_activation)"


def _parameter(parameter: BoundParameter) -> ParameterReport:
    return ParameterReport(
        name=parameter.name,
        treatment=parameter.rule.value,
        target=parameter.target,
        datatype=parameter.datatype,
        note=parameter.why if parameter.rule is Rule.REFUSED else parameter.note,
    )


def render(reports: Sequence[ModelReport]) -> str:
    """Return the reports as text for a person."""
    return "\n\n".join(_render(item) for item in reports) if reports else "Triton has no models."


def _render(item: ModelReport) -> str:
    if item.adapter is None:
        return f"{item.name}\n  not served: {item.reason}"
    lines = [
        item.name,
        f"  served as      {', '.join(item.served_as)}",
        f"  adapter        {item.adapter} ({item.reason})",
        f"  tasks          {', '.join(item.tasks)}",
    ]
    if "generate" in item.tasks:
        lines += [
            f"  streaming      {item.streaming}",
            f"  usage          {item.usage}",
            f"  finish reason  {item.finish_reason}",
            f"  tokenizer      {item.tokenizer or 'none'}",
            f"  chat template  {item.chat_template or 'none'}",
            f"  tool calls     {item.tool_calls or 'not recognised (--tool-call-parser)'}",
            f"  reasoning      {item.reasoning or 'not recognised (--reasoning-parser)'}",
            f"  suffix         {item.suffix or 'refused (fim_template)'}",
            f"  can be held to {', '.join(item.guides) or 'nothing (no guided decoding)'}",
            *([f"  LoRA adapters  {', '.join(item.loras)}"] if item.loras else ()),
            f"  images         {item.images}",
            f"  log probs      {item.logprobs}",
            f"  sampling       {item.sampling}",
            *(f"  note           {note}" for note in item.notes),
            "  parameters",
            *(f"    {parameter.name:<20} {_treatment(parameter)}" for parameter in item.parameters),
            f"    refused: {', '.join(item.refused)}",
        ]
    if item.scores is not None:
        lines += [
            f"  scores         {item.scores}",
            f"  tokenizer      {item.tokenizer or 'none'}",
            *(f"  note           {note}" for note in item.notes),
        ]
    return "\n".join(lines)


def _treatment(parameter: ParameterReport) -> str:
    if parameter.treatment == Rule.MAPPED.value:
        datatype = f" {parameter.datatype}" if parameter.datatype else ""
        text = f"-> {parameter.target}{datatype}"
    else:
        text = parameter.treatment
    return f"{text} ({parameter.note})" if parameter.note else text


def inspect(settings: Settings, *, as_json: bool) -> int:
    """Print a report on every model, as text or as JSON."""
    reports = asyncio.run(inspect_models(settings))
    print(msgspec.json.format(msgspec.json.encode(reports)).decode() if as_json else render(reports))
    return 0
