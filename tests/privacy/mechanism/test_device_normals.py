"""Normals on a GPU: the cipher against its standard, the kernels against the reference, and their distribution.

Triton reads TRITON_INTERPRET when it is imported, so kernels run, and are compiled, in processes of their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from dpquant_compile.privacy.mechanism import device_normals
from dpquant_compile.privacy.mechanism.device_normals import reference_normals, reference_words
from dpquant_compile.privacy.mechanism.normals import GROUP
from tests.support.heavy import few
from tests.support.normality import (
    check_moments_and_distribution,
    check_neighbours_and_pairs,
    check_radius_and_angle,
    check_tail_counts,
)

KEY = bytes(range(32))
N = 1 << 20
# RFC 8439: section 2.3.2, and the first test vector of appendix A.1.
VECTORS = [
    (
        KEY,
        1,
        "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        bytes(32),
        0,
        "000000000000000000000000",
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
]
# Groups and first blocks of draws: the counter's low half wraps, and its sign bit is set.
DRAWS = [(1, 0), (300, 2**32 - 7), (5, 2**63 - 4), (2, 2**64 - 3)]

INTERPRETED = """
import sys, torch
torch.set_num_threads(1)
from dpquant_compile.privacy.mechanism import device_normals as d
key, vectors, draws, n = eval(sys.argv[2])
found = []
for k, counter, nonce, _ in vectors:
    out = torch.zeros(3, 16, dtype=torch.int32)
    d.draw_keystream(k, counter, bytes.fromhex(nonce), out)
    found.append(out)
for groups, first in draws:
    out = torch.full((groups * 32 + 1,), torch.nan)
    d.draw_on_device(key, first, 0.75, out[:-1])
    found.append(out)
d._LANES = 1 << 15  # in one program: the interpreter takes as long for every operation
out = torch.empty(n)
d.draw_on_device(key, 0, 1.0, out)
torch.save([*found, out], sys.argv[1])
"""

COMPILED = """
import sys, torch
from triton.backends.compiler import GPUTarget
import triton
from triton.compiler import ASTSource
from dpquant_compile.privacy.mechanism import chacha_kernels
key = {f"k{i}": "i32" for i in range(8)}
signature = {"out": "*fp32", **key, "first": "i64", "std": "fp32", "groups": "i32", "block": "constexpr"}
source = ASTSource(chacha_kernels.normals, signature=signature, constexprs={"block": 128})
target = GPUTarget("cuda", int(sys.argv[2]), 32)
made = triton.compile(source, target=target, options={"enable_fp_fusion": False})
open(sys.argv[1], "w").write(made.asm["ptx"])
"""


def python(code: str, *args: str, **env: str) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env={**plain, **env})
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """What the kernels give in Triton's interpreter: a keystream per vector, the draws, and a million normals."""
    path = str(tmp_path_factory.mktemp("interpreted") / "found.pt")
    python(INTERPRETED, path, repr((KEY, VECTORS, DRAWS, N)), TRITON_INTERPRET="1")
    found: list[torch.Tensor] = torch.load(path)
    return found


def library(key: bytes, counter: int, nonce: bytes, blocks: int) -> bytes:
    """The keystream by `cryptography`."""
    cipher = Cipher(algorithms.ChaCha20(key, counter.to_bytes(4, "little") + nonce), None)
    return cipher.encryptor().update(bytes(64 * blocks))


@pytest.mark.parametrize(("key", "counter", "nonce", "expected"), VECTORS)
def test_the_reference_is_the_cipher_of_the_standard(key: bytes, counter: int, nonce: str, expected: str) -> None:
    nonces = np.frombuffer(bytes.fromhex(nonce), dtype="<u4").reshape(3, 1).repeat(3, 1)
    words = reference_words(key, np.arange(counter, counter + 3, dtype=np.uint32), nonces)
    assert words[0].astype("<u4").tobytes().hex() == expected
    assert words.astype("<u4").tobytes() == library(key, counter, bytes.fromhex(nonce), 3)


@pytest.mark.parametrize("first", [0, 2**32 - 1, 2**40 + 5])
def test_a_group_has_three_blocks_of_its_own(first: int) -> None:
    """A block's number is a counter of 32 bits and, above it, the first word of the nonce."""
    blocks = (first, first + 1, first + 2)
    stream = b"".join(library(KEY, b % 2**32, (b >> 32).to_bytes(4, "little") + bytes(8), 1) for b in blocks)
    want = device_normals.box_muller(torch.frombuffer(bytearray(stream), dtype=torch.int32), 0.5)
    assert torch.equal(reference_normals(KEY, first, 0.5, GROUP), want)
    two = reference_normals(KEY, first, 0.5, 2 * GROUP)
    assert torch.equal(two[GROUP:], reference_normals(KEY, first + 3, 0.5, GROUP))


def test_only_cuda_draws_its_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_normals.can_draw(torch.device("cuda", 1))
    assert not any(device_normals.can_draw(torch.device(name)) for name in ("cpu", "mps", "xpu", "meta"))
    monkeypatch.setattr(device_normals, "_has_triton", lambda: False)
    assert not device_normals.can_draw(torch.device("cuda"))


@pytest.mark.slow
def test_the_kernel_encrypts_as_the_standard_says(interpreted: list[torch.Tensor]) -> None:
    for (key, counter, nonce, expected), words in zip(VECTORS, interpreted, strict=False):
        data = words.numpy().astype("<i4").tobytes()
        assert data[:64].hex() == expected
        assert data == library(key, counter, bytes.fromhex(nonce), 3)


@pytest.mark.slow
def test_the_kernel_equals_the_reference_bit_for_bit(interpreted: list[torch.Tensor]) -> None:
    for (groups, first), out in zip(DRAWS, interpreted[len(VECTORS) :], strict=False):
        assert torch.equal(out[:-1], reference_normals(KEY, first, 0.75, groups * GROUP))
        assert out[-1].isnan()  # nothing is written behind it
    assert torch.equal(interpreted[-1], reference_normals(KEY, 0, 1.0, N))


@pytest.mark.slow
def test_what_the_kernel_gives_is_normal(interpreted: list[torch.Tensor]) -> None:
    x = interpreted[-1].double().numpy()
    check_moments_and_distribution(x)
    check_tail_counts(x)
    check_neighbours_and_pairs(x)
    check_radius_and_angle(x)


@pytest.mark.slow
@pytest.mark.parametrize("capability", few([80, 90], 90))
def test_the_kernel_compiles_for_gpus(capability: int, tmp_path: Path) -> None:
    path = tmp_path / "ptx"
    python(COMPILED, str(path), str(capability), TRITON_CACHE_DIR=str(tmp_path / "cache"))
    ptx = path.read_text()
    assert f".target sm_{capability}" in ptx
    assert "sqrt.rn.f32" in ptx and "shf.l.wrap" in ptx
    # Fused or approximate operations would round otherwise than the reference.
    assert not re.search(r"fma\.|\.approx|\.ftz|\.full", ptx)
    assert "ld.global" not in ptx  # the key is a parameter of the launch, and lies in no tensor
