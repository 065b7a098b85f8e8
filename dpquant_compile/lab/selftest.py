"""`dpquant selftest`: whether a machine computes what the tests say, and how fast, as a page to paste into an issue.

Nothing of this library has run on a GPU, since those who write it have none. This is what a user with one can run.
"""

import importlib.metadata
import importlib.util
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpquant_compile as dpq
from dpquant_compile.backends.ops.site import axis_list, geometry_list, output_shape, site_call
from dpquant_compile.backends.reference.emulated import REFERENCE_SITE
from dpquant_compile.backends.registry import Shapes, SiteCall, Streams, backend_names, choose_kernel
from dpquant_compile.errors import CompileSpecError, KernelError
from dpquant_compile.numerics.operand_spec import OperandSpec
from dpquant_compile.numerics.quantize import quantize_values
from dpquant_compile.numerics.random_bits import site_keys
from dpquant_compile.numerics.recipe import Recipe, get_recipe
from dpquant_compile.privacy.mechanism import device_normals, normals
from dpquant_compile.sites import BatchAxis, ConvGeometry

__all__ = ["Check", "Report", "Timing", "device_of", "selftest"]

CLASSES = 10
SAMPLES = BatchAxis(0)
CONV = ConvGeometry((1, 1), (1, 1), (1, 1), 1)
# Largest magnitudes that make the units of formats powers of two, so that codes times units are whole numbers.
WHOLE = (64, 56, 112, 127)


@dataclass(frozen=True)
class Check:
    """One comparison of a subject; `passed` is None where there was nothing to compare."""

    part: str
    subject: str
    what: str
    result: str
    passed: bool | None


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one contestant: medians, and half of the spread."""

    model: str
    what: str
    gradients: tuple[float, float]
    step: tuple[float, float]


@dataclass
class Report:
    """What `selftest` found."""

    environment: Mapping[str, str]
    checks: list[Check] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing differs."""
        return not any(check.passed is False for check in self.checks)

    def markdown(self) -> str:
        """The page."""
        bad = sum(check.passed is False for check in self.checks)
        said = "All equal." if self.passed else f"**{bad} of {len(self.checks)} differ.**"
        lines = ["# dpquant selftest", "", said, ""]
        lines += _rows(("", ""), self.environment.items())
        for part in dict.fromkeys(check.part for check in self.checks):
            own = [check for check in self.checks if check.part == part]
            marks = {True: "✓", False: "✗", None: "–"}
            alike: dict[tuple[str, bool | None, str], list[str]] = {}
            for check in own:
                alike.setdefault((check.subject, check.passed, check.result), []).append(check.what)
            rows = [(name, marks[passed], result, ", ".join(what)) for (name, passed, result), what in alike.items()]
            lines += ["", f"## {part}", "", *_rows(("", "", "result", "of"), rows)]
        if self.timings:
            remark = "Medians in ms, ± half of the spread; the machine may have had other work."
            lines += ["", "## Times", "", remark, ""]
            head = ("model", "training", "forward, backward, clipping", "noise and step", "private float32 / this")
            lines += _rows(head, map(self._row, self.timings))
        return "\n".join(lines) + "\n"

    def _row(self, timing: Timing) -> tuple[str, ...]:
        base = next(t for t in self.timings if t.model == timing.model and t.what == "private float32")
        cells = (f"{middle:.1f} ± {spread:.1f}" for middle, spread in (timing.gradients, timing.step))
        return (timing.model, timing.what, *cells, f"{base.gradients[0] / timing.gradients[0]:.2f}×")


