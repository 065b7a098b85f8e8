"""The Triton kernels against the reference, bit for bit, in Triton's interpreter; that they compile for GPUs; and the
choice of a GPU kernel.

Triton reads TRITON_INTERPRET when it is imported, and Inductor imports it in other tests. So the kernels run in
processes of their own, which live as long as the tests of this module.
"""

import importlib.util
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpquant_compile.backends import triton_fp4
from dpquant_compile.backends.triton_fp4 import NEVER_RUN, gpu_kernel_for
from dpquant_compile.errors import KernelError
from dpquant_compile.numerics.formats import get_format
from dpquant_compile.numerics.packing import decode, encode, pack4, unpack4
from dpquant_compile.numerics.quantize import quantize_parts
from dpquant_compile.numerics.random_bits import random_bits, sample_keys, site_keys
from dpquant_compile.sites import BatchAxis

pytestmark = pytest.mark.slow  # in the interpreter of Triton, in processes of their own

Call = Callable[..., Any]
TINY = 2.0**-126
KEY = site_keys(5, 3, ["layer"])[0, 0]
few = settings(max_examples=25, deadline=None)

# Answers calls of the functions of triton_fp4, and of the two below, until its input ends.
SERVER = """
import pickle, sys
answers, sys.stdout = sys.stdout.buffer, sys.stderr
import torch
torch.set_num_threads(1)
from dpquant_compile.backends import triton_fp4

def compile(name, signature, constants, capability):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    source = ASTSource(getattr(triton_fp4._load(), name), signature=signature, constexprs=constants)
    target, options = GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False}
    return triton.compile(source, target=target, options=options).asm["ptx"]

def patch(values):
    vars(triton_fp4).update(values)

while True:
    try:
        name, args = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    try:
        answer = ({"compile": compile, "patch": patch}.get(name) or getattr(triton_fp4, name))(*args)
    except Exception as error:
        answer = error
    pickle.dump(answer, answers)
    answers.flush()
"""


