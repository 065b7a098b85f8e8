"""What a private program holds between forward and backward, and the masks of ReLUs that it works out again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn

import dpquant_compile as dpq
from dpquant_compile import pipeline
from dpquant_compile.backends.cpu_int8 import build as native
from dpquant_compile.errors import KernelError
from dpquant_compile.passes.fx_utils import read_attribute
from dpquant_compile.passes.private import free_saved_inputs as savings
from dpquant_compile.passes.private.pack_relu_masks import pack_relu_masks
from dpquant_compile.passes.private.recompute_relu_masks import recompute_relu_masks
from dpquant_compile.privacy.clipping import program
from dpquant_compile.privacy.clipping.program import PrivateProgram
from tests.support.heavy import few
from tests.support.private import clipped_sums, made_private

pytestmark = [
    pytest.mark.slow,  # Inductor compiles each of the programs
    pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable())),
]


class Residual(nn.Module):
    """Skip connections: from a map that a pooling made, then along a chain, then across a change of width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) for _ in range(4))
        self.down, self.side = nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(8, 16, 1, 2)
        self.norm_down, self.norm_side = nn.GroupNorm(4, 16), nn.GroupNorm(4, 16)
        self.last = nn.Conv2d(16, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        for i in (0, 2):
            y = torch.relu(self.norms[i](self.convs[i](x)))
            x = torch.relu(x + self.norms[i + 1](self.convs[i + 1](y)))
        x = torch.relu(self.norm_down(self.down(x)) + self.norm_side(self.side(x)))
        out: Tensor = self.last(x)
        return out


def plain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 9, 3), nn.ReLU(), nn.Flatten(), nn.Linear(9 * 64, 4)
    )


def perceptron() -> nn.Module:
    layers = (nn.Linear(3 * 144, 33), nn.ReLU(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 4))
    return nn.Sequential(nn.Flatten(), *layers)


def smooth() -> nn.Module:
    """GELU keeps what it is given, so that nothing asks for the inputs of the sites behind it."""
    return nn.Sequential(*(layer for i in range(3) for layer in (nn.Conv2d(8 if i else 3, 8, 3), nn.GELU())))


MODELS = {"residual": Residual, "plain": plain, "perceptron": perceptron, "smooth": smooth}


def made(build: Callable[[], nn.Module], **options: Any) -> dpq.CompiledModule:
    torch.manual_seed(0)
    return made_private(build(), 6, backend="auto", **options)[0]


@contextmanager
def interpreting() -> Iterator[None]:
    """The passes run, and Inductor does not: what a graph computes and holds is the same."""

    def interpret(gm: Any, kind: str, inner: str, recorder: Any) -> Any:
        return make_boxed_func(gm.forward)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "compile_graph", interpret)
        yield


@pytest.fixture
def interpreted() -> Iterator[None]:
    with interpreting():
        yield


@contextmanager
def quick(name: str) -> Iterator[None]:
    """Inductor takes half a minute for the largest of the models."""
    with interpreting() if name == "residual" else nullcontext():
        yield


@cache
def built(name: str) -> dpq.CompiledModule:
    """One of the models, compiled once; tests set its policy."""
    with quick(name):
        model = made(MODELS[name])
        clipped_sums(model, [batch()])
    return model


