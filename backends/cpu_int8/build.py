"""The C++ kernels in `cpp/`, as one library for this machine."""

from functools import lru_cache
from pathlib import Path

from dpquant_compile.backends import native_library
from dpquant_compile.backends.native_library import NativeLibrary, Numbers, numbers

__all__ = ["Library", "Numbers", "load", "numbers", "unavailable"]

_SOURCES = Path(__file__).parent / "cpp"


class Library(NativeLibrary):
    """The functions of `cpp/`.

    name     which instructions the products use, "scalar" for none
    columns  how many columns a panel holds
    rows     how many rows are multiplied with it at once
    slack    bytes that must lie behind an array of codes, since rows are read in whole words
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.name = self.text("name")
        self.columns = self.number("columns")
        self.rows = self.number("rows")
        self.slack = self.number("slack")


def unavailable() -> str | None:
    """Why there are no kernels for this machine; None if there are."""
    found = _built()
    if isinstance(found, str):
        return found
    return "this CPU has none of AVX512-VNNI, AVX-VNNI, AVX2, NEON dot product" if found.name == "scalar" else None


def load() -> Library:
    """The library for this machine. Requires: `unavailable()` is None."""
    found = _built()
    assert isinstance(found, Library)
    return found


@lru_cache(maxsize=1)
def _built() -> Library | str:
    try:
        return Library(build())
    except Exception as error:  # no compiler, no OpenMP, an odd platform: emulation still works
        return f"the C++ kernels could not be built: {str(error).strip().splitlines()[-1]}"


def build(target: tuple[str, ...] = ("-march=native",)) -> Path:
    """The path of the library for a target."""
    return native_library.build(_SOURCES, target, what="int8 kernels")
