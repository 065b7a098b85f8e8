"""The secret bits of a private run: what they depend on, what they must not depend on, and who gets to see them."""

import copy
import os
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import dpquant_compile as dpq
from dpquant_compile.privacy.mechanism.gaussian import GaussianStream
from dpquant_compile.privacy.mechanism.secret_bits import SecretBits
from tests.support.private import clipped_sums, made_private
from tests.support.private_loops import Net, dataset, made, train

KEY = bytes(range(32))
NAMES = ("a", "b.c", "head")
INNERS = ["eager", "inductor"]


# The bits


def test_keys_of_sites_depend_on_key_step_and_name_alone() -> None:
    bits = SecretBits(KEY)
    keys = bits.site_keys(3, NAMES)
    assert keys.shape == (3, 6) and torch.equal(SecretBits(KEY, rank=5).site_keys(3, NAMES), keys)
    assert torch.equal(bits.site_keys(3, NAMES[::-1]), keys.flip(0))
    others = [bits.site_keys(4, NAMES), SecretBits(bytes(32)).site_keys(3, NAMES)]
    assert len(torch.cat([keys, *others]).unique()) == 3 * keys.numel()
    assert bits.site_keys(0, ()).shape == (0, 6)


def test_tokens_depend_on_key_step_and_sample_alone() -> None:
    bits, ids = SecretBits(KEY), torch.arange(-1, 999)
    tokens = bits.sample_ids(7, ids)
    assert torch.equal(bits.sample_ids(7, ids[100:200]), tokens[100:200])
    assert torch.equal(SecretBits(KEY, rank=2).sample_ids(7, ids), tokens)
    others = [bits.sample_ids(8, ids), bits.sample_ids(-1 << 40, ids), SecretBits(bytes(32)).sample_ids(7, ids)]
    assert len(torch.cat([tokens, *others]).unique()) == 4 * len(ids)
    assert bits.sample_ids(1 << 70, ids).shape == ids.shape  # steps may begin anywhere
    words = tokens.numpy().view(np.uint8)
    assert stats.chisquare(np.bincount(words, minlength=256)).pvalue > 1e-3


def test_streams_are_uniform_and_apart() -> None:
    bits = SecretBits(KEY)
    first, second = bits.uniform("probe", 1), bits.uniform("probe", 2)
    a = torch.cat([first(500), first(500)])
    assert torch.equal(bits.uniform("probe", 1)(1000), a)
    assert stats.kstest(a.numpy(), "uniform").pvalue > 1e-3
    assert not set(a.tolist()) & set(second(1000).tolist())


def test_random_operators_draw_from_the_secret_and_leave_no_trace() -> None:
    def drawn(bits: SecretBits, *place: int) -> torch.Tensor:
        torch.manual_seed(0)
        before = torch.get_rng_state()
        with bits.random_operators(*place, torch.device("cpu")):
            x = torch.rand(10_000)
        assert torch.equal(torch.get_rng_state(), before)
        return x

    bits = SecretBits(KEY)
    first = drawn(bits, 1, 0)
    assert torch.equal(first, drawn(SecretBits(KEY), 1, 0))
    for other in (drawn(bits, 2, 0), drawn(bits, 1, 1), drawn(SecretBits(KEY, 1), 1, 0), drawn(SecretBits(b""), 1, 0)):
        assert not (first == other).float().mean() > 0.01
    assert stats.kstest(first.numpy(), "uniform").pvalue > 1e-3


def test_they_are_neither_copied_nor_saved() -> None:
    bits = SecretBits(KEY)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="stay secret"):
            copied(bits)


# Where the key comes from


def rounded(**options: Any) -> torch.Tensor:
    """Outputs of a forward with all sites low, which show how it was rounded."""
    compile_options = options.pop("compile_options", {})
    run = made(policy="all", compile_options=compile_options, **options)
    return run.model(dataset(6).tensors[0]).detach()


