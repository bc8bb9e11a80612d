"""
Writes the parts of the documents that follow from the code, and the schema of ``settings`` in the Helm chart.

``python docs/generate.py`` rewrites them in place; a test fails while they are out of date. A part stands between
``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import msgspec

from triton_openai.adapters._common.base import Parameter, Rule
from triton_openai.adapters._common.registry import BUILT_IN
from triton_openai.api import chat, completions
from triton_openai.api.bodies import IGNORED_HEADER
from triton_openai.api.parameters import GenerationOptions, ignorable, neutral_values
from triton_openai.api.routes import OPERATIONS, RECORDED, prose
from triton_openai.cli.aliases import ALIASES, REFUSED, VARIABLES, WITHOUT_EFFECT
from triton_openai.config.options import Option, bare_type, options
from triton_openai.config.tree import Settings
from triton_openai.errors import ServiceError
from triton_openai.generation import Sampling
from triton_openai.telemetry import tracing
from triton_openai.telemetry.gauges import SCRAPED
from triton_openai.telemetry.instruments import INSTRUMENTS
from triton_openai.telemetry.vllm_names import RENAMED, RENAMED_LABELS, SCRAPED_RENAMED

ROOT = Path(__file__).resolve().parents[1]
VALUES_SCHEMA = ROOT / "deploy" / "helm" / "triton-openai" / "values.schema.json"

#: Values that their types do not say in words.
_SHAPES = {
    "stop": "a string, or up to 4",
    "stop_token_ids": "token ids",
    "bad_words": "strings",
    "allowed_token_ids": "token ids",
    "logit_bias": "token ids with -100 to 100",
    "logprobs": "up to 20 alternatives: in chats true and `top_logprobs`, in completions their number",
    "include_stop_str_in_output": "boolean",
    "ignore_eos": "boolean",
    "skip_special_tokens": "boolean",
}
_ALSO_CALLED = {"max_tokens": "max_completion_tokens"}
#: What a request is about, and not a parameter of the answer.
_FRAME = {"model", "messages", "prompt", "stream", "stream_options", "max_completion_tokens"}
#: What is done with every model that generates, in this service, or with the tables of capabilities.
_DONE_HERE = {
    "n", "best_of", "echo", "suffix", "add_special_tokens", "top_logprobs", "prompt_logprobs", "return_token_ids",
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "tools",
    "tool_choice", "parallel_tool_calls", "functions", "function_call", "reasoning_effort",
    "think", "thinking", "enable_thinking", "reasoning", "thinking_budget", "thinking_budget_tokens",
    "reasoning_budget", "max_thinking_tokens", "max_reasoning_tokens",
    "include_reasoning", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
    "documents", "truncate_prompt_tokens", "truncation_side", "priority", "use_beam_search",
}  # fmt: skip


def _tables() -> Mapping[str, Sequence[Parameter]]:
    """Return the tables of parameters, each `PARAMETERS` of a module, by the names of the adapters that share one."""
    shared: dict[Sequence[Parameter], list[str]] = {}
    for name, path in BUILT_IN.items():
        module, _, kind = path.partition(":")
        for base in getattr(import_module(module), kind).__mro__:
            if table := getattr(import_module(base.__module__), "PARAMETERS", None):
                shared.setdefault(table, []).append(f"`{name}`")
                break
    return {", ".join(names): table for table, names in shared.items()}


def parameters() -> str:
    """Return the table of the parameters that have an effect, and what becomes of the others."""
    # As `bind` has it.
    default = {"stop": Parameter("stop", otherwise=Rule.SERVICE)}
    by_name = {title: default | {row.name: row for row in table} for title, table in _tables().items()}
    rows = [
        [
            _parameter_name(name),
            _limits(name),
            *(_treatment(table[name]) if name in table else "refused" for table in by_name.values()),
        ]
        for name in Sampling.__struct_fields__
    ]
    fields = {**_fields(chat.ChatRequest), **_fields(completions.CompletionRequest)}
    # What only one of the two endpoints has is refused by the other.
    refused = sorted({*neutral_values(chat.ChatRequest), *neutral_values(completions.CompletionRequest)} - _DONE_HERE)
    unused = sorted(fields.keys() - _FRAME - _DONE_HERE - set(refused) - set(Sampling.__struct_fields__))
    ignored = [name for name in unused if name in ignorable(chat.ChatRequest)]
    return "\n".join(
        [
            *_table(["Parameter", "Values", *by_name], rows),
            "",
            f"Done for every model that can (see below): {_list(sorted(_DONE_HERE))}.",
            "",
            f"Accepted, and without influence on an answer: {_list(sorted({*unused} - {*ignored}))}.",
            "",
            f"Ignored, and named in the header [`{IGNORED_HEADER}`](endpoints.md#what-is-ignored): {_list(ignored)}.",
            "",
            "Refused with status 400, code `unsupported_parameter` and the parameter's name, unless the value is the "
            f'one that means "not used": {_list(refused)}.',
        ]
    )


def _parameter_name(name: str) -> str:
    other = _ALSO_CALLED.get(name)
    return f"`{name}`, `{other}`" if other else f"`{name}`"


def _treatment(row: Parameter) -> str:
    text = " or ".join(f"`{target}`" for target in ([row.target] if row.target else row.inputs))
    if not text:
        return f"{row.otherwise.value} ({row.note})" if row.note else row.otherwise.value
    if row.note:
        text = f"{text} ({row.note})"
    return text if row.otherwise is Rule.REFUSED else f"{text}; without that input {row.otherwise.value}"


def _fields(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(struct)}


def _limits(name: str) -> str:
    if name in _SHAPES:
        return _SHAPES[name]
    annotation = _fields(GenerationOptions)[name]
    metas = [meta for meta in _metas(annotation) if isinstance(meta, msgspec.Meta)]
    low = next((f"at least {_number(meta.ge)}" for meta in metas if meta.ge is not None), "")
    low = low or next((f"more than {_number(meta.gt)}" for meta in metas if meta.gt is not None), "")
    high = next((_number(meta.le) for meta in metas if meta.le is not None), "")
    if high:
        return f"{low.removeprefix('at least ')} to {high}"
    kind = "integer" if int in get_args(annotation) or _is_integer(annotation) else "number"
    return f"{kind}, {low}" if low else kind


def _is_integer(annotation: Any) -> bool:
    return bare_type(annotation) is int


def _metas(annotation: Any) -> Iterable[Any]:
    if get_origin(annotation) is Annotated:
        yield from get_args(annotation)[1:]
    for member in get_args(annotation):
        yield from _metas(member)


def _number(value: Any) -> str:
    return f"{value:g}"


def settings() -> str:
    """Return the reference of all settings, one table for each group."""
    lines: list[str] = []
    for section in dict.fromkeys(option.section for option in options()):
        group = [option for option in options() if option.section == section]
        lines += [f"### {_titles[section]}", "", _about(section), ""]
        rows = [
            [
                "" if option.file_only else _flag(option),
                "" if option.file_only else f"`{option.variable}`",
                f"`{option.key}`",
                _default(option),
                "yes" if option.live else "",
                _help(option),
            ]
            for option in group
        ]
        lines += [*_table(["Flag", "Environment", "YAML", "Default", "Live", "Meaning"], rows), ""]
    return "\n".join(lines[:-1])


def _flag(option: Option) -> str:
    """Return the flag and what is given with it, its unit among them."""
    metavar = (option.metavar,) if isinstance(option.metavar, str) else option.metavar or ()
    model = "[MODEL=]" if option.per_model and not option.verbatim else ""
    return f"`{' '.join((option.flag, *(model + word for word in metavar)))}`"


def live() -> str:
    """Return the settings that a running service takes over, in the words of the YAML file."""
    single = [option for option in options() if option.live and option.section in {"server", "triton"}]
    groups = sorted({option.section for option in options() if option.live} - {"server", "triton"})
    return "\n".join(
        [
            f"- all of {_list(groups)};",
            *(
                f"- of `{section}`: {_list(option.path[-1] for option in single if option.section == section)}{end}"
                for section, end in (("server", ";"), ("triton", "."))
            ),
        ]
    )


def errors() -> str:
    """Return the table of everything that a request can be answered with but an answer."""
    rows = [(error.status, f"`{error.code}`", _first_sentence(error)) for error in _below(ServiceError)]
    return "\n".join(_table(["Status", "Code", "Meaning"], [[str(status), *rest] for status, *rest in sorted(rows)]))


def metrics() -> str:
    """Return the table of everything that /metrics has of its own."""
    rows = [[f"`{one.name}`", one.kind, _list(one.labels), one.help] for one in (*INSTRUMENTS, *SCRAPED)]
    return "\n".join(_table(["Metric", "Kind", "Labels", "Meaning"], rows))


def vllm_metrics() -> str:
    """Return the table of the names of vLLM's server, and of what they show."""
    rows = [
        [f"`{name}`", _list(filter(None, map(RENAMED_LABELS.get, one.labels))), _source(one.name, only)]
        for name, (one, only) in RENAMED.items()
    ]
    rows += [[f"`{one.name}`", _list(one.labels), one.help] for one in SCRAPED_RENAMED]
    return "\n".join(_table(["Metric", "Labels", "What it shows"], rows))