def device_of(name: str) -> torch.device:
    """The device that a user named; raises `CompileSpecError` if torch cannot use it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise CompileSpecError(f"--device {name}: no device has that name. Fix: cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise CompileSpecError(f"--device {name}: this library has no kernels for it. Fix: cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        built = "sees no NVIDIA GPU" if torch.version.cuda else "is a build without CUDA"
        raise CompileSpecError(
            f"--device {name}: the installed torch {torch.__version__} {built}. Fix: install a CUDA build of torch "
            "2.13 and a driver on a machine with an NVIDIA GPU, or run --device cpu"
        )
    return device


def selftest(device: torch.device, *, quick: bool = False, log: Callable[[str], None] = lambda line: None) -> Report:
    """Compare kernels, noise and private steps on `device` with the reference on the CPU, and time steps.

    `quick` takes one recipe and a small model, and compiles little: it shows that everything runs.
    """
    report = Report(environment(device))
    with _full_precision():
        log("kernels")
        recipes = ("int8",) if quick else ("int4", "int8", "int4_w8", "luq", "luq_fp4", "nvfp4", "fp8")
        report.checks += kernel_checks(device, recipes)
        log("noise")
        report.checks += noise_checks(device)
        for model in (SMALL,) if quick else (RESNET, GPT):
            missing = next((name for name in model.needs if importlib.util.find_spec(name) is None), None)
            if missing:
                why = f"not run: {missing} is not installed"
                report.checks.append(Check("One private step", model.name, "all", why, None))
                continue
            log(f"a private step of {model.name}")
            report.checks += step_checks(model, device, quick)
            log(f"times of {model.name}")
            report.timings += timings(model, device, quick)
    return report


def environment(device: torch.device) -> dict[str, str]:
    """What a reader must know of the machine."""
    found = {"dpquant_compile": dpq.__version__, "torch": torch.__version__, "python": platform.python_version()}
    found["machine"] = f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        memory = f"{facts.total_memory >> 30} GiB"
        found["device"] = f"{facts.name}, compute capability {facts.major}.{facts.minor}, {memory}"
        found["CUDA"] = str(torch.version.cuda)
        if importlib.util.find_spec("triton"):
            found["Triton"] = importlib.metadata.version("triton")
    else:
        from dpquant_compile.backends.cpu_int8 import build

        found["device"] = f"CPU, int8 by {build.unavailable() or build.load().name}"
    return found


@contextmanager
def _full_precision() -> Iterator[None]:
    """No TF32: it would differ from float32 by more than any kernel may."""
    held = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = held[0]
        torch.set_float32_matmul_precision(held[1])


# Kernels


def kernel_checks(device: torch.device, recipes: Sequence[str]) -> Iterator[Check]:
    """Every registered kernel that runs on the device, by recipe, on a linear and a conv."""
    for name in recipes:
        recipe = get_recipe(name) if name in dpq.recipe_names() else Recipe.of_format(name)
        for op in ("linear", "conv2d"):
            for backend in backend_names()[1:]:
                yield _kernel_check(op, name, replace(recipe, backend=backend), device)


def _kernel_check(op: str, name: str, recipe: Recipe, device: torch.device) -> Check:
    geometry = None if op == "linear" else CONV
    call = site_call(op, 0, 0, str(recipe), axis_list(SAMPLES, SAMPLES), geometry_list(geometry))
    found_by = partial(Check, "Kernels against the reference", recipe.backend, f"{name} {op}")
    try:
        kernel: Any = choose_kernel(call, device).kernel.arithmetic
    except KernelError:
        return found_by("not for this device or recipe", None)
    case = _case(call)
    expected = _results(REFERENCE_SITE, call, case, torch.device("cpu"))
    found = _results(kernel, call, case, device)
    wrong, largest = [], 0.0
    for product, value in found.items():
        other = expected[product].double()
        error = float((value.double() - other).abs().max() / other.abs().max().clamp_min(1e-30))
        largest = max(largest, error)
        allowed = 0.0 if case.whole and product != "norms" else 1e-3 if product == "norms" else 1e-5
        if not error <= allowed:
            wrong.append(f"{product} by {error:.1g}")
    if wrong:
        return found_by(f"differs: {', '.join(wrong)}", False)
    return found_by("equal bit for bit" if case.whole else f"sums equal to {largest:.1g}", True)


@dataclass(frozen=True)
class _Case:
    x: Tensor
    weight: Tensor
    grad: Tensor
    bias: Tensor
    streams: Streams
    whole: bool  # whether all sums are whole numbers that float32 holds, so that no order of additions rounds


def _case(call: SiteCall) -> _Case:
    generator = torch.Generator().manual_seed(3)
    x_shape, w_shape = ((4, 6, 48), (40, 48)) if call.geometry is None else ((4, 16, 6, 6), (40, 16, 3, 3))
    grad_shape = output_shape(x_shape, w_shape, call.geometry)
    streams = Streams(site_keys(5, 1, ("site",)), torch.arange(4) * 7 + 2)
    recipe, dim = call.recipe, -1 if call.geometry is None else 1
    made, whole = [], recipe.outputs == "none" and not recipe.hadamard
    operands = ((x_shape, recipe.input), (w_shape, recipe.weight), (grad_shape, recipe.grad_output))
    for shape, spec in operands:
        value, exact = _whole_numbers(shape, spec, dim, generator)
        made.append(value)
        whole &= exact
    bias = torch.randint(-8, 8, (w_shape[0],), generator=generator).float()
    x, weight, grad = made
    return _Case(x, weight, grad, bias, streams, whole)


def _whole_numbers(
    shape: Sequence[int], spec: OperandSpec, dim: int, generator: torch.Generator
) -> tuple[Tensor, bool]:
    """Whole numbers that rounding leaves whole, if there are such; each row has the largest."""
    for largest in WHOLE:
        value = torch.randint(-largest, largest + 1, tuple(shape), generator=generator).float()
        value.flatten(1)[:, 0] = largest
        rounded = quantize_values(value, spec, site_keys(0, 0, ("",))[0, 0], torch.arange(shape[0]), SAMPLES, dim)
        if torch.equal(rounded, rounded.round()):
            return value, True
    return value, False


def _results(kernel: Any, call: SiteCall, case: _Case, device: torch.device) -> dict[str, Tensor]:
    """All products of one call, on the CPU."""
    x, weight, grad, bias = (value.to(device) for value in (case.x, case.weight, case.grad, case.bias))
    streams = Streams(case.streams.keys.to(device), case.streams.samples.to(device))
    shapes = Shapes(tuple(x.shape), tuple(weight.shape), tuple(grad.shape), len(x))
    factors = torch.tensor([1.0, 0.5, 0.0, 1.0], device=device)
    xs, grads = kernel.operand(x, "input", call, streams), kernel.operand(grad, "grad_output", call, streams)
    packed = kernel.packed(weight, call, streams)
    found = {
        "forward": kernel.forward(x, weight, bias, call, streams),
        "input gradient": kernel.grad_input(grad, x, weight, call, streams),
        "weight gradient": kernel.grad_weight(grad, x, weight, call, streams),
        "packed forward": kernel.product(xs, packed, bias, shapes, call, streams),
        "packed input gradient": kernel.product_grad_input(grads, packed, shapes, call, streams),
        "norms": kernel.sample_norms(xs, grads, shapes, "direct", call, streams),
        "sample gradients": kernel.sample_grads(xs, grads, shapes, call, streams),
        "weighted sum": kernel.weighted_grad(xs, grads, factors, shapes, call, streams),
    }
    return {name: value.detach().cpu() for name, value in found.items()}


# Noise


def noise_checks(device: torch.device) -> list[Check]:
    """The source of noise for tensors on the device, against its reference."""
    key, count = bytes(range(32)), 1 << 12
    if device_normals.can_draw(device):
        out = torch.empty(count, device=device)
        device_normals.draw_on_device(key, 2**32 - 5, 0.75, out)
        equal = torch.equal(out.cpu(), device_normals.reference_normals(key, 2**32 - 5, 0.75, count))
        return [_noise("ChaCha20 on the device", "NumPy", equal)]
    out, other = torch.empty(count), torch.empty(count)
    normals.draw_normals(key, 2**64 - 5, 0.75, out)
    normals.draw_reference(key, 2**64 - 5, 0.75, other)
    place = "" if device.type == "cpu" else "; Triton is missing, so there is none on the device"
    return [_noise(f"AES on the CPU{place}", "torch", torch.equal(out, other))]


def _noise(source: str, reference: str, equal: bool) -> Check:
    return Check("Noise", source, f"4,096 normals by {reference}", "equal bit for bit" if equal else "differs", equal)


# Private steps


@dataclass(frozen=True)
class Model:
    """A model with random weights, one batch, and the packages that it needs."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    criterion: Callable[[], nn.Module]
    needs: tuple[str, ...] = ()


