"""
``python -m bench.words``: which words a recognizer gets wrong in recordings of people, as text and as subtitles.

The recordings are prompts of Debian's packages ``asterisk-core-sounds-*`` and ``asterisk-core-sounds-*-wav``, joined to
90 seconds, and the 44 seconds in PyPI's ``moonshine-voice``. The service runs: ``make demo ARGS=--speech``.
"""

from __future__ import annotations

import argparse
import gzip
import io
import random
import re
import unicodedata
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from bench.figures import table
from bench.forms import FORM_TYPE, form_with_file

# The folder of each language in the packages.
_FOLDERS = {
    "en": "en_US_f_Allison",
    "es": "es_MX_f_Allison",
    "fr": "fr_CA_f_June",
    "it": "it_IT_m_Carlo",
    "ru": "ru_RU_f_IvrvoiceRU",
}
_RATE = 8_000
_SECONDS = 90.0
# Seconds of silence between two prompts, and between two digits.
_PAUSE = 0.3
_PAUSE_OF_DIGITS = 0.1
_DIGITS = 110
# The fewest words of a prompt.
_MIN_WORDS = 6
# Recognizers write a digit or its name.
_DIGIT_NAMES = (
    "zero one two three four five six seven eight nine",
    "cero uno dos tres cuatro cinco seis siete ocho nueve",
    "zero un deux trois quatre cinq six sept huit neuf",
    "zero uno due tre quattro cinque sei sette otto nove",
    "ноль один два три четыре пять шесть семь восемь девять",
)
_DIGIT_OF = {name: str(digit) for names in _DIGIT_NAMES for digit, name in enumerate(names.split())}
_WORD = re.compile(r"[\w']+")
TWO_CITIES = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    "it was the epoch of belief, it was the epoch of incredulity, it was the season of light, it was the season of "
    "darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
    "before us, we were all going direct to heaven, we were all going direct the other way. In short, the period "
    "was so far like the present period that some of its noisiest authorities insisted on its being received, for "
    "good or for evil, in the superlative degree of comparison only."
)


class Spoken:
    """A recording: its *name*, its *language*, what is said in it, and its *samples* of *rate* Hz."""

    def __init__(self, name: str, language: str, text: str, samples: Any, rate: int) -> None:
        self.name = name
        self.language = language
        self.text = text
        self.samples = samples
        self.rate = rate

    @property
    def file(self) -> bytes:
        """The recording as a WAV file."""
        target = io.BytesIO()
        soundfile.write(target, self.samples, self.rate, format="WAV", subtype="PCM_16")
        return target.getvalue()