def _source(name: str, only: Mapping[str, str]) -> str:
    chosen = ", ".join(f'{label}="{value}"' for label, value in only.items())
    return f"`{name}{{{chosen}}}`" if chosen else f"`{name}`"


def endpoints() -> str:
    """Return the table of all endpoints."""
    rows = []
    for operation in OPERATIONS:
        first, *others = (f"`{re.sub(r':[^}]+', '', route)}`" for route in operation.routes)
        text = prose(operation.function.__doc__).partition("\n")[0]
        rows.append([first, ", ".join(others), f"`{operation.group}`", text])
    return "\n".join(_table(["Endpoint", "Also", "Group", "What it does"], rows))


#: What each attribute of the service's spans means; a test fails when one is missing here.
_ATTRIBUTES = {
    "http.request.method": "The HTTP method.",
    "url.path": "The path, cut and with keys masked.",
    "url.scheme": "`http` or `https`.",
    "http.route": "The route, such as `/v1/models/{model}`.",
    "http.response.status_code": "The status; missing when the client left.",
    "network.protocol.version": "The version of HTTP.",
    "network.protocol.name": "`http` or `grpc`.",
    "server.address": "The host that the client named; on a call, Triton's host.",
    "server.port": "Its port.",
    "user_agent.original": "The `User-Agent` header.",
    "error.type": "The [error code](errors.md), or `cancelled` when the client left.",
    "gen_ai.operation.name": f"One of {', '.join(f'`{name}`' for name in RECORDED)}.",
    "gen_ai.provider.name": "`triton`.",
    "gen_ai.request.model": "The model name that the client sent.",
    "gen_ai.request.stream": "True for a stream.",
    "gen_ai.request.temperature": "As the client sent it.",
    "gen_ai.request.top_p": "As the client sent it.",
    "gen_ai.request.top_k": "As the client sent it.",
    "gen_ai.request.frequency_penalty": "As the client sent it.",
    "gen_ai.request.presence_penalty": "As the client sent it.",
    "gen_ai.request.seed": "As the client sent it.",
    "gen_ai.request.max_tokens": "As the client sent it.",
    "gen_ai.request.stop_sequences": "The stop strings, each cut to 256 characters.",
    "gen_ai.request.choice.count": "`n`, when it is not 1.",
    "gen_ai.request.encoding_formats": "`encoding_format` of embeddings.",
    "gen_ai.embeddings.dimension.count": "`dimensions` of embeddings.",
    "gen_ai.output.type": "`text` or `json`, from `response_format`.",
    "gen_ai.response.id": "The id of the answer.",
    "gen_ai.response.model": "The Triton model or LoRA adapter behind the name.",
    "gen_ai.response.finish_reasons": "One finish reason for each choice.",
    "gen_ai.response.time_to_first_chunk": "Seconds to the first token of a stream.",
    "gen_ai.usage.input_tokens": "Tokens of the prompt.",
    "gen_ai.usage.output_tokens": "Tokens of the answer.",
    "gen_ai.usage.cache_read.input_tokens": "Prompt tokens read from the engine's cache.",
    "gen_ai.usage.reasoning.output_tokens": "Tokens of the reasoning.",
    "gen_ai.input.messages": "The messages as JSON; only with `traces.content`.",
    "gen_ai.output.messages": "The answers as JSON; only with `traces.content`.",
    "triton.model_name": "The Triton model, as in Triton's own spans.",
    "triton.request_id": "Triton's id for the request, as in Triton's own spans.",
    "triton_openai.adapter": "The adapter that serves the model.",
    "triton_openai.chat_template": "The name of the template; `default` and `tool_use` are the tokenizer's own.",
    "triton_openai.batch": "The batch that the request is a line of.",
    "triton_openai.client_left": "True when the client left before the end.",
    "triton_openai.endpoint": "The Triton that the call goes to, where there are several.",
    "triton_openai.lora": "The LoRA adapter of the call.",
    "triton_openai.queued_seconds": "Seconds in this service's queue.",
    "triton_openai.request_id": "The request's `x-request-id`.",
}
_SERVER_ADDRESS = ["server.address", "server.port"]
#: The functions that make the attributes of each kind of span.
_SPANS: Mapping[str, Sequence[Callable[..., Any]]] = {
    "server": (
        tracing.Tracing.started, tracing.head_attributes.__wrapped__, tracing.model_attributes.__wrapped__,
        tracing.answer_attributes.__wrapped__, tracing.own_attributes, tracing.request_attributes,
        tracing.content_attributes,
    ),
    "call": (tracing.Trace, tracing.call_attributes.__wrapped__),
}  # fmt: skip


