"""What the tests of private training share: a model made private on a fixed batch, and the reference it must equal."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.privacy import engine as engine_module
from dpquant_compile.privacy.clipping.bounds import STABILITY
from dpquant_compile.privacy.mechanism.gaussian import GaussianStream
from dpquant_compile.privacy.mechanism.optimizer import PrivateOptimizer
from dpquant_compile.privacy.mechanism.secret_bits import SecretBits

SECRET = 77


def coarsest(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `compile` with a format that rounds all operands at random and coarsely, where they name no recipe.

    What one sample could do to others shows most clearly there; what holds for it is tested for recipes apart.
    """
    return dict(options) if "recipe" in options else {"format": "luq_fp4", **options}


def made_private(
    model: nn.Module,
    physical: int,
    *,
    bound: Any = 0.5,
    clipping: str = "flat",
    policy: Any = "none",
    optimizer: Any = None,
    noise_multiplier: float = 0.0,
    private: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[dpq.CompiledModule, PrivateOptimizer, dpq.PrivacyEngine]:
    """A compiled model in train() under an engine, with the sum as its loss reduction, for batches given by hand.

    Its secret is that of `SECRET`, so that a reference can round alike. `private` holds more words for make_private.
    Where `options` names no recipe, see `coarsest`.
    """
    compiled = dpq.compile(model, budget=0, **{"backend": "reference", **coarsest(options)})
    compiled.train()
    engine = dpq.PrivacyEngine(accountant="rdp")
    data = TensorDataset(torch.zeros(4 * physical, 1))
    optimizer = optimizer or torch.optim.SGD([p for p in compiled.parameters() if p.requires_grad], lr=0.0)
    compiled, made, _ = engine.make_private(
        module=compiled,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=physical),
        noise_multiplier=noise_multiplier,
        max_grad_norm=bound,
        clipping=clipping,
        max_physical_batch_size=physical,
        loss_reduction="sum",
        noise_generator=torch.Generator().manual_seed(SECRET),
        **(private or {}),
    )
    compiled.set_policy(policy)
    return compiled, made, engine


def secret_bits() -> SecretBits:
    """The random bits of models that `made_private` made."""
    noise = GaussianStream.from_generator(torch.Generator().manual_seed(SECRET))
    return SecretBits(noise.derived_key(engine_module._BITS))


def leaves(outputs: Any) -> list[Tensor]:
    """The tensors of a model's outputs that carry gradients."""
    flat = torch.utils._pytree.tree_leaves(outputs)
    return [leaf for leaf in flat if isinstance(leaf, Tensor) and leaf.requires_grad]


def weights_like(outputs: Sequence[Tensor], seed: int = 5) -> list[Tensor]:
    """Fixed random gradients for the outputs."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(out.shape, generator=generator, dtype=out.dtype) for out in outputs]


def clipped_sums(model: dpq.CompiledModule, inputs: Sequence[Tensor], seed: int = 5) -> dict[str, Tensor]:
    """One private backward of Σ weights · outputs, and what it left in the parameters."""
    model.__dict__["_private"].drop_sums()  # what an earlier call has left: no step has used it
    outputs = leaves(model(*inputs))
    torch.autograd.backward(outputs, weights_like(outputs, seed))
    return {
        name: parameter.summed_grad.clone()
        for name, parameter in model.named_parameters()
        if getattr(parameter, "summed_grad", None) is not None
    }


def reference_sums(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    bound: Any = 0.5,
    clipping: str = "flat",
    policy: Any = "none",
    seed: int = 5,
    ids: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The same by plain autograd on the reference backend: one sample at a time, clipped by hand, added up."""
    compiled = dpq.compile(model, budget=0, **{**coarsest(options), "backend": "reference", "inner": "eager"})
    compiled.train()
    compiled.set_policy(policy)
    compiled._dispatcher.bits = secret_bits()
    trainable = {name: p for name, p in compiled.named_parameters() if p.requires_grad}
    totals = {name: torch.zeros_like(p) for name, p in trainable.items()}
    with torch.no_grad():
        whole = leaves_of(compiled(*inputs))
    weights = weights_like(whole, seed)
    for i in range(inputs[0].shape[0]):
        compiled.sample_ids = torch.tensor([i]) if ids is None else ids[i : i + 1]
        outputs = leaves(compiled(*(x[i : i + 1] for x in inputs)))
        grads = torch.autograd.grad(
            outputs, list(trainable.values()), [w[i : i + 1] for w in weights], allow_unused=True
        )
        own = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(trainable.items(), grads, strict=True)}
        for name, factor in factors(own, bound, clipping).items():
            totals[name] += factor * own[name]
    return totals


def leaves_of(outputs: Any) -> list[Tensor]:
    """All floating tensors of a model's outputs."""
    flat = torch.utils._pytree.tree_leaves(outputs)
    return [leaf for leaf in flat if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def factors(grads: dict[str, Tensor], bound: Any, clipping: str) -> dict[str, float]:
    """The clip factors of one sample by definition, in float64."""
    norms = {name: float(g.double().norm()) for name, g in grads.items()}
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    if clipping == "per_layer":
        bounds = [bound / len(norms) ** 0.5] * len(norms) if isinstance(bound, float) else bound
        return {n: min(1.0, c / max(norm, 1e-30)) for (n, norm), c in zip(norms.items(), bounds, strict=True)}
    one = bound / (total + STABILITY) if clipping == "automatic" else min(1.0, bound / max(total, 1e-30))
    return dict.fromkeys(norms, one)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    """Each parameter's sum, relative to its own norm.

    One that lies below the rounding of all together on both sides (the bias of attention's keys, whose gradient cancels
    to zero) is nothing but rounding, and is not compared.
    """
    noise = 2.0**-23 * float(torch.stack([value.double().norm() for value in expected.values()]).norm())
    for name, value in expected.items():
        if name not in actual:
            assert not value.any(), f"{name} has no private gradient"
            continue
        if max(float(actual[name].norm()), float(value.norm())) <= noise:
            continue
        error = float((actual[name] - value).norm() / value.norm())
        assert error <= tolerance, f"{name}: off by {error:.1e}"
