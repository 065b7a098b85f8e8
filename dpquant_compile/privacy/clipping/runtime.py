"""A private session: what a compiled model does in train() once a privacy engine has taken it.

Each training forward runs on a micro-batch, padded to one fixed size, and its backward leaves the sum of clipped
gradients in `parameter.summed_grad`, where Opacus' optimizers keep theirs. Autograd never sees a parameter, so no
gradient reaches one around the clipping. The sums have no noise yet: they are not saved with the model.
"""

import math
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_map, tree_structure, tree_unflatten

from dpquant_compile import pipeline
from dpquant_compile.backends.ops.private_site import pack_weight
from dpquant_compile.backends.sending import sent
from dpquant_compile.engine_interface import Internals
from dpquant_compile.errors import PrivateTrainingError
from dpquant_compile.held_values import value_key
from dpquant_compile.link_table import LinkTable
from dpquant_compile.module import CompiledModule
from dpquant_compile.passes.batch.track_batch import batch_size
from dpquant_compile.passes.canonical.rewrite_products import stored_weight
from dpquant_compile.passes.fx_utils import bind_inputs, read_attribute
from dpquant_compile.passes.precision.insert_switches import call_at
from dpquant_compile.passes.private.drop_batch_loss import with_batch_loss
from dpquant_compile.passes.private.joint_facts import TENSOR
from dpquant_compile.passes.snapshot import storage_of
from dpquant_compile.privacy.accounting.replay_check import fingerprint
from dpquant_compile.privacy.clipping.bounds import Clipping
from dpquant_compile.privacy.clipping.joint_graph import Inputs, JointSpec, packed_key
from dpquant_compile.privacy.clipping.parameter_uses import find_uses, refuse_whole_modules
from dpquant_compile.privacy.clipping.program import PrivateProgram
from dpquant_compile.privacy.constants import Constants
from dpquant_compile.privacy.contents import Contents
from dpquant_compile.privacy.data.loss_gradient import DIVIDED, LossGradient, PrivateForward
from dpquant_compile.privacy.data.poisson_loader import MicroBatch
from dpquant_compile.privacy.device_checks import DeviceChecks
from dpquant_compile.privacy.distributed.shards import Shards
from dpquant_compile.privacy.hooks import refuse_hooks, refuse_modes
from dpquant_compile.privacy.mechanism.secret_bits import SecretBits
from dpquant_compile.privacy.run import Forward, Pinned, Step
from dpquant_compile.programs import Program
from dpquant_compile.sites import BatchAxis

__all__ = ["Session", "UnnoisedSum", "padded", "real_rows"]


_LEFT = (
    "left without a step of the private optimizer: the gradients are dropped, and paid for all the same. They do not "
    "add up over batches. Fix: step the optimizer that make_private returned, not the one that was given to it, after "
    "every batch that the loader yields. Skip no micro-batch, also no empty one (no `if len(x) == 0: continue`): the "
    "last of a batch may be empty. For larger batches raise batch_size, and give max_physical_batch_size for what fits "
    "into memory"
)


class UnnoisedSum(Tensor):
    """A sum of clipped gradients before noise. It is used like any tensor, and pickled as None.

    Guarantee: whoever saves a model, an optimizer or a parameter in the middle of a step writes no such sum to disk.
    """

    # What is computed from it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own do

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> "UnnoisedSum":
        return self.detach().clone().as_subclass(UnnoisedSum)


