"""``triton-openai inspect``: how each model would be served, or why it would not be."""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triton_openai.adapters._common.base import Adapter, Capabilities, Parameter, Rule
from triton_openai.answer.job_run import activation_of
from triton_openai.api.chat import ChatRequest
from triton_openai.api.completions import CompletionRequest
from triton_openai.api.parameters import neutral_values
from triton_openai.cli.arguments import Parsed
from triton_openai.cli.terminal import problems, table
from triton_openai.config.options import options
from triton_openai.config.tree import DefaultParameters, Settings
from triton_openai.config.validation import did_you_mean
from triton_openai.errors import ConfigurationError
from triton_openai.media import voice_activity
from triton_openai.models.lookup import Models
from triton_openai.models.served import ServedModel
from triton_openai.prompts.infill import fim_form, known_fim_form
from triton_openai.prompts.prompter import Prompter
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.triton.fleet import Fleet

_LOSES = (
    "streamed text may lose characters outside ASCII (they show as U+FFFD), since the model decodes each token alone; "
    "its engine, asked at token level, does not: that needs the tokenizer (--tokenizer) and --prefer-token-level auto"
)

_NO_GRPC = (
    "a client that leaves before the first token stops no work: the model detects that over gRPC only (give Triton's "
    "gRPC address too, with --triton-url)"
)


class ParameterReport(msgspec.Struct, frozen=True):
    """How a model handles a request parameter; ``target`` is its input tensor, or the key in it."""

    name: str
    treatment: str
    target: str | None = None
    datatype: str | None = None
    note: str = ""

    def __str__(self) -> str:
        """Return the treatment as text for a person."""
        text = self.treatment
        if text == Rule.MAPPED.value:
            text = f"-> {self.target}"
            if self.datatype:
                text += f" {self.datatype}"
        if self.note:
            text += f" ({self.note})"
        return text


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
    classes: str | None = None
    audio: str | None = None
    guides: Sequence[str] = ()
    loras: Sequence[str] = ()
    images: str = ""
    logprobs: str = "none"
    sampling: str = ""
    notes: Sequence[str] = ()
    chat: bool | None = None
    problems: Sequence[str] = ()
    #: Of a model that is not served: settings in YAML that would serve it.
    settings: str = ""


def inspect(settings: Settings, parsed: Parsed) -> int:
    """Print a table, details of named models, or JSON; return the exit status. Raises :class:`ConfigurationError`."""
    reports = asyncio.run(inspect_models(settings))
    if parsed.models:
        # What is served has precedence over a name in the settings that no model has.
        by_name = {}
        for report in sorted(reports, key=lambda report: report.adapter is not None):
            by_name.update(dict.fromkeys((*report.served_as, report.name), report))
        for name in parsed.models:
            if name not in by_name:
                hint = did_you_mean(name, by_name) or f" It has {', '.join(by_name) or 'none'}."
                raise ConfigurationError(f"Triton has no model '{name}'.{hint}")
        reports = [by_name[name] for name in dict.fromkeys(parsed.models)]
    if parsed.json:
        print(msgspec.json.format(msgspec.json.encode(reports)).decode())
    elif parsed.models:
        print(render(reports))
    else:
        print(overview(reports, _command(parsed.settings)))
    wrong = not any(report.adapter for report in reports) or any(report.problems for report in reports)
    return int(parsed.strict and wrong)


def _command(written: Mapping[str, Any]) -> str:
    """Return the command with the options that were *written*, for another model; without what may be a secret."""
    words = ["triton-openai", "inspect"]
    for name, value in written.items():
        option = next((option for option in options() if option.name == name), None)
        flag = f"--{name}"
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{name}")
        elif option is not None and (option.secret or option.verbatim):
            words += [flag, "..."]
        elif isinstance(value, str):
            words += [flag, value]
        else:
            for item in value:
                words += [flag, item]
    return f"{shlex.join(words)} MODEL"


