"""Number formats: what they are, and the registry of their names.

A user's own format is one call, and is then known by its name everywhere:

    register_format(Format("ternary", bits=4, grid=(-1.0, 0.0, 1.0), round=round_ternary, describe="-1, 0, 1"))
"""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from dpquant_compile.errors import FormatError, RegistryError, listing
from dpquant_compile.numerics import integers, rounding

__all__ = ["ROUNDINGS", "SCALES", "Format", "Rounding", "format_names", "get_format", "register_format"]

Rounding = Callable[..., tuple[Tensor, Tensor]]
"""`(x, bits, block_dim) -> (q, unit)`; the contract is at the top of `numerics/rounding.py`.

A format with several `scales` takes the name of one as `scale=`.
"""

ROUNDINGS = ("stochastic", "nearest")
SCALES = ("sample", "channel", "block")


@dataclass(frozen=True)
class Format:
    """A low-precision number format with its reference rounding.

    name       short and stable: it is printed, and part of cache keys
    bits       storage of one element, 4 or 8
    grid       all values of `q` that `round` returns, ascending, in units of the scale
    round      rounding to the grid, see `Rounding`
    block      how many elements share one scale, for formats that have block scales alone; None for all others
    describe   one line for tables and `explain()`
    roundings  the ways of `ROUNDINGS` that `round` knows, the default first
    scales     the granularities of `SCALES` that it knows, the default first; if None, "block" where `block` is given,
               else "sample"
    unsigned   the grid of samples that have no negative value, where that is another one
    """

    name: str
    bits: int
    grid: tuple[float, ...]
    round: Rounding
    block: int | None = None
    describe: str = ""
    roundings: tuple[str, ...] = ("stochastic",)
    scales: tuple[str, ...] | None = None
    unsigned: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        given_name, block = cast(Any, self.name), cast(Any, self.block)
        if not isinstance(given_name, str) or not given_name.isidentifier():
            raise FormatError(f"Format name={self.name!r}: use letters, digits and underscores, such as 'luq_fp4'")
        where = f"Format {self.name!r}: "
        if self.bits not in (4, 8):
            raise FormatError(f"{where}bits={self.bits!r}, must be 4 or 8")
        if block is not None and (not isinstance(block, int) or block < 1):
            raise FormatError(f"{where}block={self.block!r}, must be None or at least 1")
        if not callable(self.round):
            raise FormatError(f"{where}round={self.round!r}, must be a function (x, bits, block_dim) -> (q, unit)")
        object.__setattr__(self, "grid", _checked_grid(f"{where}grid", self.grid, self.bits))
        if self.unsigned is not None:
            object.__setattr__(self, "unsigned", _checked_grid(f"{where}unsigned", self.unsigned, self.bits))
        if self.scales is None:
            object.__setattr__(self, "scales", ("sample",) if self.block is None else ("block",))
        for name, known in (("roundings", ROUNDINGS), ("scales", SCALES)):
            given = getattr(self, name)
            if not isinstance(given, tuple | list) or not given or any(word not in known for word in given):
                raise FormatError(f"{where}{name}={given!r}, must be some of {listing(known)}")
            object.__setattr__(self, name, tuple(given))

    @property
    def packable(self) -> bool:
        """Whether two elements fit one byte and mean the same in every sample, see `numerics/packing.py`."""
        return self.bits == 4 and self.unsigned is None

    @property
    def symmetric(self) -> bool:
        """Whether every level has its negative."""
        return self.grid == tuple(-level for level in reversed(self.grid))

    @property
    def label(self) -> str:
        """How drawings call it: FP4, FP8; INT4, INT8 where the levels are evenly spaced."""
        steps = {high - low for low, high in zip(self.grid, self.grid[1:], strict=False)}
        return f"{'INT' if len(steps) == 1 else 'FP'}{self.bits}"

    def rounded(self, x: Tensor, bits: Tensor | None, block_dim: int, scale: str) -> tuple[Tensor, Tensor]:
        """`round` with a scale of that granularity."""
        assert self.scales is not None
        return self.round(x, bits, block_dim, **({} if scale == self.scales[0] else {"scale": scale}))

    def __str__(self) -> str:
        return self.name


_FORMATS: dict[str, Format] = {}


def register_format(fmt: Format) -> Format:
    """Make `fmt` known by its name, and return it. A name that is taken is refused."""
    if not isinstance(fmt, Format):
        raise RegistryError(f"{fmt!r} is no Format: give dpq.Format(name, bits=…, grid=…, round=…)")
    if fmt.name in _FORMATS:
        raise RegistryError(f"format {fmt.name!r} is already registered: choose another name")
    _FORMATS[fmt.name] = fmt
    return fmt