def batch() -> Tensor:
    return torch.randn(6, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def sums_under(model: dpq.CompiledModule, policy: "str | list[str]", x: Tensor) -> dict[str, Tensor]:
    model.set_policy(policy)
    return clipped_sums(model, [x])


@contextmanager
def without_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        others = (recompute_relu_masks, pack_relu_masks)
        kept = tuple(step for step in pipeline.COMPILED_JOINT_PASSES if step not in others)
        patch.setattr(pipeline, "COMPILED_JOINT_PASSES", kept)
        yield


class Watch:
    """Of every run of a program: the tensors it holds for backward and was not given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: list[list[Tensor]] = []
        forward = PrivateProgram.run_forward

        def watched(own: PrivateProgram, inputs: Any) -> Any:
            outputs, saved = forward(own, inputs)
            given = [read_attribute(own.spec.base, name) for name in own.spec.attributes]
            given += [*inputs.packed.values(), *inputs.args, *inputs.table, inputs.bounds, inputs.live]
            others = {t.untyped_storage()._cdata for t in (*given, *savings._ROOMS.values())}
            tensors = {t.untyped_storage()._cdata: t for t in saved if isinstance(t, Tensor)}
            self.held.append([t for key, t in tensors.items() if key not in others])
            return outputs, saved

        monkeypatch.setattr(PrivateProgram, "run_forward", watched)


def nbytes(tensors: list[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


# Elements of the inputs of all sites but the first, whose input is the batch; and of those that two sites share.
INPUTS = {
    "residual": (6 * (5 * 8 * 36 + 16 * 9), 6 * 8 * 36),
    "plain": (6 * (8 * 100 + 9 * 64), 0),
    "perceptron": (6 * (33 + 17), 0),
    "smooth": (6 * (8 * 100 + 8 * 64), 0),
}


@pytest.mark.parametrize("name", few(MODELS, "residual", "perceptron"))
def test_a_low_site_holds_at_most_three_tenths_of_its_input(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = built(name), batch()
    sums_under(model, "all", x)  # stand-ins share memory, which grows to the largest of them in the first run
    watch = Watch(monkeypatch)
    for policy in ("none", "all"):
        model.set_policy(policy)
        clipped_sums(model, [x])
    (full, low), (inputs, shared) = watch.held, INPUTS[name]
    assert nbytes(full) - nbytes(low) >= 4 * inputs  # all of the float32 inputs are gone
    codes = [t for t in low if t.dtype == torch.uint8]
    slack = native.load().slack * len(codes)  # behind the codes of a site, whatever its size
    assert nbytes(codes) - slack - x.numel() <= 0.3 * 4 * (inputs + shared)  # less the codes of the batch itself


@pytest.mark.parametrize("name", few(["residual", "plain", "perceptron"], "perceptron"))
def test_masks_worked_out_again_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = batch()
    with without_masks(monkeypatch), quick(name):
        before = made(MODELS[name])
        policies = ["none", "all", list(before.sites.names)[::2]]
        expected = [sums_under(before, policy, x) for policy in policies]
    for policy, sums in zip(policies, expected, strict=True):
        found = sums_under(built(name), policy, x)
        assert found.keys() == sums.keys()
        for key, value in sums.items():
            assert torch.equal(found[key], value), (policy, key)


def test_a_sample_with_nan_is_left_out_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a ReLU's output is NaN, its gradient goes through, in bits as in numbers."""
    x = batch()
    x[2, 0, 3, 3] = torch.nan
    with without_masks(monkeypatch):
        before = made(plain, policy="all")
        expected = clipped_sums(before, [x])
    found = sums_under(built("plain"), "all", x)
    for key, value in expected.items():
        assert value.isfinite().all() and torch.equal(found[key], value), key


@pytest.mark.parametrize("target", [("-march=native",), ("-march=haswell",), ("-mno-avx", "-mno-avx2")], ids="".join)
def test_bits_say_where_a_number_is_not_below_or_at_zero(
    target: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all sizes, of odd numbers, and laid out in any way."""
    if target != ("-march=native",) and not native.load().name.startswith("AVX"):
        pytest.skip("older instructions of x86-64")
    library = native.Library(native.build(target))
    monkeypatch.setattr(native, "load", lambda: library)
    low, sites = torch.tensor([True, True]), [0, 1]
    odd = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-42, -1e-42])
    generator = torch.Generator().manual_seed(3)
    shapes = [(n,) for n in (*range(1, 20), 8 << 12, (8 << 12) + 1, 99_999)] + [(3, 5, 7, 2)]
    for shape in shapes:
        x = torch.randn(shape, generator=generator)
        x.view(-1)[: min(7, x.numel())] = odd[: x.numel()]
        grad = torch.randn(shape, generator=generator)
        grad.view(-1)[0] = torch.nan  # behind a zero it must not come through
        x = x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x
        expected = torch.ops.aten.threshold_backward(grad, x, 0)
        bits = torch.ops.dpquant.positive_bits(x, low, sites)
        assert bits.numel() == (x.numel() + 7) // 8
        found = torch.ops.dpquant.relu_grad(torch.full_like(x, torch.nan), bits, grad, low, sites)
        assert torch.equal(found, expected) and found.stride() == x.stride()
        low[1] = False  # one of the two reads numbers: so does ReLU
        unread = torch.full_like(bits, 255)
        assert torch.equal(torch.ops.dpquant.relu_grad(x, unread, grad, low, sites), expected)
        low[1] = True


class Fork(nn.Module):
    """One ReLU before two sites, of which a policy may choose one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(5, 40), nn.Linear(40, 3), nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        out: Tensor = self.left(x) * self.right(x)
        return out


@pytest.mark.usefixtures("interpreted")
def test_an_input_of_two_sites_is_held_until_both_are_low(monkeypatch: pytest.MonkeyPatch) -> None:
    x, policies = torch.randn(6, 5, generator=torch.Generator().manual_seed(2)), [[], ["left"], ["left", "right"]]
    with without_masks(monkeypatch):
        before = made(Fork)
        expected = [sums_under(before, low, x) for low in policies]
    model, watch = made(Fork), Watch(monkeypatch)
    for low, sums in zip(policies, expected, strict=True):
        found = sums_under(model, low, x)
        assert all(torch.equal(found[key], value) for key, value in sums.items())
        assert any(t.shape == (6, 40) for t in watch.held[-1]) == (len(low) < 2)


class Compares(nn.Module):
    """Asks itself where the output of a ReLU is zero, which is what that ReLU's backward asks."""

    def __init__(self, dtype: torch.dtype = torch.float32, wide: bool = False) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(5, 12), nn.Linear(12, 3), nn.Linear(5, 12)
        self.dtype, self.wide = dtype, wide

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        other = self.right(x).to(self.dtype)
        if self.wide:  # wider than the mask
            other = torch.stack([other, 2 * other, -other], 1)
            return self.left(h) + other.masked_fill((h <= 0)[:, None], 0.0).sum((1, 2))[:, None]
        return self.left(h) + other.masked_fill(h <= 0, 0.0).float().sum(1, keepdim=True)


COMPARED: list[dict[str, Any]] = [{}, {"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"wide": True}]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("options", few(COMPARED, {"dtype": torch.float64}), ids=str)
def test_masks_of_the_model_are_its_own(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal nodes are merged. Numbers of eight bytes, read as floats, would be those of other samples."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    with without_masks(monkeypatch):
        expected = clipped_sums(made(lambda: Compares(**options), policy="all"), [x])
    model = made(lambda: Compares(**options), policy="all")
    found = clipped_sums(model, [x])
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    with torch.no_grad():
        before = model(x)
        x[1] += 1.0
        changed = (model(x) != before).any(1)
    assert changed.tolist() == [i == 1 for i in range(6)]


class Deep(nn.Module):
    """Many operations between a map and a ReLU: a chain, or diamonds, of which there are 3^n ways through."""

    def __init__(self, steps: int, diamonds: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 3)
        self.steps, self.diamonds = steps, diamonds

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        for _ in range(self.steps):
            h = h + 0.1 * h * (1 - h) if self.diamonds else h * 0.99 + 0.01
        out: Tensor = self.last(torch.relu(h))
        return out


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("steps", "diamonds"), few([(300, False), (30, True), (2, True)], (30, True), (2, True)))
def test_long_ways_to_a_mask_are_not_gone_again(steps: int, diamonds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = batch()
    with without_masks(monkeypatch):
        expected = clipped_sums(made(lambda: Deep(steps, diamonds), policy="all"), [x])
    model = made(lambda: Deep(steps, diamonds), policy="all")
    found = clipped_sums(model, [x])
    packed = [r.ops.get("positive_bits.default", 0) for r in model.trace_log() if r.name == "pack_relu_masks"]
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert packed == [int(steps > 2)]  # a bit for each element instead


def test_a_gradient_that_is_not_like_the_output_is_refused() -> None:
    """Its memory would be read as that of other samples."""
    x, low = torch.randn(4, 6), torch.tensor([True])
    bits = torch.ops.dpquant.positive_bits(x, low, [0])
    for grad in (torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 1)):
        with pytest.raises(KernelError, match="a gradient"):
            torch.ops.dpquant.relu_grad(x, bits, grad, low, [0])
    with pytest.raises(KernelError, match="strides"):
        torch.ops.dpquant.positive_bits(torch.randn(4, 12)[:, ::2], low, [0])
