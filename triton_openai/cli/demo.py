"""``triton-openai demo``: from nothing to a first answer over the OpenAI API."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp
from msgspec.structs import replace

from triton_openai.cli.arguments import Parsed
from triton_openai.cli.banner import Banner
from triton_openai.cli.endpoint import pieces_of
from triton_openai.cli.serve import serve_demo
from triton_openai.config.tree import (
    AccessSettings,
    ApiGroup,
    ModelDefaults,
    ModelSettings,
    Settings,
    TlsSettings,
    TritonAccess,
)
from triton_openai.demo import speech
from triton_openai.demo.engine import PASSIVE, Engine, missing
from triton_openai.demo.repository import BUILDERS, CONTEXT_LENGTH, build_repository
from triton_openai.demo.weights import find_model
from triton_openai.errors import ConfigurationError
from triton_openai.serving.server import listening_sockets
from triton_openai.tritonserver.supervisor import triton_for

_QUESTION = "What is the capital of France?"
_SCRIPTED_QUESTION = "What is the Triton Inference Server?"
_WEATHER = "What is the weather in Paris?"
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
# A model as small as the demo's goes on calling until it is stopped.
_CALL: Mapping[str, Any] = {"tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False}
_PREFERRED_MODEL = "ensemble"
_SHOWN = ("ensemble", "vllm_model", "text_embedding")
_ANSWER_SECONDS = 60


def demo(settings: Settings, environ: Mapping[str, str], options: Parsed) -> int:
    """
    Start the language model, build the demo models, start a Triton on them, serve, and ask a question and for a tool
    call; go on serving unless the *options* say ``once``.

    Raises :class:`ConfigurationError` for settings that have no meaning here.
    """
    if settings.server.workers > 1:
        raise ConfigurationError("The demo is one process: workers are for 'serve'.")
    asked_for = options.model is not None or options.weights is not None
    if options.scripted and asked_for:
        raise ConfigurationError("--scripted has no language model, so it takes no --model and no --weights.")
    if options.speech:
        speech.check_installed()
    with (
        listening_sockets(settings.server) as sockets,
        tempfile.TemporaryDirectory(prefix="triton-openai-demo-") as folder,
        contextlib.ExitStack() as running,
    ):
        engine = None
        tokenizer = None
        socket = None
        if not options.scripted:
            engine = _start_engine(Path(folder), environ, options, required=asked_for)
        if engine is not None:
            running.callback(engine.stop)
            tokenizer = engine.tokenizer
            socket = engine.socket
        models = list(_SHOWN)
        if options.all:
            models = list(BUILDERS)
        if options.speech:
            models += speech.BUILDERS
        builders = {**BUILDERS, **speech.BUILDERS}
        repository = build_repository(
            Path(folder), models=models, builders=builders, tokenizer=tokenizer, engine=socket
        )
        own_settings: Mapping[str, ModelSettings] = {}
        if options.speech:
            own_settings = speech.settings_in(repository.path)
        load: tuple[str, ...] = ()
        if settings.triton.model_control_mode == "explicit":
            # All models are there at first, and can be unloaded.
            load = ("*",)
        # The demo sends a request to itself, at an address that is in no certificate. Its Triton needs no credentials.
        settings = replace(
            settings,
            access=_with_own_key(settings.access),
            models={**own_settings, **settings.models},
            defaults=_defaults(settings.defaults, repository.tokenizer, has_language_model=engine is not None),
            tls=TlsSettings(),
            triton=replace(settings.triton, model_repository=(repository.path,), load_model=load),
            triton_access=TritonAccess(),
        )
        triton = triton_for(settings, {**environ, **PASSIVE}, backends=repository.backends)
        if engine is not None:
            engine.wait()
        on_ready = partial(
            _ask_questions, access=settings.access, has_language_model=engine is not None, once=options.once
        )
        return serve_demo(settings, sockets, triton, on_ready)


def _start_engine(folder: Path, environ: Mapping[str, str], options: Parsed, *, required: bool) -> Engine | None:
    """Start the language model; without one that is *required*, say why there is none and return None."""
    try:
        if problem := missing():
            raise ConfigurationError(f"The demo cannot run a language model here: {problem}.")
        model = find_model(options.model, options.weights)
        engine = Engine(model, folder, environ)
    except ConfigurationError as error:
        if required:
            raise
        _say(f"{error.message.rstrip('.')}. The answers are scripted.")
        return None
    _say(f"Loading {model.name} ({model.weights.stat().st_size / 1e6:.0f} MB) ...")
    return engine


def _defaults(settings: ModelDefaults, tokenizer: Path, *, has_language_model: bool) -> ModelDefaults:
    """Return *settings* with the tokenizer, and with what scripted models or a language model as small as this need."""
    defaults = replace(settings, tokenizer=settings.tokenizer or str(tokenizer))
    if not has_language_model:
        own = settings.tokenizer or settings.chat_template or settings.history_template
        # That of their tokenizer shows no tools.
        if own:
            template = settings.chat_template
        else:
            template = str(files("triton_openai.demo") / "chat_template.jinja")
        return replace(defaults, chat_template=template)
    sampling = settings.default_parameters
    return replace(
        defaults,
        # A small model that is sampled wanders. A request that asks for more than the context would run for minutes.
        default_parameters=sampling if "temperature" in sampling.explicit() else replace(sampling, temperature=0.0),
        max_model_len=settings.max_model_len or CONTEXT_LENGTH,
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _with_own_key(access: AccessSettings) -> AccessSettings:
    """Return *access* with a key for the demo's own question if all other keys are in a file."""
    if access.api_keys_file is None or access.api_key:
        return access
    return replace(access, api_key=(f"demo question:{secrets.token_hex(32)}",))


