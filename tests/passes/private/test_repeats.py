"""find_repeats: stretches that come several times in a row."""

import pytest

from dpquant_compile.passes.private.repeats import Repeat, find_repeats

FLAT = [0] * 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("xyabcabcabcz", [Repeat(2, 3, 3)]),
        ("abcabc", []),  # twice is too few
        ("aaaaaa", [Repeat(0, 2, 3)]),  # one token is too small
        ("abcabcabcabab", [Repeat(0, 3, 3)]),
        ("abababzcdecdecde", [Repeat(0, 2, 3), Repeat(7, 3, 3)]),
        ("abcdefgh", []),
        ("", []),
    ],
)
def test_runs_of_three_are_found_in_order(text: str, expected: list[Repeat]) -> None:
    assert list(find_repeats(text, FLAT, at_least=3, smallest=2)) == expected


def test_the_shortest_period_wins() -> None:
    assert find_repeats("abc" * 8, FLAT, at_least=3, smallest=2) == (Repeat(0, 3, 8),)


def test_edges_lie_where_least_is_alive() -> None:
    text = "bcabcabcabc"  # a run of eleven: three stretches of three can begin at one of three places
    live = [9, 9, 1, 9, 9, 1, 9, 9, 1, 9, 9, 1]
    (repeat,) = find_repeats(text, live, at_least=3, smallest=2)
    assert repeat.edges == (2, 5, 8, 11)