async def inspect_models(settings: Settings) -> list[ModelReport]:
    """Ask Triton once and report on every model that it has. Raises :class:`ServiceError` when it does not answer."""
    fleet = Fleet(settings.triton, settings.triton_access)
    try:
        models = Models(settings, fleet)
        await fleet.refresh()
        error = fleet.snapshot.error
        if error is not None:
            urls = " and ".join(url for member in fleet.members.values() for url in member.settings.url)
            raise ConfigurationError(f"No Triton answers at {urls}: {error.detail or error.message}")
        return await report(models)
    finally:
        await fleet.close()


async def report(models: Models) -> list[ModelReport]:
    """Return the reports, by name."""
    served: dict[str, dict[str, ServedModel]] = {}
    for public, model in models.served.items():
        served.setdefault(model.triton_model, {})[public] = model
    reports = list(await asyncio.gather(*(_served(models, names) for names in served.values())))
    for entry in models.unserved:
        problems: tuple[str, ...] = ()
        if entry.role is None:
            problems = (entry.why,)
        reports.append(ModelReport(name=entry.name, reason=entry.why, problems=problems, settings=entry.settings))
    for name, state in models.fleet.snapshot.waiting.items():
        # In one line, also for a traceback.
        why = " ".join(state.split())
        problems = ()
        # A model that was never loaded is no problem.
        if why not in ("", "unloaded"):
            problems = (why,)
        reports.append(ModelReport(name=name, reason=f"not ready: {why}", ready=False, problems=problems))
    for name, why in models.misnamed.items():
        reports.append(ModelReport(name=name, reason=why, problems=(why,)))
    return sorted(reports, key=lambda item: item.name)


async def _served(models: Models, names: Mapping[str, ServedModel]) -> ModelReport:
    """Report on the model that is served under *names*."""
    model = await list(names.values())[-1].with_fallback()
    await model.check()
    capabilities = model.adapter.capabilities
    details: dict[str, Any] = {"images": "none"}
    try:
        prompter = await model.lazy_prompter.get()
        notes = list(prompter.provenance.notes)
        details = _prompt_details(model, prompter)
    except ConfigurationError as error:
        notes = [error.message]
    tokenizer = details.get("tokenizer")
    if "generate" in model.tasks:
        notes += _generation_notes(models, model)
    elif tokenizer or not capabilities.tokens:
        notes = []
    else:
        # Only the note about the tokenizer, which a model that takes token ids needs.
        notes = notes[:1]
    changes = [
        *models.loras.problems.get(model.triton_model, ()),
        *models.differences.get(model.triton_model, ()),
    ]
    notes += changes
    missing = models.fleet.without(model.triton_model)
    if missing:
        notes.append(f"it is not ready at {', '.join(missing)}")
    problems = []
    if model.lazy_prompter.problem is not None:
        problems.append(model.lazy_prompter.problem.message)
    return ModelReport(
        name=model.triton_model,
        served_as=list(names),
        adapter=model.adapter.name,
        reason=model.reason,
        tasks=model.tasks,
        streaming=_streaming(capabilities),
        usage=_usage(capabilities, tokenizer),
        finish_reason=_finish_reason(capabilities),
        parameters=list(map(_parameter, model.adapter.parameters)),
        refused=_refused(model),
        scores=_scores(model),
        audio=audio_report(capabilities),
        guides=sorted(capabilities.guides),
        loras=sorted({served.lora.name for served in names.values() if served.lora is not None}),
        logprobs=_logprobs(model.adapter),
        notes=notes,
        chat=model.can_chat,
        problems=[*problems, *changes],
        **details,
    )


def _prompt_details(model: ServedModel, prompter: Prompter) -> dict[str, Any]:
    """Return the fields of a report that need the tokenizer and the template. Raises :class:`ConfigurationError`."""
    origins = prompter.provenance
    parsers = model.lazy_prompter.parsers
    details = {
        "tokenizer": origins.tokenizer,
        "tool_calls": _format(parsers.tools, parsers.tools_reason),
        "reasoning": _format(parsers.reasoning, parsers.reasoning_reason),
        "images": _images(model, prompter),
        "sampling": _sampling(model, model.default_parameters(prompter), origins.generation_config),
    }
    if "generate" in model.tasks:
        details["chat_template"] = origins.chat_template
        details["suffix"] = _suffix(model, prompter.tokenizer)
    if "classify" in model.tasks:
        details["classes"] = _classes(model, prompter.tokenizer)
    return details