def spans() -> str:
    """Return the table of the attributes of all spans, from the functions that make them."""
    rows = []
    for span, functions in _SPANS.items():
        names = [name for function in functions for name in _attribute_names(function)]
        if span == "server":
            names += [name for name, _ in tracing.NUMBERS.values()]
        if unknown := set(names) - _ATTRIBUTES.keys():
            raise ValueError(f"describe these attributes in {__file__}: {sorted(unknown)}")
        rows += [[f"`{name}`", span, _ATTRIBUTES[name]] for name in sorted(dict.fromkeys(names))]
    return "\n".join(_table(["Attribute", "Span", "Meaning"], rows))


def _attribute_names(function: Callable[..., Any]) -> Iterable[str]:
    source = inspect.getsource(function)
    if "_server(" in source:
        yield from _SERVER_ADDRESS
    yield from re.findall(r'"([a-z_]+(?:\.[a-z_]+)+)"(?::|\] =)', source)


#: Those of vLLM's engine that people write most.
ENGINE_ARGUMENTS = (
    "--dtype",
    "--enable-prefix-caching",
    "--gpu-memory-utilization",
    "--max-num-seqs",
    "--tensor-parallel-size",
)


def flags_of(server: str) -> str:
    """Return the table of the flags and variables of another *server*."""
    rows = [[f"`{theirs}`", f"`{ours}`; the other name works too"] for theirs, (ours, _) in ALIASES[server].items()]
    rows += [
        [f"`{theirs}`", f"accepted without effect. {why}"] for theirs, why in WITHOUT_EFFECT.get(server, {}).items()
    ]
    rows += [[f"`{theirs}`", advice] for theirs, advice in REFUSED.get(server, {}).items()]
    if server == "vLLM's server":
        rows.append([f"{_list(ENGINE_ARGUMENTS)} and all other arguments of the engine", "Write it into `model.json`."])
    if server == "openai_trtllm":
        rows += [[f"`{variable}`", f"as `{flag}`"] for variable, flag in VARIABLES.items()]
    return "\n".join(_table(["There", "Here"], rows))


