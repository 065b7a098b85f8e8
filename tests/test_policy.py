"""Budgets and policies."""

import copy
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpquant_compile.errors import BudgetError, DPQuantError, SiteError
from dpquant_compile.policy import Policy, draw_policy, resolve_budget, resolve_policy

NAMES = ("stem", "layer.0", "layer.1", "layer.2", "fc")


@pytest.mark.parametrize(
    ("budget", "k"),
    [(0, 0), (3, 3), (5, 5), (0.0, 0), (1.0, 5), (0.75, 4), (0.5, 3), (0.1, 1), (0.09, 0), (np.int64(2), 2)],
)
def test_budget_is_a_count_or_a_fraction(budget: Any, k: int) -> None:
    assert resolve_budget(budget, NAMES) == k


def test_budget_takes_other_numbers() -> None:
    assert resolve_budget(Fraction(2, 5), NAMES) == 2
    assert resolve_budget(np.float32(1.0), NAMES) == 5


@pytest.mark.parametrize(
    "budget", [-1, 6, 1.5, -0.1, float("nan"), float("inf"), True, False, "3", None, [1], 1j, np.bool_(True)], ids=repr
)
def test_bad_budget_says_n_and_lists_the_sites(budget: Any) -> None:
    with pytest.raises(BudgetError) as info:
        resolve_budget(budget, NAMES)
    assert isinstance(info.value, ValueError)
    message = str(info.value)
    assert repr(budget) in message
    assert "n = 5" in message
    assert all(name in message for name in NAMES)


@pytest.mark.parametrize("budget", [1, 0.5])
def test_a_model_without_sites_is_an_error(budget: float) -> None:
    with pytest.raises(BudgetError, match=r"nothing to quantize.*n = 0 sites.*sites="):
        resolve_budget(budget, ())


def test_none_of_no_sites_is_fine() -> None:
    assert resolve_budget(0, ()) == 0


def test_long_lists_of_sites_are_cut() -> None:
    with pytest.raises(BudgetError, match=r"n = 100 sites: s0, .*, s59, and 40 more"):
        resolve_budget(-1, [f"s{i}" for i in range(100)])


@given(st.floats(0, 1), st.integers(1, 200))
def test_fractions_round_to_the_nearest_count(fraction: float, n: int) -> None:
    k = resolve_budget(fraction, [str(i) for i in range(n)])
    assert 0 <= k <= n
    assert abs(k - fraction * n) <= 0.5 + 1e-9


def test_policy_words() -> None:
    assert resolve_policy("all", NAMES) == set(NAMES)
    assert resolve_policy("none", NAMES) == set()
    assert resolve_policy("fc", NAMES) == {"fc"}
    assert resolve_policy(iter(["fc", "stem", "fc"]), NAMES) == {"fc", "stem"}
    once = resolve_policy(["fc"], NAMES)
    assert resolve_policy(once, NAMES) == once


@pytest.mark.parametrize("wrong", ["layer", ["fc", "nope"], ["ALL"], [""]], ids=repr)
def test_unknown_site_lists_the_choices(wrong: Any) -> None:
    with pytest.raises(SiteError) as info:
        resolve_policy(wrong, NAMES)
    message = str(info.value)
    assert isinstance(info.value, KeyError)
    assert message.startswith("no such site: "), "a KeyError would print the repr of its message"
    assert "5 sites: stem, layer.0, layer.1, layer.2, fc" in message


@pytest.mark.parametrize("wrong", [[1], [None, "fc", 2], 3], ids=repr)
def test_policy_of_things_that_are_no_names(wrong: Any) -> None:
    with pytest.raises(DPQuantError):
        resolve_policy(wrong, NAMES)


@pytest.mark.parametrize(
    ("chosen", "text"),
    [("none", "none"), ("all", "all"), (["stem"], "1of5:1"), (["fc"], "1of5:10"), (["fc", "layer.0"], "2of5:12")],
)
def test_str_is_short_and_stable(chosen: Any, text: str) -> None:
    assert str(resolve_policy(chosen, NAMES)) == text


def test_str_tells_policies_apart() -> None:
    every = [Policy([n for i, n in enumerate(NAMES) if bits >> i & 1], NAMES) for bits in range(32)]
    assert len({str(policy) for policy in every}) == 32


def test_repr_names_the_sites_in_graph_order() -> None:
    assert repr(resolve_policy(["fc", "stem"], NAMES)) == "Policy(2of5:11: stem, fc)"
    many = [f"s{i}" for i in range(20)]
    assert repr(resolve_policy("all", many)).endswith("s7, and 12 more)")


def test_mask_follows_the_universe() -> None:
    assert resolve_policy(["fc", "layer.0"], NAMES).mask == (False, True, False, False, True)


@pytest.mark.parametrize("again", [lambda p: pickle.loads(pickle.dumps(p)), copy.copy, copy.deepcopy])
def test_policy_survives_copies(again: Any) -> None:
    policy = resolve_policy(["fc", "layer.2"], NAMES)
    other = again(policy)
    assert type(other) is Policy
    assert other == policy and hash(other) == hash(policy)
    assert other.universe == NAMES and str(other) == str(policy)


def test_policy_is_a_frozen_set() -> None:
    policy = resolve_policy(["fc"], NAMES)
    assert isinstance(policy, frozenset)
    assert not hasattr(policy, "add")
    assert {policy: 1}[resolve_policy("fc", NAMES)] == 1


def test_universe_cannot_be_replaced() -> None:
    policy = resolve_policy(["fc"], NAMES)
    with pytest.raises(AttributeError):
        policy.universe = ("fc",)


@pytest.mark.parametrize("k", range(6))
def test_first_policy_is_a_reproducible_draw(k: int) -> None:
    policy = draw_policy(k, NAMES, seed=7)
    assert len(policy) == k
    assert policy == draw_policy(k, NAMES, seed=7)


def test_first_policy_is_uniform_over_subsets() -> None:
    counts: dict[str, int] = {}
    for seed in range(2000):
        text = str(draw_policy(2, NAMES, seed))
        counts[text] = counts.get(text, 0) + 1
    assert len(counts) == 10
    assert all(140 <= count <= 260 for count in counts.values()), counts
