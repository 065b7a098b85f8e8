"""Normals from a key: known answers of the cipher, the transform against float64, and the same bits on every way."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats
from torch import Tensor

from dpquant_compile.backends import native_library
from dpquant_compile.backends.native_library import NativeLibrary
from dpquant_compile.privacy.mechanism import normals
from dpquant_compile.privacy.mechanism.normals import BLOCKS, GROUP, draw_normals

KEY = bytes(range(32))
# NIST SP 800-38A, F.5.5, CTR-AES256.Encrypt.
STANDARD_KEY = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
STANDARD_COUNTER = int("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16)
STANDARD_OUTPUT = "0bdf7df1591716335e9a8b15c860c502"

# The wrap of each part of the counter, within a register, between registers, and between chunks.
FIRSTS = [
    0,
    *(2**bits - back for bits, backs in ((32, (5,)), (64, (1, 2, 3, 4, 33, 200)), (128, (3, 40))) for back in backs),
]

# Flags of older processors of x86-64, and the instructions that they encrypt by.
_OLDER = {"AES-NI": ("-march=haswell", "-maes"), "": ("-mno-avx",)}


class WithoutCipher(NativeLibrary):
    """A library on a CPU that does not encrypt by instructions."""

    def text(self, function: str) -> str:
        return ""


_library = normals._library


def native() -> NativeLibrary:
    library = _library()
    if library is None:
        pytest.skip("no C++ compiler")
    return library


def older(cipher: str) -> NativeLibrary:
    if native().text("cipher") != "VAES":
        pytest.skip("these are older instructions of x86-64")
    library = NativeLibrary(native_library.build(normals._SOURCES, _OLDER[cipher], what="noise"))
    assert library.text("cipher") == cipher
    return library


WAYS = ["this CPU", "AES-NI", "no cipher", "no vectors", "torch"]


@pytest.fixture(params=WAYS)
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way of making normals is that of `draw_normals` in turn."""
    library: NativeLibrary | None = None
    if request.param == "this CPU":
        library = native()
    elif request.param == "AES-NI":
        library = older("AES-NI")
    elif request.param == "no cipher":
        library = WithoutCipher(Path(native()._functions._name))
    elif request.param == "no vectors":
        library = older("")
    monkeypatch.setattr(normals, "_library", lambda: library)
    return str(request.param)


def drawn(groups: int, counter: int = 0, std: float = 1.0, key: bytes = KEY) -> Tensor:
    out = torch.full((groups * GROUP,), torch.nan)
    draw_normals(key, counter, std, out)
    return out


def counter_mode(key: bytes, first: int, blocks: int) -> bytes:
    """The keystream by its definition: the encrypted counter values, one by one."""
    counters = b"".join(((first + i) % 2**128).to_bytes(16, "big") for i in range(blocks))
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(counters)


