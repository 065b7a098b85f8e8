"""Gaussian noise: the distribution, no byte of the keystream twice, exact resumption, secure streams."""

import copy
import hashlib
import io
import itertools
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from dpquant_compile.errors import DPQuantError, PrivacySpecError
from dpquant_compile.numerics.random_bits import ROLES, random_bits, sample_keys, site_keys
from dpquant_compile.privacy.mechanism import device_normals
from dpquant_compile.privacy.mechanism import gaussian as noise
from dpquant_compile.privacy.mechanism.gaussian import GaussianStream, Part
from dpquant_compile.privacy.mechanism.normals import BLOCKS, GROUP, draw_normals
from tests.support.normality import (
    SIGMAS,
    check_moments_and_distribution,
    check_neighbours_and_pairs,
    check_radius_and_angle,
    check_tail_counts,
    correlation,
)

N = 1 << 20

SOURCES: dict[str, Callable[[], GaussianStream]] = {
    "seeded": lambda: GaussianStream.seeded(1234),
    "rank 3": lambda: GaussianStream.seeded(1234, rank=3),
    "generator": lambda: GaussianStream.from_generator(torch.Generator().manual_seed(7)),
    "secure": GaussianStream.secure,
}


LOCAL = threading.local()


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws leave in `LOCAL.used` what they use of the keystream of which key."""

    def draw(key: bytes, counter: int, std: float, out: Tensor) -> None:
        LOCAL.used = (key, counter, out.numel() // GROUP * BLOCKS)
        draw_normals(key, counter, std, out)

    monkeypatch.setattr(noise, "draw_normals", draw)


class Recorder(GaussianStream):
    """A stream that keeps what its draws use of the keystream."""

    def __init__(self, seed: int | None, rank: int = 0) -> None:
        super().__init__(seed, rank)
        self.taken: list[bytes] = []

    def _draw(self, part: Part, std: float, *device: torch.device) -> Tensor:
        result = super()._draw(part, std, *device)
        self.taken.append(counter_mode(*LOCAL.used))
        return result

    def blocks(self) -> list[bytes]:
        stream = b"".join(self.taken)
        return [stream[i : i + 16] for i in range(0, len(stream), 16)]


@pytest.fixture(scope="module")
def drawn() -> dict[str, np.ndarray]:
    """A million normals from each source, as float64: read only."""
    return {name: make().fill(N).double().numpy() for name, make in SOURCES.items()}


def key_of(seed: int, rank: int) -> bytes:
    return hashlib.blake2b(f"{seed}\0{rank}".encode(), digest_size=32, person=b"dpquant noise v2").digest()


def counter_mode(key: bytes, first: int, blocks: int) -> bytes:
    """The keystream by its definition: the encrypted counter values, one by one."""
    counters = b"".join(((first + i) % 2**128).to_bytes(16, "big") for i in range(blocks))
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(counters)


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 1001])
@pytest.mark.parametrize("first", [0, 12, 2**128 - 5])
def test_normals_are_those_of_the_next_blocks(n: int, first: int) -> None:
    stream = GaussianStream.seeded(5, rank=2)
    stream.load_state_dict({**stream.state_dict(), "position": first})
    for position in (first, first + 12 * -(-n // 32)):
        assert stream.position == position
        want = torch.empty(32 * -(-n // 32))
        draw_normals(key_of(5, 2), position, 1.0, want)
        assert torch.equal(stream.fill(n), want[:n])


@pytest.mark.parametrize("source", SOURCES)
def test_moments_and_distribution(drawn: dict[str, np.ndarray], source: str) -> None:
    check_moments_and_distribution(drawn[source])


@pytest.mark.parametrize("source", SOURCES)
def test_tail_counts(drawn: dict[str, np.ndarray], source: str) -> None:
    check_tail_counts(drawn[source])


@pytest.mark.parametrize("source", SOURCES)
def test_neighbours_and_pairs_are_independent(drawn: dict[str, np.ndarray], source: str) -> None:
    check_neighbours_and_pairs(drawn[source])


def test_radius_and_angle_are_uniform(drawn: dict[str, np.ndarray]) -> None:
    check_radius_and_angle(drawn["seeded"])


def test_no_block_is_taken_twice_whatever_the_sizes() -> None:
    stream = Recorder(11)
    sizes = [0, 1, 1, 2, 3, 8, 9, 1000, 0, 17, 8191, 8192, 8193, 5]
    for n in sizes:
        assert stream.fill(n).shape == (n,)
    stream.normal_like([torch.zeros(3, 5), torch.zeros(7)], 1.0)
    blocks = stream.blocks()
    assert len(blocks) == stream.position == sum(12 * -(-n // 32) for n in [*sizes, 22])
    assert len(set(blocks)) == len(blocks)
    assert b"".join(blocks) == counter_mode(key_of(11, 0), 0, len(blocks))


def test_no_block_is_taken_twice_by_several_threads() -> None:
    stream = Recorder(12)
    with ThreadPoolExecutor(4) as pool:  # in draws long enough for the threads to meet in the cipher
        parts = list(pool.map(stream.fill, [50_001] * 16))
    blocks = stream.blocks()
    assert len(set(blocks)) == len(blocks) == stream.position
    assert len({part.numpy().tobytes() for part in parts}) == 16


def test_no_64_bit_word_repeats_across_draws_ranks_and_seeds() -> None:
    streams = [Recorder(seed, rank) for seed in (0, 1, -1, 2**70) for rank in (0, 1, 10)]
    streams += [Recorder(None), Recorder(None)]
    for stream in streams:
        for n in (4000, 1, 4000):
            stream.fill(n)
    words = np.concatenate([np.frombuffer(b"".join(stream.taken), dtype="<u8") for stream in streams])
    # Among 85 000 random words, two are the same with a chance of 2e-10.
    assert len(np.unique(words)) == len(words) > 80_000


def test_streams_are_uncorrelated(drawn: dict[str, np.ndarray]) -> None:
    streams = [*drawn.values(), GaussianStream.seeded(1235).fill(N).double().numpy()]
    for i, a in enumerate(streams):
        for b in streams[:i]:
            assert abs(correlation(a, b)) < SIGMAS
            assert np.mean(a == b) < 1e-4


def test_rounding_bits_of_the_same_seed_are_another_stream() -> None:
    stream = Recorder(42)
    stream.fill(1 << 16)
    words = np.frombuffer(b"".join(stream.taken), dtype="<i4")
    index = torch.arange(len(words), dtype=torch.int32)
    for step in (0, 1):
        for role in range(len(ROLES)):
            k0, k1 = sample_keys(site_keys(42, step, ["fc"])[0, role], torch.zeros(1, dtype=torch.int64))
            bits = random_bits(k0, k1, index).numpy()
            assert abs(correlation(words.astype(float), bits.astype(float))) < SIGMAS
            assert len(np.intersect1d(words[:64], bits[:64])) == 0
    assert stream._key[:8] != hashlib.blake2b(b"42\x000", digest_size=8).digest()
    assert stream._key != hashlib.blake2b(b"42\x000", digest_size=32).digest()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("whole", [0, 1, 31, 32, 33, 1000, 64 * 32])
def test_parts_make_up_the_draw(whole: int, size: int) -> None:
    streams = [Recorder(6) for _ in range(size)]
    parts = [Part.of(whole, rank, size) for rank in range(size)]
    lengths = [part.stop - part.start for part in parts]
    want = GaussianStream.seeded(6)
    for std in (0.5, 2.0):
        found = [
            stream.normal_like([torch.zeros(length)], std, part)[0]
            for stream, length, part in zip(streams, lengths, parts, strict=True)
        ]
        assert torch.equal(torch.cat(found), want.normal_like([torch.zeros(whole)], std)[0])
        assert {stream.position for stream in streams} == {want.position}
    blocks = [block for stream in streams for block in stream.blocks()]
    assert len(set(blocks)) == len(blocks) == want.position
    assert max(lengths) - min(lengths) <= 32 + whole % 32


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, int, int]]:
    """Noise is drawn as on a GPU, by the reference. What each draw takes: a key, its first block, and the next one."""
    taken = []

    def draw(key: bytes, first: int, std: float, out: Tensor) -> None:
        taken.append((key, first, first + out.numel() // GROUP * device_normals.BLOCKS))
        out.copy_(device_normals.reference_normals(key, first, std, out.numel()))

    monkeypatch.setattr(device_normals, "can_draw", lambda device: True)
    monkeypatch.setattr(device_normals, "draw_on_device", draw)
    return taken


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_on_devices_make_up_the_draw(size: int, on_device: list[tuple[bytes, int, int]]) -> None:
    n, parts = 1000, []
    stream = GaussianStream.seeded(3)
    stream.fill(5)
    whole = stream.normal_like([torch.empty(n)], 2.0)[0]
    used = on_device[-1]
    for rank in range(size):
        other, part = GaussianStream.seeded(3), Part.of(n, rank, size)
        other.skip(5)
        parts.append(other.normal_like([torch.empty(part.stop - part.start)], 2.0, part)[0])
        assert other.position == stream.position
    assert torch.equal(torch.cat(parts), whole)
    ends = [used[1], *(last for _, _, last in on_device[2:])]
    assert [first for _, first, _ in on_device[2:]] == ends[:-1] and ends[-1] == used[2]  # and no block twice


def test_a_device_takes_other_blocks_for_every_draw(on_device: list[tuple[bytes, int, int]]) -> None:
    stream = GaussianStream.seeded(8)
    for n in (1, 40, 32, 0, 7):
        stream.normal_like([torch.empty(n)], 1.0)
    state = stream.state_dict()
    resumed = GaussianStream.seeded(8)
    resumed.load_state_dict(state)
    assert torch.equal(resumed.normal_like([torch.empty(9)], 1.0)[0], stream.normal_like([torch.empty(9)], 1.0)[0])
    spans = sorted(span[1:] for span in on_device[:-1])
    assert all(last <= first for (_, last), (first, _) in itertools.pairwise(spans))


def test_the_key_of_a_device_is_its_own(on_device: list[tuple[bytes, int, int]]) -> None:
    """Derived from the stream's: not the key of AES, nor one that another purpose has; and another after `renew`."""
    stream, keys = GaussianStream.secure(), set()
    for _ in range(2):
        stream.normal_like([torch.empty(3)], 1.0)
        others = stream._key, stream.derived_key(b"dpquant bits v1"), stream.derived_key(noise._PLACE)
        keys |= {on_device[-1][0], *others}
        stream.renew()
    assert len(keys) == 8