class Session:
    """Runs a compiled model's training forwards privately.

    stored      the trainable parameters that the optimizer holds, by name, in its order; of several processes maybe
                shards, see `Shards`
    parameters  the same as programs read them: whole
    physical    the one batch size of the compiled programs; smaller micro-batches are padded to it
    mean        whether gradients come divided by the size of the batch, as from a loss that the loop reduces by itself
    gradient    how the criterion's losses come; None without a criterion
    step        the order of a logical batch, which says what may run and which sums may leave
    constant_inputs  arguments of forward() without a row per sample, by name: see `Constants`
    varying_shapes   whether rows may have other sizes from call to call

    checks      refusals that wait for a device; they come before any sum leaves

    Guarantee: a sum holds each sample's gradient once, clipped as a whole, so that adding or removing a sample moves it
    by at most `sensitivity`. It has no noise, must stay secret, and leaves by `take_sums` alone, when `step` allows it.
    """

    def __init__(
        self,
        model: CompiledModule,
        stored: Mapping[str, nn.Parameter],
        clipping: Clipping,
        physical: int,
        mean: bool,
        *,
        step: Step,
        gradient: LossGradient | None = None,
        constant_inputs: Mapping[str, Any] | None = None,
        varying_shapes: bool = False,
        shards: Shards | None = None,
    ) -> None:
        self.model = model
        self.shards = shards
        self.gradient = gradient
        if gradient is not None:
            gradient.in_batch = lambda: self.micro is not None
        self.bits: SecretBits  # from `attach`, without which nothing runs
        self.step = step
        self.internals: Internals = model.internals()
        with model.whole_parameters():
            self.constants = Constants(self.internals.original, constant_inputs or {}, varying_shapes)
        self.stored = dict(stored)
        self.parameters = {name: p if shards is None else shards.whole(p) for name, p in stored.items()}
        self.clipping = clipping
        self.physical = physical
        self.mean = mean
        self.checks = DeviceChecks()
        self._dropped: Tensor | int = 0
        self._used: set[str] = set()
        self._programs: dict[Hashable, tuple[Program, PrivateProgram]] = {}
        self._outputs: dict[Hashable, list[Tensor]] = {}  # what each program gives: shapes, types and devices
        self._forwards = (0, 0)  # (step, forwards of that step so far)
        self._sums: dict[str, Tensor] = {}
        self._left = 0  # logical batches in a row that were left without a step
        self._packed: dict[str, tuple[Any, Tensor, Tensor]] = {}
        self._anchor = torch.zeros((), requires_grad=True)

    def attach(self, bits: SecretBits) -> None:
        """Take over the model's training forwards; `bits` is the secret that random bits are drawn from."""
        self.bits = bits
        self.model.attach(self)

    def check_attached(self) -> None:
        """Refuse to go on once another session has taken the model's training forwards over."""
        if not self.model.is_run_by(self):
            raise PrivateTrainingError(
                "this optimizer belongs to an earlier make_private: the model has been made private anew since, with a "
                "clipping bound and an account of its own. Fix: use the optimizer that the last make_private returned"
            )

    def take_bits(self, bits: SecretBits) -> None:
        """Go on with other random bits, when the noise gets another key: a checkpoint is loaded, a replay is left."""
        self.bits = bits

    @property
    def dropped(self) -> int:
        """How many samples were left out, since their gradients were not finite."""
        return int(self._dropped)

    @property
    def draws_random(self) -> bool:
        """Whether a program of this session has random operators, such as dropout."""
        return any(private.draws_random for _, private in self._programs.values())

    @property
    def own_rules(self) -> tuple[str, ...]:
        """The operators of programs of this session whose isolation rests on a rule of the user."""
        graphs = (program.base.graph for program, _ in self._programs.values())
        found = (node.meta["own_rule"] for graph in graphs for node in graph.nodes if "own_rule" in node.meta)
        return tuple(sorted(set(found)))

    def uses(self, name: str) -> bool:
        """Whether a parameter has gradients; what is not known yet has."""
        return not self._used or name in self._used

    @property
    def used(self) -> frozenset[str]:
        """The parameters that have gradients, by the programs made so far."""
        return frozenset(self._used)

    def add_used(self, names: Iterable[str]) -> None:
        """Take parameters for used that another process of this run has used."""
        self._used.update(names)

    def gather(self) -> None:
        """After a change of `stored`, bring `parameters` up to date; a collective where they are sharded."""
        if self.shards is not None:
            self.shards.gather()

    def printed_parameters(self) -> str:
        """A fingerprint of the model's parameters as programs read them."""
        with self.model.whole_parameters():
            return fingerprint(list(self.internals.original.parameters()))

    # The sums of a logical batch

    @property
    def micro(self) -> MicroBatch | None:
        """The micro-batch that the loop works on."""
        return self.step.micro

    def announce(self, micro: MicroBatch | None) -> None:
        """What the loader is about to hand out; None at the end of an iteration."""
        if micro is None:
            self.step.end()
        else:
            if micro.first and self.step.micro is not None and self.step.growing:
                self._note_left()
            self.step.hand_out(micro)
        if self.step.empty:
            self._clear()

    def _note_left(self) -> None:
        """A logical batch was left without a step: warn; if the one before was too, refuse to go on."""
        self._left += 1
        if self._left > 1:
            raise PrivateTrainingError(f"{self._left} batches in a row were {_LEFT}")
        warnings.warn(f"a batch was {_LEFT}", stacklevel=4)

    @contextmanager
    def rehearsal(self, noise_multiplier: float) -> Iterator[None]:
        """Between epochs, take batches whose sums stay inside of an analysis, which is paid for; no trace is left."""
        dropped = self._dropped
        self.announce(None)  # what was given by hand before is no part of it
        self.step.pay(noise_multiplier)
        try:
            yield
        finally:
            self.announce(None)
            self._dropped = dropped

    def take_sums(self, noise_multiplier: float) -> dict[str, Tensor | None]:
        """The sums for a step to use, with this noise; None for parameters that had no gradient.

        Guarantee: sums leave here alone, and only those that `Step.release` lets go. They have no noise yet, and
        sensitivity `self.sensitivity`.
        """
        self.check_attached()
        self.settle()
        self.step.release(noise_multiplier)
        self._left = 0
        return {name: None if self.step.empty else self._sums.get(name) for name in self.parameters}

    def settle(self) -> None:
        """Raise what `checks` has to refuse, and drop the sums then: another try must not release them."""
        try:
            self.checks.settle()
        except BaseException:
            self.drop_sums()
            raise

    def drop_sums(self) -> None:
        """Drop sums that were used, or that no step will use: a sample must not be in the sums of two steps."""
        self.step.drop()
        self._clear()

    def _clear(self) -> None:
        self._sums.clear()
        for parameter in self.parameters.values():
            parameter.summed_grad = None  # type: ignore[attr-defined]

    @property
    def sensitivity(self) -> float:
        """The most that one sample has added to the sums that lie in the parameters now."""
        return self.clipping.sensitivity * self._scale(self.step.sum_bound)

    def _scale(self, bound: float) -> float:
        """What the clipping bounds are multiplied by, for one sample to add at most `bound`."""
        return bound / self.clipping.sensitivity

    def ways(self) -> tuple[tuple[str, str, str], ...]:
        """How the per-sample gradients of each parameter are taken, by the programs made so far."""
        rows = {row[0]: row for _, private in self._programs.values() for row in private.ways}
        unused = (name for name in self.parameters if self._programs and name not in rows)
        return (*rows.values(), *((name, "", "not used: no gradient, no noise") for name in unused))

    # One micro-batch

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # under torch.compile of the private model
    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A training forward."""
        refuse_hooks(self.model)
        refuse_modes()
        self._check_parameters()
        args, kwargs = self.internals.programs.normalise(args, kwargs)
        size = batch_size(args, kwargs)
        self._check_call(size, args, kwargs)
        if self.micro is not None and len(self.micro.ids) == 0 and size < 2:  # rand_on_empty makes up one row
            empty = self._run_empty(size, args, kwargs)
            if empty is not None:
                return empty
        setting = self.internals.programs.setting()
        if size == 0:
            args, kwargs = tree_map(self._blank, (args, kwargs))
        program = self._program(args, kwargs, size)  # first: a capture may find other sites, and so another policy
        pinned = Pinned(self.model.step, self.model.policy, setting, self.contents())
        forward = self.step.forward(pinned, size)
        given = bind_inputs(program.base, args, kwargs)
        self.constants.check_call(program.base, given, args, kwargs, "training")
        table = self.internals.begin(self.physical, self._ids(size), self.bits)
        if self.mean and bool(table.policy.any()):
            raise PrivateTrainingError(DIVIDED)
        if self.gradient is not None:
            self.gradient.begin()
        inputs = self._inputs(program, given, size, table, self._scale(forward.bound))
        private = self._private(program, inputs, (args, kwargs))
        self.constants.check_read(program.base, private.spec.attributes, self.parameters, "training", self.checks)
        call = _Call(self, private, size, forward)
        apply: Any = _Run.apply
        with self._random_operators(private, table.keys.device):
            flat: tuple[Any, ...] = apply(self._anchor, call, inputs)
        key = (id(program), value_key(inputs.args))
        if key not in self._outputs:
            self._outputs[key] = [value.detach().new_zeros(()).expand(value.shape) for value in flat]
        return _unpadded(private, flat, size)

    def _run_empty(self, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
        """The outputs of a micro-batch of no samples, without running a program: nothing of it would enter the sum.

        None where no forward has shown the outputs of such a call yet, or where they are not plain rows.
        """
        if size == 0:
            args, kwargs = tree_map(self._blank, (args, kwargs))
        program = self._program(args, kwargs, size)
        key = (id(program), value_key(self._padded(program, bind_inputs(program.base, args, kwargs), size)))
        known = self._outputs.get(key)
        if known is None or key not in self._programs:
            return None
        _, private = self._programs[key]
        rows = _made_up_rows(private, known, size)
        if rows is None:
            return None
        self.internals.begin(self.physical, self._ids(size), self.bits)  # the step counts, whoever is in the batch
        self.step.forward_empty(size)
        apply: Any = _Empty.apply
        return _unpadded(private, apply(self._anchor, private.differentiable, *rows), size)

    def contents(self) -> object:
        """What the parameters hold, in a batch of several micro-batches; None in others, where no two can differ.

        Version counters do not see what is written through `.data`, by NumPy, or before `model.step` is set.
        """
        if not self.step.divided:
            return None
        held = tuple(map(id, self.internals.original.parameters()))  # one may be put in the place of another
        return held, Contents(list(self.parameters.values()), self.checks)

    def finish(self, call: "_Call", sums: Sequence[Tensor], dropped: Tensor) -> None:
        """Add what one backward has made to the sums."""
        self._dropped = self._dropped + dropped  # not in place: `rehearsal` keeps what was there
        if not self.step.growing:
            self._clear()
        self.step.backward(call.forward)
        for name, total in zip(call.program.spec.order, sums, strict=True):
            # Kept here, since another session may write to the same parameters; shown there, as Opacus does.
            self._sums[name] = self._sums[name].add_(total) if name in self._sums else total.as_subclass(UnnoisedSum)
            self.parameters[name].summed_grad = self._sums[name]  # type: ignore[attr-defined]

    def _check_parameters(self) -> None:
        """Refuse other tensors in the place of trained parameters: they may be made of the batch."""
        held = dict(self.internals.original.named_parameters(remove_duplicate=False))
        other = next((name for name, parameter in self.parameters.items() if held.get(name) is not parameter), None)
        if other is not None:
            raise PrivateTrainingError(
                f"parameter {other!r} of the model is not the one that make_private took, whose gradient would then be "
                "computed at another place. Fix: no torch.func.functional_call with other tensors in private training; "
                "after load_state_dict(assign=True), merge_and_unload() or a replaced layer, make a new optimizer and "
                "call make_private"
            )

    def _check_call(self, size: int, args: Any, kwargs: Any) -> None:
        given = None if self.micro is None else len(self.micro.ids)
        if size > self.physical and given in (None, size):  # for other sizes see `_ids`
            raise PrivateTrainingError(
                f"the model was called on {size} samples, but its programs hold {self.physical}: take batches from the "
                "loader that make_private returned, or raise max_physical_batch_size"
            )
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_flatten((args, kwargs))[0]):
            raise PrivateTrainingError(
                "an input of the model requires a gradient. A private program gives none to its inputs: detach it, or "
                "put what made it into the model. A generator that learns from this model gives its images to the "
                "plain one, model.original"
            )

    def _random_operators(self, private: PrivateProgram, device: torch.device) -> AbstractContextManager[None]:
        """Let dropout and the like draw from the run's secret, anew in each forward of a step."""
        if not private.draws_random:
            return nullcontext()
        step, before = self.model.step, self._forwards
        self._forwards = (step, before[1] + 1 if before[0] == step else 0)
        return self.bits.random_operators(*self._forwards, device)

    def _ids(self, size: int) -> Tensor:
        ids = self.model.sample_ids if self.micro is None else self.micro.ids
        if ids is None:
            ids = torch.arange(size)
        if len(ids.unique()) < len(ids):
            raise PrivateTrainingError(
                "model.sample_ids names a sample twice, which then counts twice however its gradient is clipped. Fix: "
                "put each sample into a batch once"
            )
        if len(ids) != size and not (len(ids) == 0 and size == 1):  # an empty batch may come as one made-up row
            raise PrivateTrainingError(
                f"the loader gave {len(ids)} samples and the model was called on {size} rows: each row of a private "
                "batch is one sample. Fix: call the model on the batch as it comes; run other data under "
                "torch.no_grad()"
            )
        return torch.cat([ids, torch.full((self.physical - len(ids),), -1, dtype=torch.int64)])

    def _program(self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> Program:
        program: Program = self.internals.programs.get(args, kwargs, size or self.physical)
        if not program.any_batch and size not in (0, self.physical):
            raise PrivateTrainingError(
                f"the graph of this model holds for one batch size only, so a micro-batch of {size} cannot be padded "
                f"to {self.physical}: {program.bound}. Fix: take sizes from x.shape, and do not decide by them"
            )
        return program

    def _blank(self, value: Any) -> Any:
        empty = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == 0
        return value.new_zeros((self.physical, *value.shape[1:])) if empty else value

    def _inputs(self, program: Program, given: Sequence[Any], size: int, table: LinkTable, scale: float) -> Inputs:
        args = self._padded(program, given, size)
        device = table.keys.device
        real = 0 if self.micro is not None and len(self.micro.ids) == 0 else size
        live = torch.arange(self.physical, device=device) < real
        bounds = sent(torch.tensor([bound * scale for bound in self.clipping.bounds]), device)
        return Inputs(args, self._weights(program, table), (table.policy, table.keys, table.samples), bounds, live)

    def _padded(self, program: Program, given: Sequence[Any], size: int) -> list[Any]:
        placeholders = [node for node in program.base.graph.nodes if node.op == "placeholder"]
        # Programs are compiled for one layout. Views that read another one were checked in capture.
        return [
            tree_map(_row_major, padded(node, value, size, self.physical))
            for node, value in zip(placeholders, given, strict=True)
        ]

    def _weights(self, program: Program, table: LinkTable) -> dict[str, Tensor]:
        """The sites' weights as low-precision products take them, where the policy asks for it; kept until a step.

        A weight that does not train and is rounded to nearest is kept for the whole run: `Constants` refuses changes.
        """
        trained = {id(parameter) for parameter in self.parameters.values()}
        weights: dict[str, Tensor] = {}
        for node in program.base.graph.nodes:
            row = program.rows.get(node.meta["site"].name) if "site" in node.meta else None
            key = None if row is None else packed_key(node, row)
            if row is None or key is None:
                continue
            held, transposed = stored_weight(node.args[1])
            value = read_attribute(program.base, str(held.target))
            # What is written through `.data` raises no version, but a tensor that is put there has another address.
            state: tuple[Any, ...] = (value.data_ptr(), value.dtype, value.shape)
            precision, recipe = int(table.policy[row]), self.internals.spec.recipe
            running = recipe.running(precision)
            if running is not None:
                fixed = id(value) not in trained and running.weight.rounding == "nearest"
                state += (precision, value._version, None if fixed else table.weight_keys[row])
            if self._packed.get(key, (None,))[0] != state:
                weight = value.detach().t() if transposed else value
                packed = pack_weight(weight, table.keys, call_at(node, row, str(recipe)), precision)
                self._packed[key] = (state, packed, value)  # held, so that its address stays its own
            weights[key] = self._packed[key][1]
        return weights

    def _private(self, program: Program, inputs: Inputs, call: tuple[Any, Any]) -> PrivateProgram:
        key = (id(program), value_key(inputs.args))  # numbers and shapes are constants of a compiled program
        if key not in self._programs:
            # Bounds, noise and seeds are no part of a program, so a second run of the same model finds it compiled.
            held = tuple(self.parameters), _tensors(self.internals.original)
            kind = (*key, self.clipping.mode, self.physical, held)
            kept = self.internals.programs.private
            if kind not in kept:
                with torch.autograd.set_detect_anomaly(False):  # what it adds would become part of the program
                    kept[kind] = (program, self._built(program, inputs, call))
            self.constants.check_attributes(program.attributes)
            self._programs[key] = kept[kind]
            self._used |= set(kept[kind][1].spec.order)
        return self._programs[key][1]

    def _built(self, program: Program, inputs: Inputs, call: tuple[Any, Any]) -> PrivateProgram:
        trainable = {id(p): n for n, p in self.parameters.items() if p.requires_grad}
        refuse_whole_modules(program.base, trainable)
        log = self.internals.programs.log
        base = pipeline.isolated(program.base, *call, log)
        uses = find_uses(base, trainable)
        order = tuple(name for name in self.parameters if name in uses.parameters)
        if not order:
            raise PrivateTrainingError(
                "no parameter that the optimizer trains has a gradient in this forward: they are frozen, or the model "
                "does not use them. Fix: set requires_grad_(True), or run it under torch.no_grad()"
            )
        recipe = str(self.internals.spec.recipe)
        places = tuple(list(self.parameters).index(name) for name in order)
        spec = JointSpec(base, uses, self.clipping, order, places, program.rows, recipe, self.physical)
        return PrivateProgram(spec, inputs, self.internals.spec.inner, self.internals.programs.recorder, log)


class _Call:
    """One forward, until its backward."""

    def __init__(self, session: Session, program: PrivateProgram, size: int, forward: Forward) -> None:
        self.session, self.program, self.size, self.forward = session, program, size, forward
        self.saved: list[Any] | None = None
        self.versions = self._versions()
        self._watched: list[tuple[str, Tensor, int]] = []

    def _versions(self) -> int:
        held = (*self.session.parameters.values(), *self.session.stored.values())
        return sum(parameter._version for parameter in held)

    def run(self, inputs: Inputs) -> list[Any]:
        """The outputs, padded; what backward needs stays here, and is watched for writes from outside."""
        spec = self.program.spec
        outputs, saved = self.program.run_forward(inputs)
        shown = {id(value) for value in outputs}
        # Without the outputs' history, which holds this call: a cycle that Python could not free.
        self.saved = [value.detach() if id(value) in shown else value for value in saved]
        kept = {storage_of(value) for value in saved if isinstance(value, Tensor)}
        read = {f"attribute {name!r}": read_attribute(spec.base, name) for name in spec.attributes}
        given = {f"input {place}": leaf for place, leaf in enumerate(tree_flatten(inputs.args)[0])}
        made = {f"output {place}": leaf for place, leaf in enumerate(outputs)}
        self._watched = [
            (name, value.detach(), value._version)
            for name, value in {**read, **given, **made}.items()
            if isinstance(value, Tensor) and not value.is_inference() and storage_of(value) in kept
        ]
        return outputs

    def backward(self, grads: Sequence[Tensor]) -> None:
        with self.session.model.whole_parameters():
            self._backward(grads)

    def _backward(self, grads: Sequence[Tensor]) -> None:
        session = self.session
        refuse_hooks(session.model)
        refuse_modes()
        session.step.check_backward(self.forward)
        if session.gradient is not None:
            session.gradient.check(session.checks)
        if self.versions != self._versions() or self.forward.pinned.contents != session.contents():
            raise PrivateTrainingError(
                "parameters were changed between the forward and its backward: the gradient would belong to neither. "
                "Fix: call optimizer.step() after backward()"
            )
        written = next((name for name, value, version in self._watched if value._version != version), None)
        if written is not None:
            raise PrivateTrainingError(
                f"{written} of the model was written to in place between the forward and its backward, which needs it "
                "as it was; what was written may also come from other samples. Fix: change a copy, as in x.clone() or "
                "y = x * 2"
            )
        assert self.saved is not None
        saved, self.saved, self._watched = self.saved, None, []
        scale = self.size if session.mean else 1
        tangents = [
            (grad * scale).contiguous()
            for grad, wanted in zip(grads, self.program.differentiable, strict=True)
            if wanted
        ]
        session.finish(self, *self.program.run_backward(saved, tangents))


class _Run(PrivateForward):
    """Ties a program to autograd: its only differentiable input is an anchor that stands for all parameters."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: _Call, inputs: Inputs) -> tuple[Any, ...]:
        outputs = call.run(inputs)
        ctx.call = call
        flags = zip(outputs, call.program.differentiable, strict=True)
        ctx.mark_non_differentiable(*(value for value, wanted in flags if not wanted))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.call.backward(grads)
        return None, None, None


class _Empty(PrivateForward):
    """Ties outputs of no samples to autograd, so that a loss of them has a backward, which does nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, differentiable: Sequence[bool], *rows: Tensor) -> tuple[Tensor, ...]:
        outputs = tuple(value.clone() for value in rows)
        pairs = zip(outputs, differentiable, strict=True)
        ctx.mark_non_differentiable(*(value for value, wanted in pairs if not wanted))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return (None,) * (2 + len(grads))


