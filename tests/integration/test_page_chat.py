"""Chats of the page in a browser: formulas, versions of messages, and the search."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests import chromium
from tests.integration.test_page import ANSWERS, IDLE, MARKDOWN, action, asked, said
from tests.programs import needs
from tests.proxy_fixture import proxy_settings, serving
from tests.triton_fixture import TestTriton

#: Formulas in each notation, prices, broken formulas, and such as would load or run something.
FORMULAS = r"""Solve $ax^2 = 0$ for $5 or $6, \(b\) and $$c$$

\[
\begin{pmatrix} 1 & 2 \\ 3 & \cancel{4} \end{pmatrix}
\]

- $$
  d
  $$

$\frac{e$ $\href{javascript:pwned=1}{f}$ $\class{x}{<img src=x onerror="pwned=1">}$"""
#: What stays a source.
SOURCES = [
    r"$\frac{e$",
    r"$\href{javascript:pwned=1}{f}$",
    r'$\class{x}{<img src=x onerror="pwned=1">}$',
]
#: Notes how many formulas of the third answer each frame shows.
FRAMES = """counts = []; (function frame() {
    requestAnimationFrame(() => setTimeout(() => {
        counts.push(document.querySelectorAll("#log > :nth-child(6) math").length);
        frame();
    }));
})()"""
LOADED = "performance.getEntriesByType('resource').map((one) => one.name.split('/').at(-1))"


#: Drops an image, a text, audio and what is none of them on the chat.
DROP = """{
    const files = new DataTransfer();
    const file = (name, type, ...bytes) => new File([new Uint8Array(bytes)], name, { type });
    files.items.add(file("a.png", "image/png", 0, 0, 0));
    files.items.add(new File(["hello"], "b.txt", { type: "text/plain" }));
    files.items.add(file("c.wav", "audio/x-wav", 0, 0, 0));
    files.items.add(file("d.pdf", "application/pdf", 0xff, 0));
    const dropped = new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true });
    document.querySelector("#log").dispatchEvent(dropped);
}"""


async def begin(tab: chromium.Tab, url: str) -> None:
    """Open the page and choose the model."""
    await tab.open(url)
    await tab.until("document.querySelector('#model').options.length > 1")
    await tab.type("#model", "vllm_model")


async def texts(tab: chromium.Tab) -> list[str]:
    """Return the first line of each message, without what steers the model."""
    shown = await tab.run("[...document.querySelectorAll('.said')].map((one) => one.innerText)")
    return [text.split("\n")[0].partition(" <<")[0] for text in shown]


@pytest.mark.extended
@needs("Chromium")
async def test_formulas_in_a_browser(triton: TestTriton, tmp_path: Path) -> None:
    """Formulas become MathML, with a library that only they load; broken and hostile ones stay a source."""
    async with serving(proxy_settings(triton, "http")) as proxy:
        await proxy.ready()
        async with chromium.tab(tmp_path) as tab:
            await begin(tab, str(proxy.client.make_url("/")))
            await said(tab, "Hello", "No formula for $5.")
            assert not {"math.css", "math.js", "temml.js"} & {*await tab.run(LOADED)}

            await said(tab, "Solve", FORMULAS)
            await tab.until(f"{ANSWERS}[1].querySelectorAll('math').length === 5")
            assert {"math.css", "math.js", "temml.js"} < {*await tab.run(LOADED)}
            sources = f"[...{ANSWERS}[1].querySelectorAll('.math > code')].map((one) => one.textContent)"
            assert SOURCES == await tab.run(sources)
            assert "for $5 or $6," in await tab.run(f"{ANSWERS}[1].innerText")
            displayed = f"[...{ANSWERS}[1].querySelectorAll('math')].map((one) => one.getAttribute('display'))"
            assert [None, None, "block", "block", "block"] == await tab.run(displayed)
            # The source of a formula over several lines is hidden behind it.
            hidden = f"[...{ANSWERS}[1].querySelectorAll('.formula > code')].map((one) => one.offsetHeight)"
            assert [0, 0] == await tab.run(hidden)
            assert await tab.run(f"{ANSWERS}[1].querySelector('li math') !== null")

            # While an answer streams, no frame shows a formula as a source again.
            await tab.run(FRAMES)
            slow = {"text": "One $x_1$ and two $x_2$ and three $x_3$ and four $x_4$ are all.", "delay_ms": 30}
            await tab.type("#prompt", f"Slow <<steer {json.dumps(slow)}>>")
            await tab.click("#send")
            await tab.until(f"{IDLE} && {ANSWERS}[2]?.querySelectorAll('math').length === 4")
            counts = await tab.run("counts")
            assert sorted(counts) == counts
            assert "undefined" == await tab.run("typeof pwned")
            assert [] == tab.problems


@pytest.mark.extended
@needs("Chromium")
async def test_versions_in_a_browser(triton: TestTriton, tmp_path: Path) -> None:
    """A reader changes a question, regenerates an answer, goes back to former versions, also after a reload."""
    async with serving(proxy_settings(triton, "http")) as proxy:
        await proxy.ready()
        async with chromium.tab(tmp_path) as tab:
            url = str(proxy.client.make_url("/"))
            await begin(tab, url)
            await said(tab, "One", "First.")
            await said(tab, "Two", "Second.")
            assert 0 == await tab.run("document.querySelectorAll('.versions').length")

            await action(tab, 3, "Regenerate")
            await tab.until(f"{IDLE} && document.querySelector('.versions')?.innerText.includes('2/2')")
            await action(tab, 0, "Edit")
            await tab.run("document.querySelector('.bubble textarea').value = 'Three <<steer {\"text\": \"Third.\"}>>'")
            await action(tab, 0, "Send")
            await tab.until(f"{IDLE} && {ANSWERS}.length === 1 && {ANSWERS}[0].innerText.includes('stop')")
            assert ["Three", "Third."] == await texts(tab)

            await tab.click(".Previous")
            assert ["One", "First.", "Two", "Second."] == await texts(tab)
            # The focus stays at the versions of the message: a keyboard goes on from there.
            assert "Next version" == await tab.run("document.activeElement.ariaLabel")
            assert ["One", "First.", "Two"] == [
                message["content"].partition(" <<")[0] for message in (await asked(tab))["messages"]
            ]
            await begin(tab, url)
            assert ["One", "First.", "Two", "Second."] == await texts(tab)
            versions = "[...document.querySelectorAll('.versions')].map((one) => one.innerText.replace(/[^0-9/]/g, ''))"
            assert ["1/2", "2/2"] == await tab.run(versions)
            await tab.click(".Next:not(:disabled)")
            assert ["Three", "Third."] == await texts(tab)

            # A message is deleted with what follows, and a former version takes its place; the second click does it.
            await action(tab, 0, "Delete")
            assert ["Three", "Third."] == await texts(tab)
            await action(tab, 0, "Delete now?")
            assert ["One", "First.", "Two", "Second."] == await texts(tab)
            assert ["2/2"] == await tab.run(versions)
            assert [] == tab.problems


@pytest.mark.extended
@needs("Chromium")
async def test_search_in_a_browser(triton: TestTriton, tmp_path: Path) -> None:
    """A reader finds a chat by a word in it, with the keyboard."""
    async with serving(proxy_settings(triton, "http")) as proxy:
        await proxy.ready()
        async with chromium.tab(tmp_path) as tab:
            await begin(tab, str(proxy.client.make_url("/")))
            await said(tab, "Fruit", "A banana <b>is</b> yellow.")
            await tab.click("#new")
            await said(tab, "Colours", "Red.")
            keys = "new KeyboardEvent('keydown', {{ key: '{}', ctrlKey: {}, bubbles: true }})"
            await tab.run(f"document.dispatchEvent({keys.format('k', 'true')})")
            await tab.until("document.activeElement === document.querySelector('#search')")
            await tab.type("#search", "BANANA")
            assert "1 chat" == await tab.text("#search-count")
            assert "banana <b>is</b> yellow." in await tab.text("#found")
            await tab.click("#found button")
            assert "Fruit" == (await texts(tab))[0]
            assert not await tab.run("document.querySelector('#search-menu').open")

            await tab.run(f"document.dispatchEvent({keys.format('k', 'true')})")
            await tab.until("document.activeElement === document.querySelector('#search')")
            for words, count in (("red", "1 chat"), ("r", "2 chats"), ("no such", "0 chats"), (" ", "")):
                await tab.type("#search", words)
                assert count == await tab.text("#search-count"), words
            await tab.run(f"document.dispatchEvent({keys.format('Escape', 'false')})")
            assert not await tab.run("document.querySelector('#search-menu').open")
            assert "Search" == await tab.run("document.activeElement.textContent")
            assert [] == tab.problems


@pytest.mark.extended
@needs("Chromium")
async def test_files_and_answers_in_a_browser(triton: TestTriton, tmp_path: Path) -> None:
    """A reader drops files on the chat, sees an answer as the model wrote it, and changes it."""
    async with serving(proxy_settings(triton, "http")) as proxy:
        await proxy.ready()
        async with chromium.tab(tmp_path) as tab:
            await begin(tab, str(proxy.client.make_url("/")))
            await said(tab, "Bold?", "It is **bold**.")
            assert ["You", "vllm_model"] == await tab.run(
                "[...document.querySelectorAll('.bubble > strong')].map((one) => one.innerText)"
            )
            await action(tab, -1, "Raw")
            assert "It is **bold**." in await tab.run(f"{ANSWERS}[0].innerText")
            await action(tab, -1, "Raw")
            assert "It is bold." in await tab.run(f"{ANSWERS}[0].innerText")

            await action(tab, -1, "Edit")
            await tab.run("document.querySelector('.bubble textarea').value = 'It is not.'")
            await action(tab, -1, "Save")
            await tab.until(f"{ANSWERS}[0].innerText.startsWith('It is not.')")
            assert "2/2" in await tab.text(".versions")
            await tab.type("#prompt", "So?")
            assert ["Bold?", "It is not.", "So?"] == [
                message["content"].partition(" <<")[0] for message in (await asked(tab))["messages"]
            ]

            await tab.run(DROP)
            await tab.until("document.querySelectorAll('#attached li').length === 3")
            await tab.until("document.querySelector('#problem').textContent")
            assert "d.pdf is neither an image, nor audio, nor a text." == await tab.text("#problem")
            await tab.type("#prompt", "Files?")
            image, audio, text = sorted(
                (await asked(tab))["messages"][-1]["content"], key=lambda part: str(part["type"])
            )
            assert "data:image/png;base64,AAAA" == image["image_url"]["url"]
            assert {"data": "AAAA", "format": "wav"} == audio["input_audio"]
            assert "Files?\n\nb.txt:\n```\nhello\n```" == text["text"]
            assert [] == tab.problems


@pytest.mark.extended
@needs("Chromium")
async def test_accessibility(triton: TestTriton, tmp_path: Path) -> None:
    """axe finds nothing in either theme, at three widths, with every part of the page in use."""
    axe = Path(sys.prefix) / "node/node_modules/axe-core/axe.min.js"
    if not axe.exists():
        pytest.skip("axe is not installed (make clients)")
    async with serving(proxy_settings(triton, "http")) as proxy:
        await proxy.ready()
        async with chromium.tab(tmp_path) as tab:
            await tab.open(str(proxy.client.make_url("/")))
            await tab.until("document.querySelector('#model').options.length > 1")
            await tab.type("#model", "vllm_model")
            code = "```python\nif a > 1:\n    print('b')  # c\n```"
            await said(tab, "Formulas", f"Wide: ${'a+' * 80}b$. {FORMULAS}")
            await action(tab, -1, "Regenerate")
            await tab.until(
                f"{IDLE} && document.querySelectorAll('math').length === 6 && {ANSWERS}[0].innerText.includes('stop')"
            )
            await action(tab, -1, "Raw")
            await action(tab, 0, "Delete")
            await tab.type("#search", "solve")
            await said(tab, "Hello", f"{MARKDOWN}\n\n| a | b |\n| - | - |\n| 1 | 2 |\n\n- [x] done\n\n{code}\n")
            await tab.type("#prompt", f"Fail <<steer {json.dumps({'text': 'a b', 'fail_at': 1})}>>")
            await tab.click("#send")
            await tab.until(f"{IDLE} && document.querySelector('.bubble.broken [role=alert]')")
            await tab.click("#key-button")
            await tab.run("for (const one of document.querySelectorAll('details')) one.open = true")
            assert [] == await violations(tab, axe)
            await tab.open(str(proxy.client.make_url("/docs")))
            await tab.until("document.querySelectorAll('#operations > details').length > 10")
            await tab.click("#operations > details summary")
            assert [] == await violations(tab, axe)


async def violations(tab: chromium.Tab, axe: Path) -> list[str]:
    """Return what axe finds in the page."""
    found = []
    await tab.run(await asyncio.to_thread(axe.read_text))
    for theme in ("light", "dark"):
        await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        for width in (1280, 800, 390):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            await tab.call("Emulation.setDeviceMetricsOverride", **size)
            result = await tab.run(
                "axe.run().then((done) => done.violations.map(({ id, nodes }) => [id, nodes[0].html]))"
            )
            found += [f"{theme} {width}: {name} {html}" for name, html in result]
            wide = await tab.run("document.documentElement.scrollWidth > document.documentElement.clientWidth")
            found += [f"{theme} {width}: it is wider than the window"] * bool(wide)
            lefts = "[...document.querySelectorAll('body *')].map((one) => one.getBoundingClientRect().left)"
            found += [f"{theme} {width}: a part begins left of the window"] * bool(
                await tab.run(f"Math.min(...{lefts}) < 0")
            )
    return found