def _below(kind: type[ServiceError]) -> Iterable[type[ServiceError]]:
    for error in kind.__subclasses__():
        yield error
        yield from _below(error)


def _first_sentence(kind: type) -> str:
    text = " ".join((inspect.getdoc(kind) or "").split())
    return re.sub(r"\*(\w+)\*", r"`\1`", re.split(r"(?<=\.)\s", text)[0])


_titles = {
    "server": "The service",
    "tls": "TLS",
    "triton": "Triton",
    "triton_access": "Access to Triton",
    "api": "The API",
    "responses": "Responses",
    "files": "Files",
    "batches": "Batches",
    "media": "Images",
    "audio": "Audio",
    "metrics": "Metrics",
    "access": "Access",
    "limits": "Limits",
    "traces": "Traces",
    "defaults": "Models",
    "models": "Single models",
}


def _about(section: str) -> str:
    field = next(field for field in msgspec.structs.fields(Settings) if field.name == section)
    kind = bare_type(field.type)
    kind = get_args(kind)[1] if get_origin(kind) is Mapping else kind
    return " ".join((inspect.getdoc(kind) or "").split())


def _default(option: Option) -> str:
    if option.is_switch:
        return "" if option.default is None else "on" if option.default else "off"
    if option.default in (None, (), msgspec.NODEFAULT) or isinstance(option.default, msgspec.Struct):
        return ""
    value = option.default
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    unit = f" {option.metavar.lower()}" if option.metavar in ("SECONDS", "BYTES") else ""
    return (f"`{value:g}`" if isinstance(value, float) else f"`{value}`") + unit


