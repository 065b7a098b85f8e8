"""Operator arguments go by name: a schema may gain fields or change their order, and every reader stays right."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from dpquant_compile.backends.ops.site import call_of, site_arguments, site_call, static_arguments
from dpquant_compile.backends.ops.specialised_site import low_precision_site
from dpquant_compile.backends.site_args import (
    Signature,
    by_name,
    grads_in_order,
    in_order,
    named_args,
    signature_of,
    site_args,
)
from dpquant_compile.errors import OperatorArgumentError

ROOT = Path(__file__).parents[2]
OPS = torch.ops.dpquant
CALL = site_call("conv2d", 3, 1, "luq_fp4/all/reference", [0, 1, 1, 0, 2, 1], [2, 2, 1, 1, 1, 1, 4])
OPERATORS = (
    "site site_grad_input site_grad_params round_weight sample_grad_sum packed_weight round_operand private_site "
    "private_grad_input sample_norms sample_grads weighted_grad sample_factors positive_bits relu_grad"
).split()


def node_of(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return fx.Graph().call_function(target, args, kwargs)


@pytest.fixture(scope="module")
def extended() -> Any:
    """An operator like those of sites, with a field more in the middle and two, with defaults, at the end."""
    library = torch.library.Library("dpquant_test_args", "DEF")
    library.define(
        "site(Tensor x, Tensor policy, int extra, int site, int[] axes, int late=7, *, bool last=True) -> Tensor"
    )
    yield torch.ops.dpquant_test_args.site.default
    library._destroy()


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_is_read_by_the_names_of_its_schema(name: str) -> None:
    target = getattr(OPS, name).default
    names = [argument.name for argument in target._schema.arguments]
    values = [f"value of {name}" for name in names]
    for split in range(len(names) + 1):
        node = node_of(target, *values[:split], **dict(zip(names[split:], values[split:], strict=True)))
        assert list(vars(site_args(node)).items()) == list(zip(names, values, strict=True))
    assert vars(named_args(target, values)) == vars(site_args(node_of(target, *values)))
    assert in_order(target, **dict(zip(names, values, strict=True))) == tuple(values)


def test_fields_in_the_middle_and_at_the_end_move_nothing(extended: Any) -> None:
    for node in (
        node_of(extended, "x", "policy", 5, 3, [0]),
        node_of(extended, "x", "policy", axes=[0], site=3, extra=5),
        node_of(extended, "x", "policy", 5, 3, [0], 7, last=True),
    ):
        given = site_args(node)
        assert (given.x, given.policy, given.extra, given.site, given.axes) == ("x", "policy", 5, 3, [0])
        assert (given.late, given.last) == (7, True)
    assert named_args(extended, ("x", "policy", 5, 3, [0], 8)).late == 8
    assert grads_in_order(extended, policy="p") == (None, "p", None, None, None, None, None)


def test_python_functions_of_the_graph_are_read_the_same_way() -> None:
    node = node_of(low_precision_site, "x", "weight", None, "keys", "samples", **static_arguments(CALL))
    assert (site_args(node).site, site_args(node).bias, site_args(node).samples) == (3, None, "samples")


def test_an_unknown_name_says_what_there_is(extended: Any) -> None:
    given = site_args(node_of(extended, "x", "policy", 5, 3, [0]))
    with pytest.raises(
        OperatorArgumentError, match=r"dpquant_test_args::site has no argument 'sites'.*x, policy, extra"
    ):
        _ = given.sites
    with pytest.raises(OperatorArgumentError, match="has no argument 'rows'"):
        in_order(extended, rows=1)
    with pytest.raises(OperatorArgumentError, match="is not given site, axes"):
        named_args(extended, ("x", "policy", 5))
    with pytest.raises(OperatorArgumentError, match="8 arguments"):
        named_args(extended, range(8))


def test_an_implementation_gets_what_it_names() -> None:
    signature = Signature.parse("dpquant::made_up", "(int a, int b, int c, int d=4) -> int")

    @by_name(signature)
    def some(c: int, a: int, rest: dict[str, int]) -> Any:
        return a, c, rest

    @by_name(signature)
    def whole(d: int, c: int, b: int, a: int) -> Any:
        return a, b, c, d

    assert some(1, 2, 3) == some(1, 2, 3, 4) == some(1, b=2, c=3) == (1, 3, {"b": 2, "d": 4})
    assert whole(1, 2, 3) == (1, 2, 3, 4)
    assert signature_of(whole).names == signature.names
    with pytest.raises(OperatorArgumentError, match="no argument 'e'"):
        by_name(signature)(lambda e, rest: e)
    with pytest.raises(OperatorArgumentError, match="leaves out b, c, d"):
        by_name(signature)(lambda a: a)


def test_a_call_goes_through_an_operator_and_comes_back() -> None:
    assert call_of(site_arguments(("policy", "keys", "samples"), CALL)) == CALL  # type: ignore[arg-type]
    assert CALL.geometry is not None and CALL.groups == CALL.geometry.groups == 4
    assert CALL.recipe.outputs == "all"


# Gradients of plain steps and parameters after private ones, of a model whose sites are low, full and both.
STEPS = """
import hashlib
import torch
from torch import fx, nn
import dpquant_compile as dpq
from dpquant_compile.backends.site_args import in_order, site_args
from dpquant_compile.passes.private.free_saved_inputs import sites_reading