def _headers(access: AccessSettings, group: ApiGroup = "inference") -> dict[str, str]:
    """Return the headers that authorize a request to the APIs of *group*."""
    headers = {entry.header: entry.value for entry in access.openai_restricted_api if group in entry.apis}
    if access.api_key:
        _, _, key = access.api_key[0].rpartition(":")
        headers["x-api-key"] = key
    return headers


async def _ask_questions(banner: Banner, *, access: AccessSettings, has_language_model: bool, once: bool) -> int | None:
    """Ask as a client and print the answers; return the exit status if that is *once* and for all."""
    names = [model.name for model in banner.models if model.adapter]
    if not names:
        raise ConfigurationError("The demo's models did not become ready.")
    if _PREFERRED_MODEL in names:
        model = _PREFERRED_MODEL
    else:
        model = names[0]
    timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, headers=_headers(access)) as session:
        url = f"{banner.base_url}/chat/completions"
        asked: dict[str, Any] = {"model": model, "stream": True, "max_tokens": 64, "temperature": 0, "seed": 1}
        problem = await _ask(session, url, asked, _QUESTION if has_language_model else _SCRIPTED_QUESTION)
        if has_language_model and problem is None:
            problem = await _ask(session, url, {**asked, **_CALL}, _WEATHER)
    if problem:
        print(problem, flush=True)
    if once:
        if problem:
            return 1
        return 0
    print(_snippets(banner.base_url, model, access, has_language_model=has_language_model), flush=True)
    return None


async def _ask(session: aiohttp.ClientSession, url: str, asked: Mapping[str, Any], question: str) -> str | None:
    """Ask a question, print the answer or the tool call as it arrives, and return the error, if any."""
    print(f"Q: {question}\nA: ", end="", flush=True)
    try:
        async with session.post(url, json={**asked, "messages": [{"role": "user", "content": question}]}) as response:
            if response.status != 200:
                return f"HTTP {response.status}: {await response.text()}"
            async for piece in pieces_of(response.content):
                print(piece.text + piece.calls, end="", flush=True)
    except TimeoutError:
        return f"No answer within {_ANSWER_SECONDS} s."
    except aiohttp.ClientError as error:
        return f"No answer: {error}"
    except ValueError as error:
        return str(error)
    finally:
        print(flush=True)
    return None


def _snippets(base_url: str, model: str, access: AccessSettings, *, has_language_model: bool) -> str:
    """Return commands to copy, with the key: its owner, who has started the demo, reads them."""

    def curl(path: str, group: ApiGroup = "inference", **body: Any) -> str:
        headers = {**_headers(access, group), "Content-Type": "application/json"}
        shown = " ".join(f"-H {shlex.quote(f'{name}: {value}')}" for name, value in headers.items())
        return f"  curl {base_url}/{path} {shown} \\\n    -d {shlex.quote(json.dumps(body))}"

    def user(content: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": content}]

    examples = [curl("chat/completions", model=model, messages=user("Hello!"), stream=True)]
    if has_language_model:
        examples.append(curl("chat/completions", model=model, messages=user(_WEATHER), **_CALL))
    examples.append(curl("embeddings", "embedding", model="text_embedding", input=["How do I bake bread?"]))
    return "\n\n".join(["\nAsk it yourself:", *examples, "Ctrl-C ends the demo.\n"])
