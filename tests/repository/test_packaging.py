"""The package as others get it: a wheel and an sdist, built from a copy of the tree and imported from elsewhere."""

import configparser
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import dpquant_compile as dpq

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "dpquant_compile"
BUILD_INPUTS = ("pyproject.toml", "README.md", "LICENSE", PACKAGE, "passes", "backends")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Distribution:
    """What one build made, and a folder with nothing but the wheel installed."""

    wheel: Path
    sdist: Path
    wheel_from_sdist: Path
    site: Path


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """The standard output of a command; its standard error is part of the failure."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{command} failed in {cwd}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Build `kind` ("wheel" or "sdist") by the build backend itself, which needs no network."""
    target.mkdir()
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    run(sys.executable, "-c", code, target, cwd=source)
    (built,) = target.iterdir()
    return built


def copy_of_the_tree(target: Path) -> Path:
    """A copy of what a build reads, symlinks kept, so that building leaves nothing behind in the checkout."""
    target.mkdir()
    for name in BUILD_INPUTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target / name)
    return target


@pytest.fixture(scope="session")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    work = tmp_path_factory.mktemp("dist")
    wheel = build("wheel", copy_of_the_tree(work / "for_wheel"), work / "wheel")
    sdist = build("sdist", copy_of_the_tree(work / "for_sdist"), work / "sdist")

    with tarfile.open(sdist) as archive:
        archive.extractall(work / "unpacked", filter="data")
    (unpacked,) = (work / "unpacked").iterdir()
    wheel_from_sdist = build("wheel", unpacked, work / "wheel_from_sdist")

    site = work / "site"
    run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index"),
        *("--no-compile", "--target", site, wheel),
        cwd=work,
    )
    return Distribution(wheel, sdist, wheel_from_sdist, site)


def package_files() -> set[str]:
    """Every file of the package as the tree has it, relative to where the package would be installed."""
    return {
        (Path(folder) / file).relative_to(ROOT).as_posix()
        for folder, _, files in os.walk(ROOT / PACKAGE, followlinks=True)
        for file in files
        if not file.endswith(".pyc")
    }


def module_files() -> set[str]:
    return {path for path in package_files() if path.endswith(".py")}


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_package_list_equals_the_tree() -> None:
    files = module_files()
    folders = {path.rpartition("/")[0] for path in files}
    without_init = {folder for folder in folders if f"{folder}/__init__.py" not in files}
    assert not without_init, f"folders with modules but no __init__.py: {sorted(without_init)}"
    packages = SETTINGS["tool"]["setuptools"]["packages"]
    assert sorted(packages) == sorted(folder.replace("/", ".") for folder in folders)


def test_package_dirs_are_the_symlinks_targets() -> None:
    for package, folder in SETTINGS["tool"]["setuptools"]["package-dir"].items():
        reached = ROOT / package.replace(".", "/")
        assert reached.resolve() == (ROOT / folder).resolve()
        if package != PACKAGE:
            assert reached.is_symlink()
            assert reached.readlink() == Path("..") / folder


@pytest.mark.slow
def test_wheel_holds_every_module_and_data_file(distribution: Distribution) -> None:
    names = names_in(distribution.wheel)
    assert {name for name in names if ".dist-info/" not in name} == package_files()
    assert f"{PACKAGE}/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel(distribution: Distribution, tmp_path: Path) -> None:
    code = """
import sys, dpquant_compile
from importlib.metadata import distribution
(entry,) = distribution("dpquant-compile").entry_points.select(group="console_scripts", name="dpquant")
code = entry.load()(["demo", "--quick", "--json", "--out", "demo"])
assert dpquant_compile.__file__.startswith(sys.argv[1]), dpquant_compile.__file__
sys.exit(code)
"""
    printed = run(sys.executable, "-P", "-c", code, distribution.site, cwd=tmp_path, PYTHONPATH=str(distribution.site))
    figures = json.loads(printed)
    assert figures["accuracy"].keys() == {"low", "low, used in low", "float32", "opacus"}
    assert set(figures["milliseconds"]) == {"Opacus", "float32", "int8", "int4", "not private"}
    assert {path.name for path in (tmp_path / "demo").glob("*.html")} == {"report.html", "graph.html"}


@pytest.mark.slow
def test_every_module_imports_from_the_wheel(distribution: Distribution, tmp_path: Path) -> None:
    modules = sorted(module_name(path) for path in module_files() if not path.endswith("__main__.py"))
    code = """
import importlib, json, sys
print(json.dumps({name: importlib.import_module(name).__file__ for name in sys.argv[1:]}))
"""
    printed = run(sys.executable, "-c", code, *modules, cwd=tmp_path, PYTHONPATH=str(distribution.site))
    imported = json.loads(printed.splitlines()[-1])
    assert sorted(imported) == modules
    outside = {name: file for name, file in imported.items() if not Path(file).is_relative_to(distribution.site)}
    assert not outside


def test_sdist_holds_files_and_no_links(distribution: Distribution) -> None:
    with tarfile.open(distribution.sdist) as archive:
        links = [member.name for member in archive if not (member.isfile() or member.isdir())]
        held = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert not links
    # In the sdist, as in the checkout, passes/ and backends/ lie beside the package.
    in_the_tree = {(ROOT / path).resolve().relative_to(ROOT).as_posix() for path in package_files()}
    assert in_the_tree <= held
    assert {"pyproject.toml", "README.md", "LICENSE"} <= held


def test_wheel_built_from_the_sdist_is_the_same(distribution: Distribution) -> None:
    with zipfile.ZipFile(distribution.wheel) as one, zipfile.ZipFile(distribution.wheel_from_sdist) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())
        different = [name for name in one.namelist() if one.read(name) != other.read(name)]
    assert not different


@pytest.mark.parametrize("name", ["passes", "backends"])
def test_no_import_under_a_bare_name(name: str) -> None:
    code = f"""
try:
    import {name}
except ImportError as error:
    print(error)
else:
    raise SystemExit("{name} was imported under its bare name")
"""
    # From the root of the checkout, where the folder of that name is on the path.
    assert f"{PACKAGE}.{name}" in run(sys.executable, "-c", code, cwd=ROOT)


def test_dynamo_backend_is_declared(distribution: Distribution) -> None:
    (path,) = [name for name in names_in(distribution.wheel) if name.endswith("/entry_points.txt")]
    with zipfile.ZipFile(distribution.wheel) as archive:
        declared = configparser.ConfigParser()
        declared.read_string(archive.read(path).decode())
    assert dict(declared["torch_dynamo_backends"]) == {"dpquant": f"{PACKAGE}.torch_compile:dpquant"}


@pytest.mark.heavy
def test_dynamo_backend_loads(distribution: Distribution, tmp_path: Path) -> None:
    code = """
from importlib.metadata import distribution
(entry,) = distribution("dpquant-compile").entry_points.select(group="torch_dynamo_backends", name="dpquant")
assert callable(entry.load())
"""
    run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(distribution.site))


def test_the_version_is_the_same_everywhere() -> None:
    version = SETTINGS["project"]["version"]
    assert dpq.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
