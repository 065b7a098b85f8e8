"""Accountants: an ε that is a bound, or a failure that is reported."""

import math

import pytest
from opacus.accountants import PRVAccountant

from dpquant_compile.privacy.accounting.accountants import composed_epsilon
from tests.support.ledgers import DELTA


@pytest.mark.parametrize("answer", [RuntimeError("Cannot compute epsilon"), math.nan, math.inf])
def test_prv_that_fails_is_replaced_by_rdp_and_says_so(monkeypatch, answer):
    def get_epsilon(self, delta, **_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(PRVAccountant, "get_epsilon", get_epsilon)
    history = ((1.0, 0.02, 10),)
    with pytest.warns(RuntimeWarning, match="PRV accountant failed.*RDP"):
        epsilon = composed_epsilon("prv", history, DELTA)
    assert epsilon == composed_epsilon("rdp", history, DELTA)


@pytest.mark.parametrize(("sigma", "steps"), [(0.01, 1), (0.05, 1000), (1.0, 10**9)])
def test_what_prv_cannot_hold_is_left_to_rdp(sigma, steps):
    with pytest.warns(RuntimeWarning, match="PRV accountant failed"):
        assert 100 < composed_epsilon("prv", ((sigma, 0.02, steps),), DELTA) < math.inf


def test_what_no_accountant_can_hold_is_infinite():
    with pytest.warns(RuntimeWarning, match="RDP accountant failed"):
        assert composed_epsilon("rdp", ((1e-200, 0.02, 1),), DELTA) == math.inf


def test_without_spends_epsilon_is_zero_and_without_noise_infinite():
    for accountant in ("prv", "rdp", "gdp"):
        assert composed_epsilon(accountant, (), DELTA) == 0.0
        assert composed_epsilon(accountant, ((0.0, 0.02, 1),), DELTA) == math.inf