def _made_up_rows(private: PrivateProgram, known: Sequence[Tensor], size: int) -> list[Tensor] | None:
    """Zeros in the form of the outputs `known`, for `size` samples; None where an output is not plain rows."""
    pairs = zip(private.axes, private.outputs, strict=True)
    rows = []
    for axis, value in zip((axis for axis, constant in pairs if constant is TENSOR), known, strict=True):
        if axis is None or axis.outer != 1:
            return None
        shape = list(value.shape)
        shape[axis.dim] = size * axis.inner
        rows.append(value.new_zeros(shape))
    return rows


def _unpadded(private: PrivateProgram, flat: Sequence[Tensor], size: int) -> Any:
    """The model's outputs for the samples of the batch alone, in the form that the model gives them."""
    graph: Any = private.spec.base.graph
    output = graph.output_node()
    spec = tree_structure(output.args[0])
    values = iter(flat)
    result = [
        real_rows(next(values), axis, size) if constant is TENSOR else constant
        for axis, constant in zip(private.axes, private.outputs, strict=True)
    ]
    return graph._codegen.process_outputs(tree_unflatten(with_batch_loss(output, result), spec))


def _tensors(model: nn.Module) -> tuple[Hashable, ...]:
    """What a program is compiled for: every tensor of the model, which are one, and which train."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    return tuple(
        (name, first.setdefault(id(t), name), tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad)
        for name, t in named
    )


def _row_major(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def padded(node: fx.Node, value: Any, size: int, physical: int) -> Any:
    """An argument for `physical` samples: rows past the end repeat the first, so that they hold sensible numbers."""
    leaves, spec = tree_flatten(value)
    missing = physical - size if size else 0
    if not missing:
        return value
    filled = [
        torch.cat([leaf, leaf[:1].expand(missing, *leaf.shape[1:])]) if batched else leaf
        for leaf, batched in zip(leaves, node.meta["batch_leaves"], strict=True)
    ]
    return tree_unflatten(filled, spec)


def real_rows(value: Tensor, axis: BatchAxis | None, size: int) -> Tensor:
    """An output without the rows of padding."""
    if axis is None:
        return value
    dim = axis.dim % value.dim()
    if axis.outer == 1:
        return value.narrow(dim, 0, size * axis.inner)
    split = value.reshape(*value.shape[:dim], axis.outer, -1, axis.inner, *value.shape[dim + 1 :])
    kept = split.narrow(dim + 1, 0, size)
    return kept.reshape(*value.shape[:dim], math.prod((axis.outer, size, axis.inner)), *value.shape[dim + 1 :])
