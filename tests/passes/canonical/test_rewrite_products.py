"""rewrite_products: linears in other clothes become linears, and everything else stays as it is."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from dpquant_compile.passes.canonical.mark_sites import collect_sites
from dpquant_compile.passes.canonical.rewrite_products import rewrite_products
from tests.support.matrix_models import SPELLINGS, Spelled, TiedBothWays
from tests.support.models import after, canonical, gradients, program, seeded, traced


class Matrices(nn.Module):
    """A model of one function with parameters a and w."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.w, self.a = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 6))
        self.stack, self.register = nn.Parameter(torch.randn(3, 6, 4)), self.register_buffer("fixed", torch.eye(6))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def test_golden() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = torch.addmm(self.b, x, self.w)
        y = torch.einsum("bi,oi->bo", y, self.u)
        return self.u @ y

    model = Matrices(forward)
    model.u, model.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    assert_expected_inline(
        program(after(traced(model), rewrite_products)),
        """\
def forward(self, x : torch.Tensor) -> typing_Any:
    b = self.b
    w = self.w
    t = torch.t(w)
    linear = torch._C._nn.linear(x, t, b)
    u = self.u
    linear_1 = torch._C._nn.linear(linear, u, None)
    swap_last = dpquant_compile_passes_canonical_rewrite_products_swap_last(linear_1)
    linear_2 = torch._C._nn.linear(swap_last, u, None)
    swap_last_1 = dpquant_compile_passes_canonical_rewrite_products_swap_last(linear_2)
    contiguous = swap_last_1.contiguous()
    return contiguous""",
    )


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_a_site_with_the_same_results(spelling: str) -> None:
    model, x = seeded(lambda: Spelled(spelling)), torch.randn(5, 3, 6)
    gm = canonical(model)
    (site,) = collect_sites(gm)
    assert site.op == "linear" and site.weight_shape == (4, 6) and site.name == site.weight
    assert site.transposed == (site.weight == "w")
    parameters = list(model.parameters())
    torch.testing.assert_close(gradients(gm, [x], parameters), gradients(model, [x], parameters))


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: x @ x.transpose(1, 2),
        lambda self, x: x @ (self.a @ self.w),
        lambda self, x: x @ self.fixed,
        lambda self, x: torch.bmm(x, self.stack),
        lambda self, x: torch.einsum("bti,io->bo", x, self.w),
        lambda self, x: torch.einsum("bti,bi->bt", x, self.a),
        lambda self, x: torch.einsum("bti,ii->bt", x, self.a),
        lambda self, x: torch.einsum("...i,io->o...", x, self.w),
        lambda self, x: torch.tensordot(x, self.a, 2),
        lambda self, x: F.linear(x, self.a),
    ],
    ids=["batch", "of a product", "buffer", "stack", "sum", "rows", "trace", "ellipsis", "two dimensions", "linear"],
)
def test_other_products_are_left_alone(function: Any) -> None:
    gm = traced(Matrices(function))
    code = gm.code
    result = rewrite_products(gm)
    gm.recompile()
    assert not result.modified and gm.code == code


def test_a_matrix_used_both_ways_is_two_sites() -> None:
    first, second = collect_sites(canonical(TiedBothWays()))
    assert (first.name, first.weight_shape, first.transposed) == ("table", (7, 4), False)
    assert (second.weight, second.weight_shape, second.transposed) == ("table.weight", (4, 7), True)