@pytest.mark.parametrize("edges", [[0, 1000], [0, 31, 33, 64, 64, 500, 999, 1000], [5, 70, 70, 90]])
def test_cuts_are_those_of_the_whole_draw(edges: list[int]) -> None:
    """Whatever processes share a group of normals; every one of them counts the whole as drawn."""
    cuts = list(itertools.pairwise(edges))
    (want,) = GaussianStream.seeded(6).normal_like([torch.zeros(1000)], 2.0)
    for own in (cuts, cuts[::2], cuts[1::2], []):
        stream = GaussianStream.seeded(6)
        found = stream.normals_at(own, 1000, 2.0)
        assert [torch.equal(part, want[a:b]) for part, (a, b) in zip(found, own, strict=True)] == [True] * len(own)
        after = GaussianStream.seeded(6)
        after.skip(1000)
        assert stream.place == after.place


def test_what_another_process_drew_is_skipped() -> None:
    one, other = GaussianStream.seeded(6), GaussianStream.seeded(6)
    one.fill(33)
    other.skip(33)
    assert one.place == other.place and torch.equal(one.fill(5), other.fill(5))


def test_places_differ_where_the_noise_does() -> None:
    places = [GaussianStream.seeded(seed, rank).place for seed, rank in ((1, 0), (1, 1), (2, 0))]
    moved = GaussianStream.seeded(1)
    moved.fill(1)
    assert len({*places, moved.place}) == 4
    assert GaussianStream.secure().place == GaussianStream.secure().place != places[0]


