"""Imports go one way: every module of the package imports only from layers below its own, and none in a circle."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "dpquant_compile"

# From the bottom up; a name stands for a module or for all of a package. Within a layer modules may import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("sites", "policy", "numerics", "torchvision_compat", "batchnorm", "losses", "progress", "torch_version"),
    ("backends",),
    ("passes",),
    ("link_table", "pipeline", "spec", "view"),
    ("held_values", "programs", "variants", "explain", "engine_interface"),
    ("module", "torch_compile"),
    ("privacy",),
    ("api", "perf", "integrations"),
    ("lab",),
    ("cli",),
)


def modules() -> dict[str, Path]:
    """Every module by its name; passes/ and backends/ lie beside the package and are links in it."""
    files = [path for folder in (PACKAGE, "passes", "backends") for path in (ROOT / folder).rglob("*.py")]
    found = {}
    for path in files:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] != PACKAGE:
            parts = (PACKAGE, *parts)
        elif parts[1] in ("passes", "backends"):
            continue
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules that are imported when this one is; what a function imports when it runs is not among them."""
    found = set()
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").split(".")[0] == PACKAGE:
            whole = statement.module or ""
            found |= {f"{whole}.{a.name}" if f"{whole}.{a.name}" in known else whole for a in statement.names}
        elif isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names if alias.name.split(".")[0] == PACKAGE}
    return found


KNOWN = modules()
GRAPH = {name: imports_of(path, KNOWN) for name, path in KNOWN.items() if name != PACKAGE}


def layer_of(module: str) -> int:
    below = module.removeprefix(f"{PACKAGE}.")
    return next(i for i, names in enumerate(LAYERS) for n in names if below == n or below.startswith(f"{n}."))


@pytest.mark.parametrize("module", sorted(GRAPH))
def test_a_module_imports_from_its_own_layer_and_those_below(module: str) -> None:
    own = layer_of(module)
    upwards = {other for other in GRAPH[module] - {PACKAGE} if layer_of(other) > own}
    assert not upwards, f"{module} imports {sorted(upwards)}, which lie above it"
    assert PACKAGE not in GRAPH[module] or LAYERS[own] in (("lab",), ("cli",)), "the package's own names are for users"


def test_the_reference_needs_no_other_backend() -> None:
    """Other kernels are compared with it, so nothing of theirs may be in it."""
    others = tuple(f"{PACKAGE}.backends.{name}" for name in ("compiled", "cpu_int8", "triton"))
    seen, ahead = set(), [module for module in GRAPH if module.startswith(f"{PACKAGE}.backends.reference")]
    while ahead:
        seen.add(module := ahead.pop())
        ahead += [m for m in GRAPH.get(module, ()) if m not in seen and m != f"{PACKAGE}.backends"]
    assert [module for module in sorted(seen) if module.startswith(others)] == []


def test_no_imports_go_in_a_circle() -> None:
    # A package's __init__ only says what it holds, but for those that register what is inside.
    graph = {m: {o for o in others if o != PACKAGE and KNOWN[o].name != "__init__.py"} for m, others in GRAPH.items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' → '.join(error.args[1])}")


def test_every_module_has_a_layer_and_a_place_in_the_document() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for module in GRAPH:
        layer_of(module)
        if KNOWN[module].name != "__init__.py" and not module.startswith((f"{PACKAGE}.lab", f"{PACKAGE}.cli")):
            assert f"`{module.rpartition('.')[2]}`" in text, f"{module} is not in docs/architecture.md"
