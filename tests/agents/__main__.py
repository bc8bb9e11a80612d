"""
``python -m tests.agents``: run Codex CLI, Claude Code and opencode against the service and a scripted model.

Each answers a plain question, runs a tool that the model calls and hands the result back, and goes on with the
conversation in a second turn. Then it reads twenty notes, one after the other, while the model slips in each of its
calls. OpenAI's JavaScript client and LiteLLM do the same over the Responses API, and both JavaScript clients run
batches. The exit status is 1 if one of them does not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from tests.clients.service import serving, steered
from tests.slipping import slipping_calls
from triton_openai.demo.record import Record
from triton_openai.demo.repository import build_repository
from triton_openai.tritonserver.embedded import EmbeddedTriton

MODEL = "vllm_model"
# More than an agent's own instructions, and less than these with the longest answer that Claude Code asks for.
CONTEXT = 48_000
PACKAGES = (
    *("@anthropic-ai/claude-code@2.1.330", "@openai/codex@0.169.0", "opencode-ai@1.18.33"),
    *("openai@6.49.0", "ws@8", "@anthropic-ai/sdk@1.13.0"),
)
CLIENTS = {
    "OpenAI's JavaScript client": "openai_client.cjs",
    "Anthropic's JavaScript client": "anthropic_client.cjs",
    "LiteLLM": "litellm_client.py",
}
_TEMPLATE = Path(__file__).parents[1] / "fixtures" / "tools.jinja"
# For twenty turns: opencode needs some seconds for each on a slow machine.
_SECONDS = 400
_CODEX = """
model = "{model}"
model_provider = "triton"
model_context_window = {context}