def _images(count: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, CLASSES, (count,), generator=generator)
    return torch.randn(count, 3, size, size, generator=generator), y


def _small() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(8 * 64, CLASSES))


def _resnet18() -> nn.Module:
    from dpquant_compile import torchvision_compat

    build: Any = torchvision_compat.models().resnet18
    model: nn.Module = build(num_classes=CLASSES, norm_layer=lambda width: nn.GroupNorm(min(32, width), width))
    return model


def _gpt2() -> nn.Module:
    import transformers

    shape: dict[str, Any] = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 64, "vocab_size": 2048}
    quiet: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    quiet |= {"bos_token_id": 0, "eos_token_id": 0}
    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **quiet))
    return model


def _texts() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 2048, (8, 64), generator=torch.Generator().manual_seed(1))
    return tokens, tokens


SMALL = Model("a small CNN", _small, lambda: _images(8, 8), nn.CrossEntropyLoss)
RESNET = Model("ResNet18, 32×32, batch 32", _resnet18, lambda: _images(32, 32), nn.CrossEntropyLoss, ("torchvision",))
GPT = Model("GPT-2, 4 layers of 256, batch 8×64", _gpt2, _texts, dpq.losses.CausalLMLoss, ("transformers",))


class _Private:
    """Private training of a model on its one batch; secrets follow from a seed, so that two can be compared."""

    def __init__(self, model: Model, device: torch.device, inner: str, **numerics: Any) -> None:
        torch.manual_seed(0)
        self.x, self.y = (part.to(device) for part in model.batch())
        made = dpq.compile(model.build().to(device), budget=0, inner=inner, **numerics)
        self.model, self.optimizer, self.criterion, _ = dpq.PrivacyEngine(accountant="rdp").make_private(
            module=made.train(),
            optimizer=torch.optim.SGD(made.parameters(), lr=1e-3),
            criterion=model.criterion(),
            data_loader=DataLoader(TensorDataset(self.x, self.y), batch_size=len(self.x)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            max_physical_batch_size=len(self.x),
            noise_generator=torch.Generator().manual_seed(2),
        )

    def gradients(self, policy: Any) -> None:
        self.model.set_policy(policy)
        self.optimizer.zero_grad()
        self.criterion(self.model(self.x), self.y).backward()

    def sums(self, policy: Any) -> Tensor:
        """The clipped sums of all parameters, in a row, of a step that is then made."""
        self.gradients(policy)
        held = (getattr(parameter, "summed_grad", None) for parameter in self.model.parameters())
        found = torch.cat([value.detach().cpu().double().flatten() for value in held if value is not None])
        self.optimizer.step()
        return found


# What two ways of computing a step may differ by, in dB: sums in another order turn a rounding over here and there.
_FULL_DB, _LOW_DB = 60.0, 8.0


def step_checks(model: Model, device: torch.device, quick: bool) -> Iterator[Check]:
    """One private step in full precision, and all sites in low, against the reference on the CPU."""
    for recipe in ("int8",) if quick else ("int8", "int4"):
        inner = "aot_eager" if quick else "inductor"
        expected = _Private(model, torch.device("cpu"), "eager", recipe=recipe, backend="reference")
        for policy in ("none", "all"):
            found = _Private(model, device, inner, recipe=recipe)
            want, got = (each.sums(policy) for each in (expected, found))
            error = float((got - want).square().sum() / want.square().sum())
            decibels = -10 * math.log10(error) if error > 0 else math.inf
            finite = all(bool(p.isfinite().all()) for p in found.model.parameters())
            what = f"all sites in {recipe}" if policy == "all" else f"float32, in the program of {recipe}"
            passed = finite and decibels >= (_FULL_DB if policy == "none" else _LOW_DB)
            said = f"clipped sum {decibels:.0f} dB above its error" if error > 0 else "clipped sum equal bit for bit"
            said += "" if finite else "; weights are not finite"
            yield Check("One private step", model.name, what, said, passed)
            expected = _Private(model, torch.device("cpu"), "eager", recipe=recipe, backend="reference")


def timings(model: Model, device: torch.device, quick: bool) -> Iterator[Timing]:
    """Times of a step, taken in turn."""
    steps = {"not private, eager": _plain(model, device)}
    for recipe, shares in {"int8": (0.0, 1.0)}.items() if quick else {"int4": (0.0, 0.9), "int8": (1.0,)}.items():
        private = _Private(model, device, "aot_eager" if quick else "inductor", recipe=recipe)
        private.gradients("none")
        private.optimizer.step()  # compiled by now, with all sites known
        names = private.model.sites.names
        for share in shares:
            chosen = names[: round(share * len(names))]
            what = f"private {recipe}, {share:.0%} of the sites" if share else "private float32"
            steps[what] = (partial(private.gradients, chosen), private.optimizer.step)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(2 if quick else 8):
        for name, (gradients, step) in steps.items():
            taken = _timed(gradients, device), _timed(step, device)
            if turn:
                times[name].append(taken)
    for name, taken_all in times.items():
        parts = [[taken[part] for taken in taken_all] for part in (0, 1)]
        middles = [(statistics.median(part), (max(part) - min(part)) / 2) for part in parts]
        yield Timing(model.name, name, middles[0], middles[1])


def _plain(model: Model, device: torch.device) -> tuple[Callable[[], None], Callable[[], None]]:
    torch.manual_seed(0)
    built, criterion = model.build().to(device).train(), model.criterion()
    x, y = (part.to(device) for part in model.batch())
    optimizer = torch.optim.SGD(built.parameters(), lr=1e-3)

    def gradients() -> None:
        optimizer.zero_grad()
        criterion(built(x), y).backward()

    return gradients, lambda: optimizer.step()


def _timed(function: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call, to the end of what it has asked of the device."""
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _rows(head: Sequence[str], rows: Any) -> list[str]:
    """A table in markdown."""
    cells = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(row)} |" for row in cells]