def _generation_notes(models: Models, model: ServedModel) -> list[str]:
    notes = []
    if model.adapter.splits_characters:
        notes.append(_LOSES)
    notes += model.adapter.notes
    if model.adapter.advice:
        notes.append(model.adapter.advice)
    if model.adapter.prefers_grpc and not models.fleet.over_grpc:
        notes.append(_NO_GRPC)
    return notes


def _streaming(capabilities: Capabilities) -> str:
    if capabilities.streaming:
        return "token by token"
    return "whole answer as one chunk"


def _usage(capabilities: Capabilities, tokenizer: str | None) -> str:
    if capabilities.usage:
        return "from the backend"
    if tokenizer:
        return "from the responses and the tokenizer"
    return "left out (not counted)"


def _finish_reason(capabilities: Capabilities) -> str:
    if capabilities.finish_reason:
        return "from the backend"
    if capabilities.usage:
        return "from the token counts"
    return "from the number of responses"


def _refused(model: ServedModel) -> list[str]:
    """Return the request parameters that every model refuses."""
    if "generate" not in model.tasks:
        return []
    return sorted({*neutral_values(ChatRequest), *neutral_values(CompletionRequest)})


def _scores(model: ServedModel) -> str | None:
    if model.tasks != ("rerank",):
        return None
    if model.settings.score_activation == "sigmoid":
        return "the sigmoid of the model's numbers"
    return "the model's numbers (score_activation)"


def audio_report(capabilities: Capabilities) -> str | None:
    """Return how a recognizer gets a recording."""
    recognition = capabilities.recognition
    if recognition is None:
        return None
    text = f"{recognition.max_seconds:g} s at once"
    if recognition.max_tokens is not None:
        text += f", answers of up to {recognition.max_tokens} tokens"
    if recognition.token_ids:
        text += "; the next window begins where an answer ends"
    if recognition.invents and voice_activity.silero_available():
        text += "; audio without speech is left out (Silero)"
    elif recognition.invents:
        text += "; silence is left out (tones and noise too with the extra 'vad')"
    return text


def _parameter(row: Parameter) -> ParameterReport:
    if row.rule is Rule.REFUSED:
        note = row.why
    else:
        note = row.note
    return ParameterReport(row.name, row.rule.value, row.target, row.datatype, note)


def _format(parser: type | None, reason: str) -> str | None:
    """Return the name of a format, and why it was chosen."""
    if parser is None:
        return None
    return f"{parser.__name__} ({reason})"


def _images(model: ServedModel, prompter: Prompter) -> str:
    capabilities = model.adapter.capabilities
    if capabilities.images and not model.metadata.images:
        return "none: the model ignores them unless it is set up for them, which its files or 'multimodal' can say"
    if capabilities.images and capabilities.images_as_turn:
        return "as many as the model takes, with one user message alone"
    if not capabilities.images or not prompter.can_chat:
        return "none"
    if not model.marks_images:
        return "none: the chat template takes none, and no image_placeholder is set"
    if capabilities.images == math.inf:
        return "as many as the model takes"
    return f"{capabilities.images} at most"


def _sampling(model: ServedModel, defaults: DefaultParameters, source: str | None) -> str:
    """Return how requests without sampling parameters are sampled."""
    own = model.settings.default_parameters.explicit()
    others = {name: value for name, value in defaults.explicit().items() if name not in own}
    parts = []
    if own:
        parts.append(f"{_listed(own)} (default_parameters)")
    if others:
        parts.append(f"{_listed(others)} ({source})")
    if not parts:
        return model.adapter.default_sampling
    return "; ".join([*parts, f"else {model.adapter.default_sampling}"])


def _listed(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in parameters.items())


def _logprobs(adapter: Adapter) -> str:
    if "logprobs" not in adapter.supported:
        return "none"
    text = "of the chosen tokens"
    max_alternatives = adapter.capabilities.top_logprobs
    if max_alternatives:
        text += f", with up to {max_alternatives} alternatives"
    if adapter.capabilities.prompt_logprobs:
        return f"{text}, and of the prompt's"
    return text