@pytest.mark.parametrize("source", ["seeded", "rank 3", "generator"])
def test_resume_goes_on_as_if_never_interrupted(source: str) -> None:
    stream = SOURCES[source]()
    sizes = [10, 1000, 3, 17]
    for n in sizes:
        stream.fill(n)
    file = io.BytesIO()
    torch.save(stream.state_dict(), file)
    file.seek(0)
    rank = 3 if source == "rank 3" else 0
    resumed = GaussianStream.seeded(99, rank)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.state_dict() == stream.state_dict()
    for n in sizes:
        assert torch.equal(resumed.fill(n), stream.fill(n))


def test_nothing_old_is_drawn_after_a_load() -> None:
    stream, resumed = Recorder(8), Recorder(8)
    stream.fill(107)
    early = stream.state_dict()
    resumed.load_state_dict(early)
    resumed.fill(500)
    assert not set(stream.blocks()) & set(resumed.blocks())
    # Nor by a stream that is sent back to where it was.
    stream.fill(100)
    stream.load_state_dict(early)
    stream.fill(100)
    assert len(set(stream.blocks())) == len(stream.blocks())


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_copies_and_pickles(twin: Callable[[GaussianStream], GaussianStream]) -> None:
    seeded = GaussianStream.seeded(4, rank=1)
    seeded.fill(10)
    assert torch.equal(twin(seeded).fill(10), seeded.fill(10))
    secure = GaussianStream.secure()
    other = twin(secure)
    assert other.is_secure and other._key != secure._key
    assert secure._key not in pickle.dumps(secure)


