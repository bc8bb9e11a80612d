"""``triton-openai demo``: from nothing to a first answer over the OpenAI API."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

import aiohttp
import msgspec

from triton_openai.cli.banner import Banner
from triton_openai.cli.serve import OnReady, serve_demo
from triton_openai.config import AccessSettings, Settings, TlsSettings, TritonAccess
from triton_openai.demo.repository import build_repository
from triton_openai.errors import ConfigurationError
from triton_openai.serving.sockets import listening_sockets
from triton_openai.tritonserver.supervisor import triton_for

_QUESTION = "What is the Triton Inference Server?"
_PREFERRED_MODEL = "ensemble"
_ANSWER_SECONDS = 60


def demo(settings: Settings, environ: Mapping[str, str], *, once: bool) -> int:
    """
    Build the demo models, start a Triton on them, serve, and ask one question; go on serving unless *once*.

    Raises :class:`ConfigurationError` for settings that have no meaning here.
    """
    if settings.server.workers > 1:
        raise ConfigurationError("The demo is one process: workers are for 'serve'.")
    with (
        listening_sockets(settings.server) as sockets,
        tempfile.TemporaryDirectory(prefix="triton-openai-demo-") as folder,
    ):
        repository = build_repository(Path(folder))
        replace = msgspec.structs.replace
        # In explicit mode all models are there at first, and can be unloaded.
        load = ("*",) if settings.triton.model_control_mode == "explicit" else ()
        # The demo sends a request to itself, at an address that is in no certificate. Its Triton needs no credentials.
        settings = replace(
            settings,
            access=_with_own_key(settings.access),
            defaults=replace(settings.defaults, tokenizer=settings.defaults.tokenizer or str(repository.tokenizer)),
            tls=TlsSettings(),
            triton=replace(settings.triton, model_repository=(repository.path,), load_model=load),
            triton_access=TritonAccess(),
        )
        triton = triton_for(settings, environ, backends=repository.backends)
        return serve_demo(settings, sockets, triton, _ask_one_question(_headers(settings.access), once=once))


def _with_own_key(access: AccessSettings) -> AccessSettings:
    """Return *access* with a key for the demo's own question if all other keys are in a file."""
    if access.api_keys_file is None or access.api_key:
        return access
    return msgspec.structs.replace(access, api_key=(f"demo question:{secrets.token_hex(32)}",))


def _headers(access: AccessSettings) -> dict[str, str]:
    """Return the headers that authorize the demo's own question."""
    headers = {entry.header: entry.value for entry in access.openai_restricted_api if "inference" in entry.apis}
    if access.api_key:
        _, _, key = access.api_key[0].rpartition(":")
        headers["x-api-key"] = key
    return headers


def _ask_one_question(headers: Mapping[str, str], *, once: bool) -> OnReady:
    async def on_ready(banner: Banner) -> int | None:
        names = [model.name for model in banner.models if model.adapter]
        if not names:
            raise ConfigurationError("The demo's models did not become ready.")
        model = _PREFERRED_MODEL if _PREFERRED_MODEL in names else names[0]
        print(f"Q: {_QUESTION}\nA: ", end="", flush=True)
        problem = await _ask(banner.base_url, model, headers)
        print(f"\n{problem}" if problem else "", flush=True)
        if once:
            return 1 if problem else 0
        print(_snippets(banner.base_url, model), flush=True)
        return None

    return on_ready


async def _ask(base_url: str, model: str, headers: Mapping[str, str]) -> str | None:
    """Ask as a client, print the answer as it arrives, and return the error, if any."""
    body = {"model": model, "messages": [{"role": "user", "content": _QUESTION}], "stream": True, "max_tokens": 64}
    timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{base_url}/chat/completions", json=body, headers=headers) as response,
        ):
            if response.status != 200:
                return f"HTTP {response.status}: {await response.text()}"
            async for line in response.content:
                payload = line.decode().partition("data:")[2].strip()
                if not payload or payload == "[DONE]":
                    continue
                chunk = json.loads(payload)
                if "error" in chunk:
                    return str(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    print(choice["delta"].get("content") or "", end="", flush=True)
    except TimeoutError:
        return f"No answer within {_ANSWER_SECONDS} s."
    except aiohttp.ClientError as error:
        return f"No answer: {error}"
    return None


def _snippets(base_url: str, model: str) -> str:
    return f"""
Ask it yourself:

  curl {base_url}/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'

or, after pip install openai:

  from openai import OpenAI

  client = OpenAI(base_url="{base_url}", api_key="none")
  answer = client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": "Hello!"}}])
  print(answer.choices[0].message.content)

Ctrl-C ends the demo.
"""
