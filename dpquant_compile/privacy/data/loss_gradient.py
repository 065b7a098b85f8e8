"""The gradient with which a loss reaches the private program: that of a sum over samples, whatever the loop shows.

A mean divides each sample's gradient by the size of the batch, and a multiplication does not restore the last bit of
(g / n) · n. Rounding turns such a bit into a whole step of four or eight bits, and later layers amplify it: one more
sample would change how all others are rounded, and move their clipped gradients by many percent of the bound.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.privacy.device_checks import DeviceChecks

__all__ = ["DIVIDED", "LossGradient", "PrivateForward", "is_private"]

DIVIDED = (
    "a loss that the loop reduces to a mean by itself divides each sample's gradient by the size of the batch. In low "
    "precision the last bit of such a gradient can decide how it is rounded, so one more sample would change the "
    "gradients of all others. Fix: give the loss to make_private as criterion=, with reduction 'mean' or 'sum'; or "
    "reduce it by a sum, and say loss_reduction='sum'"
)


class PrivateForward(torch.autograd.Function):
    """The base of what ties a private program to autograd, by which losses of its outputs are known."""


class LossGradient:
    """What the backwards of one criterion's losses have in common.

    Guarantee: samples reach the program with the gradients of their own losses, times one number that is the same in
    every backward, or the backward is refused. The value shown to the loop may be divided; gradients are not. That
    number is the one of the first backward, which must not be made of the batch. Terms that the loop adds to the
    criterion's loss are the user's own: see "The loss" in docs/private.md.
    """

    def __init__(self) -> None:
        self._factors: list[Tensor] = []  # in the backward under way
        self._usual: Tensor | None = None  # in the first one
        self._reached = False
        self.in_batch: Callable[[], bool] = bool  # whether the loader's loop is in a batch; a session knows

    def begin(self) -> None:
        """A new forward: what was seen before belongs to another backward."""
        self._factors, self._reached = [], False

    def shown(self, losses: Tensor, divisor: int | None) -> Tensor:
        """`losses / divisor`, with the gradient of `losses`. Without a divisor `losses` are not reduced yet."""
        result: Tensor = _Shown.apply(losses, divisor, self)  # type: ignore[no-untyped-call]
        return result

    def around(self, losses: Tensor) -> Tensor:
        """A loss of a model in eval(): as it is, but a backward of it within a batch of the loader is refused.

        Its gradients are not clipped, and a step would leave them out: it would be paid for, and be noise alone.
        """
        if losses.requires_grad:
            losses.register_hook(self._refuse_around)
        return losses

    def _refuse_around(self, grad: Tensor) -> None:
        if self.in_batch():
            raise PrivateTrainingError(
                "backward of a loss that did not come through the private program, in a batch of the private loader: "
                "the model was in eval() at its forward, so nothing was clipped, and optimizer.step() would be noise "
                "alone. Fix: model.train() before the loop, and after an evaluation"
            )

    def take(self, grad: Tensor, reduced: bool) -> None:
        """A gradient that has arrived from the loop."""
        self._reached = True
        if reduced:
            self._factors.append(grad.detach().reshape(()))

    def check(self, checks: DeviceChecks) -> None:
        """Refuse a backward that does not come from the criterion, or scales its loss otherwise than the first did."""
        if not self._reached:
            raise PrivateTrainingError(
                "this backward does not come from the criterion that make_private returned, so nothing shows that the "
                "loss keeps samples apart; a mean over tokens, or over pairs, does not. Fix: "
                "criterion(model(x), y).backward(); give another loss to make_private as criterion="
            )
        now = torch.stack(self._factors) if self._factors else torch.zeros(0)
        if self._usual is None:
            self._usual = now
        elif now.device == self._usual.device:
            checks.refuse(_differ(now, self._usual), partial(_scaled, now, self._usual))
        else:
            raise PrivateTrainingError(_scaled(now, self._usual))


def _differ(some: Tensor, others: Tensor) -> Tensor:
    """Whether two lists of numbers hold other ones, however often."""
    equal = some[:, None] == others
    return ~(equal.any(0).all() & equal.any(1).all())


def _scaled(now: Tensor, usual: Tensor) -> str:
    told, first = (" and ".join(map(str, sorted(set(each.cpu().tolist())))) for each in (now, usual))
    return (
        f"the loss was multiplied by {told} before this backward, and by {first} before the first one. "
        "Gradients are clipped after that, so a factor made of the batch lets one sample scale all others. "
        "Fix: call backward() on what the criterion returns, or on a constant multiple of it; the learning "
        "rate may change"
    )


def is_private(losses: Tensor) -> bool:
    """Whether gradients of `losses` reach a private program."""
    # What a private program computes is a single node, so only the loop's own operations are walked over.
    seen, left = set[Any](), [losses.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if issubclass(getattr(type(node), "_forward_cls", object), PrivateForward):
            return True
        seen.add(node)
        left += [before for before, _ in node.next_functions]
    return False


class _Shown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, divisor: int | None, gradient: LossGradient) -> Tensor:
        ctx.gradient, ctx.reduced = gradient, divisor is not None
        return losses.clone() if divisor is None else losses / divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.gradient.take(grad, ctx.reduced)
        return grad, None, None