def test_secure_streams_are_all_different_and_keep_their_key() -> None:
    a, b = GaussianStream.secure(), GaussianStream.secure()
    assert a.is_secure and not GaussianStream.seeded(0).is_secure
    assert a._key != b._key and a._nonce != b._nonce
    assert not torch.equal(a.fill(100), b.fill(100))
    state = a.state_dict()
    assert state == {"kind": "secure"}
    key, old = a._key, a.fill(100)
    a.load_state_dict(state)
    b.load_state_dict(state)
    assert len({key, a._key, b._key}) == 3
    assert not torch.equal(a.fill(100), old)


def test_a_fork_while_a_stream_is_made_leaves_no_key_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, rekey = GaussianStream.secure(), GaussianStream._rekey

    def forked(self: GaussianStream, *given: Any) -> None:
        if not hasattr(self, "_key"):  # it is being made, and another thread forks
            monkeypatch.setattr(GaussianStream, "_rekey", rekey)
            noise._after_fork()
        rekey(self, *given)

    key = whole.derived_key(b"test")
    monkeypatch.setattr(GaussianStream, "_rekey", forked)
    made = GaussianStream.secure()
    assert whole.derived_key(b"test") != key and made.is_secure


def test_generator_is_asked_once() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = GaussianStream.from_generator(generator), GaussianStream.from_generator(generator)
    state = generator.get_state()
    assert not torch.equal(a.fill(100), b.fill(100))
    assert torch.equal(generator.get_state(), state)
    again = GaussianStream.from_generator(torch.Generator().manual_seed(0), rank=1)
    assert again.state_dict() == {**a.state_dict(), "rank": 1, "position": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)  # no generator means the global one
        assert GaussianStream.from_generator(None, rank=1).state_dict() == again.state_dict()


def test_default_device_and_autograd_do_not_matter() -> None:
    with torch.device("meta"), torch.enable_grad():
        x = GaussianStream.seeded(6).fill(10)
    assert x.device.type == "cpu" and not x.requires_grad
    assert torch.equal(x, GaussianStream.seeded(6).fill(10))


def test_normal_like_has_the_shapes_and_wide_enough_dtypes() -> None:
    tensors = [
        torch.zeros(3, 4),
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(2, 0, 3),
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(6, 4).T,
        torch.zeros(5, dtype=torch.float64),
        torch.zeros(5, dtype=torch.bfloat16),
        torch.zeros(5, requires_grad=True),
    ]
    result = GaussianStream.seeded(9).normal_like(tensors, 2.5)
    assert [x.shape for x in result] == [x.shape for x in tensors]
    assert [x.dtype for x in result] == [torch.float32] * 6 + [torch.float64] + [torch.float32] * 2
    assert not any(x.requires_grad for x in result)
    flat = GaussianStream.seeded(9).fill(sum(x.numel() for x in tensors)) * 2.5
    assert torch.equal(torch.cat([x.reshape(-1).float() for x in result]), flat)