@pytest.mark.slow
def test_rounding_follows_the_noise_and_not_the_seed_of_compile() -> None:
    base = rounded()
    assert torch.equal(rounded(compile_options={"seed": 5}), base)
    assert torch.equal(rounded(), base)  # a run can be repeated
    assert not torch.equal(rounded(noise=1), base)


def test_rounding_in_secure_mode_is_new_in_every_run() -> None:
    runs = [rounded(engine=dpq.PrivacyEngine(secure_mode=True)) for _ in range(2)]
    assert not torch.equal(*runs)


def test_evaluation_goes_on_by_the_seed_of_compile() -> None:
    x = dataset(6).tensors[0]
    options = {"quantize_eval": True, "seed": 3, "format": "luq_fp4"}
    private = made(policy="all", compile_options=options).model.eval()(x)
    plain = dpq.compile(copy.deepcopy(made().model._original), budget=0, backend="reference", **options).eval()
    plain.set_policy("all")
    assert torch.equal(private, plain(x))


def test_a_derived_key_tells_nothing_of_the_noise() -> None:
    stream = GaussianStream.seeded(3)
    first = stream.derived_key(b"one")
    stream.fill(100)
    assert stream.derived_key(b"one") == first != stream.derived_key(b"two")
    assert GaussianStream.seeded(4).derived_key(b"one") != first != stream._key
    secure = GaussianStream.secure()
    before = secure.derived_key(b"one")
    secure.renew()
    assert secure.derived_key(b"one") != before


def test_other_noise_brings_other_rounding() -> None:
    run = made(policy="all")
    x = dataset(6).tensors[0]
    first = run.model(x).detach()
    run.engine.renew()
    assert not torch.equal(run.model(x).detach(), first)


# Random operators


@pytest.mark.slow
@pytest.mark.parametrize("inner", INNERS)
def test_dropout_draws_from_the_secret(inner: str) -> None:
    """And not from torch's generator, whose seed others may know, nor does it move that."""
    x = torch.ones(4, 64)

    def masks(secure: bool, seed: int) -> list[torch.Tensor]:
        network = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Dropout(0.5))
        torch.nn.init.eye_(network[0].weight)
        engine = dpq.PrivacyEngine(accountant="rdp", secure_mode=secure)
        run = made(network, engine=engine, max_physical_batch_size=4, compile_options={"inner": inner})
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found = [run.model(x).detach() != 0 for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), before)
        return found

    first = masks(False, 0)
    assert not torch.equal(first[0], first[1])  # each forward has its own
    assert all(map(torch.equal, first, masks(False, 1)))
    assert not torch.equal(masks(True, 0)[0], masks(True, 0)[0])
    assert 0.3 < float(torch.stack(first).float().mean()) < 0.7


@pytest.mark.slow
def test_the_statement_names_what_dropout_assumes() -> None:
    class Dropping(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(nn.functional.dropout(x, 0.1))

    for model, named in ((Net(), False), (Dropping(), True)):
        run = made(model, compile_options={"inner": "eager"})
        train(run)
        assert ("not cryptographic" in run.engine.ledger.statement(1e-5)) == named


# Forks


def in_child(read: Any) -> bytes:
    """What a forked child reads."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(into, read())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return data


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_child_draws_other_noise_in_secure_mode() -> None:
    stream, seeded = GaussianStream.secure(), GaussianStream.seeded(1)
    stream.fill(8)

    def draw(source: GaussianStream) -> bytes:
        return source.fill(64).numpy().tobytes()

    theirs = in_child(lambda: draw(stream))
    assert len(theirs) == 256 and theirs != draw(stream)
    assert in_child(lambda: draw(seeded)) == draw(seeded)  # which can be repeated by anyone


# By hand


def test_sums_do_not_depend_on_how_batches_by_hand_are_numbered() -> None:
    """Tokens are secret, so ids may be any: the same ids give the same bits."""
    model, _, _ = made_private(Net(), 4, policy="all")
    x = torch.randn(4, 6)
    first = clipped_sums(model, [x])
    model.sample_ids = torch.arange(4)
    second = clipped_sums(model, [x])
    assert all(torch.equal(first[name], second[name]) for name in first)