def serve(**env: str) -> Iterator[Call]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | env
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        questions, answers = process.stdin, process.stdout
        assert questions is not None and answers is not None

        def call(name: str, *args: Any) -> Any:
            pickle.dump((name, args), questions)
            questions.flush()
            answer = pickle.load(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        yield call
        process.kill()  # it has nothing to save, and torch takes seconds to leave


@pytest.fixture(scope="module")
def run() -> Iterator[Call]:
    """Calls a function of `triton_fp4` by its name, in Triton's interpreter."""
    yield from serve(TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def for_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """The same where Triton compiles, as on a machine with a GPU."""
    yield from serve(TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, type and every bit."""
    return a.shape == b.shape and a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


def reference(x: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    q, unit = quantize_parts(x, "luq_fp4", KEY, samples, BatchAxis(0))
    return pack4(encode(q, "luq_fp4")), unit.reshape(-1)


def check_quantize(run: Call, x: Tensor, samples: Tensor | None = None) -> tuple[Tensor, Tensor]:
    samples = torch.arange(len(x)) if samples is None else samples
    packed, unit = run("quantize_pack", x, KEY, samples)
    expected, expected_unit = reference(x, samples)
    assert same(packed, expected)
    assert same(unit, expected_unit)
    return packed, unit


def normal(shape: tuple[int, ...], seed: int = 0, spread: float = 0.0) -> Tensor:
    """Normal numbers, times powers of two up to 2^±spread so that small codes and zeros are common."""
    generator = torch.Generator().manual_seed(seed)
    powers = (torch.rand(shape, generator=generator) * 2 - 1) * spread
    return torch.randn(shape, generator=generator) * powers.round().exp2()


# Quantize and pack

SHAPES = st.one_of(
    st.tuples(st.integers(0, 4), st.integers(0, 40)),
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 9)),
    st.tuples(st.integers(1, 2), st.sampled_from([1023, 2047, 2048, 2049])),
)


@few
@given(shape=SHAPES, seed=st.integers(0, 2**31), spread=st.sampled_from([0.0, 8.0, 120.0]))
@example(shape=(3, 5, 683), seed=1, spread=4.0)  # odd rows, whose bytes take several blocks
def test_quantize_pack(run: Call, shape: tuple[int, ...], seed: int, spread: float) -> None:
    check_quantize(run, normal(shape, seed, spread))


@few
@given(rows=st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=4))
def test_quantize_pack_of_any_floats(run: Call, rows: list[list[float]]) -> None:
    check_quantize(run, torch.tensor(rows))


def test_every_code_occurs(run: Call) -> None:
    packed, _ = check_quantize(run, normal((2, 4096), spread=8.0))
    assert unpack4(packed, 4096).unique().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15]


def test_at_the_thresholds(run: Call) -> None:
    """Numbers whose random bits just round them up, or just not: off by one anywhere shows."""
    k0, k1 = sample_keys(KEY, torch.arange(3))
    bits = random_bits(k0[:, None], k1[:, None], torch.arange(600, dtype=torch.int32))
    to_one = (bits >> 8 & 0xFFFFFF | 1) * 2.0**-24
    carry = 2 - (bits & 0x7FFFFF) * 2.0**-23
    for threshold in (to_one, carry):
        x = torch.stack([threshold[0].nextafter(torch.tensor(0.0)), threshold[1], threshold[2].nextafter(carry[2] * 2)])
        x[:, 0] = 64.0  # makes the unit 1
        check_quantize(run, x)


def test_rows_that_are_not_numbers(run: Call) -> None:
    x = normal((6, 3000))
    x[0, 2999], x[1, 7], x[2, 1500], x[3] = torch.nan, torch.inf, -torch.inf, 0.0
    x[4, 0], x[4, 2000] = torch.inf, torch.nan
    packed, unit = check_quantize(run, x)
    assert unit.isnan().tolist() == [True, True, True, False, True, False]
    assert not packed[:5].any() and packed[5].any()
    assert run("unpack_dequantize", packed, unit, 3000).isnan().all(dim=1).tolist() == unit.isnan().tolist()


@pytest.mark.parametrize("size", [TINY / 2, TINY, 1.9 * TINY, 2.0**-121, 2.0**-120, 2.0**-100, 1e38])
def test_tiny_and_huge_scales(run: Call, size: float) -> None:
    x = torch.cat([torch.tensor([[1.0, -1.0, -0.0]]), normal((1, 198)).clamp(-1, 1)], dim=1) * size
    check_quantize(run, x.expand(4, -1))


def test_zeros(run: Call) -> None:
    packed, unit = check_quantize(run, torch.tensor([[0.0, -0.0, 0.0], [1e-40, -1e-45, TINY / 2]]))
    assert not packed.any() and unit.tolist() == [TINY, TINY]


def test_bits_follow_the_sample_and_not_its_place(run: Call) -> None:
    x, ids = normal((3, 501), spread=4.0), torch.tensor([2**40 + 9, 0, 77])
    packed, _ = check_quantize(run, x, ids)
    turned, _ = check_quantize(run, x.flip(0), ids.flip(0))
    assert same(turned, packed.flip(0)) and not same(turned, reference(x.flip(0), ids)[0])


def test_one_scale_for_a_weight_of_any_layout(run: Call) -> None:
    weight = normal((13, 9)).T
    packed, unit = check_quantize(run, weight[None], torch.zeros(1, dtype=torch.int64))
    assert packed.shape == (1, 9, 7) and unit.item() == weight.abs().max().item() / 64


# Unpack


@few
@given(shape=SHAPES, seed=st.integers(0, 2**31))
@example(shape=(3, 5, 683), seed=1)
def test_unpack_dequantize(run: Call, shape: tuple[int, ...], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)  # -0.0, code 8, among them
    unit = torch.rand(shape[0], generator=generator) + TINY
    values = run("unpack_dequantize", pack4(codes), unit, shape[-1])
    assert same(values, decode(codes, "luq_fp4") * unit.reshape([-1, *(1 for _ in shape[1:])]))


def test_round_trip(run: Call) -> None:
    x, ids = normal((4, 3, 77), spread=6.0), torch.arange(4)
    values = run("unpack_dequantize", *run("quantize_pack", x, KEY, ids), 77)
    q, unit = quantize_parts(x, "luq_fp4", KEY, ids, BatchAxis(0))
    assert same(values, q * unit)


# Matrix product


def check_matmul(run: Call, a: Tensor, unit_a: Tensor, b: Tensor, unit_b: Tensor) -> Tensor:
    """`a` and `b` are codes, not packed."""
    product: Tensor = run("matmul_packed", pack4(a), unit_a, pack4(b), unit_b)
    whole = decode(a, "luq_fp4").to(torch.int64) @ decode(b, "luq_fp4").to(torch.int64).T
    assert same(product, whole.to(torch.float32) * unit_a[:, None] * unit_b[None, :])
    return product


def codes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)


def units(size: int, seed: int = 0) -> Tensor:
    """All bits of the mantissa used, so that an order of multiplication shows."""
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)) + 0.1


DEPTHS = st.one_of(st.integers(0, 20), st.sampled_from([127, 128, 129, 255, 257]))
SIDES = st.one_of(st.integers(0, 9), st.sampled_from([63, 64, 65, 130]))


@few
@given(m=SIDES, n=SIDES, k=DEPTHS, seed=st.integers(0, 2**31), one_unit=st.booleans())
@example(m=65, n=130, k=257, seed=0, one_unit=False)
@example(m=2, n=3, k=0, seed=0, one_unit=True)
def test_matmul(run: Call, m: int, n: int, k: int, seed: int, one_unit: bool) -> None:
    unit_b = units(1 if one_unit else n, seed + 1)
    check_matmul(run, codes(m, k, seed=seed), units(m, seed), codes(n, k, seed=seed + 1), unit_b)


def test_matmul_of_quantized_tensors(run: Call) -> None:
    x, weight = normal((5, 6, 33)), normal((10, 33), seed=1)
    x[1, 2, 3] = torch.nan
    packed, unit = run("quantize_pack", x, KEY, torch.arange(5))
    packed_weight, unit_weight = run("quantize_pack", weight[None], KEY, torch.zeros(1, dtype=torch.int64))
    y = run("matmul_packed", packed.flatten(0, 1), unit.repeat_interleave(6), packed_weight[0], unit_weight)
    q, unit_x = quantize_parts(x, "luq_fp4", KEY, torch.arange(5), BatchAxis(0))
    qw, unit_w = quantize_parts(weight, "luq_fp4", KEY, torch.zeros(1, dtype=torch.int64), None)
    assert same(y.reshape(5, 6, 10), q @ qw[0].T * unit_x * unit_w)  # the sums are under 2^24, so floats are exact
    assert y.reshape(5, 60).isnan().all(dim=1).tolist() == [False, True, False, False, False]


def test_sums_beyond_int32(run: Call) -> None:
    """2^19 products of 64 and 64 are 2^31."""
    k = 2**19 + 3
    a, b = torch.full((2, k), 7, dtype=torch.uint8), torch.full((1, k), 7, dtype=torch.uint8)
    a[1] |= 8
    a[0, -1] = 1
    run("patch", dict(_TILE=16, _STEP=4096))  # the interpreter takes a minute in small steps
    try:
        product = check_matmul(run, a, torch.ones(2), b, torch.ones(1))
    finally:
        run("patch", dict(_TILE=64, _STEP=64))
    assert product[1].item() == -(2.0**12) * k and product[0].item() > 2.0**31


def test_the_units_do_not_meet_first(run: Call) -> None:
    """Their product is under the smallest float32, the result is not."""
    a, unit = torch.full((1, 4096), 7, dtype=torch.uint8), torch.full((1,), 2.0**-75)
    assert check_matmul(run, a, unit, a, unit).item() == 2.0**-126


# On a GPU, as far as one can tell without

POINTERS = {"x": "*fp32", "k0": "*i32", "k1": "*i32", "largest": "*i32", "packed": "*u8", "unit": "*fp32"}
SIZES = {"size": "i32", "row_bytes": "i32", "bytes_each": "i32", "blocks": "i32"}
ODD = {"odd": "constexpr", "block": "constexpr"}
MATRICES = {"a": "*u8", "unit_a": "*fp32", "b": "*u8", "unit_b": "*fp32", "out": "*fp32", "m": "i32", "n": "i32"}
STRIDES = {"depth": "i32", "columns": "i32", "stride_a": "i32", "stride_b": "i32"}
TILES = {"wide": "constexpr", "span": "constexpr", "tile": "constexpr", "step": "constexpr"}


@pytest.mark.heavy
@pytest.mark.parametrize("odd", [0, 1])
def test_quantize_compiles_for_gpus(for_gpu: Call, odd: int) -> None:
    ptx = for_gpu("compile", "quantize", POINTERS | SIZES | ODD, {"odd": odd, "block": 1024}, 80)
    assert "div.rn.f32" in ptx and "div.full" not in ptx  # an approximate quotient would be off by a bit at times


def test_the_others_compile_for_gpus(for_gpu: Call) -> None:
    signature = {"x": "*fp32", "largest": "*i32", "size": "i32", "blocks": "i32", "block": "constexpr"}
    assert "max.s32" in for_gpu("compile", "row_max", signature, {"block": 1024}, 80)
    signature = {"packed": "*u8", "unit": "*fp32", "values": "*fp32"} | SIZES | ODD
    assert "mul.rn.f32" in for_gpu("compile", "dequantize", signature, {"odd": 1, "block": 1024}, 80)


@pytest.mark.parametrize("capability", [80, *(pytest.param(c, marks=pytest.mark.heavy) for c in (90, 100))])
def test_matmul_compiles_to_int8_tensor_cores(for_gpu: Call, capability: int) -> None:
    constants = {"wide": capability == 80, "span": 1 << 17, "tile": 64, "step": 64}
    ptx = for_gpu("compile", "matmul", MATRICES | STRIDES | TILES, constants, capability)
    assert re.search(r"mma\S*(\.s32\.s8\.s8|\.kind::i8)", ptx)  # the second from Triton 3.9 on, for Blackwell


@pytest.mark.parametrize(
    ("capability", "format", "name"),
    [
        ((7, 0), "luq_fp4", "emulated"),
        ((7, 5), "luq_fp4", "int8"),
        ((8, 9), "luq_fp4", "fp8"),
        ((9, 0), "luq_fp4", "fp8"),
        ((10, 0), "luq_fp4", "fp8"),
        ((9, 0), "uniform4", "fp8"),
        ((9, 0), "fp4_e2m1_nv", "emulated"),
        ((10, 0), "fp4_e2m1_nv", "nvfp4"),
        ((12, 0), "fp4_e2m1_nv", "nvfp4"),
        ((12, 0), "fp4_e2m1", "emulated"),
    ],
)
def test_gpu_kernel_for(capability: tuple[int, int], format: str, name: str) -> None:
    kernel = gpu_kernel_for(capability, format)
    assert kernel.name == name and kernel.native == (name != "emulated") and kernel.exact == (name == "int8")
    in_int8 = capability >= (7, 5) and format in ("luq_fp4", "uniform4")
    assert gpu_kernel_for(capability, format, exact=True).name == ("int8" if in_int8 else "emulated")
    assert kernel.status == NEVER_RUN and kernel.reason and "\n" not in kernel.reason + kernel.status


@pytest.mark.parametrize("name", ["luq_fp4", "uniform4"])
def test_levels_are_exact_in_the_types_of_their_kernels(name: str) -> None:
    levels = torch.tensor(get_format(name).grid)
    for dtype in (torch.float8_e4m3fn, torch.int8):
        assert torch.equal(levels.to(dtype).to(torch.float32), levels)


@few
@given(seed=st.integers(0, 2**31), k=st.integers(0, 300))
def test_products_of_fp8_operands_are_exact(seed: int, k: int) -> None:
    a, b = decode(codes(4, k, seed=seed), "luq_fp4"), decode(codes(3, k, seed=seed + 1), "luq_fp4")
    through_fp8 = a.to(torch.float8_e4m3fn).to(torch.float32) @ b.to(torch.float8_e4m3fn).to(torch.float32).T
    assert torch.equal(through_fp8.to(torch.int64), a.to(torch.int64) @ b.to(torch.int64).T)


def test_luq_does_not_fit_nvfp4() -> None:
    """What keeps LUQ off the FP4 tensor cores: no scale makes all its levels E2M1 numbers."""
    luq, e2m1 = get_format("luq_fp4").grid, set(get_format("fp4_e2m1_nv").grid)
    scales = {level / other for level in luq for other in e2m1 if level > 0 and other > 0}
    assert not any({level / scale for level in luq} <= e2m1 for scale in scales)


# Refusals


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module imports and chooses, and a kernel says what to install."""
    spec = importlib.util.spec_from_file_location("triton_fp4_alone", triton_fp4.__file__)
    assert spec is not None and spec.loader is not None
    alone = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "triton_fp4_alone", alone)
    monkeypatch.setitem(sys.modules, "triton", None)  # which makes `import triton` fail
    spec.loader.exec_module(alone)
    assert alone.gpu_kernel_for((9, 0)).name == "fp8"
    with pytest.raises(KernelError, match="`pip install triton`"):
        alone.quantize_pack(torch.ones(2, 2), KEY, torch.arange(2))


def test_tensors_in_main_memory_need_the_interpreter(for_gpu: Call) -> None:
    with pytest.raises(KernelError, match=r"the tensors are on cpu: .*TRITON_INTERPRET=1"):
        for_gpu("quantize_pack", torch.ones(2, 2), KEY, torch.arange(2))


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("quantize_pack", (torch.ones(4), KEY, torch.arange(4)), r"x must be torch.float32 \[B, ..., K\]"),
        ("quantize_pack", (torch.ones(4, 2).double(), KEY, torch.arange(4)), "not torch.float64"),
        ("quantize_pack", (torch.ones(4, 2), KEY, torch.arange(3)), r"samples must be torch.int64 \[4\]"),
        ("quantize_pack", (torch.ones(2, 2), KEY, torch.arange(2, device="meta")), "several devices, cpu, meta"),
        ("quantize_pack", (torch.ones(1, 1).expand(1, 2**30 + 1), KEY, torch.arange(1)), "536870913 bytes"),
        ("unpack_dequantize", (codes(2, 3), torch.ones(2), 4), r"\[B, ..., 2\] for length=4, not torch.uint8 \[2, 3\]"),
        ("matmul_packed", (codes(2, 3), torch.ones(2), codes(2, 4), torch.ones(2)), "the depth of a"),
        ("matmul_packed", (codes(2, 3), torch.ones(3), codes(2, 3), torch.ones(2)), r"unit_a .* \[2\] or \[1\]"),
        ("matmul_packed", (codes(2, 3), torch.ones(2), codes(4, 3), torch.ones(2)), r"unit_b .* \[4\] or \[1\]"),
    ],
)
def test_what_does_not_fit_is_refused(run: Call, name: str, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        run(name, *args)