def test_memory_is_drawn_into_again_only_when_nobody_holds_any_of_it() -> None:
    stream = GaussianStream.seeded(9)
    first = stream.fill(64)
    address, part, values = first.data_ptr(), first[3:5], first[3:5].clone()
    del first
    second = stream.fill(64)
    assert second.data_ptr() != address and torch.equal(part, values)
    del second
    assert len({stream.fill(64).data_ptr() for _ in range(2)}) == 1


def test_nothing_to_draw_draws_nothing() -> None:
    stream = GaussianStream.seeded(9)
    assert stream.normal_like([], 1.0) == []
    assert [x.shape for x in stream.normal_like([torch.zeros(0, 3)], 1.0)] == [(0, 3)]
    assert stream.fill(0).shape == (0,)
    assert stream.position == 0


def test_std_zero_gives_zeros_and_still_advances() -> None:
    still, moving = GaussianStream.seeded(9), GaussianStream.seeded(9)
    (zeros,) = still.normal_like([torch.zeros(100)], 0)
    moving.normal_like([torch.zeros(100)], 3.0)
    assert (zeros == 0).all()
    assert still.position == moving.position > 0
    assert torch.equal(still.fill(10), moving.fill(10))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.normal_like([torch.zeros(5)], 1.0, Part(0, 32, 64)), "5 values in the tensors of Part"),
        (lambda s: Part(0, 31, 64), "no part of a draw in whole groups of 32"),
        (lambda s: Part(32, 96, 64), "no part of a draw"),
        (lambda s: s.normals_at([(0, 5), (4, 8)], 8, 1.0), "no parts of a draw of 8, one after the other"),
        (lambda s: s.normals_at([(0, 9)], 8, 1.0), "no parts of a draw of 8"),
        (lambda s: s.normals_at([(0, 8)], 8, -1.0), "std must be a finite number"),
        (lambda s: s.skip(-1), "n must be an int of at least 0, not -1"),
        (lambda s: s.fill(1.5), "n must be an int of at least 0, not 1.5"),
        (lambda s: s.normal_like([torch.zeros(2)], -1.0), "std must be a finite number of at least 0"),
        (lambda s: s.normal_like([torch.zeros(2)], float("nan")), "not nan"),
        (lambda s: s.normal_like([torch.zeros(2)], 1e39), "that float32 can hold"),
        (lambda s: s.normal_like([torch.zeros(2)], float("inf")), "not inf"),
        (lambda s: s.normal_like([torch.zeros(2)], "1"), "not '1'"),
        (lambda s: s.normal_like([torch.zeros(2), torch.zeros(2, dtype=torch.cfloat)], 1.0), "tensor 1 is .*complex64"),
        (lambda s: GaussianStream.seeded("abc"), "seed must be an int, not 'abc'"),
        (lambda s: GaussianStream.seeded(True), "seed must be an int, not True"),
        (lambda s: GaussianStream.seeded(0, rank=-1), "rank must be an int of at least 0, not -1"),
        (lambda s: GaussianStream.from_generator(5), "must be a torch.Generator or None, not int"),
        (lambda s: s.load_state_dict({"kind": "secure"}), "saved noise is 'secure', but this run's is 'seeded'"),
        (lambda s: GaussianStream.secure().load_state_dict(s.state_dict()), "resume with the same secure_mode"),
        (lambda s: s.load_state_dict({"kind": "seeded", "version": 2, "seed": 1}), "lacks rank, position"),
        (lambda s: s.load_state_dict({"kind": "seeded", "seed": 1, "rank": 0, "position": 0}), "of another release"),
        (lambda s: s.load_state_dict({**s.state_dict(), "position": -1}), "saved position must be an int of at least"),
        (lambda s: s.load_state_dict({**s.state_dict(), "rank": 1}), "Load on each rank the state that this rank"),
    ],
)
def test_bad_arguments_are_told_and_change_nothing(call: Callable[[Any], object], message: str) -> None:
    stream = GaussianStream.seeded(1)
    stream.fill(8)
    before = stream.state_dict()
    with pytest.raises(PrivacySpecError, match=message) as caught:
        call(stream)
    assert isinstance(caught.value, DPQuantError) and isinstance(caught.value, ValueError)
    assert stream.state_dict() == before
