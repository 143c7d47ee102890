from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.policy.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher, shown = StopStrings(stops), []
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.flush()], None


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """By the definition: the first character at which any stop is complete; of several, the one that begins first."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[:end - len(stop)], stop
    return text, None


def test_beginning_of_a_stop_string_is_held_back() -> None:
    matcher = StopStrings(["END now"])
    assert matcher.push("go EN") == ("go ", None)
    assert matcher.push("D") == ("", None)
    assert matcher.push(" now and more") == ("", "END now")


def test_held_text_is_released_once_a_match_is_impossible() -> None:
    matcher = StopStrings(["END now"])
    assert matcher.push("END") == ("", None)
    assert matcher.push("ING") == ("ENDING", None)
    assert matcher.flush() == ""


def test_flush_releases_an_unfinished_stop() -> None:
    assert run(["abc"], ["xab"]) == (["x", "ab"], None)


def test_match_inside_a_failed_longer_match() -> None:
    """A naive matcher that restarts after a mismatch misses it."""
    assert run(["aab"], ["a", "a", "a", "b", "z"]) == (["", "", "a", ""], "aab")
    assert run(["abcd", "bc"], ["abce"]) == (["a"], "bc")


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert run(["c", "abc"], ["xabc"]) == (["x"], "abc")


alphabet = st.text("ab", min_size=1, max_size=5)


@given(st.lists(alphabet, min_size=0, max_size=4), st.text("abc", max_size=40), st.data())
def test_any_cutting_of_the_text_gives_the_same(stops: list[str], text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, stop = run(stops, pieces)
    assert ("".join(shown), stop) == expected(stops, text)


@given(st.lists(alphabet, min_size=1, max_size=4), st.lists(st.text("abc", max_size=6), max_size=10))
def test_nothing_shown_can_turn_out_to_be_part_of_a_stop(stops: list[str], pieces: list[str]) -> None:
    matcher, shown = StopStrings(stops), ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown += text
        if stop is not None:
            break
    assert expected(stops, "".join(pieces))[0].startswith(shown)
