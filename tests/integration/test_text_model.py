"""A model that its operator describes, as the example has it, over both transports."""

from __future__ import annotations

import json

import msgspec
import yaml

from tests.conformance.calls import in_session_loop
from tests.proxy_fixture import TRANSPORTS, proxy_settings, serving
from tests.triton_fixture import EXAMPLES, TestTriton
from triton_openai.config.tree import ModelSettings

pytestmark = in_session_loop


async def test_the_example(triton: TestTriton) -> None:
    """The settings of the example's page find texts, reasons and counts in its tensors."""
    file = EXAMPLES / "text-model" / "settings.yaml"
    assert f"```yaml\n{file.read_text()}```" in file.with_name("README.md").read_text()
    described = yaml.safe_load(file.read_text())["models"]["my_model"]
    models = {"my_model": msgspec.convert({**described, "tokenizer": str(triton.tokenizer)}, ModelSettings)}
    cases = [(4, "TO BE OR NOT", "length", 4), (9, "TO BE OR NOT TO BE", "stop", 6)]
    for transport in TRANSPORTS:
        async with serving(msgspec.structs.replace(proxy_settings(triton, transport), models=models)) as proxy:
            for limit, text, reason, count in cases:
                body = {"model": "my_model", "prompt": "to be or not to be", "max_tokens": limit, "stop": "NO!"}
                whole = (await proxy.post("/v1/completions", body)).json
                assert (text, reason) == (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"])
                assert (6, count) == (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"])
                usage = json.dumps(whole["usage"], separators=(",", ":"))
                assert (limit == 4) == (f'"usage":{usage},' in file.with_name("README.md").read_text())
                answer = await proxy.post("/v1/completions", {**body, "stream": True})
                pieces = [choice for chunk in answer.chunks for choice in chunk["choices"]]
                assert (text, reason) == ("".join(one["text"] for one in pieces), pieces[-1]["finish_reason"])
            chat = {"model": "my_model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 99}
            assert "HELLO" in (await proxy.post("/v1/chat/completions", chat)).json["choices"][0]["message"]["content"]


async def test_counts_without_a_tokenizer(triton: TestTriton) -> None:
    """A model that counts the tokens of its answers alone has a usage; no prompt has 0 tokens."""
    described = yaml.safe_load((EXAMPLES / "text-model" / "settings.yaml").read_text())["models"]["my_model"]
    del described["outputs"]["prompt_tokens"]
    models = {"my_model": msgspec.convert({**described, "tokenizer": None}, ModelSettings)}
    usage = {"prompt_tokens": 0, "completion_tokens": 6, "total_tokens": 6}
    for transport in TRANSPORTS:
        async with serving(msgspec.structs.replace(proxy_settings(triton, transport), models=models)) as proxy:
            body = {"model": "my_model", "prompt": "to be or not to be", "max_tokens": 9}
            whole = await proxy.post("/v1/completions", body)
            stream = await proxy.post(
                "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
            )
            assert usage == whole.json["usage"] == stream.chunks[-1]["usage"]
