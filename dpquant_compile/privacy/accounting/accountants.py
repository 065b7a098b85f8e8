"""Accountants: from what was spent to ε, by one accountant over all of it, with every failure of one reported."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from opacus.accountants import RDPAccountant, create_accountant
from opacus.accountants.analysis import gdp, rdp

from dpquant_compile.errors import PrivacySpecError
from dpquant_compile.privacy.accounting.epsilon import History

__all__ = ["ACCOUNTANTS", "check_accountant", "composed_epsilon", "opacus_accountant"]

ACCOUNTANTS = ("prv", "rdp", "gdp")


def check_accountant(accountant: str) -> None:
    """Raise for a name that is not an accountant's."""
    if accountant not in ACCOUNTANTS:
        raise PrivacySpecError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, not {accountant!r}.")


def opacus_accountant(accountant: str, history: History) -> Any:
    """Opacus' accountant of that name, filled with the history."""
    if accountant == "gdp" and len(history) > 1:
        pairs = ", ".join(f"(σ={sigma:g}, q={q:g})" for sigma, q, _ in history)
        raise PrivacySpecError(
            f"The GDP accountant composes one pair of noise multiplier and sampling rate, and here are {len(history)}: "
            f"{pairs}. Fix: use accountant='prv' or accountant='rdp'."
        )
    with warnings.catch_warnings():
        # The ledger warns once, when it is made, that GDP is experimental.
        warnings.filterwarnings("ignore", message="GDP accounting is experimental")
        filled = create_accountant(accountant)
    filled.history = list(history)
    return filled


def composed_epsilon(accountant: str, history: History, delta: float) -> float:
    """ε of the whole history at `delta`, by one accountant.

    Without spends it is 0; a mechanism without noise gives infinity. Where PRV fails, RDP replaces it, with a
    RuntimeWarning: its ε is an upper bound too, but a looser one. Where RDP fails too, ε is infinity.

    Guarantee: no number of an accountant that failed is used; ε then becomes a looser bound or infinity.
    """
    if not history:
        return 0.0
    if any(sigma == 0 for sigma, _, _ in history):
        return math.inf
    if accountant == "gdp":
        return _gdp_epsilon(history, delta)
    if accountant == "prv":
        try:
            return _prv_epsilon(history, delta)
        except Exception as error:  # after any failure the accountant's numbers must not be used
            warnings.warn(
                f"Opacus' PRV accountant failed on (σ, q, steps) = {list(history)} with {type(error).__name__}: "
                f"{error}. ε is from the RDP accountant instead, which is a valid but looser bound.",
                RuntimeWarning,
                stacklevel=2,
            )
    try:
        return _rdp_epsilon(history, delta)
    except (ArithmeticError, ValueError, Warning) as error:
        warnings.warn(
            f"Opacus' RDP accountant failed on (σ, q, steps) = {list(history)} with {type(error).__name__}: {error}. "
            "No finite ε can be stated: it is taken to be infinite.",
            RuntimeWarning,
            stacklevel=2,
        )
        return math.inf


# Losses beyond this overflow exp() in double precision.
MAX_LOSS = 700.0
# Limit on the points of the grid of privacy losses: 64 MiB per array, PRV holds about ten; takes up to a minute.
MAX_GRID = 2**23
PRV_ERROR = 0.01  # on ε, and added to the estimate. Opacus' default, written out because the grid depends on it.


@functools.lru_cache(maxsize=4096)  # a second of work each; runs that differ only in their seed repeat it
def _prv_epsilon(history: History, delta: float) -> float:
    # The grid reaches as far as the RDP bound at a much smaller δ; its mesh is as in PRVAccountant._get_domain. Check
    # its size first: the accountant would exhaust the memory before it fails.
    delta_error = delta / 1000
    reach = _rdp_epsilon(history, delta_error / 4) + 3
    if not reach < MAX_LOSS:
        raise OverflowError(f"privacy losses up to {reach:.4g} do not fit double precision")
    steps = sum(count for _, _, count in history)
    points = 2 * reach / PRV_ERROR * math.sqrt(steps * math.log(12 / delta_error) / 2)
    if points > MAX_GRID:
        raise OverflowError(f"a grid of {points:.3g} privacy losses is too large")
    # At q = 1 the lowest loss is log(1 - q) = -inf, as intended; elsewhere a division by zero is a fault.
    whole = any(q == 1 for _, q, _ in history)
    epsilon = _strictly(
        lambda: opacus_accountant("prv", history).get_epsilon(delta, eps_error=PRV_ERROR, delta_error=delta_error),
        divide="ignore" if whole else "raise",
    )
    if not math.isfinite(epsilon):
        raise FloatingPointError(f"ε came out as {epsilon}")
    return max(0.0, epsilon)


def _rdp_epsilon(history: History, delta: float) -> float:
    def epsilon() -> Any:
        spent = sum(_rdp_of_one(sigma, q) * steps for sigma, q, steps in history)
        return rdp.get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=spent, delta=delta)[0]

    value = _strictly(epsilon, divide="raise")
    return math.inf if math.isnan(value) else max(0.0, value)


@functools.lru_cache(maxsize=64)
def _rdp_of_one(sigma: float, q: float) -> Any:
    """RDP of one step. `RDPAccountant` computes it again for every ε, though it does not depend on the steps."""
    return rdp.compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=RDPAccountant.DEFAULT_ALPHAS)


def _gdp_epsilon(history: History, delta: float) -> float:
    accountant = opacus_accountant("gdp", history)
    ((sigma, q, steps),) = history
    try:
        mu = gdp.compute_mu_poisson(steps=steps, noise_multiplier=sigma, sample_rate=q)
        if gdp.delta_eps_mu(eps=0, mu=mu) <= delta:
            return 0.0  # Opacus searches a root above 0, finds none, and raises
        return float(_strictly(lambda: accountant.get_epsilon(delta), divide="raise"))
    except (ArithmeticError, ValueError, Warning) as error:
        raise PrivacySpecError(
            f"The GDP accountant cannot account for σ={sigma:g}, q={q:g}, {steps} steps ({type(error).__name__}: "
            f"{error}). Fix: use accountant='prv' or accountant='rdp'."
        ) from error


def _strictly(compute: Callable[[], Any], divide: Any) -> float:
    """The result of `compute`, with floating-point faults and warnings, except one, raised as errors."""
    with np.errstate(over="raise", invalid="raise", divide=divide), warnings.catch_warnings():
        warnings.simplefilter("error")
        # RDP minimises over a fixed list of orders; at its ends ε is still a valid bound, only not the tightest. This
        # is common after a few steps and cannot be avoided here; PRV uses it only for the size of its grid.
        warnings.filterwarnings("ignore", message="Optimal order is the (smallest|largest) alpha")
        return float(compute())
