"""Products of operands that no recipe rounds: in the model's precision, and in bfloat16."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dpquant_compile.backends.reference.products import FULL, products_at
from dpquant_compile.numerics.recipe import Precision
from dpquant_compile.sites import ConvGeometry

BFLOAT16 = products_at(Precision.BFLOAT16)
GEOMETRIES = {
    "linear": None,
    "conv1d": ConvGeometry((1,), (1,), (1,), 1),
    "conv2d": ConvGeometry((2, 1), (1, 1), (1, 1), 1),
    "grouped": ConvGeometry((1, 1), (1, 1), (1, 1), 2),
    "dilated": ConvGeometry((1, 1), (2, 2), (2, 2), 1),
    "conv3d": ConvGeometry((1, 1, 1), (1, 1, 1), (1, 1, 1), 1),
}
STEP = 2.0**-8  # of a number in bfloat16, relative to it


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def operands(name: str, channels: int = 6) -> tuple[str, ConvGeometry | None, Tensor, Tensor, Tensor]:
    """Operator, geometry, input, weight and bias."""
    geometry = GEOMETRIES[name]
    if geometry is None:
        return "linear", None, normal(5, 3, channels), normal(4, channels), normal(4)
    rank = len(geometry.stride)
    weight = normal(4, channels // geometry.groups, *(3,) * rank)
    return f"conv{rank}d", geometry, normal(5, channels, *(6,) * rank), weight, normal(4)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_operands_are_rounded_to_bfloat16_and_results_are_float32(name: str) -> None:
    """Beside full-precision products of rounded operands; what differs is the rounding of the sums."""
    op, geometry, x, weight, bias = operands(name)
    rounded = [part.bfloat16().double() for part in (x, weight)]
    y = BFLOAT16.forward(op, geometry, x, weight, bias)
    exact = FULL.forward(op, geometry, *rounded, None)
    scale = exact.abs().max()
    assert y.dtype == torch.float32
    without = BFLOAT16.forward(op, geometry, x, weight, None)
    assert without.dtype == torch.float32 and (without - exact).abs().max() <= STEP * scale
    features = -1 if geometry is None else 1
    each = bias.reshape([-1 if d == features % y.dim() else 1 for d in range(y.dim())])
    assert torch.equal(y, without + each), "the bias is added in float32"
    grad = normal(*y.shape)
    dx = BFLOAT16.grad_input(geometry, grad, x, weight)
    exact = FULL.grad_input(geometry, grad.bfloat16().double(), x.double(), rounded[1])
    assert dx.dtype == torch.float32 and dx.shape == x.shape
    assert (dx - exact).abs().max() <= STEP * exact.abs().max()


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_what_bfloat16_cannot_tell_apart_gives_the_same_bits(name: str) -> None:
    op, geometry, x, weight, bias = operands(name)
    near = x.bfloat16().float(), weight.bfloat16().float()
    assert not torch.equal(near[0], x)
    assert torch.equal(BFLOAT16.forward(op, geometry, *near, bias), BFLOAT16.forward(op, geometry, x, weight, bias))
    assert not torch.equal(FULL.forward(op, geometry, *near, bias), FULL.forward(op, geometry, x, weight, bias))


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_gradients_of_parameters_stay_in_full_precision(name: str) -> None:
    op, geometry, x, weight, bias = operands(name)
    grad = normal(*FULL.forward(op, geometry, x, weight, bias).shape)
    for a, b in zip(
        BFLOAT16.grad_params(geometry, grad, x, weight, (True, True)),
        FULL.grad_params(geometry, grad, x, weight, (True, True)),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_left_as_they_are(dtype: torch.dtype) -> None:
    for name in ("linear", "conv2d"):
        op, geometry, x, weight, bias = operands(name)
        x, weight, bias = (part.to(dtype) for part in (x, weight, bias))
        y = BFLOAT16.forward(op, geometry, x, weight, bias)
        assert y.dtype == dtype and torch.equal(y, FULL.forward(op, geometry, x, weight, bias))
        dx = BFLOAT16.grad_input(geometry, y, x, weight)
        assert dx.dtype == dtype and torch.equal(dx, FULL.grad_input(geometry, y, x, weight))


def test_only_one_precision_multiplies_in_bfloat16() -> None:
    assert [products_at(precision) is FULL for precision in Precision] == [True, True, True, False]


# One sample's results whatever else is in the batch


def cancelling(name: str, count: int, width: int) -> tuple[str, ConvGeometry | None, Tensor, Tensor]:
    """Inputs whose large terms all but cancel in each sum, so that another order of adding would show."""
    op, geometry, _, weight, _ = operands(name, 2)
    generator = torch.Generator().manual_seed(count * width)
    places = (3,) if geometry is None else (6, 6)
    parts = [torch.randn(count, width, *places, generator=generator) for _ in range(2)]
    large = parts[0].bfloat16().float() * 2.0**17
    x = torch.cat([large, parts[1], -large], 1)
    taps = tuple(weight.shape[2:])
    first, middle = (torch.randn(4, width, *taps, generator=generator) for _ in range(2))
    weight = torch.cat([first, middle, first], 1)
    x = x.transpose(1, 2) if geometry is None else x.contiguous(memory_format=torch.channels_last)
    return op, geometry, x.contiguous() if geometry is None else x, weight


def moved(product: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """How many numbers of other samples change when the first sample leaves and another comes in at the end."""
    layout: Any = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    other = torch.cat([x[1:], 100 * x[:1].flip(-1)]).contiguous(memory_format=layout)
    return int((product(x)[1:] != product(other)[:-1]).sum())


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="no bfloat16 products on this CPU")
@pytest.mark.parametrize("width", [1, 5, 17, 64])
@pytest.mark.parametrize("name", ["linear", "conv2d", "dilated"])
def test_a_samples_products_do_not_depend_on_its_place(name: str, width: int) -> None:
    """To the bit: rounding would make a whole step of a last bit. In float32 some linears of these sizes do depend."""
    for count in (2, 5, 13, 16, 33):
        op, geometry, x, weight = cancelling(name, count, width)
        assert moved(lambda rows: BFLOAT16.forward(op, geometry, rows, weight, None), x) == 0  # noqa: B023
        # The gradient of an input [B, …, 4] is a product with the same numbers, turned round.
        turned = weight.t().contiguous() if geometry is None else weight.transpose(0, 1).contiguous()
        if geometry is None:
            assert moved(lambda rows: BFLOAT16.grad_input(None, rows, torch.empty(*rows.shape[:2], 4), turned), x) == 0  # noqa: B023
        elif geometry.stride == (1, 1):
            like = torch.empty(count, 4, 6, 6).contiguous(memory_format=torch.channels_last)
            assert moved(lambda rows: BFLOAT16.grad_input(geometry, rows, like, turned), x) == 0  # noqa: B023


def test_a_sample_that_is_not_finite_spoils_no_other() -> None:
    for name in ("linear", "conv2d"):
        op, geometry, x, weight, bias = operands(name)
        usual = BFLOAT16.forward(op, geometry, x, weight, bias)
        for value in (torch.nan, torch.inf, 3.4e38):  # the last one is infinity in bfloat16
            x[2].view(-1)[3] = value
            found = BFLOAT16.forward(op, geometry, x, weight, bias)
            kept = [0, 1, 3, 4]
            assert torch.equal(found[kept], usual[kept]) and not found[2].isfinite().all()


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of torch's switch
def test_processors_without_bfloat16_have_the_same_rounding() -> None:
    """Slower, in torch's own loops, which add the taps of a conv's input gradient in bfloat16."""
    for name in GEOMETRIES:
        op, geometry, x, weight, bias = operands(name)
        y = BFLOAT16.forward(op, geometry, x, weight, bias)
        dx = BFLOAT16.grad_input(geometry, y, x, weight)
        with torch.backends.mkldnn.flags(enabled=False):
            plain = BFLOAT16.forward(op, geometry, x, weight, bias)
            back = BFLOAT16.grad_input(geometry, y, x, weight)
        assert (plain - y).abs().max() <= STEP * y.abs().max(), name
        assert (back - dx).abs().max() <= (1 if geometry is None else 8) * STEP * dx.abs().max(), name
