"""Algorithm 2: scores to [0, 1], softmax, and draws without replacement with the distribution that this has exactly."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpquant_compile.errors import PrivacySpecError
from dpquant_compile.privacy.schedule.selection import NORMALISATIONS, draw, lowest, normalised, probabilities

# Numbers as noised scores are: finite, of any size that sums do not overflow, and often equal.
SCORES = st.lists(st.floats(-1e30, 1e30).map(lambda v: float(f"{v:.4g}")), min_size=1, max_size=12)

# Normalising


def test_minmax_is_the_published_formula() -> None:
    assert normalised([3.0, 1.0, 2.0, 5.0]) == [0.5, 0.0, 0.25, 1.0]
    assert normalised([-0.3, -0.1]) == [0.0, 1.0]


def test_rank_knows_order_only_and_ties_share_their_rank() -> None:
    assert normalised([10.0, -5.0, 1e9], "rank") == [0.5, 0.0, 1.0]
    # Places 0, 1½ twice, 3: over a range of 3.
    assert normalised([2.0, 7.0, 2.0, 1.0], "rank") == [0.5, 1.0, 0.5, 0.0]
    # Two lowest at ½, two highest at 2½.
    assert normalised([1.0, 1.0, 4.0, 4.0], "rank") == [0.0, 0.0, 1.0, 1.0]
    assert normalised([1.0, 1.0, 1.0, 4.0], "rank") == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("how", NORMALISATIONS)
def test_all_equal_scores_are_all_zero(how: str) -> None:
    """The published formula divides by zero here; before the first analysis every score is 0, and all are alike."""
    assert normalised([0.7] * 4, how) == [0.0] * 4
    assert normalised([0.7], how) == [0.0]
    assert probabilities([0.7] * 4, 10.0, how) == [0.25] * 4


def test_one_outlier_leaves_the_rest_alike_under_minmax_and_not_under_rank() -> None:
    scores = [0.0, 0.01, 0.02, 100.0]
    assert max(normalised(scores)[:3]) < 1e-3
    assert normalised(scores, "rank") == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_an_unknown_normalisation_is_refused() -> None:
    with pytest.raises(PrivacySpecError, match="minmax, rank"):
        normalised([1.0, 2.0], "zscore")


@given(SCORES, st.sampled_from(NORMALISATIONS))
def test_normalised_scores_keep_order_and_span_the_interval(scores: list[float], how: str) -> None:
    values = normalised(scores, how)
    assert all(0.0 <= value <= 1.0 for value in values)
    if len(set(scores)) > 1:
        assert min(values) == 0.0 and max(values) == 1.0
    for (a, u), (b, v) in itertools.combinations(zip(scores, values, strict=True), 2):
        assert u <= v if a <= b else u >= v
        assert (u == v) if a == b else True
        assert (u != v) if a != b and how == "rank" else True


# Probabilities


def test_probabilities_are_the_softmax_of_minus_beta_v() -> None:
    chances = probabilities([0.0, 2.0, 4.0], 3.0)
    weights = [math.exp(-3.0 * v) for v in (0.0, 0.5, 1.0)]
    assert chances == pytest.approx([w / sum(weights) for w in weights], rel=1e-12)


def test_beta_zero_is_uniform_and_a_large_beta_is_greedy() -> None:
    scores = [0.4, -0.2, 0.9, 0.1, 0.5]
    assert probabilities(scores, 0.0) == pytest.approx([0.2] * 5)
    rng = random.Random(0)
    for _ in range(200):
        chosen = draw(probabilities(scores, 700.0), 3, rng)
        assert chosen == lowest(scores, 3, rng) == [1, 3, 0]


def test_an_infinite_beta_gives_probabilities_and_not_nan() -> None:
    """It is what the scheduler calls "greedy"; what it shows must be a distribution all the same."""
    assert probabilities([2.0, 1.0, 3.0], math.inf) == [0.0, 1.0, 0.0]
    assert probabilities([1.0, 1.0, 3.0, 1.0], math.inf) == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert probabilities([1.0, 1.0], math.inf) == [0.5, 0.5]


@given(SCORES, st.floats(0, 50), st.sampled_from(NORMALISATIONS))
def test_probabilities_add_up_and_prefer_lower_scores(scores: list[float], beta: float, how: str) -> None:
    chances = probabilities(scores, beta, how)
    assert sum(chances) == pytest.approx(1.0) and min(chances) > 0
    for (a, p), (b, q) in itertools.combinations(zip(scores, chances, strict=True), 2):
        assert p >= q if a <= b else p <= q


# Drawing


def plackett_luce(chances: Sequence[float], count: int) -> dict[tuple[int, ...], float]:
    """The chance of each ordered draw without replacement: Π p_i / (1 − those drawn before), by its definition."""
    exact = {}
    for order in itertools.permutations(range(len(chances)), count):
        chance, left = 1.0, sum(chances)
        for i in order:
            chance *= chances[i] / left
            left -= chances[i]
        exact[order] = chance
    return exact


@pytest.mark.parametrize(
    ("chances", "count"),
    [
        ([0.5, 0.3, 0.2], 1),
        ([0.5, 0.3, 0.2], 2),
        ([0.1, 0.2, 0.3, 0.4], 3),
        (probabilities([0.1, 0.5, 0.2, 0.9, 0.3], 2.0), 2),
        (probabilities([0.0] * 4, 10.0), 4),
    ],
)
def test_draws_follow_the_exact_distribution_without_replacement(chances: list[float], count: int) -> None:
    rng, n = random.Random(3), 40_000
    seen = Counter(tuple(draw(chances, count, rng)) for _ in range(n))
    exact = plackett_luce(chances, count)
    assert set(seen) <= set(exact)
    observed = [seen[order] for order in exact]
    result = stats.chisquare(observed, [n * chance for chance in exact.values()])
    assert result.pvalue > 1e-3


def test_the_chi_square_test_would_notice_a_wrong_draw() -> None:
    """The usual mistake, the k highest of p_i · u_i, has other odds; if this passed, the test above would be blind."""
    chances, rng, n = [0.1, 0.2, 0.3, 0.4], random.Random(3), 40_000
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(n):
        keys = [chance * rng.random() for chance in chances]
        seen[tuple(sorted(range(4), key=lambda i: -keys[i])[:3])] += 1
    exact = plackett_luce(chances, 3)
    assert stats.chisquare([seen[o] for o in exact], [n * c for c in exact.values()]).pvalue < 1e-6


def test_chances_that_have_underflowed_are_drawn_from_alike() -> None:
    rng = random.Random(0)
    seen = Counter(draw([1.0, 0.0, 0.0, 0.0], 2, rng)[1] for _ in range(3000))
    assert draw([1.0, 0.0, 0.0, 0.0], 2, rng)[0] == 0
    assert set(seen) == {1, 2, 3} and stats.chisquare([seen[i] for i in (1, 2, 3)]).pvalue > 1e-3


@settings(max_examples=50)
@given(SCORES, st.floats(0, 1000), st.data())
def test_a_draw_is_of_distinct_members_and_as_many_as_asked(
    scores: list[float], beta: float, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(scores)))
    seed = data.draw(st.integers(0, 1000))
    chances = probabilities(scores, beta)
    chosen = draw(chances, count, random.Random(seed))
    assert len(set(chosen)) == len(chosen) == count and set(chosen) <= set(range(len(scores)))
    assert chosen == draw(chances, count, random.Random(seed))


# Greedy


def test_greedy_takes_the_lowest_and_breaks_ties_at_random() -> None:
    rng, n = random.Random(5), 6000
    assert lowest([0.3, 0.1, 0.2], 2, rng) == [1, 2]
    seen = Counter(frozenset(lowest([1.0, 0.0, 1.0, 1.0, 5.0], 2, rng)) for _ in range(n))
    assert set(seen) == {frozenset({1, i}) for i in (0, 2, 3)}
    assert stats.chisquare(list(seen.values())).pvalue > 1e-3


@given(SCORES, st.data())
def test_greedy_leaves_no_lower_score_out(scores: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(scores)))
    chosen = lowest(scores, count, random.Random(0))
    assert len(set(chosen)) == count
    assert sorted(scores[i] for i in chosen) == sorted(scores)[:count]
