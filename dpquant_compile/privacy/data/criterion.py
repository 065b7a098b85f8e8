"""`PrivateCriterion`: the user's loss as a sum over samples of functions of one sample each.

DP-SGD clips what one sample adds to the gradient, so that must depend on this sample alone. The usual reductions do not
ensure it: the mean of `nn.CrossEntropyLoss(weight=w)`, or with an `ignore_index`, divides by a sum over the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dpquant_compile.errors import PrivacySpecError, PrivateTrainingError
from dpquant_compile.losses import OnField, own_reduction, read_fields, signature_of, with_reduction
from dpquant_compile.passes.private.drop_batch_loss import BatchLoss
from dpquant_compile.privacy.accounting.replay_check import fingerprint
from dpquant_compile.privacy.call_structure import CallStructure
from dpquant_compile.privacy.constants import FrozenValues, changed, check_names, named_arguments
from dpquant_compile.privacy.data.loss_gradient import LossGradient, is_private
from dpquant_compile.privacy.hooks import refuse_hooks, refuse_modes
from dpquant_compile.programs import is_default

__all__ = ["CONSTANT_PREFIX", "PrivateCriterion"]

CONSTANT_PREFIX = "criterion."  # before the names of the loss' arguments in constant_inputs=

REDUCTIONS = ("mean", "sum", "none", "batchmean")


class PrivateCriterion(nn.Module):
    """The user's loss, computed per sample and reduced over the batch as the user asked.

    `criterion` is a module with an attribute `reduction`, or a function with a keyword `reduction`, that knows
    "none"; `.reduction` is its own unless another is given. It is always evaluated with "none", to [B, ...]; then

    - "mean": each sample's mean over its own positions, then the mean over the B samples. Positions whose target equals
      the `ignore_index` are left out of the sample's mean; a sample without other positions has loss 0, but still
      counts as one of the B. Class weights scale a sample's loss and are not divided out again.
    - "batchmean": each sample's sum, then the mean over samples. "sum": the sum over all samples.
    - "none": the criterion's own result; the caller reduces it sample by sample.

    Without class weights and ignored positions, these are the values that the criterion itself would give. A batch of
    no samples has loss 0, with a graph.

    `samples` gives the number of samples in the batch if it is known: the loss must have as many rows. If it is unknown
    (None), the loss must have as many rows as the first or second tensor of the call.

    `verify` compares each sample's loss and its gradient in the batch with those in a part of the batch: at the first
    call with two samples or more, and from time to time after it. This finds a loss that mixes these samples; it is not
    a proof.

    `gradient` is how losses of a private model's outputs reach its program: undivided, see `LossGradient`. Losses of
    other tensors have autograd's gradients.

    Guarantee: after `pin`, a loss for training and `per_sample` for analyses read only rows of samples, and values that
    were fixed at `pin`, before any batch was read. Calls differ only in the contents of rows.
    """

    def __init__(
        self,
        criterion: Callable[..., Any],
        reduction: str | None = None,
        samples: Callable[[], int | None] = lambda: None,
        verify: bool = True,
    ) -> None:
        super().__init__()
        # torch.compile's wrapper forwards attributes to the inner module: a copy of it has no reduction of its own.
        self.criterion: Any = getattr(criterion, "_orig_mod", criterion)
        self.samples = samples
        self.gradient = LossGradient()
        self.verify = verify  # whether the next call must verify
        self._verifies = verify
        self._calls = 0  # with two samples or more
        self._by_item: dict[str, bool] = {}  # whether an argument is a list with one entry per sample
        self._tensors: dict[str, str] = {}
        self._set: dict[str, Any] = {}
        self._structure: CallStructure | None = None
        self._frozen: FrozenValues | None = None
        self._signature = signature_of(self._inner)
        self._defaults = {n: p.default for n, p in self._signature.parameters.items()} if self._signature else {}
        own = own_reduction(self.criterion)
        reduction = own if reduction is None else reduction
        if reduction not in REDUCTIONS:
            raise PrivacySpecError(f"reduction={reduction!r} of {self._name}: give one of {', '.join(REDUCTIONS)}")
        if reduction == "mean" and (isinstance(self._inner, nn.CTCLoss) or self._inner is F.ctc_loss):
            raise PrivacySpecError("the mean of a CTC loss divides by target lengths; give reduction='sum' or 'none'")
        if any(p.requires_grad for p in self.parameters()):
            raise PrivacySpecError(
                f"{self._name} has trainable parameters, whose gradients nothing clips; make them part of the model"
            )
        self.reduction: str = reduction

    def pin(self, declared: Mapping[str, Any], varying_shapes: bool = False) -> None:
        """Fix what the loss reads beside rows of samples: the values it holds now, and declared arguments.

        See `CallStructure` for what calls must have in common from now on.
        """
        check_names(declared, self._signature, self._name, CONSTANT_PREFIX)
        self._structure = CallStructure("the criterion", declared, varying_shapes, CONSTANT_PREFIX)
        innermost = self.criterion
        while isinstance(innermost, PrivateCriterion):
            innermost = innermost.criterion
        self._frozen = FrozenValues(innermost, "the criterion")
        self._tensors = self._fingerprint()
        self._set = self._settings()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        refuse_modes()
        refuse_hooks(self, "criterion")  # those of the user's own criterion are part of what is compared
        args = read_fields(self.criterion, args)
        losses = self._checked(args, kwargs, "training" if _trains(args, kwargs) else None)
        private = is_private(losses)
        shown = self.gradient.shown if private else _divided
        if self.reduction == "none":
            result = shown(losses, None)
        else:
            total = self._shares(losses, args, kwargs).sum()
            result = shown(total, 1 if self.reduction == "sum" else max(len(losses), 1))
        return result if private else self.gradient.around(result)

    def per_sample(self, *args: Any, **kwargs: Any) -> Tensor:
        """Each sample's own loss, [B]: `forward` adds these up."""
        args = read_fields(self.criterion, args)
        losses = self._checked(args, kwargs, "training" if _trains(args, kwargs) else "analysis")
        losses = self._shares(losses, args, kwargs)
        return losses.flatten(1).sum(1) if losses.ndim > 1 else losses

    def _checked(self, args: Sequence[Any], kwargs: Mapping[str, Any], kind: str | None) -> Tensor:
        """The losses of a call; the kind None is an evaluation, which is not checked for privacy."""
        if kind is not None:
            self._check_held()
        try:
            unreduced = self._unreduced(args, kwargs)
        except (TypeError, AttributeError) as error:
            self._check_tensor(args[0] if args else None, error)
            raise
        losses = self._with_rows(unreduced, [*args, *kwargs.values()])
        if kind is not None:
            self._check_structure(len(losses), args, kwargs, kind)
        if self._verifies and len(losses) > 1:
            self._calls += 1
            if self.verify or self._calls in (4, 16) or self._calls % 64 == 0:  # it may begin to mix samples later
                self._compare_with_parts(losses.detach(), args, kwargs)
                self.verify = False
        if kind is not None:
            self._check_held()  # the loss itself may have written into its state
        return losses

    def _check_tensor(self, output: Any, error: Exception) -> None:
        """Say which loss to give where one of torch failed on an output with fields."""
        own = self._inner if hasattr(self._inner, "__name__") else type(self._inner)
        if not isinstance(output, Mapping | tuple | list) or not own.__module__.startswith("torch."):
            return
        fields = list(output) if isinstance(output, Mapping) else list(range(len(output)))
        field = "logits" if "logits" in fields or not fields else fields[0]
        raise PrivacySpecError(
            f"{self._name} takes a tensor, and the model's output is a {type(output).__name__} with fields {fields}. "
            "Fix: give make_private criterion=one of dpq.losses, or the same loss on a field: "
            f"dpq.losses.on_field({field!r}, {self._name}{'()' if isinstance(own, type) else ''})"
        ) from error

    def _check_held(self) -> None:
        if self._frozen is None:
            return
        self._frozen.check()
        now = self._fingerprint()
        if name := next((n for n in {**now, **self._tensors} if now.get(n) != self._tensors.get(n)), None):
            raise PrivateTrainingError(changed(f"buffer or parameter {name!r}", "the criterion"))
        settings = self._settings()
        if name := next((n for n in {**settings, **self._set} if settings.get(n) != self._set.get(n)), None):
            raise PrivateTrainingError(changed(name, "the criterion"))

    def _settings(self) -> dict[str, Any]:
        """By name: the reduction, by which gradients are scaled before they are clipped, and modes of modules."""
        modules = self.criterion.named_modules() if isinstance(self.criterion, nn.Module) else ()
        modes = {f"train() of {name!r}" if name else "train()": module.training for name, module in modules}
        return {"reduction": self.reduction, **modes}

    def _fingerprint(self) -> dict[str, str]:
        if not isinstance(self.criterion, nn.Module):
            return {}
        named = (*self.criterion.named_parameters(), *self.criterion.named_buffers())
        return {name: fingerprint([tensor]) for name, tensor in named}

    def _check_structure(self, size: int, args: Sequence[Any], kwargs: Mapping[str, Any], kind: str) -> None:
        if self._structure is None or size == 0:  # without samples the structure is unknown
            return

        def sizes(name: str, leaf: Any) -> tuple[Any, ...] | None:
            if leaf is _ITEMS or isinstance(leaf, BatchLoss):
                return ()
            dim = None if name.endswith("weight") else _batch_dim(leaf, size)  # weights may be as many by chance
            return None if dim is None else (*leaf.shape[:dim], *leaf.shape[dim + 1 :])

        declared = self._structure.declared
        given: dict[str, Any] = {}
        for name, value in named_arguments(self._signature, args, kwargs):
            if name in declared or not is_default(value, self._defaults.get(name)):
                items = name not in declared and self._has_items(name, value, size)
                given[name] = _ITEMS if items else value
        for name in declared - given.keys():
            self._structure.check_default(name, self._defaults.get(name))
        self._structure.check(kind, list(given.items()), sizes)

    def _has_items(self, name: str, value: Any, size: int) -> bool:
        """Whether an argument is a list with one entry per sample; entries may be of any kind, as rows may."""
        if not isinstance(value, list | tuple) or len(value) != size:
            return False
        leaves = [leaf for leaf in tree_leaves(value) if leaf is not None and not isinstance(leaf, BatchLoss)]
        rows = all(_batch_dim(leaf, size) is not None for leaf in leaves)
        return self._by_item.setdefault(name, not rows)

    def _rows(self, name: str, value: Any, rows: list[int], size: int) -> Any:
        """An argument for some of the samples."""
        if self._has_items(name, value, size):
            return [value[i] for i in rows]

        def chosen(leaf: Any) -> Any:
            dim = None if name.endswith("weight") else _batch_dim(leaf, size)  # weights may be as many by chance
            return leaf if dim is None else leaf[:, rows] if dim else leaf[rows]

        return tree_map(chosen, value)

    def _shares(self, losses: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Losses [B, ...] scaled so that their sum over a sample is the sample's own loss."""
        if self.reduction not in ("mean", "none") or losses.ndim == 1:
            return losses
        counted = self._counted(losses, args, kwargs).sum(tuple(range(1, losses.ndim)), keepdim=True)
        return losses / counted.clamp(min=1)

    def extra_repr(self) -> str:
        return f"{self._name}, reduction={self.reduction!r}"

    @property
    def _inner(self) -> Any:
        """The loss itself, where the criterion is a loss of one field of the output."""
        return self.criterion.criterion if isinstance(self.criterion, OnField) else self.criterion

    @property
    def _name(self) -> str:
        return str(getattr(self._inner, "__name__", type(self._inner).__name__))

    def _unreduced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return with_reduction(self.criterion, "none", args, kwargs)

    def _with_rows(self, losses: Any, inputs: list[Any]) -> Tensor:
        """`losses`, which must be a tensor with one row for each sample."""
        known = self.samples()
        tensors = [[leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.ndim > 0] for x in inputs]
        # The second argument is the target: losses on sequences may have the batch second in the first one.
        wanted = {known} if known is not None else {len(leaves[0]) for leaves in tensors[:2] if leaves}
        if isinstance(losses, Tensor) and losses.ndim > 0 and len(losses) in wanted:
            return losses
        got = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise PrivacySpecError(
            f"{self._name} with reduction='none' gives {got}, but must give one row for each sample, here "
            f"{' or '.join(map(str, sorted(wanted))) or 'unknown'}. Keep the batch as the first dimension and flatten "
            "nothing into it (cross entropy takes [B, C, T] with targets [B, T])"
        )

    def _counted(self, losses: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Which positions of the loss count: all that the criterion does not ignore."""
        call = {**self._defaults, **dict(zip(self._defaults, args, strict=False)), **kwargs}
        ignore = getattr(self._inner, "ignore_index", call.get("ignore_index"))
        target = call.get("target", args[1] if len(args) > 1 else None)
        # A target of another shape, or of floating point, holds class probabilities: no position is ignored.
        if ignore is None or target is None or target.shape != losses.shape or target.is_floating_point():
            return torch.ones_like(losses, dtype=torch.bool)
        return torch.ne(target, ignore)

    def _compare_with_parts(self, losses: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        size = len(losses)
        names = [name for name, _ in named_arguments(self._signature, args, kwargs)]  # those of `args` come first
        gradients = self._gradients(args, kwargs)
        for rows in (list(range((size + 1) // 2)), list(range(1, size, 2))):
            some, expected = (
                (
                    [self._rows(name, x, rows, size) for name, x in zip(names, given, strict=False)],
                    {name: self._rows(name, x, rows, size) for name, x in named.items()},
                )
                for given, named in ((args, kwargs), gradients)
            )
            try:
                with torch.no_grad():
                    part = self._unreduced(*some)
                alone = self._gradients(*some)
            except Exception as error:
                raise PrivacySpecError(
                    f"{self._name} fails on a part of the batch, so it cannot be seen whether it keeps samples apart: "
                    f"{error}. If it does, give verify=False"
                ) from error
            pairs: list[tuple[str, Any, Any]] = [("losses", losses[rows], part)]
            pairs += [("gradients", *two) for two in zip(tree_leaves(expected), tree_leaves(alone), strict=True)]
            for what, whole, own in pairs:
                if whole is not None and not _close(whole, own):
                    raise PrivacySpecError(
                        f"{self._name} mixes samples: some have other {what} without the rest of the batch. DP-SGD "
                        "needs a loss that is a function of one sample (are output and target of the same shape?); if "
                        "it is one but random, give verify=False"
                    )

    def _gradients(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The arguments of a call, each tensor that requires a gradient replaced by that of the sum of all losses."""
        leaves, spec = tree_flatten((list(args), dict(kwargs)))
        learned = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        held: list[Any] = [None] * len(leaves)
        if learned and torch.is_grad_enabled():
            given = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            for place in learned:
                given[place].requires_grad_()
            some_args, some_kwargs = tree_unflatten(given, spec)
            total = self._unreduced(some_args, some_kwargs).sum()
            found = torch.autograd.grad(total, [given[place] for place in learned], materialize_grads=True)
            for place, grad in zip(learned, found, strict=True):
                held[place] = grad
        return tree_unflatten(held, spec)


_ITEMS = object()  # stands for a list with one entry per sample


def _divided(losses: Tensor, divisor: int | None) -> Tensor:
    return losses if divisor in (None, 1) else losses / divisor


def _close(whole: Tensor, part: Tensor) -> bool:
    """Whether two results are equal but for the order of sums."""
    tolerance = max(1e-4, 4 * torch.finfo(whole.dtype).eps)
    scale = float(whole.nan_to_num(0, 0, 0).abs().max()) if whole.numel() else 0.0
    return part.shape == whole.shape and torch.allclose(
        part, whole, rtol=tolerance, atol=tolerance * scale, equal_nan=True
    )


def _trains(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may have a backward."""
    return torch.is_grad_enabled() and any(
        isinstance(v, Tensor) and v.requires_grad for v in tree_leaves((args, kwargs))
    )


def _batch_dim(leaf: Any, size: int) -> int | None:
    """Which dimension holds the samples: the first, or as in losses on sequences the second."""
    if not isinstance(leaf, Tensor):
        return None
    return next((dim for dim in range(min(leaf.ndim, 2)) if leaf.shape[dim] == size), None)