def box_muller(words: np.ndarray) -> np.ndarray:
    """The normals of uint32 words in float64."""
    high, low, angle = words.reshape(-1, 3, GROUP // 2).swapaxes(0, 1).astype(np.int64)
    u = (high >> 8) * 2.0**-24 + ((low >> 8) + 0.5) * 2.0**-48
    radius = np.sqrt(-2 * np.log(np.minimum(u, 1 - 2.0**-24)))
    eighth = ((angle & 0x3FFFFFFF) ^ 0x20000000) - 0x20000000  # a signed number of 30 bits
    t = (eighth + 0.5) * 2.0**-30 * np.pi / 2
    sine, cosine = np.sin(t), np.cos(t) * np.where(angle >> 31, -1, 1)
    swap = (angle >> 30 & 1).astype(bool)
    first, second = np.where(swap, sine, cosine), np.where(swap, cosine, sine)
    return np.stack([radius * first, radius * second], 1).ravel()


def transformed(words: Tensor) -> Tensor:
    """`[2, m]`: what the loop in use makes of int32 words `[3, m]`, m a multiple of the lanes."""
    library, lanes = normals._library(), GROUP // 2
    flat = words.view(3, -1, lanes).transpose(0, 1).contiguous().view(-1)
    if library is None:
        out = normals.box_muller(flat, 1.0)
    else:
        out = torch.empty(flat.numel() // 3 * 2)
        library("transform", flat, len(flat) // (3 * lanes), 1.0, out)
    return out.view(-1, 2, lanes).transpose(0, 1).reshape(2, -1)


@pytest.mark.parametrize("cipher", ["VAES", "AES-NI"])
def test_aes_is_the_one_of_the_standard(cipher: str) -> None:
    library = native() if cipher == "VAES" and native().text("cipher") else older("AES-NI")
    out = torch.empty(64, dtype=torch.uint8)
    library("keystream", STANDARD_KEY, STANDARD_COUNTER.to_bytes(16, "big"), 4, out)
    assert bytes(out[:16].tolist()).hex() == STANDARD_OUTPUT
    assert counter_mode(STANDARD_KEY, STANDARD_COUNTER, 1).hex() == STANDARD_OUTPUT


@pytest.mark.parametrize("cipher", ["VAES", "AES-NI"])
@pytest.mark.parametrize("first", FIRSTS)
def test_keystream_is_aes_256_in_counter_mode(first: int, cipher: str) -> None:
    library = native() if cipher == "VAES" and native().text("cipher") else older("AES-NI")
    for blocks in (4, 12, 36, 252):  # whole registers, and rests of them
        out = torch.full((16 * blocks + 1,), 7, dtype=torch.uint8)
        library("keystream", KEY, first.to_bytes(16, "big"), blocks, out)
        direct = Cipher(algorithms.AES(KEY), modes.CTR(first.to_bytes(16, "big"))).encryptor()
        assert out[:-1].numpy().tobytes() == direct.update(bytes(16 * blocks)) == counter_mode(KEY, first, blocks)
        assert out[-1] == 7  # nothing is written behind it


@pytest.mark.parametrize(("groups", "first"), [(1, 2**128 - 5), (17, 2**64 - 200), (normals._RUN + 3, 0)])
def test_normals_are_box_muller_of_the_keystream(groups: int, first: int, way: str) -> None:
    got = drawn(groups, first).double().numpy()
    want = box_muller(np.frombuffer(counter_mode(KEY, first, BLOCKS * groups), dtype="<u4"))
    # float32 rounds u by up to 2^-25, which the radius feels the more the smaller it is.
    assert np.abs(got - want)[np.abs(want) > 0.05].max(initial=0) < 2e-6
    assert np.abs(got - want).max() < 1e-4


def test_every_way_gives_the_same_bits(way: str) -> None:
    found = drawn(40_000, 2**64 - 777, 0.7).numpy().tobytes()
    if way == "this CPU":
        return
    with pytest.MonkeyPatch.context() as patch:
        library = native()
        patch.setattr(normals, "_library", lambda: library)
        assert found == drawn(40_000, 2**64 - 777, 0.7).numpy().tobytes()


def test_a_part_of_the_keystream_gives_that_part_of_the_normals(way: str) -> None:
    whole = drawn(100, 2**64 - 500)
    assert torch.equal(drawn(60, 2**64 - 500 + 40 * BLOCKS), whole[40 * GROUP :])


def test_nothing_is_written_behind_the_output(way: str) -> None:
    room = torch.full((3 * GROUP,), torch.nan)
    draw_normals(KEY, 0, 1.0, room[GROUP : 2 * GROUP])
    assert torch.equal(room[GROUP : 2 * GROUP], drawn(1))
    assert room[:GROUP].isnan().all() and room[2 * GROUP :].isnan().all()
    draw_normals(KEY, 0, 1.0, torch.empty(0))


def test_threads_do_not_change_the_normals(way: str) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(drawn(10_007, 5))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_extreme_words_give_numbers_that_are_neither_zero_nor_infinite(way: str) -> None:
    edge = [0, -1, 1, 0xFF, 0x100, 2**31 - 1, -(2**31), 1 << 30, -(1 << 30), -256, 1 << 29, -(1 << 29)]
    words = torch.cartesian_prod(*[torch.tensor(edge, dtype=torch.int32)] * 3).T.contiguous()
    assert words.shape[1] % (GROUP // 2) == 0
    out = transformed(words)
    assert torch.isfinite(out).all()
    assert (out != 0).all()
    assert 8.2 < out.abs().max() < 8.3


def test_the_angle_goes_around_the_circle_once(way: str) -> None:
    # All upper 16 bits of the angle, at one radius: the points are those of a regular polygon.
    m = 1 << 16
    words = torch.zeros(3, m, dtype=torch.int32)
    words[0] = 1 << 30
    words[2] = (torch.arange(-(m // 2), m // 2, dtype=torch.int32) << 16) + (1 << 15)
    x, y = transformed(words).double()
    angles = torch.atan2(y, x).sort().values
    gaps = torch.diff(angles, append=angles[:1] + 2 * torch.pi)
    assert gaps.min() > 0
    assert (gaps * m / (2 * torch.pi) - 1).abs().max() < 0.02
    assert (torch.hypot(x, y) / (2 * np.log(4)) ** 0.5 - 1).abs().max() < 4e-7


def test_far_tail_has_the_right_shape(way: str) -> None:
    # With the upper 24 bits zero, the radius is beyond 5.7, and its u is uniform below 2^-24.
    words = torch.randint(-(2**31), 2**31, (3, 1 << 16), generator=torch.Generator().manual_seed(0)).int()
    words[0] &= 0xFF
    radius = transformed(words).double().pow(2).sum(0).sqrt()
    u = torch.exp(-radius.pow(2) / 2) * 2**24
    assert radius.min() > 5.7
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3


def test_the_logarithm_is_good_to_the_last_bits(way: str) -> None:
    # At an angle near zero the cosine is one, so that the first normal is the radius.
    m = 1 << 16
    words = torch.randint(-(2**31), 2**31, (3, m), generator=torch.Generator().manual_seed(1)).int()
    words[0] >>= torch.arange(m, dtype=torch.int32) % 24  # all sizes of u
    words[0] &= 0x7FFFFFFF
    words[2] = 0
    radius = transformed(words)[0].double().numpy()
    high, low = (words[:2].numpy().astype(np.int64) & 0xFFFFFFFF) >> 8
    u = (high * 2.0**-24 + (low + 0.5) * 2.0**-48).astype(np.float32).astype(np.float64)
    want = np.sqrt(-2 * np.log(np.minimum(u, 1 - 2.0**-24)))
    assert np.abs(radius / want - 1).max() < 3e-7


def test_default_device_and_inference_mode_do_not_matter(way: str) -> None:
    with torch.device("meta"), torch.inference_mode():
        out = torch.empty(2 * GROUP, device="cpu")
        draw_normals(KEY, 0, 1.0, out)
    assert torch.equal(out, drawn(2))


class WithoutNoise(NativeLibrary):
    """A library that something has replaced, or that a compiler got wrong."""

    def __call__(self, function: str, *arguments: Any) -> None:
        out = arguments[-1]
        assert isinstance(out, Tensor)
        out.zero_()


def test_a_library_that_gives_other_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(native()._functions._name)
    assert native() is not None
    monkeypatch.setattr(normals, "NativeLibrary", lambda built: WithoutNoise(path))
    assert _library.__wrapped__() is None