def net():
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers)

def digest(tensors):
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()

torch.manual_seed(0)
x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,))
for outputs in ("none", "all"):
    model = dpq.compile(net(), budget=2, seed=0, quantize_outputs=outputs, inner="eager")
    model.set_policy(["0", "5"])
    nn.functional.cross_entropy(model(x), y).backward()
    print(outputs, "plain", digest([p.grad for p in model.parameters()]))

    model = dpq.compile(net(), budget=2, seed=0, quantize_outputs=outputs, inner="eager")
    data = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), 4, generator=torch.Generator().manual_seed(0), shuffle=True)
    model, optimizer, criterion, loader = dpq.PrivacyEngine(accountant="rdp").make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), criterion=nn.CrossEntropyLoss(),
        data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0, noise_generator=torch.Generator().manual_seed(0))
    model.set_policy(["0", "5"])
    for a, b in loader:
        optimizer.zero_grad()
        criterion(model(a), b).backward()
        optimizer.step()
    print(outputs, "private", digest(model.parameters()))

low = [node for node in model.variant("all").graph.nodes if "low_precision_site" in str(node.target)]
print("rows", [site_args(node).site for node in low])
ops, graph = torch.ops.dpquant, fx.Graph()
node = graph.placeholder("node")
others = dict.fromkeys(("bits", "grad", "policy"), graph.placeholder("other"))
mask = graph.call_function(ops.relu_grad.default, in_order(ops.relu_grad.default, x=node, sites=[1, 2], **others))
print("sites", sites_reading(mask, node), sites_reading(mask, others["policy"]))
"""

# What is edited to add a field in the middle and one at the end of every operator of a site, and to turn others around.
EDITS = {
    "backends/ops/site.py": (
        (
            '"str op, int site, int call, int[] geometry, int[] axes, str recipe"',
            '"str recipe, int[] axes, int middle, str op, int call, int site, int[] geometry, int end=9"',
        ),
        ("geometry: Sequence[int] = ()\n", "geometry: Sequence[int] = (), middle: int = 5, end: int = 9\n"),
        ('        "op": call.op,\n', '        "op": call.op,\n        "middle": 5,\n'),
    ),
    "backends/ops/relu_bits.py": (
        (
            "(Tensor x, Tensor bits, Tensor grad, Tensor policy, int[] sites)",
            "(int[] sites, Tensor policy, Tensor grad, Tensor bits, Tensor x)",
        ),
    ),
}


@pytest.mark.heavy
def test_with_more_fields_in_another_order_every_step_has_the_same_bits(tmp_path: Path) -> None:
    for folder in ("backends", "passes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    skip = shutil.ignore_patterns("__pycache__", "backends", "passes")
    shutil.copytree(ROOT / "dpquant_compile", tmp_path / "dpquant_compile", ignore=skip)
    for folder in ("backends", "passes"):
        (tmp_path / "dpquant_compile" / folder).symlink_to(f"../{folder}")
    for name, changes in EDITS.items():
        text = (tmp_path / name).read_text(encoding="utf-8")
        for before, after in changes:
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        (tmp_path / name).write_text(text, encoding="utf-8")
    check = "import dpquant_compile; print(dpquant_compile.__file__)"
    assert run(tmp_path, check).startswith(str(tmp_path))
    found = run(tmp_path, STEPS)
    assert found == run(ROOT, STEPS)
    assert "rows [0, 1, 2]" in found and "sites (1, 2) ()" in found


def run(tree: Path, script: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tree, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def negative_reads(source: str) -> list[int]:
    """Lines that read arguments by position from the end: `args[-1]`, `rest[-6:]`, `static[3][-1]`."""
    names = {"args", "inputs", "rest", "static", "kwargs"}

    def is_arguments(value: ast.expr) -> bool:
        while isinstance(value, ast.Subscript):
            value = value.value
        return (value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")) in names

    def is_negative(index: ast.expr | None) -> bool:
        if isinstance(index, ast.Slice):
            return is_negative(index.lower) or is_negative(index.upper)
        return isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub)

    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Subscript))
    return [node.lineno for node in found if is_negative(node.slice) and is_arguments(node.value)]


def test_the_search_for_reads_from_the_end_finds_them() -> None:
    source = "a = node.args[-5]\nb = rest[-6:]\nc = static[3][-1]\nd = x.shape[-1]\ne = node.args[0]\n"
    assert negative_reads(source) == [1, 2, 3]


@pytest.mark.parametrize("folder", ["backends", "passes", "dpquant_compile"])
def test_nothing_reads_arguments_by_position_from_the_end(folder: str) -> None:
    found = {str(path): negative_reads(path.read_text(encoding="utf-8")) for path in (ROOT / folder).rglob("*.py")}
    assert not {path: lines for path, lines in found.items() if lines}, "read them by name: backends/site_args.py"
