"""The command `completion`: scripts that the shells themselves run."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.cases import every_case
from tests.programs import found
from triton_openai.cli import main
from triton_openai.cli.arguments import OWN_COMMANDS
from triton_openai.cli.completion import SHELLS

#: What is typed, what has to be offered, and what must not be.
TYPED = {
    "a command": ("triton-openai ser", {"serve"}, {"demo"}),
    "all commands": ("triton-openai ", {"serve", "demo", "chat", "bench", "check", "completion"}, {"--port"}),
    "an option": ("triton-openai serve --triton-u", {"--triton-url"}, {"--port"}),
    "an option of another command": ("triton-openai chat --s", {"--system"}, {"--strict"}),
    "a value": ("triton-openai serve --log-format ", {"json", "console"}, {"--port"}),
    "a word": ("triton-openai completion z", {"zsh"}, {"bash"}),
}

#: What zsh makes of what is typed.
COMPLETED = {
    "triton-openai ser": "serve ",
    "triton-openai serve --triton-u": "--triton-url=",
    "triton-openai chat --sy": "--system=",
    "triton-openai serve --log-format j": "json",
    "triton-openai completion z": "zsh",
    "triton-openai model-repository vllm --lo": "--lora-modules=",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the scripts, named as their shells want them."""
    for shell in SHELLS:
        (tmp_path / shell).write_text(printed_for(shell))
    return tmp_path


def printed_for(shell: str) -> str:
    """Return the script that the command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert 0 == main(["completion", shell])
    return printed.getvalue()


def run(shell: str, text: str, folder: Path) -> str:
    """Return what *shell* prints when it runs *text*; it must not complain."""
    command = [found(shell), *{"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell], "-c", text]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TERM": "dumb", "XDG_CONFIG_HOME": str(folder)}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
    )
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout


def check(offered: set[str], name: str) -> None:
    _, expected, others = TYPED[name]
    assert expected <= offered, name
    assert not others & offered, name


def test_bash(folder: Path) -> None:
    """bash offers what the words before the cursor allow."""
    text = ". ./bash\n"
    for typed, *_ in TYPED.values():
        words = typed.split(" ")
        quoted = " ".join(f'"{word}"' for word in words)
        text += f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _triton_openai; echo "${{COMPREPLY[*]}}"\n'
    for name, line in zip(TYPED, run("bash", text, folder).splitlines(), strict=True):
        check(set(line.split()), name)


def test_fish(folder: Path) -> None:
    """fish offers what the words before the cursor allow."""
    lines = [f"complete -C '{typed}'; echo @" for typed, *_ in TYPED.values()]
    outputs = run("fish", "source ./fish\n" + "\n".join(lines), folder).split("@\n")
    assert "" == outputs.pop()
    for name, output in zip(TYPED, outputs, strict=True):
        check({line.partition("\t")[0] for line in output.splitlines()}, name)


def test_zsh(folder: Path) -> None:
    """zsh completes what is typed, in a terminal: its completion works nowhere else."""
    own, other = pty.openpty()
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TERM": "dumb", "PS1": ""}
    process = subprocess.Popen(
        [found("zsh"), "-f", "-i"], stdin=other, stdout=other, stderr=other, cwd=folder, env=environ
    )
    os.close(other)

    def until(text: str) -> None:
        shown = ""
        while text not in shown:
            shown += os.read(own, 65_536).decode()

    def press(keys: str) -> None:
        os.write(own, keys.encode())

    try:
        press('PROMPT=; autoload -U compinit; compinit -u -D; eval "$(<zsh)"\n')
        # The shell joins the word: what is typed is shown too.
        press('echo rea""dy\n')
        until("ready")
        for typed, expected in COMPLETED.items():
            press(f"{typed}\t")
            until(expected)
            press("\x15")
    finally:
        process.kill()
        process.wait()
        os.close(own)


@every_case("shell", SHELLS)
def test_every_command_is_in_the_script(shell: str) -> None:
    """Each command is offered."""
    script = printed_for(shell)

    assert all(command in script for command in (*OWN_COMMANDS, "serve", "demo", "check", "collect-env"))