def prompts(root: Path, language: str) -> Iterator[tuple[str, Any]]:
    """Yield the texts and the samples of the sentences in the packages of *language* below the folder *root*."""
    folder = root / "usr/share/asterisk/sounds" / _FOLDERS[language]
    package = root / f"usr/share/doc/asterisk-core-sounds-{language}"
    with gzip.open(package / f"core-sounds-{language}.txt.gz", "rt", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, text = line.strip().partition(":")
            path = folder / f"{name.strip()}.wav"
            is_whole = "\ufffd" not in text and not re.search(r"[\[(;<]", text)
            if is_whole and len(words(text)) >= _MIN_WORDS and path.is_file():
                samples, rate = soundfile.read(path, dtype="float32")
                assert rate == _RATE
                yield text.strip(), samples


def joined(name: str, language: str, parts: Sequence[tuple[str, Any]], pause: float = _PAUSE) -> Spoken:
    """Return the recording of *parts* with a *pause* in seconds behind each."""
    silence = np.zeros(int(pause * _RATE), np.float32)
    samples = [piece for _, spoken in parts for piece in (spoken, silence)]
    return Spoken(name, language, " ".join(text for text, _ in parts), np.concatenate(samples), _RATE)


def recordings(root: Path) -> Iterator[Spoken]:
    """Yield all recordings; the packages of Debian are below the folder *root*."""
    for language in _FOLDERS:
        parts: list[tuple[str, Any]] = []
        number = 1
        for part in prompts(root, language):
            parts.append(part)
            if sum(len(samples) / _RATE + _PAUSE for _, samples in parts) >= _SECONDS:
                yield joined(f"{language} {number}", language, parts)
                parts = []
                number += 1
            if number > 2:
                break
    for name, numbers in (("random", _random_digits()), ("counted", [number % 10 for number in range(_DIGITS)])):
        folder = root / "usr/share/asterisk/sounds" / _FOLDERS["en"] / "digits"
        parts = [(str(number), soundfile.read(folder / f"{number}.wav", dtype="float32")[0]) for number in numbers]
        yield joined(f"digits, {name}", "en", parts, _PAUSE_OF_DIGITS)
    package = find_spec("moonshine_voice")
    if package is not None and package.submodule_search_locations:
        path = Path(package.submodule_search_locations[0], "assets", "two_cities.wav")
        samples, rate = soundfile.read(path, dtype="float32")
        yield Spoken("A Tale of Two Cities", "en", TWO_CITIES, samples, rate)


def _random_digits() -> Sequence[int]:
    generator = random.Random(1)
    return [generator.randrange(10) for _ in range(_DIGITS)]


def words(text: str) -> Sequence[str]:
    """Return the words of *text* without marks and accents; digits one by one."""
    plain = unicodedata.normalize("NFKD", text.lower())
    plain = "".join(letter for letter in plain if not unicodedata.combining(letter))
    plain = re.sub(r"\d", lambda match: f" {match[0]} ", plain)
    return [_DIGIT_OF.get(word, word) for word in _WORD.findall(plain)]


def differences(wanted: Sequence[str], heard: Sequence[str]) -> Sequence[tuple[str, str]]:
    """Return the fewest changes that make *heard* of *wanted*: a word of each; an empty one is missing."""
    # The changes from the first words of one to the first words of the other.
    costs = [list(range(len(heard) + 1))]
    for row, word in enumerate(wanted, 1):
        costs.append([row])
        for column, other in enumerate(heard, 1):
            replaced = costs[row - 1][column - 1] + (word != other)
            costs[row].append(min(costs[row - 1][column] + 1, costs[row][column - 1] + 1, replaced))
    changes = []
    row = len(wanted)
    column = len(heard)
    while row or column:
        if row and column and costs[row][column] == costs[row - 1][column - 1] + (wanted[row - 1] != heard[column - 1]):
            row -= 1
            column -= 1
            if wanted[row] != heard[column]:
                changes.append((wanted[row], heard[column]))
        elif row and costs[row][column] == costs[row - 1][column] + 1:
            row -= 1
            changes.append((wanted[row], ""))
        else:
            column -= 1
            changes.append(("", heard[column]))
    return changes[::-1]


def ask(url: str, model: str, spoken: Spoken, form: str) -> str:
    """Return what the service at *url* writes down, in the format *form*; of subtitles only the text."""
    fields = {"model": model, "language": spoken.language, "response_format": form}
    body = form_with_file(fields, spoken.file, "speech.wav")
    request = urllib.request.Request(f"{url}/v1/audio/transcriptions", body, {"Content-Type": FORM_TYPE})
    with urllib.request.urlopen(request, timeout=3600) as answer:
        text = answer.read().decode()
    if form == "text":
        return str(text)
    lines = text.splitlines()
    return " ".join(line for line in lines if "-->" not in line and not line.isdigit())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the share of wrong words of each recording, and of the words in which the two formats differ."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.words", description="The words that a recognizer gets wrong."
    )
    parser.add_argument("--root", type=Path, default=Path("/"), help="where the packages of Debian are unpacked (/)")
    parser.add_argument("--url", default="http://127.0.0.1:9000", help="the service (http://127.0.0.1:9000)")
    parser.add_argument("--model", default="whisper-1", help="the recognizer (whisper-1)")
    parser.add_argument("--verbose", action="store_true", help="print each word that differs")
    options = parser.parse_args(arguments)
    rows = []
    for spoken in recordings(options.root):
        said = words(spoken.text)
        text = words(ask(options.url, options.model, spoken, "text"))
        subtitles = words(ask(options.url, options.model, spoken, "srt"))
        compared = [differences(said, text), differences(said, subtitles), differences(text, subtitles)]
        rows.append([spoken.name, *(f"{len(changes) / len(said):.1%}" for changes in compared)])
        if options.verbose:
            print(spoken.name, *compared, sep="\n")
    print(table(["recording", "text", "subtitles", "text and subtitles"], rows))


if __name__ == "__main__":
    main()
