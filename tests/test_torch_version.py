"""The torch that this release is for: one minor release, refused otherwise at import, the same in pyproject.toml."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dpquant_compile.errors import TorchVersionError
from dpquant_compile.torch_version import SUPPORTED, check

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("version", [SUPPORTED, f"{SUPPORTED}.0", f"{SUPPORTED}.1+cpu", f"{SUPPORTED}.0a0+git1234"])
def test_the_supported_release_is_taken(version: str) -> None:
    check(version)


@pytest.mark.parametrize("version", [f"{SUPPORTED}0.0", "2.12.1", "2.14.0+cu130", "3.0.0"])
def test_others_are_refused_with_the_command_that_mends_it(version: str) -> None:
    with pytest.raises(TorchVersionError, match=rf"torch {version.split('+')[0]}.*pip install 'torch>={SUPPORTED},<"):
        check(version)


def test_the_bound_is_that_of_the_package() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (torch,) = [each for each in dependencies if each.startswith("torch")]
    assert torch.startswith(f"torch>={SUPPORTED},")


@pytest.mark.slow
def test_importing_the_package_refuses_another_torch() -> None:
    code = "import torch; torch.__version__ = '2.12.1'; import dpquant_compile"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("dpquant_compile.errors.TorchVersionError: dpquant-compile needs")
    )