def _help(option: Option) -> str:
    text = option.help
    if option.choices:
        text = f"{text} One of {_list(option.choices)}."
    return text


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


#: What is generated, by the document and the name of the part.
PARTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "docs/guides/migrating.md": {f"flags of {server}": partial(flags_of, server) for server in ALIASES},
    "docs/reference/endpoints.md": {"endpoints": endpoints},
    "docs/reference/errors.md": {"errors": errors},
    "docs/reference/metrics.md": {"metrics": metrics, "vllm metrics": vllm_metrics},
    "docs/reference/parameters.md": {"parameters": parameters},
    "docs/reference/settings.md": {"settings": settings, "live": live},
    "docs/reference/spans.md": {"spans": spans},
}


def renewed(document: str, text: str) -> str:
    """Return *text*, that of *document*, with its generated parts as they should be."""
    for name, make in PARTS[document].items():
        part = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        if not part.search(text):
            raise ValueError(f"{document} has no place for {name}")
        body = make()
        text = part.sub(lambda found, body=body: found[1] + body + "\n" + found[2], text)  # type: ignore[misc]
    return text


def values_schema(text: str) -> str:
    """Return *text*, the schema of the chart's values, with that of ``settings`` as the service's types have it."""
    _, types = msgspec.json.schema_components([Settings], schema_hook=_path, ref_template="#/definitions/{name}")
    schema = json.loads(text)
    schema["definitions"] = {
        "Labels": schema["definitions"]["Labels"],
        **{name: _plain_schema(made) for name, made in types.items()},
    }
    return json.dumps(schema, indent=2) + "\n"


def _path(kind: type) -> dict[str, Any]:
    if kind is Path:
        return {"type": "string", "minLength": 1}
    raise NotImplementedError(kind)


def _plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return *schema* as the settings file is read: one text may stand for a list of texts."""
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            plain[key] = {name: _plain_schema(inner) for name, inner in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, Mapping):
            plain[key] = _plain_schema(value)
        elif key == "anyOf" and len(some := [one for one in value if one != {"type": "null"}]) == 1:
            plain |= _plain_schema(some[0])
        # Patterns are in Python's dialect of regular expressions, which Helm does not read.
        elif key not in ("title", "default", "pattern") and value != []:
            plain[key] = value
    if plain.get("type") == "object":
        plain.pop("description", None)
    if plain.get("type") == "array" and "$ref" not in plain["items"]:
        plain["type"] = ["array", "string"]
    return plain


def main() -> None:
    """Rewrite the documents, and the schema of the chart's values."""
    VALUES_SCHEMA.write_text(values_schema(VALUES_SCHEMA.read_text(encoding="utf-8")), encoding="utf-8")
    for document in PARTS:
        path = ROOT / document
        path.write_text(renewed(document, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
