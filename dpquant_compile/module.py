"""`CompiledModule`: the user's model, running as a graph with switchable sites."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from dpquant_compile import pipeline
from dpquant_compile.backends.graph_compile import AotGraph
from dpquant_compile.backends.registry import Choice
from dpquant_compile.engine_interface import Internals, Runner, Storage, refuse_grad_samplers
from dpquant_compile.errors import CaptureError, PrivateTrainingError, SiteError, listing
from dpquant_compile.explain import Explanation, explain, kernel_of, kernels_of
from dpquant_compile.link_table import Dispatcher, LinkTable
from dpquant_compile.numerics.random_bits import RandomBits
from dpquant_compile.numerics.recipe import Precision
from dpquant_compile.passes.batch.track_batch import batch_size
from dpquant_compile.passes.canonical.mark_sites import collect_sites, declared_sites
from dpquant_compile.passes.generation_cache import holds_object
from dpquant_compile.passes.runner import PassRecord
from dpquant_compile.policy import Policy, draw_policy, resolve_budget, resolve_policy
from dpquant_compile.programs import Programs, mark_batch_dynamic, site_axes
from dpquant_compile.sites import Site, SiteFilter, SiteTable, Skipped, renumber, select_sites
from dpquant_compile.spec import CompileSpec
from dpquant_compile.variants import Precompilation, VariantCache
from dpquant_compile.view import GraphView, PrivateView

__all__ = ["CompiledModule"]

# Shared with the original, so that both show the same parameters, buffers and hooks.
_SHARED = (
    "_modules",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class CompiledModule(nn.Module):
    """A model whose convs and linears can be switched to low precision, one policy at a time.
    Made by `dpquant_compile.compile`. It shares parameters, buffers and submodules with the original, keeps their
    names, and takes the same arguments. In train() the sites of `policy` run in low precision; in eval() all run in
    full precision, unless compiled with `quantize_eval=True`. `use_variants = False` disables precompiled variants.
    """

    def __init__(
        self, original: nn.Module, spec: CompileSpec, sites: "SiteFilter | Iterable[SiteFilter] | None" = None
    ) -> None:
        super().__init__()
        self.__dict__["_original"] = original
        self.__dict__["forward"] = MethodType(_forward_of(original), self)
        for name in _SHARED:
            self.__dict__[name] = getattr(original, name)
        self._spec = spec
        self._chosen = sites
        self._explicit = ""  # how the policy was set: by "names", as "all", or not at all
        self._pending: tuple[str, ...] | None = None
        self._programs = Programs(original, spec, self._link)
        self._provisional = self._programs.provisional
        known = self._programs.known_sites()
        self._sites = known if self._provisional and not known else select_sites(known, sites)
        self._dispatcher = self._new_dispatcher()
        for site in self._sites:
            kernel_of(site, spec, self._device())  # raises now instead of during training
        self._variants = VariantCache()
        self.use_variants = True
        self.__dict__["_private"] = None
        self.__dict__["_storage"] = None

    # Running

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if _is_recorded(args, kwargs):
            return self._plain(args, kwargs)
        if self.storage is None:  # apart: Dynamo would trace the context of the others
            return self._run(args, kwargs)
        self.storage.refresh()
        with self.storage.in_place():
            return self._run(args, kwargs)

    def _plain(self, args: Any, kwargs: Any) -> Any:
        """The original's forward, for an export or a trace of the model in eval(), where both give the same."""
        why = None
        if self._original.training:
            why = "in train() it runs low-precision sites and clipping. Fix: call model.eval() first, or"
        elif self._spec.quantize_eval:
            why = "with quantize_eval=True its sites run in low precision. Fix:"
        elif isinstance(args, fx.Proxy):
            why = "torch.fx does not see its arguments. Fix:"
        if why is not None:
            raise CaptureError(
                "a compiled model was given to torch.export, ONNX, torch.jit or torch.fx, which make a plain graph; "
                f"{why} give model.original, the plain model with the same parameters"
            )
        return self._original.forward(*args, **kwargs)

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script takes in place of this module."""
        return self.original

    @property
    def original(self) -> nn.Module:
        """The model that was compiled. It has the same parameters, and trains with this one; exports may take it."""
        original: nn.Module = self.__dict__["_original"]
        return original

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._original.training and torch.is_grad_enabled():
            if self.__dict__["_private"] is not None:
                return self.__dict__["_private"].run(args, kwargs)
            refuse_grad_samplers(self._original)
        low = self._original.training or self._spec.quantize_eval
        if not low and self._programs.may_cache(args, kwargs):
            result = self._original.forward(*args, **kwargs)
            if holds_object(result):
                return result
        args, kwargs = self._programs.normalise(args, kwargs)
        batch = batch_size(args, kwargs)
        program = self._programs.get(args, kwargs, batch)
        self._begin(batch, low)
        if batch < 2:
            # Dynamo specialises on sizes 0 and 1; such batches run the same graph, uncompiled.
            return program.switched(*args, **kwargs)
        ready = self._variants.get(program, self.policy) if low and self.use_variants else None
        mark_batch_dynamic(args, kwargs, batch)
        return (ready or program.call)(*args, **kwargs)

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture and prepare the graph for a call with these arguments, without running or compiling it."""
        with self.whole_parameters():
            args, kwargs = self._programs.normalise(args, kwargs)
            self._programs.get(args, kwargs, batch_size(args, kwargs))

    def recapture(self) -> None:
        """Discard the captured graphs, after a change of the model outside its parameters, modes and modules.

        Plain Python values that forward() reads, such as a rate or a flag, are constants of a captured graph.
        """
        self._programs.clear()
        self._variants = VariantCache()

    # Private training

    def internals(self) -> Internals:
        """The interface to a privacy engine."""
        precompiled = self._variants.asked and not self._spec.quantize_eval
        return Internals(self._original, self._programs, self._spec, self._begin_private, precompiled)

    def attach(self, runner: Runner | None) -> None:
        """Let `runner`, such as a private session, run this model's training forwards; None detaches it."""
        self.__dict__["_private"] = runner

    def is_run_by(self, runner: Runner) -> bool:
        """Whether `runner` runs this model's training forwards now."""
        return self.__dict__["_private"] is runner

    def keep_in(self, storage: Storage) -> None:
        """Let `storage` keep the parameters at rest."""
        self.__dict__["_storage"] = storage

    @property
    def storage(self) -> Storage | None:
        """What keeps the parameters at rest; None if the model has them itself."""
        storage: Storage | None = self.__dict__["_storage"]
        return storage

    def whole_parameters(self) -> AbstractContextManager[None]:
        """Within it parameters are whole tensors, as programs read them, also where processes keep shards of them."""
        return nullcontext() if self.storage is None else self.storage.in_place()

    def _kept(self) -> Iterable[torch.Tensor]:
        """The parameters whose versions tell steps: those that an optimizer writes to."""
        return self._original.parameters() if self.storage is None else self.storage.stored

    def _begin_private(self, batch: int, ids: torch.Tensor, bits: RandomBits) -> LinkTable:
        self._begin(batch, True, bits=bits, ids=ids)
        return self._dispatcher.table

    def _begin(self, batch: int, low: bool, **private: Any) -> None:
        parameters = self._kept() if self._original.training else None
        self._dispatcher.begin(batch=batch, device=self._device(), low=low, parameters=parameters, **private)

    # Sites and policies

    @property
    def sites(self) -> SiteTable:
        """All sites, in graph order; shapes and FLOPs are filled in at the first forward."""
        return self._sites

    @property
    def budget(self) -> int:
        """k, the number of sites in low precision."""
        skipped = "; ".join(f"{skip.name}: {skip.reason}" for skip in self._sites.skipped)
        reasons = f" Skipped: {skipped}." if skipped else ""
        names, provisional = self._sites.names, self._provisional
        return resolve_budget(self._spec.budget, names, provisional=provisional, reasons=reasons)

    @property
    def policy(self) -> Policy:
        """The sites that currently run in low precision."""
        return self._dispatcher.policy

    def set_policy(self, policy: "str | Iterable[str]") -> Policy:
        """Choose the sites to run in low precision: names, "all" or "none". Costs microseconds, compiles nothing."""
        chosen = self._dispatcher.set_policy(policy)
        self._explicit = "all" if isinstance(policy, str) and policy == "all" else "names"
        return chosen

    @property
    def step(self) -> int:
        """The step that the rounding of the next training forward depends on; it advances when parameters change.

        To resume, set it to its value at the checkpoint. Set it also where parameters change undetected, through
        `parameter.data`.
        """
        return self._dispatcher.step + self._dispatcher.changed(self._kept())

    @step.setter
    def step(self, value: int) -> None:
        self._dispatcher.set_step(int(value))

    @property
    def sample_ids(self) -> torch.Tensor | None:
        """The ids that the random bits of the next batches' samples depend on; None: their positions in the batch.

        In private training they identify the samples of a batch that did not come from the loader, each id once.
        """
        return self._dispatcher.sample_ids

    @sample_ids.setter
    def sample_ids(self, ids: torch.Tensor | None) -> None:
        self._dispatcher.sample_ids = None if ids is None else torch.as_tensor(ids, dtype=torch.int64, device="cpu")

    def _new_dispatcher(self) -> Dispatcher:
        names = self._sites.names
        first = draw_policy(self.budget, names, self._spec.seed)
        return Dispatcher(names, self._spec.seed, first, self._spec.recipe.other)

    def _link(self, found: SiteTable) -> tuple[LinkTable, dict[str, int]]:
        """Adopt the sites that a captured graph has; called once per captured program."""
        table, old = select_sites(found, self._chosen), self._dispatcher
        first, self._provisional = not self._programs.captured, False
        # A graph of one mode may lack layers of another mode; a layer that is skipped in one is a site in none.
        gone = {skip.name for skip in found.skipped}
        if first:
            others = [] if self._programs.was_provisional else [s for s in self._sites if s.name not in gone]
        else:
            others = list(self._sites)  # a site that this call cannot quantize stays a site; explain() says so
        merged = [*table.sites, *(site for site in others if site.name not in table.names)]
        skipped = (*table.skipped, *_uncalled(self._original, merged, table.skipped)) if first else self._sites.skipped
        called = {site.name for site in merged}
        self._sites = SiteTable(renumber(merged), tuple(skip for skip in skipped if skip.name not in called))
        if not first:
            old.extend([name for name in self._sites.names if name not in old.names])
        elif set(self._sites.names) != set(old.names):
            self._dispatcher = self._new_dispatcher()
            self._dispatcher.step, self._dispatcher.sample_ids = old.step, old.sample_ids
            self._keep_policy(old)
        self._pending = None
        return self._dispatcher.table, self._dispatcher.rows

    def _keep_policy(self, old: Dispatcher) -> None:
        """Transfer a policy that was set on declared sites to the sites of the graph."""
        chosen = self._pending or (tuple(old.policy) if self._explicit else None)
        if chosen is None:
            return
        # Without declared sites, all of them are none of them: then the word counts.
        if set(chosen) == set(old.names) and (chosen or self._explicit == "all"):
            self._dispatcher.set_policy("all")
            return
        reasons = {skip.name: skip.reason for skip in self._sites.skipped}
        names = _renamed(chosen, self._sites.names)
        if lost := [f"{name} ({reasons[name]})" for name in names if name in reasons]:
            raise SiteError(f"the policy names layers that are no sites: {listing(lost)}. Use names from model.sites")
        self._dispatcher.set_policy(names)

    # Reading

    def variant(self, policy: "str | Iterable[str]" = "all") -> fx.GraphModule:
        """The graph specialised to `policy`: callable like the model, readable by `print_readable()`.

        It shares parameters, random streams and step with the model. For the same batch it gives the result of the
        model under that policy: bit for bit in reference arithmetic.
        """
        chosen = self._resolve(policy)
        base, table, rows = self._programs.readable(), self._dispatcher.table, self._dispatcher.rows
        gm = pipeline.specialised(base, table, chosen, rows, str(self._spec.recipe), self._programs.log)
        gm.register_forward_pre_hook(partial(self._before_variant, site_axes(base)), with_kwargs=True)
        return gm

    def _before_variant(self, axes: Any, gm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = batch_size(args, kwargs)
        program = self._programs.get(args, kwargs, batch)
        if site_axes(program.base) != axes:
            raise CaptureError(
                "this variant was made before the model had seen a batch of this shape, and its samples lie elsewhere. "
                "Fix: call model.variant(policy) again"
            )
        self._begin(batch, True)

    def _resolve(self, policy: "str | Iterable[str]") -> Policy:
        return resolve_policy(policy, self._dispatcher.names)

    def precompile(self, policies: "Iterable[str | Iterable[str]]", *, background: bool = True) -> Precompilation:
        """Compile whole-graph variants for the policies of a schedule ahead of their epochs.

        They fuse the quantizers with their neighbours, and replace the link table as soon as they are ready; `wait()`
        on the result blocks until then. With `background` a thread compiles during training, unless the model draws
        random numbers (dropout). At most 32 variants are kept. Variants round intermediate sums in another order than
        the link table, so results may differ in the last bits: wait for them where runs must repeat exactly.

        For training without privacy. One private program serves all policies, so a model that a privacy engine trains
        is refused, unless variants can serve its evaluation (`quantize_eval=True`).
        """
        if self.__dict__["_private"] is not None and not self._spec.quantize_eval:
            raise PrivateTrainingError(
                "precompile(): a privacy engine trains this model, and one program serves all policies there. Programs "
                "for one policy gain too little (docs/performance.md, 'Variants in private training'). Fix: leave "
                "precompile() out; set_policy() and schedules compile nothing anyway"
            )
        if isinstance(policies, str) or not isinstance(policies, Iterable):
            raise SiteError(f"precompile({policies!r}): give a list of policies, such as [{policies!r}]")
        chosen = [self._resolve(policy) for policy in policies]
        return self._variants.precompile(self._programs, self._dispatcher.table, chosen, background)

    def diff(self, first: "str | Iterable[str]", second: "str | Iterable[str]") -> str:
        """The difference between the graphs of two policies, as a unified diff of their code."""
        a, b = self._resolve(first), self._resolve(second)
        before, after = (self.variant(policy).code.strip().splitlines() for policy in (a, b))
        return "\n".join(difflib.unified_diff(before, after, f"policy {a}", f"policy {b}", lineterm="", n=1))

    def explain(self) -> Explanation:
        """How each site runs now: by which kernel, native or emulated; and why the rest is skipped."""
        latest = self._programs.latest
        lost = {s.name: s.reason for s in collect_sites(latest.base).skipped} if latest is not None else {}
        private = self.__dict__["_private"].ways() if self.__dict__["_private"] is not None else ()
        where = self._device(), self._original.training
        return explain(self._sites, self.policy, self._spec, *where, self._kernels(), self._dtypes(), lost, private)

    def _kernels(self) -> Callable[[Site], Choice]:
        """What runs a site, by its tensors in the last call."""
        latest = self._programs.latest
        return kernels_of(self._spec, self._device(), self._dtypes(), None if latest is None else latest.base)

    def _dtypes(self) -> dict[str, torch.dtype]:
        return {name: p.dtype for name, p in self._original.named_parameters(remove_duplicate=False)}

    def trace_log(self) -> tuple[PassRecord, ...]:
        """Every pass over this model's graphs so far; `print` a record to read the graph before and after it."""
        return tuple(self._programs.log)

    @property
    def compiled_graphs(self) -> tuple[AotGraph, ...]:
        """The forward and backward graphs that were compiled so far; `print` one to read it."""
        return self._programs.graphs

    def graph_view(self) -> GraphView:
        """The graph as a drawing: `.to_networkx()`, `.to_svg()`, `.with_policy(policy)`."""
        kernel_for = self._kernels()
        kernels = {site.name: str(kernel_for(site)) for site in self._sites}
        title = type(self._original).__name__
        readable, recipe = self._programs.readable(), self._spec.recipe
        view = GraphView.build(readable, self._sites, self.policy, kernels, title, recipe)
        runner = self.__dict__["_private"]
        return view if runner is None else replace(view, private=PrivateView.build(self.trace_log(), runner.ways()))

    def draw(self, path: str | Path) -> Path:
        """Write the graph as an SVG drawing, sites coloured by their precision."""
        return self.graph_view().draw(path)

    def save_html(self, path: str | Path, schedule: "Sequence[str | Iterable[str]] | None" = None) -> Path:
        """Write one self-contained page with the graph; `schedule`, a policy per epoch, puts a slider on it."""
        chosen = None if schedule is None else [self._resolve(policy) for policy in schedule]
        return self.graph_view().save_html(path, chosen)

    # Behaving as the original

    def _replicate_for_data_parallel(self) -> "CompiledModule":
        raise CaptureError(
            "nn.DataParallel copies a model to several devices in each forward, and a compiled model's programs are "
            "for one. Fix: leave nn.DataParallel out, or train one process per device under "
            "nn.parallel.DistributedDataParallel, started by torchrun"
        )

    def _device(self) -> torch.device:
        return next((p.device for p in self._original.parameters()), torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)

    @property
    def training(self) -> bool:
        """The original's mode. Trainers set it module by module, without `train()`."""
        return bool(self.__dict__["_original"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_original" in self.__dict__:  # it is missing while nn.Module sets its own defaults
            self.__dict__["_original"].training = mode

    @property
    def _is_full_backward_hook(self) -> bool | None:
        flag: bool | None = self.__dict__["_original"]._is_full_backward_hook
        return flag

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, value: bool | None) -> None:
        if "_original" in self.__dict__:  # it is missing while nn.Module sets its own defaults
            self.__dict__["_original"]._is_full_backward_hook = value

    def train(self, mode: bool = True) -> "CompiledModule":
        self._original.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> "CompiledModule":
        self._original._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._original.load_state_dict(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # Graphs and compiled programs are not copied: the model and the spec suffice to make them again.
        chosen = self._sites.names if self._chosen is not None else None
        state = {"step": self.step, "policy": tuple(sorted(self.policy)), "explicit": self._explicit}
        return _restore, (self._original, self._spec, chosen, state)

    def extra_repr(self) -> str:
        recipe = self._spec.recipe
        others = "" if recipe.other == Precision.FULL else f", the others in {recipe.high}"
        return f"{len(self.policy)} of {len(self._sites)} sites in {recipe.name}{others}"


def _forward_of(original: nn.Module) -> Callable[..., Any]:
    """`CompiledModule.forward` with the signature of the original's, by which exports name inputs and their shapes."""

    def forward(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        return CompiledModule.forward(self, *args, **kwargs)

    own = inspect.signature(original.forward)
    bound = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = own.replace(parameters=[bound, *own.parameters.values()])  # type: ignore[attr-defined]
    return forward


def _is_recorded(args: Any, kwargs: Any) -> bool:
    """Whether the call is one of torch's exports, not a run."""
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if torch.compiler.is_exporting() or tracing or isinstance(args, fx.Proxy):
        return True
    return any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values()))


def _uncalled(model: nn.Module, sites: Sequence[Site], skipped: Sequence[Skipped]) -> Iterator[Skipped]:
    """Layers that the model declares but forward() does not call."""
    known = [*(site.name for site in sites), *(skip.name for skip in skipped)]
    for site in declared_sites(model):
        whole = any(site.name.startswith(f"{skip.name}.") for skip in skipped)
        if site.name not in known and not whole and not any(name.startswith(f"{site.name}.") for name in known):
            yield Skipped(site.name, site.op, "forward() did not call it")


def _renamed(policy: Iterable[str], names: Sequence[str]) -> list[str]:
    """A policy on declared sites as one on captured sites: "in_proj" may become "in_proj.q" and others."""
    parts = {name: [n for n in names if n.startswith(f"{name}.")] for name in policy if name not in names}
    return [new for name in policy for new in (parts.get(name) or [name])]


def _restore(
    original: nn.Module, spec: CompileSpec, chosen: tuple[str, ...] | None, state: dict[str, Any]
) -> CompiledModule:
    module = CompiledModule(original, spec, chosen)
    module._dispatcher.step = state["step"]
    module._explicit = state["explicit"]
    if set(state["policy"]) <= set(module._dispatcher.names):
        module._dispatcher.set_policy(state["policy"])
    if module._provisional:
        module._pending = state["policy"]  # its sites are known only with the graph
    return module