[model_providers.triton]
name = "Triton"
base_url = "{address}/v1"
wire_api = "responses"
supports_websockets = {sockets}
"""


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """
    An agent: how it is asked, first and again, and how the model calls its shell.

    A question follows each of the commands, or comes from the standard input where the agent would change it (*pipe*).
    *files* lie in its home, *environ* is added to its environment.
    """

    name: str
    command: Sequence[str]
    again: Sequence[str]
    tool: str
    argument: str = "command"
    pipe: bool = False
    files: Mapping[str, str] = {}
    environ: Mapping[str, str] = {}

    def arguments(self, command: str) -> dict[str, str]:
        """Return the arguments of the tool that runs *command*."""
        if self.tool == "bash":
            return {self.argument: command, "description": "Read the note"}
        return {self.argument: command}

    def call(self, command: str) -> str:
        """Return what the model writes to run *command*."""
        call = {"name": self.tool, "arguments": self.arguments(command)}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def agents(address: str) -> list[Agent]:
    """Return the agents for the service at *address*."""
    codex = ("codex", "exec")
    codex_flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    claude = ("claude", "-p", "--allowedTools", "Bash", "--")
    found = []
    for name, sockets in (("Codex CLI", "false"), ("Codex CLI over WebSockets", "true")):
        config = _CODEX.format(model=MODEL, context=CONTEXT, address=address, sockets=sockets)
        found.append(
            Agent(
                name=name,
                command=(*codex, *codex_flags),
                again=(*codex, "resume", "--last", *codex_flags),
                tool="exec_command",
                argument="cmd",
                files={".codex/config.toml": config},
            )
        )
    found.append(
        Agent(
            name="Claude Code",
            command=claude,
            again=("claude", "--continue", *claude[1:]),
            tool="Bash",
            environ={
                "ANTHROPIC_BASE_URL": address,
                "ANTHROPIC_AUTH_TOKEN": "none",
                "ANTHROPIC_MODEL": MODEL,
                "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT),
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            },
        )
    )
    for package in ("openai-compatible", "openai", "anthropic"):
        provider = {
            "npm": f"@ai-sdk/{package}",
            "options": {"baseURL": f"{address}/v1", "apiKey": "none"},
            "models": {MODEL: {"limit": {"context": CONTEXT, "output": 8192}}},
        }
        run = ("opencode", "run", "-m", f"triton/{MODEL}")
        found.append(
            Agent(
                name=f"opencode over {package}",
                command=run,
                again=(*run, "--continue"),
                tool="bash",
                # It puts quotes round an argument with spaces.
                pipe=True,
                files={".config/opencode/opencode.json": json.dumps({"provider": {"triton": provider}})},
                environ={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
            )
        )
    return found


def install(folder: Path) -> Path:
    """Install the agents from npm in *folder* unless they are there, and return where their commands are."""
    done = folder / "installed"
    wanted = "\n".join(PACKAGES)
    if not done.exists() or done.read_text() != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        print(f"Installing {', '.join(PACKAGES)} in {folder}: 1.1 GB, a minute or two.", flush=True)
        npm = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(folder), *PACKAGES]
        subprocess.run(npm, check=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder / "python")], check=True)
        subprocess.run(
            [str(folder / "python" / "bin" / "pip"), "install", "--quiet", "litellm>=1.80", "mcp"], check=True
        )
        done.write_text(wanted)
    return folder / "node_modules" / ".bin"


def use(client: str, folder: Path, address: str) -> dict[str, str]:
    """Return what went wrong in the program that uses *client*."""
    program = Path(__file__).with_name(CLIENTS[client])
    interpreter = "node" if program.suffix == ".cjs" else str(folder / "python" / "bin" / "python")
    done = subprocess.run(
        [interpreter, str(program), f"{address}/v1", MODEL],
        env={"PATH": os.environ["PATH"], "NODE_PATH": str(folder / "node_modules")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    wrong = "" if done.stdout.endswith("PASSED\n") else done.stdout or "Nothing was printed."
    return {"its calls": wrong}


class Session:
    """One agent with a home and a folder of work of its own."""

    def __init__(self, agent: Agent, folder: Path, commands: Path, record: Record) -> None:
        self._agent = agent
        self._home, self._work = folder / "home", folder / "work"
        self._record = record
        self._work.mkdir(parents=True)
        for name, text in agent.files.items():
            file = self._home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        self._home.mkdir(exist_ok=True)
        # Nothing of the caller's own configuration, nor its keys.
        self._environ = {
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self._home),
            "TERM": "dumb",
            **agent.environ,
        }

    def ask(self, question: str, *, again: bool = False) -> str:
        """Return what the agent prints when it is asked *question*."""
        agent = self._agent
        command = list(agent.command)
        if again:
            command = list(agent.again)
        piped = question
        if not agent.pipe:
            command.append(question)
            piped = ""
        process = subprocess.Popen(
            command,
            cwd=self._work,
            env=self._environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            printed, _ = process.communicate(piped, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            # opencode ignores other signals.
            process.kill()
            printed, _ = process.communicate()
            printed += f"\nStopped after {_SECONDS} seconds."
        return printed

    def run(self) -> dict[str, str]:
        """Return what went wrong, by what was tried; an empty text is nothing."""
        (self._work / "note.txt").write_text(steered("The note says:", text="READ-THE-NOTE"))
        call = self._agent.call("cat note.txt")
        before = len(self._asked())
        found = {
            "a plain question": self._lacking("PLAIN-ANSWER", self.ask(steered("Marker one.", text="PLAIN-ANSWER"))),
            "a second turn": self._lacking(
                "SECOND-ANSWER", self.ask(steered("Go on.", text="SECOND-ANSWER"), again=True)
            ),
        }
        if not any("Marker one." in prompt and "Go on." in prompt for prompt in self._asked()[before:]):
            found["a second turn"] = found["a second turn"] or "The model was not told of the first one."
        found["a tool call"] = self._lacking("READ-THE-NOTE", self.ask(steered("Read the note.", text=call)))
        found["twenty slips"] = self._lacking("ALL-NOTES-READ", self.ask(self._notes()))
        return found

    def _notes(self) -> str:
        """Write notes, each of which has the model call for the next one with another slip. Return the question."""
        slips = [
            slipping_calls(self._agent.tool, self._agent.arguments(f"cat note{turn}.txt"))[turn] for turn in range(20)
        ]
        for turn, slip in enumerate(slips[1:]):
            (self._work / f"note{turn}.txt").write_text(steered(f"Note {turn} says:", text=slip))
        (self._work / f"note{len(slips) - 1}.txt").write_text(steered("The last note says:", text="ALL-NOTES-READ"))
        return steered("Read all notes.", text=slips[0])

    def _asked(self) -> list[str]:
        return [json.dumps(event) for event in self._record.events(event="request")]

    @staticmethod
    def _lacking(wanted: str, printed: str) -> str:
        # Codex repeats the question: the answer stands at the end.
        return "" if re.search(rf"^\W*{wanted}", printed, re.MULTILINE) else printed or "Nothing was printed."


def main() -> int:
    """Run it. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.agents", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).with_name("environment"))
    parser.add_argument("--only", default="", metavar="PATTERN", help="those whose name matches this alone")
    arguments = parser.parse_args()
    commands = install(arguments.folder.resolve())
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record = folder / "record.jsonl"
        repository = build_repository(folder / "repository", models=[MODEL], record=record)
        engine = repository.path / MODEL / "1" / "model.json"
        engine.write_text(json.dumps({**json.loads(engine.read_text()), "max_model_len": CONTEXT}))
        triton = EmbeddedTriton(model_repository=repository.path, backends=repository.backends, environment=os.environ)
        triton.start()
        flags = ("--triton-url", triton.http_url, "--tokenizer", str(repository.tokenizer))
        settings = {"models": {MODEL: {"max_model_len": CONTEXT, "chat_template": str(_TEMPLATE)}}}
        try:
            with serving(folder, *flags, settings=settings) as service:
                tried: dict[str, Callable[[], Mapping[str, str]]] = {
                    client: partial(use, client, arguments.folder.resolve(), service.address) for client in CLIENTS
                }
                for agent in agents(service.address):
                    home = folder / re.sub(r"\W", "-", agent.name)
                    tried[agent.name] = Session(agent, home, commands, Record(record)).run
                for who, run in tried.items():
                    for what, wrong in run().items() if re.search(arguments.only, who) else ():
                        failed += bool(wrong)
                        print(f"{'FAILS' if wrong else 'ok   '} {who}: {what}", flush=True)
                        if wrong:
                            print(wrong, flush=True)
                shutil.copy(service.log, arguments.folder / "service.log")
        finally:
            triton.stop(timeout=1.0)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