def get_format(name_or_format: str | Format) -> Format:
    """The format of that name. A `Format` is returned as it is, registered or not."""
    if isinstance(name_or_format, Format):
        return name_or_format
    if str(name_or_format) not in _FORMATS:
        raise FormatError(f"no format is named {name_or_format!r}. Choose one of: {listing(format_names())}")
    return _FORMATS[name_or_format]


def format_names() -> tuple[str, ...]:
    """The names of all registered formats, in the order of registration."""
    return tuple(_FORMATS)


def _checked_grid(what: str, given: Iterable[float], bits: int) -> tuple[float, ...]:
    try:
        grid = tuple(float(level) for level in given)
    except (TypeError, ValueError):
        raise FormatError(f"{what}={given!r}, must be numbers, such as (-1.0, 0.0, 1.0)") from None
    if not all(math.isfinite(level) for level in grid):
        raise FormatError(f"{what} holds a level that is not finite")
    if any(low >= high for low, high in itertools.pairwise(grid)):
        raise FormatError(f"{what} must ascend, without repetition (-0.0 and 0.0 are one level)")
    if 0.0 not in grid:
        raise FormatError(f"{what} lacks 0.0, which zero inputs and padding need")
    if len(grid) > 2**bits:
        raise FormatError(f"{what} has {len(grid)} levels, {bits} bits code {2**bits}")
    return grid


def _binary_grid(mantissa: int, min_exp: int, largest: float) -> tuple[float, ...]:
    """Zero and all ± numbers up to `largest` of binary floating point with subnormals under 2^min_exp."""
    step = 2.0 ** (min_exp - mantissa)
    positive = [number * step for number in range(1, 2**mantissa)]
    exp = min_exp
    while not positive or positive[-1] < largest:
        positive += [2.0**exp * (1.0 + fraction / 2**mantissa) for fraction in range(2**mantissa)]
        exp += 1
    positive = [level for level in positive if level <= largest]
    return (*(-level for level in reversed(positive)), 0.0, *positive)


register_format(
    Format(
        "luq_fp4",
        bits=4,
        grid=_binary_grid(mantissa=0, min_exp=0, largest=64.0),
        round=rounding.round_luq_fp4,
        roundings=ROUNDINGS,
        describe="1 sign, 3 exponent bits: 0 and ±2^0…±2^6, one scale per sample",
    )
)
register_format(
    Format(
        "fp8_e5m2",
        bits=8,
        grid=_binary_grid(mantissa=2, min_exp=-14, largest=57344.0),
        round=rounding.round_fp8_e5m2,
        roundings=ROUNDINGS,
        describe="1 sign, 5 exponent, 2 mantissa bits, one scale per sample",
    )
)
register_format(
    Format(
        "uniform4",
        bits=4,
        grid=tuple(float(level) for level in range(-8, 8)),
        round=rounding.round_uniform4,
        roundings=ROUNDINGS,
        describe="16 equal steps -8…7, one scale per sample",
    )
)
register_format(
    Format(
        "fp4_e2m1",
        bits=4,
        grid=_binary_grid(mantissa=1, min_exp=0, largest=6.0),
        round=rounding.round_fp4_e2m1,
        block=rounding.MX_BLOCK,
        roundings=ROUNDINGS,
        describe="1 sign, 2 exponent, 1 mantissa bits, MX: a power-of-two scale per 32 elements",
    )
)
register_format(
    Format(
        "fp4_e2m1_nv",
        bits=4,
        grid=_binary_grid(mantissa=1, min_exp=0, largest=6.0),
        round=rounding.round_fp4_e2m1_nv,
        block=rounding.NV_BLOCK,
        roundings=ROUNDINGS,
        describe="1 sign, 2 exponent, 1 mantissa bits, NV: an E4M3 scale per 16 elements, one float32 scale per sample",
    )
)
register_format(
    Format(
        "fp8_e4m3",
        bits=8,
        grid=_binary_grid(mantissa=3, min_exp=-6, largest=448.0),
        round=rounding.round_fp8_e4m3,
        roundings=ROUNDINGS,
        describe="1 sign, 4 exponent, 3 mantissa bits, one scale per sample",
    )
)
register_format(
    Format(
        "int8",
        bits=8,
        grid=tuple(float(level) for level in range(-127, 128)),
        round=integers.round_int8,
        roundings=ROUNDINGS,
        describe="integers -127…127, one scale per sample",
    )
)
register_format(
    Format(
        "int4",
        bits=4,
        grid=tuple(float(level) for level in range(-7, 8)),
        unsigned=tuple(float(level) for level in range(16)),
        round=integers.round_int4,
        roundings=ROUNDINGS,
        scales=SCALES,
        describe="integers -7…7, or 0…15 in samples without negative values; a scale per sample, channel or block",
    )
)
