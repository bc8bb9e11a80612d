"""The page for people: what it is made of, who may see what, and how it works in a browser."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import FormData

import triton_openai
from tests import chromium
from tests.conformance.calls import steered
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.programs import needs
from tests.proxy_fixture import Proxy, changed, proxy_settings, serving
from tests.speech import SENTENCE, speak, wav
from tests.standins.repository import build_repository
from tests.triton_fixture import TestTriton, embedded, shared
from triton_openai.config.tree import (
    AccessSettings,
    AudioSettings,
    ModelSettings,
    RestrictedApi,
    ServerSettings,
    Settings,
    TritonSettings,
)
from triton_openai.serving.page import FILES, HEADERS, LATER

KEYS = """
keys:
  - {name: all, key: sk-all}
  - {name: one, key: sk-one, models: [short]}
"""
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


# What a model may write to format an answer, or to harm its reader; and what the page makes of it.
MARKDOWN = """# Title

**Bold** and *em*, `a<b>`, 2*3*4, f(**kw) and snake_case_name.
- one
  - [deep](https://example.com/a_(b))
1. <script>pwned = 1</script> <img src=x onerror="pwned = 1">

[a](javascript:pwned=1) [b](java\tscript:pwned=1) [c](data:text/html,x) [d](/v1) ![e](//x.y/z.png)
```html
<script>pwned = 1</script>
**no**
```
https://example.com/x."""
LINK = 'href="https://example.com/{0}" title="https://example.com/{0}" target="_blank" rel="noopener noreferrer"'
SHOWN = (
    "<h3>Title</h3><p><strong>Bold</strong> and <em>em</em>, <code>a&lt;b&gt;</code>, 2*3*4, f(**kw) and "
    f"snake_case_name.</p><ul><li>one<ul><li><a {LINK.format('a_(b)')}>deep</a></li></ul></li></ul>"
    '<ol start="1"><li>&lt;script&gt;pwned = 1&lt;/script&gt; &lt;img src=x onerror="pwned = 1"&gt;</li></ol>'
    "<p>[a](javascript:pwned=1) [b](java\tscript:pwned=1) [c](data:text/html,x) [d](/v1) ![e](//x.y/z.png)</p>"
    '<div class="block" data-language="html"><button class="copy">Copy</button><pre tabindex="0"><code>'
    "&lt;script&gt;pwned = 1&lt;/script&gt;\n**no**\n</code></pre></div>"
    f"<p><a {LINK.format('x')}>https://example.com/x</a>.</p>"
)

# `classList` leaves an empty attribute.
INNER = """innerHTML.replaceAll(' class=""', '')"""

#: The SHA-256 of `dist/temml.min.js` of Temml 0.13.5.
TEMML = "1ab19148afe0dbc836b7a74f344071b3f3a70a7a8259ae4049e76894fcdf8d95"


@asynccontextmanager
async def service(**parts: Any) -> AsyncIterator[Proxy]:
    """Serve a model of text without a tokenizer, called ``m`` and ``short``, beside one that nobody knows."""
    outputs = ("text_output BYTES -1", "num_input_tokens UINT32 1", "num_output_tokens UINT32 1")
    inputs = (
        *("text_input BYTES 1", "sampling_parameters? BYTES 1", "stream? BOOL 1"),
        *("return_num_input_tokens? BOOL 1", "return_num_output_tokens? BOOL 1"),
    )
    resnet = config_of("resnet", ("image FP32 3",), ("label FP32 9",))
    async with FakeTriton(config_of("m", inputs, outputs), resnet) as triton:
        triton.responses = [{"text_output": "a", "num_input_tokens": 4, "num_output_tokens": 3}]
        models = {"m": ModelSettings(aliases=("short",))}
        settings = Settings(triton=TritonSettings(url=(triton.url,)), models=models, **parts)
        async with serving(settings) as proxy:
            await proxy.ready()
            await proxy.models.served["m"].check()
            yield proxy


async def status_of(proxy: Proxy, key: str) -> Any:
    """Return what the service tells the owner of *key*."""
    async with proxy.client.get("/status", headers={"Authorization": f"Bearer {key}"}) as response:
        assert 200 == response.status
        return await response.json()


async def test_the_files_are_open_and_self_contained(tmp_path: Path) -> None:
    """The page's files need no key, have a policy that allows nothing from elsewhere, and name only each other."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    restricted = (RestrictedApi(apis=("info", "health", "metrics"), header="a", value="b"),)
    access = AccessSettings(api_keys_file=keys, openai_restricted_api=restricted)
    async with service(access=access) as proxy:
        for path, (_, kind) in FILES.items():
            async with proxy.client.get(path) as response, proxy.client.head(path) as head:
                text = await response.text()
                assert (200, 200, kind) == (response.status, head.status, response.content_type)
                assert HEADERS.items() <= response.headers.items()
            assert [] == [
                url for url in re.findall(r"https?://[^\s'\"]+", text) if not url.startswith("http://www.w3.org")
            ]
            # Temml is as it was published.
            assert path == "/page/temml.js" or not re.search(
                r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=|innerHTML|\beval\(|cookie", text
            )
            for name in re.findall(r'(?:src|href|from) ?=?"(?:\./)?((?:page/)?[a-z]+\.(?:js|css))"', text):
                assert f"/page/{name.removeprefix('page/')}" in FILES
        for path in ("/status", "/page/", "/page/x.js", "/docs/"):
            async with proxy.client.get(path) as response:
                assert 401 == response.status
    folder = Path(triton_openai.__file__).with_name("page")
    # What `/` loads at once: neither the description of the API nor what shows formulas.
    first = {name for name, _ in FILES.values()} - {
        "docs.html",
        "docs.js",
        "math.css",
        *(f"{name}.js" for name in LATER),
    }
    assert sum((folder / name).stat().st_size for name in first) < 100_000
    licence, _, published = (folder / "temml.js").read_text().partition("*/\n")
    assert "MIT License" in licence
    assert TEMML == hashlib.sha256(published.encode()).hexdigest()
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in HEADERS["Content-Security-Policy"]


async def test_without_the_page() -> None:
    """``--no-page`` takes the files away; the endpoint that they read stays."""
    async with service(server=ServerSettings(page=False)) as proxy:
        assert {404} == {(await proxy.get(path)).status for path in FILES}
        assert 200 == (await proxy.get("/status")).status


async def test_the_status(tmp_path: Path) -> None:
    """A key sees its models under the names that it opens; one for all sees the figures too."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    async with service(access=AccessSettings(api_keys_file=keys)) as proxy:
        body = {"model": "m", "prompt": "a"}
        async with proxy.client.post("/v1/completions", json=body, headers={"api-key": "sk-all"}) as response:
            assert 200 == response.status
        everything, one = await status_of(proxy, "sk-all"), await status_of(proxy, "sk-one")

    model, resnet = everything["models"]
    assert ("m", ["short"], "ready", False, ["generate"]) == tuple(
        model[name] for name in ("name", "aliases", "state", "chat", "tasks")
    )
    assert "--tokenizer" in model["problem"]
    assert ("resnet", "not served", None) == (resnet["name"], resnet["state"], resnet["adapter"])
    assert "no adapter fits its tensors" in resnet["problem"]
    figures = everything["figures"]
    assert (0, 0, 4, 3, 1) == tuple(
        figures[name] for name in ("running", "queued", "input_tokens", "output_tokens", "first_tokens")
    )
    assert [("short", [])] == [(each["name"], each["aliases"]) for each in one["models"]]
    assert "figures" not in one


@pytest.mark.extended
@needs("Chromium")
async def test_in_a_browser(triton: TestTriton, tmp_path: Path) -> None:
    """A reader gives a key, chats, has a tool called, stays within a schema, and reads the description."""
    settings = proxy_settings(triton, "http")
    template = str(Path(__file__).parents[1] / "fixtures" / "tools.jinja")
    own = ModelSettings(tokenizer=str(triton.tokenizer), chat_template=template, aliases=("a-name",))
    access = AccessSettings(api_key=("reader:sk-reader",))
    async with serving(msgspec.structs.replace(settings, models={"vllm_model": own}, access=access)) as proxy:
        await proxy.ready()
        async with chromium.tab(tmp_path) as tab:
            await tab.open(str(proxy.client.make_url("/")))
            await tab.until("!document.querySelector('#key-form').hidden")
            # Enter sends also where the browser would refuse the button, because no model is chosen.
            await tab.type("#prompt", "Hello")
            pressed = "new KeyboardEvent('keydown', { key: 'Enter', bubbles: true })"
            await tab.run(f"document.querySelector('#prompt').dispatchEvent({pressed})")
            await tab.until("document.querySelector('#problem').textContent.startsWith('No model can chat now.')")
            await tab.type("#key", "wrong")
            await tab.click("#key-form button")
            await tab.until(
                "document.querySelector('#key-problem').textContent.includes('does not accept this API key')"
            )
            assert "API key" == await tab.text("#key-button")
            await tab.type("#key", "sk-reader")
            await tab.click("#key-form button")
            await tab.until("document.querySelector('#key-form').hidden")
            assert "API key: in use" == await tab.text("#key-button")
            cards = await tab.text("#models")
            assert re.search(r"vllm_model\s+ready\s+adapter vllm, also as a-name", cards)
            assert re.search(r"text_embedding\s+ready\s+adapter embeddings\s+embed", cards)

            await tab.run("document.querySelector('#model').value = 'a-name'")
            answer = await said(tab, "Hello", "It is <b>fine</b>.")
            assert re.search(
                r"^It is <b>fine</b>\.\s+\d\.\d\d s to the first token · \d+ tokens( · \d+ tokens/s)? · stop$", answer
            )
            assert 'api_key=os.environ["API_KEY"]' in await tab.text("#python")
            assert "sk-reader" not in await tab.run("document.documentElement.outerHTML")
            await tab.until("document.querySelector('#first').textContent.endsWith('s')")

            await said(tab, "Code?", MARKDOWN)
            assert SHOWN == await tab.run(f"[...document.querySelectorAll('.said')].at(-1).children[1].{INNER}")
            # However it is cut; and a line that has ended is not made again.
            cut = await tab.run(f"""import("./page/markdown.js").then(({{ Markdown }}) => [1, 5, 999].map((size) => {{
                const place = document.createElement("div"), shown = new Markdown(place), text = {json.dumps(MARKDOWN)};
                let first;
                for (let at = 0; at < text.length; at += size) {{
                    shown.write(text.slice(at, at + size));
                    if (at + size > 10) first ??= place.firstChild;
                }}
                return [place.{INNER}, place.firstChild === first];
            }}))""")
            assert [[SHOWN, True]] * 3 == cut

            assert "undefined" == await tab.run("typeof pwned")

            # What is typed while an answer streams stays.
            await tab.type("#prompt", f"Slow? <<steer {json.dumps({'text': 'It is slow.', 'delay_ms': 60})}>>")
            await tab.click("#send")
            assert "" == await tab.run("document.querySelector('#prompt').value")
            await tab.type("#prompt", "And then?")
            await tab.until("document.querySelector('#stop').hidden")
            assert "And then?" == await tab.run("document.querySelector('#prompt').value")

            await tab.click("#new")
            await tab.click("[data-example=tools]")
            assert 'get_weather({"city": "Bonn"})' in await said(tab, "Weather?", CALL)
            assert "What get_weather returns" == await tab.run("document.querySelector('#prompt-label').textContent")
            assert "Fine in Bonn." in await said(tab, "sunny", "Fine in Bonn.")
            code = await tab.text("#curl")
            body = json.loads(code[code.index("-d '") + 4 : -1].replace("'\\''", "'"))
            assert ["user", "assistant", "tool"] == [message["role"] for message in body["messages"]]

            await tab.click("#new")
            await tab.type("#tools", "")
            await tab.click("[data-example=schema]")
            await tab.click("#stream")
            assert '{"answer": "x", "sure": true}' in await said(tab, "Sure?", '{"answer": "x", "sure": true}')
            assert "json_schema" in await tab.text("#python")
            # An answer that broke before its first character shows no empty block of code.
            await tab.type("#prompt", f"Sure? <<steer {json.dumps({'text': 'a b', 'fail_at': 0})}>>")
            await tab.click("#send")
            await tab.until("document.querySelector('.bubble.broken [role=alert]')")
            assert not await tab.run("Boolean(document.querySelector('.bubble.broken .block'))")
            assert ["Copy", "Try again", "Edit", "Raw", "Delete"] == await tab.run(
                "[...document.querySelectorAll('.bubble.broken button')].map((one) => one.textContent)"
            )

            # Parameters without a field of their own: OpenAI's client takes them apart.
            await tab.click("#new")
            await tab.type("#more", '{"top_k": 3}')
            await said(tab, "More?", "Yes.")
            assert 3 == (await asked(tab))["top_k"]
            assert 'extra_body={"top_k": 3},' in await tab.text("#python")
            for text in ("[1]", "7", "{"):
                await tab.type("#more", text)
                await tab.type("#prompt", "Hello")
                await tab.click("#send")
                await tab.until(
                    "document.querySelector('#problem').textContent.startsWith('More parameters, as JSON: ')"
                )
                await tab.type("#prompt", "")
            await tab.type("#more", "")

            await tab.type("#schema", "{")
            await tab.type("#prompt", "Hello")
            await tab.click("#send")
            await tab.until("document.querySelector('#problem').textContent.startsWith('A schema, as JSON: ')")

            await tab.open(str(proxy.client.make_url("/docs")))
            await tab.until("!document.querySelector('#key-form').hidden")
            await tab.type("#key", "sk-reader")
            await tab.click("#key-form button")
            await tab.until("document.querySelectorAll('#operations > details').length > 10")
            await tab.click("#operations > details summary")
            await tab.until("document.querySelector('#operations > details details')")
            await tab.click("#operations > details details summary")
            await tab.until("document.querySelector('.fields')?.innerText.includes('max_completion_tokens')")
            assert "`" not in await tab.text("#operations")
            # A word of the path, or a field at any depth.
            for words, count in (("GET voices", 1), ("max_completion_tokens", 1), ("nosuchfield", 0)):
                await tab.type("#search", words)
                assert f"{count} operations" == await tab.text("#count"), words
                hidden = "document.querySelectorAll('#operations > details:not([hidden])').length"
                assert count == await tab.run(hidden)
            assert [] == tab.problems


@pytest.mark.extended
@needs("Chromium")
async def test_chats_in_a_browser(triton: TestTriton, tmp_path: Path) -> None:
    """A reader changes a message, asks again, stops, and finds everything after a reload, but for the key."""
    settings = proxy_settings(triton, "http")
    access = AccessSettings(api_key=("reader:sk-reader",))
    async with serving(msgspec.structs.replace(settings, access=access)) as proxy:
        await proxy.ready()
        async with chromium.tab(tmp_path) as tab:

            async def enter() -> None:
                await tab.open(str(proxy.client.make_url("/")))
                await tab.until("!document.querySelector('#key-form').hidden")
                await tab.type("#key", "sk-reader")
                await tab.click("#key-form button")
                await tab.until("document.querySelector('#model').options.length > 1")

            await enter()
            await tab.type("#model", "vllm_model")
            await tab.type("#system", "Be brief.")
            await tab.type("#temperature", "0")
            await said(tab, "One", "First.")
            await said(tab, "Two", "Second.")
            assert ["Be brief.", "One", "First.", "Two"] == [
                message["content"].partition(" <<")[0] for message in (await asked(tab))["messages"]
            ]

            # Another first question: what followed is gone.
            await action(tab, 0, "Edit")
            await tab.run("document.querySelector('.bubble textarea').value = 'Three <<steer {\"text\": \"Third.\"}>>'")
            await action(tab, 0, "Send")
            await tab.until(f"{ANSWERS}.length === 1 && {IDLE} && {ANSWERS}[0].innerText.includes('Third.')")
            await action(tab, 1, "Regenerate")
            await tab.until(f"{IDLE} && {ANSWERS}.length === 1 && {ANSWERS}[0].innerText.includes('stop')")

            # Escape stops an answer; what has come of it stays.
            slow = {"text": "a b c d e f g h", "repeat": 100, "delay_ms": 300}
            await tab.type("#prompt", f"Four <<steer {json.dumps(slow)}>>")
            await tab.click("#send")
            await tab.until(f"{ANSWERS}[1]?.innerText.includes('a')")
            await tab.run("document.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape' }))")
            await tab.until(f"{IDLE} && {ANSWERS}[1].innerText.includes('Stopped.')")

            # An answer that the limit has cut goes on in its place.
            kept = "fetch = (url, asked) => { sent.push(asked?.body); return real(url, asked); }"
            await tab.run(f"sent = []; {{ const real = fetch; {kept} }}")
            await tab.type("#max_tokens", "2")
            cut = await said(tab, "Cut", "x y z")
            assert cut.startswith("x y\n")
            assert cut.endswith("length")
            await tab.type("#max_tokens", "")
            await action(tab, -1, "Continue")
            await tab.until(f"{IDLE} && {ANSWERS}.length === 3 && {ANSWERS}[2].innerText.includes('stop')")
            assert (await tab.run(f"{ANSWERS}[2].innerText")).startswith("x yx y z\n")
            body = json.loads(await tab.run("sent.filter(Boolean).at(-1)"))
            assert (False, True) == (body["add_generation_prompt"], body["continue_final_message"])
            assert {"role": "assistant", "content": "x y"} == body["messages"][-1]
            assert 0 == await tab.run("document.querySelectorAll('.bubble:last-child .continue').length")

            # A failure is seen at the answer, and mended by another try.
            await tab.type("#prompt", f"Five <<steer {json.dumps({'text': 'a b', 'fail_at': 1})}>>")
            await tab.click("#send")
            await tab.until(f"{IDLE} && document.querySelector('.bubble.broken [role=alert]')")
            assert "Try again" in await tab.text(".bubble.broken")

            await tab.click("#new")
            await tab.type("#prompt", "Not sent yet")
            await tab.type("#title", "Ideas")
            kept = await tab.run("JSON.stringify({ ...localStorage })")
            assert "Third." in kept
            assert "sk-reader" not in kept

            await enter()
            assert "Not sent yet" == await tab.run("document.querySelector('#prompt').value")
            assert "Be brief." == await tab.run("document.querySelector('#system').value")
            assert "vllm_model" == await tab.run("document.querySelector('#model').value")
            titles = "[...document.querySelector('#chats').options].map((one) => one.text)"
            assert ["Ideas", 'Three <<steer {"text": "Third."}>>'] == await tab.run(titles)
            await tab.run("document.querySelector('#chats').selectedIndex = 1")
            await tab.run("document.querySelector('#chats').dispatchEvent(new Event('change'))")
            texts = await tab.run("[...document.querySelectorAll('.said')].map((one) => one.innerText)")
            first = [text.split("\n")[0].partition(" <<")[0] for text in texts]
            assert ["Three", "Third.", "Four", "Cut", "x yx y z", "Five"] == [
                first[number] for number in (0, 1, 2, 4, 5, 6)
            ]
            assert await tab.run("Boolean(document.querySelector('.bubble.broken'))")

            for _ in range(2):
                await tab.click("#delete-all")
            assert ["New chat"] == await tab.run(titles)
            assert "Third." not in await tab.run("JSON.stringify({ ...localStorage })")
            assert [] == tab.problems


ANSWERS = "document.querySelectorAll('.bubble.assistant .said')"
IDLE = "document.querySelector('#stop').hidden"


async def asked(tab: chromium.Tab) -> Any:
    """Return the request that the page shows as a curl command."""
    code = await tab.text("#curl")
    return json.loads(code[code.index("-d '") + 4 : -1].replace("'\\''", "'"))


async def action(tab: chromium.Tab, number: int, name: str) -> None:
    """Click the button *name* of a message."""
    buttons = f"[...[...document.querySelectorAll('.bubble')].at({number}).querySelectorAll('button')]"
    await tab.run(f"{buttons}.find((one) => one.textContent === '{name}').click()")


@pytest.mark.extended
@needs("Chromium")
async def test_batches_in_a_browser(triton: TestTriton, tmp_path: Path) -> None:
    """A reader sees how far batches are, and cancels one by a second click; a key that may not have any sees none."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n  - {name: reader, key: sk-reader, batch: true}\n  - {name: other, key: sk-other, batch: false}\n"
    )
    settings = changed(
        proxy_settings(triton, "http"),
        access={"api_keys_file": keys},
        files={"store": f"dir:{tmp_path / 'files'}"},
        batches={"store": f"sqlite:{tmp_path / 'batches.sqlite'}"},
    )
    texts = [steered(text="one"), steered(text="two"), steered(text="late", first_delay_ms=600_000)]
    async with serving(settings) as proxy:
        await proxy.ready()
        batch = await batch_of(proxy, [{"prompt": text, "max_tokens": -(text == texts[0]) or 9} for text in texts])
        async with chromium.tab(tmp_path / "chromium") as tab:
            await tab.open(str(proxy.client.make_url("/")))
            await tab.until("!document.querySelector('#key-form').hidden")
            await tab.type("#key", "sk-reader")
            await tab.click("#key-form button")
            await tab.until(
                "document.querySelector('#batches .note')?.textContent.startsWith('2 of 3 lines · 1 failed')"
            )
            assert [batch, "in progress"] == (await tab.text("#batches .row")).split("\n")
            assert [3, 2] == await tab.run(
                "(({max, value}) => [max, value])(document.querySelector('#batches progress'))"
            )
            assert "/v1/completions" in await tab.text("#batches .note")
            # Ids have no place to break, and a phone has little room.
            for width in (400, 250, 150):
                fits = f"(list => (list.style.width = '{width}px', [...list.querySelectorAll('*')].every(one => "
                fits += "one.scrollWidth <= list.clientWidth)))(document.querySelector('#batches'))"
                assert await tab.run(fits), width
            await tab.run("document.querySelector('#batches').style.width = ''")

            await tab.click("#batches button")
            assert "Cancel now?" == await tab.text("#batches button")
            await tab.run("document.querySelector('#batches button').dispatchEvent(new Event('blur'))")
            assert "Cancel" == await tab.text("#batches button")
            assert "in_progress" == (await read(proxy, f"/v1/batches/{batch}"))["status"]
            for _ in range(2):
                await tab.click("#batches button")
            await tab.until("document.querySelector('#batches .badge').textContent === 'cancelling'")
            await tab.until("document.querySelector('#batches button').hidden")
            assert "cancelling" == (await read(proxy, f"/v1/batches/{batch}"))["status"]

            await tab.open(str(proxy.client.make_url("/")) + "?other")
            await tab.until("!document.querySelector('#key-form').hidden")
            await tab.type("#key", "sk-other")
            await tab.click("#key-form button")
            await tab.until("document.querySelector('#key-form').hidden")
            assert await tab.run("document.querySelector('#batches-part').hidden")
            assert [] == tab.problems


async def read(proxy: Proxy, path: str) -> Any:
    """Return what the first key gets."""
    async with proxy.client.get(path, headers={"api-key": "sk-reader"}) as response:
        return await response.json()


async def batch_of(proxy: Proxy, bodies: Sequence[dict[str, Any]]) -> str:
    """Make a batch of completions for the first key; return its id."""
    asked = {"method": "POST", "url": "/v1/completions"}
    lines = [
        {"custom_id": f"id-{number}", **asked, "body": {"model": "vllm_model", **body}}
        for number, body in enumerate(bodies)
    ]
    form, headers = FormData({"purpose": "batch"}), {"api-key": "sk-reader"}
    form.add_field("file", "\n".join(map(json.dumps, lines)).encode(), filename="input.jsonl")
    async with proxy.client.post("/v1/files", data=form, headers=headers) as response:
        file = (await response.json())["id"]
    made = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    async with proxy.client.post("/v1/batches", json=made, headers=headers) as response:
        return str((await response.json())["id"])


@pytest.mark.extended
@needs("Chromium")
async def test_speech_in_a_browser(tmp_path: Path) -> None:
    """A reader records what the microphone hears, has a file written down, and hears a text spoken."""
    microphone, recording = tmp_path / "microphone.wav", tmp_path / "recording.wav"
    # However the recording begins and ends, and whatever the browser leaves out: it has one word.
    microphone.write_bytes(wav(speak(["again"] * 20, rate=48_000, pause=0.3), 48_000))
    recording.write_bytes(wav(speak(SENTENCE)))
    repository = build_repository(tmp_path / "repository", models=["infer_bls", "int16_tts"])
    server = embedded(repository)
    rate = ModelSettings(audio=AudioSettings(sample_rate=24_000))
    with shared(server):
        settings = Settings(triton=TritonSettings(url=(server.grpc_url,)), models={"int16_tts": rate})
        async with serving(settings) as proxy, chromium.tab(tmp_path / "browser", microphone=microphone) as tab:
            await proxy.ready()
            await tab.open(str(proxy.client.make_url("/")))
            await tab.until("!document.querySelector('#hear-form').hidden")
            await tab.click("#record")
            await tab.until("/Stop .[3-9] s/.test(document.querySelector('#record').textContent)")
            await tab.click("#record")
            heard = "document.querySelector('#heard').textContent"
            problem = "document.querySelector('#hear-problem').textContent"
            await tab.until(f"{problem} || ({heard} && !document.querySelector('#record').disabled)")
            assert "" == await tab.run(problem)
            assert {"again"} == {*str(await tab.run(heard)).split()}

            document = await tab.call("DOM.getDocument")
            field = await tab.call("DOM.querySelector", nodeId=document["root"]["nodeId"], selector="#recording")
            await tab.call("DOM.setFileInputFiles", nodeId=field["nodeId"], files=[str(recording)])
            await tab.click("#transcribe")
            await tab.until(f"{heard} === {' '.join(SENTENCE)!r}")

            await tab.type("#speak-text", "Triton answers in plain English.")
            await tab.click("#speak")
            await tab.until("!document.querySelector('#spoken').hidden")
            await tab.until("document.querySelector('#spoken').duration > 0")
            samples = 240 * len("Triton answers in plain English.")
            assert round(samples / 24_000, 2) == round(await tab.run("document.querySelector('#spoken').duration"), 2)
            assert "" == await tab.text("#speak-problem")
            assert [] == tab.problems


async def said(tab: chromium.Tab, prompt: str, answer: str) -> str:
    """Send *prompt*, which the model answers with *answer*, and return what the page shows of it."""
    count = await tab.run("document.querySelectorAll('.bubble.assistant').length")
    await tab.type("#prompt", f"{prompt} <<steer {json.dumps({'text': answer})}>>")
    await tab.click("#send")
    shown = f"document.querySelectorAll('.bubble.assistant .said')[{count}]"
    problem = "document.querySelector('#problem').textContent"
    await tab.until(f"{problem} || ({shown} && document.querySelector('#stop').hidden)")
    assert "" == await tab.run(problem)
    return str(await tab.run(f"{shown}.innerText"))
