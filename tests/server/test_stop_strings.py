"""Stop strings in any pieces of text agree with a brute-force reference on the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.server.text import StopStringFinder

letters = st.text("ab", max_size=20)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def twin(text: str, strings: list[str], include: bool) -> tuple[str, str | None]:
    """Reference: reads character by character and looks back after each."""
    for end in range(1, len(text) + 1):
        if endings := [string for string in strings if text[:end].endswith(string)]:
            longest = max(endings, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


@given(st.lists(letters, max_size=6), stop_strings, st.booleans())
def test_the_result_is_that_of_reading_the_whole_text_however_it_is_cut(
    pieces: list[str], strings: list[str], include: bool
) -> None:
    finder = StopStringFinder(strings, include_in_output=include)
    shown = ""
    for piece in pieces:
        shown += finder.feed(piece)
        if finder.found is not None:
            break
    else:
        shown += finder.flush()
    assert (shown, finder.found) == twin("".join(pieces), strings, include)


@given(letters, stop_strings)
def test_no_more_is_held_back_than_can_still_become_a_stop_string(text: str, strings: list[str]) -> None:
    finder = StopStringFinder(strings)
    shown = finder.feed(text)
    if finder.found is None:
        held = text[len(shown) :]
        ends = [text[start:] for start in range(len(text))]
        undecided = [end for end in ends if any(s.startswith(end) for s in strings)]
        assert held == max(undecided, key=len, default="")


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopStringFinder([]).feed("anything") == "anything"


@pytest.mark.parametrize(("include", "shown"), [(False, "the end"), (True, "the end.\n")])
def test_a_stop_string_is_shown_only_on_demand(include: bool, shown: str) -> None:
    finder = StopStringFinder([".\n"], include_in_output=include)
    assert finder.feed("the end") + finder.feed(".") + finder.feed("\nmore") == shown
    assert finder.found == ".\n"
