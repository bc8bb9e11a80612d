"""Stop strings: found however the text is cut, and never shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from triton_openai.answer.stages import StopStrings

# Few letters, so that stop strings do occur, overlap and begin again.
LETTERS = st.text(alphabet="ab\n😀", max_size=12)
STOPS = st.lists(st.text(alphabet="ab\n😀", min_size=1, max_size=4), min_size=1, max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Return the text before the stop string that ends first (the longest of those that end there), and that string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def passed(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    """Return what is shown after each piece and at the end, and the stop string that was found."""
    stage = StopStrings(stops)
    shown = [stage.feed(piece) for piece in pieces]
    return [*shown, stage.flush()], stage.matched


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_any_cutting_gives_what_the_reference_gives(pieces, stops):
    """The result depends on the text alone, not on how it came."""
    shown, matched = passed(pieces, stops)

    assert reference("".join(pieces), stops) == ("".join(shown), matched)


@given(text=LETTERS, stops=STOPS)
def test_one_character_at_a_time_is_the_same_as_all_at_once(text, stops):
    """The extremes of cutting agree."""
    returns_whole, matched = passed([text], stops)
    singly, matched_singly = passed(list(text), stops)

    assert ("".join(returns_whole), matched) == ("".join(singly), matched_singly)


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_no_more_is_held_back_than_may_become_a_stop_string(pieces, stops):
    """What is missing after each piece is the beginning of a stop string: a client sees all it can see."""
    stage = StopStrings(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += stage.feed(piece)
        if stage.matched is not None:
            break
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)


@every_case(
    "pieces, stops, expected",
    [
        (["one two"], ["x"], (["one two", ""], None)),
        (["one ", "two"], ["two"], (["one ", "", ""], "two")),
        (["one t", "w", "o three"], ["two"], (["one ", "", "", ""], "two")),
        # Held back, and then shown after all.
        (["one t", "hree"], ["two"], (["one ", "three", ""], None)),
        (["one t"], ["two"], (["one ", "t"], None)),
        # The one that ends first wins, not the one that stands first in the list or begins first.
        (["abcd"], ["abcd", "bc"], (["a", ""], "bc")),
        (["abc"], ["bc", "abc", "c"], (["", ""], "abc")),
        # A beginning that is broken off by a second beginning.
        (["aa", "ab"], ["aab"], (["", "a", ""], "aab")),
        # After a match there is nothing more.
        (["xy", "more", "x"], ["x"], (["", "", "", ""], "x")),
        (["", ""], ["x"], (["", "", ""], None)),
    ],
)
def test_what_is_shown_and_when(pieces, stops, expected):
    """Text goes out as soon as it can be no part of a stop string."""
    assert expected == passed(pieces, stops)


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS, include=st.booleans())
def test_the_end_that_a_backend_found(pieces, stops, include):
    """A backend takes the first of the list of those that its text ends with: all is shown but that."""
    before = reference("".join(pieces), stops)[0]
    stage = StopStrings(stops, include=include)

    shown = stage.feed(before) + stage.end(stops[-1])

    text = before + stops[-1]
    matched = next(stop for stop in stops if text.endswith(stop))
    assert (matched, text) == (stage.matched, shown if include else shown + matched)


def test_an_end_without_a_stop_string():
    """Nothing is cut off, and what was held back is shown."""
    stage = StopStrings(["abc"])

    assert ("x", "aby", None) == (stage.feed("xab"), stage.end("y"), stage.matched)