def _classes(model: ServedModel, tokenizer: Tokenizer | None) -> str:
    """Return what the probabilities are, and where the labels come from."""
    activation = activation_of(model, tokenizer)
    if activation == "none":
        what = "the model's numbers"
    else:
        what = f"the {activation} of its logits (problem_type)"
    if model.adapter.capabilities.labels:
        return f"{what}; labels from Triton"
    if tokenizer is not None and tokenizer.labels:
        return f"{what}; labels from the tokenizer's config.json"
    return f"{what}; no labels"


def _suffix(model: ServedModel, tokenizer: Tokenizer | None) -> str | None:
    """Return how a suffix is written. Raises :class:`ConfigurationError`."""
    if (form := fim_form(model.settings.fim_template, tokenizer)) is not None:
        return form
    known = known_fim_form(tokenizer)
    if known is None:
        return None
    return f"refused (fim_template; the tokenizer has the tokens of '{known}')"


def overview(reports: Sequence[ModelReport], command: str) -> str:
    """Return a table of all models and their problems, for a person; *command* shows the details of one."""
    if not reports:
        return "Triton has no models."
    chat = {None: "", True: "yes", False: "no"}
    # A tokenizer without the reason why it is this one.
    tokenizers = [(report.tokenizer or "").partition(" (")[0] for report in reports]
    rows = [
        [report.name, report.adapter or "", ", ".join(report.tasks), chat[report.chat], tokenizer, _state(report)]
        for report, tokenizer in zip(reports, tokenizers, strict=True)
    ]
    lines = table(["MODEL", "ADAPTER", "TASKS", "CHAT", "TOKENIZER", "STATE"], rows)
    lines += problems([f"{report.name}: {text}" for report in reports for text in report.problems])
    if any(report.settings for report in reports):
        lines += ["", "The details of a model that is not served have settings that would serve it."]
    return "\n".join([*lines, "", f"For details: {command}"])


def _state(report: ModelReport) -> str:
    if report.adapter is not None:
        return "ready"
    if not report.ready:
        return "not ready"
    if report.problems:
        return "not served"
    return "serves others"


def render(reports: Sequence[ModelReport]) -> str:
    """Return the reports as text for a person."""
    if reports:
        return "\n\n".join(_render(item) for item in reports)
    return "Triton has no models."


def _render(item: ModelReport) -> str:
    if item.adapter is None:
        lines = [item.name, f"  not served: {item.reason}"]
        if item.settings:
            lines += ["  settings that would serve it:", *[f"    {line}" for line in item.settings.splitlines()]]
        return "\n".join(lines)
    rows = [
        ("served as", ", ".join(item.served_as)),
        ("adapter", f"{item.adapter} ({item.reason})"),
        ("tasks", ", ".join(item.tasks)),
    ]
    notes = [("note", note) for note in item.notes]
    if "generate" in item.tasks:
        rows += [
            ("streaming", item.streaming),
            ("usage", item.usage),
            ("finish reason", item.finish_reason),
            ("tokenizer", item.tokenizer or "none"),
            ("chat template", item.chat_template or "none"),
            ("tool calls", item.tool_calls or "not recognised (--tool-call-parser)"),
            ("reasoning", item.reasoning or "not recognised (--reasoning-parser)"),
            ("suffix", item.suffix or "refused (fim_template)"),
            ("guides", ", ".join(item.guides) or "none (no guided decoding)"),
        ]
        if item.loras:
            rows.append(("LoRA adapters", ", ".join(item.loras)))
        rows += [
            ("images", item.images),
            ("log probs", item.logprobs),
            ("sampling", item.sampling),
            *notes,
        ]
    for name, text in (("scores", item.scores), ("classes", item.classes), ("audio", item.audio)):
        if text is not None:
            rows += [(name, text), ("tokenizer", item.tokenizer or "none"), *notes]
    lines = [item.name, *(f"  {name:<14} {text}" for name, text in rows)]
    if "generate" in item.tasks:
        width = max((len(parameter.name) for parameter in item.parameters), default=0)
        lines += ["  parameters", *(f"    {parameter.name:<{width}} {parameter}" for parameter in item.parameters)]
        lines.append(f"    refused: {', '.join(item.refused)}")
    return "\n".join(lines)
