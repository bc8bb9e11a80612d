"""The command ``completion``: scripts that complete commands and options in bash, zsh and fish."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triton_openai.cli.parser import CommandParser

SHELLS = ("bash", "zsh", "fish")
_PROGRAM = "triton-openai"
# The metavars of options that take a file or a folder.
_FILES = ("FILE", "DIR", "FOLDER", "PATH")
_HOW = """\
Load it in the files that your shell reads:
  bash  ~/.bashrc                   eval "$(triton-openai completion bash)"
  zsh   ~/.zshrc, after compinit    eval "$(triton-openai completion zsh)"
  fish  ~/.config/fish/config.fish  triton-openai completion fish | source"""


class Flag(msgspec.Struct, frozen=True):
    """One option of a command."""

    name: str
    help: str
    takes_value: bool
    #: The values it accepts, if there are only a few.
    choices: Sequence[str] = ()
    takes_file: bool = False


class CompletableCommand(msgspec.Struct, frozen=True):
    """One command, as a shell completes it."""

    name: str
    help: str
    flags: Sequence[Flag]
    #: The words it accepts without a flag, if there are only a few.
    words: Sequence[str] = ()

    @classmethod
    def of(cls, name: str, parser: CommandParser) -> CompletableCommand:
        """Return the command *name* with the options of its *parser*."""
        flags = []
        words: list[str] = []
        for names, keywords in parser.arguments:
            flags += _flags(names, keywords)
            if not names[0].startswith("-"):
                words += map(str, keywords.get("choices") or ())
        return cls(name, parser.description or "", flags, words)


def _flags(names: Sequence[str], keywords: Mapping[str, Any]) -> list[Flag]:
    """Return an argument under each of its long names."""
    text = keywords.get("help", "")
    if text == argparse.SUPPRESS:
        text = ""
    text = text.partition(". ")[0].partition("\n")[0].replace("%%", "%").rstrip(".")
    action = keywords.get("action")
    is_switch = action in ("store_true", "help", "version", argparse.BooleanOptionalAction)
    takes_file = str(keywords.get("metavar", "")).rpartition("=")[2].partition("|")[0] in _FILES
    long = [name for name in names if name.startswith("--")]
    if action is argparse.BooleanOptionalAction:
        long += [name.replace("--", "--no-", 1) for name in long]
    choices = tuple(map(str, keywords.get("choices") or ()))
    return [Flag(name, text, not is_switch, choices, takes_file) for name in long]


def add_completion_options(parser: CommandParser) -> None:
    """Add the options of ``completion`` to its *parser*."""
    parser.add_argument("shell", choices=SHELLS, help="The shell.")
    parser.epilog = _HOW
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def script(shell: str, commands: Sequence[CompletableCommand]) -> str:
    """Return the script for *shell*, one of :data:`SHELLS`."""
    writers = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    return "\n".join(writers[shell](commands)) + "\n"


def _bash(commands: Sequence[CompletableCommand]) -> list[str]:
    """Return a function for bash 3.2 and newer, without the package bash-completion."""
    names = " ".join([*(command.name for command in commands), "--help", "--version"])
    lines = [
        "_triton_openai() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" options="" values=""',
        "    COMPREPLY=()",
        # bash splits --flag=value at the sign.
        '    if [ "$word" = "=" ]; then word=""; fi',
        '    if [ "$before" = "=" ]; then before="${COMP_WORDS[COMP_CWORD-2]}"; fi',
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        COMPREPLY=($(compgen -W "{names}" -- "$word"))',
        "        return",
        "    fi",
        '    case "${COMP_WORDS[1]} $before" in',
    ]
    for command in commands:
        for flag in command.flags:
            if flag.choices:
                lines.append(f'        "{command.name} {flag.name}") values="{" ".join(flag.choices)}" ;;')
            elif flag.takes_value:
                lines.append(f'        "{command.name} {flag.name}") COMPREPLY=($(compgen -f -- "$word")); return ;;')
    lines += ["    esac", '    case "${COMP_WORDS[1]}" in']
    for command in commands:
        words = [*command.words, *(flag.name for flag in command.flags)]
        lines.append(f'        {command.name}) options="{" ".join(words)}" ;;')
    lines += [
        "    esac",
        '    if [ -n "$values" ]; then options="$values"; fi',
        '    COMPREPLY=($(compgen -W "$options" -- "$word"))',
        "}",
        f"complete -o default -F _triton_openai {_PROGRAM}",
    ]
    return lines


def _zsh(commands: Sequence[CompletableCommand]) -> list[str]:
    """Return a function for zsh's own completion, for a file on ``fpath`` as for ``eval``."""
    lines = [f"#compdef {_PROGRAM}", "_triton_openai() {", "    local -a commands", "    commands=("]
    lines += [f"        {_quoted(f'{command.name}:{command.help}')}" for command in commands]
    lines += [
        "    )",
        "    if (( CURRENT == 2 )); then",
        "        _describe command commands",
        "        return",
        "    fi",
        "    local command=$words[2]",
        "    shift words",
        "    (( CURRENT-- ))",
        "    case $command in",
    ]
    for command in commands:
        lines.append(f"        {command.name})")
        specs = [_quoted(_zsh_flag(flag)) for flag in command.flags]
        if command.words:
            specs.append(_quoted(f"1: :({' '.join(command.words)})"))
        else:
            specs.append(_quoted("*: :_files"))
        lines.append(f"            _arguments {' '.join(specs)} ;;")
    lines += [
        "    esac",
        "}",
        'if [ "$funcstack[1]" = "_triton_openai" ]; then',
        '    _triton_openai "$@"',
        "else",
        f"    compdef _triton_openai {_PROGRAM}",
        "fi",
    ]
    return lines


def _zsh_flag(flag: Flag) -> str:
    text = flag.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    spec = f"*{flag.name}[{text}]"
    if not flag.takes_value:
        return spec
    if flag.choices:
        return f"*{flag.name}=[{text}]: :({' '.join(flag.choices)})"
    if flag.takes_file:
        return f"*{flag.name}=[{text}]: :_files"
    return f"*{flag.name}=[{text}]: : "


def _fish(commands: Sequence[CompletableCommand]) -> list[str]:
    """Return commands for fish."""
    begin = f"complete -c {_PROGRAM}"
    lines = [f"{begin} -f"]
    for command in commands:
        lines.append(f"{begin} -n __fish_use_subcommand -a {command.name} -d {_quoted(command.help)}")
        used = f"-n '__fish_seen_subcommand_from {command.name}'"
        if command.words:
            lines.append(f"{begin} {used} -a {_quoted(' '.join(command.words))}")
        for flag in command.flags:
            line = f"{begin} {used} -l {flag.name.removeprefix('--')} -d {_fish_quoted(flag.help)}"
            if flag.choices:
                line += f" -x -a {_fish_quoted(' '.join(flag.choices))}"
            elif flag.takes_file:
                line += " -r -F"
            elif flag.takes_value:
                line += " -x"
            lines.append(line)
    return lines


def _quoted(text: str) -> str:
    """Return *text* in single quotes, as bash and zsh read them."""
    quote = "'"
    return quote + text.replace(quote, "'\\''") + quote


def _fish_quoted(text: str) -> str:
    quote = "'"
    return quote + text.replace("\\", "\\\\").replace(quote, "\\'") + quote
