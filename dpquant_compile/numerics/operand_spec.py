"""`OperandSpec`: how one operand of a product is rounded, in one short printable name."""

from dataclasses import dataclass
from typing import Any

from dpquant_compile.errors import FormatError, listing
from dpquant_compile.numerics.formats import Format, get_format

__all__ = ["OperandSpec", "operand_spec", "rounding_of"]


@dataclass(frozen=True)
class OperandSpec:
    """A number format, a way of rounding, and how finely scales are set.

    format    name of the number format
    rounding  "stochastic" (without bias) or "nearest" (deterministic)
    scale     what shares a scale: a whole "sample"; in "channel", 16 elements of a channel of a sample, or several
              channels where they have fewer; in "block", neighbours along the channels, as many as the format says. Of
              a weight, the tensor, elements of an output channel, or neighbours in a row

    Rounding and scale may be left out: the format's first choice is taken. `str(spec)` ("int4.nearest.channel") leaves
    out what is the format's first choice, and `OperandSpec.parse` reads it back.

    Guarantee: scales of inputs and output gradients are a sample's own in every granularity.
    """

    format: str
    rounding: str = ""
    scale: str = ""

    def __post_init__(self) -> None:
        given: Any = self.format
        if not isinstance(given, str):
            raise FormatError(f"OperandSpec format={given!r}: give the name of a registered format, such as 'int8'")
        fmt = get_format(self.format)
        assert fmt.scales is not None
        for name, value, known in (("rounding", self.rounding, fmt.roundings), ("scale", self.scale, fmt.scales)):
            if not value:
                object.__setattr__(self, name, known[0])
            elif value not in known:
                raise FormatError(f"{name}={value!r}: format {fmt} knows {listing(known)}")

    def __str__(self) -> str:
        fmt = get_format(self.format)
        assert fmt.scales is not None
        words = [self.format]
        words += [self.rounding] if self.rounding != fmt.roundings[0] else []
        words += [self.scale] if self.scale != fmt.scales[0] else []
        return ".".join(words)

    @property
    def spelt(self) -> str:
        """All three words, also those that are the format's first choice."""
        return f"{self.format}.{self.rounding}.{self.scale}"

    @property
    def of(self) -> Format:
        """The format itself."""
        return get_format(self.format)

    @staticmethod
    def parse(text: str) -> "OperandSpec":
        """The spec that prints as `text`; the words behind the format may come in any order."""
        fmt, rounding, scale = _read(text)
        return OperandSpec(fmt.name, rounding, scale)


def operand_spec(given: "str | OperandSpec") -> OperandSpec:
    """A spec from what users type: a spec, or its text."""
    if not isinstance(given, str | OperandSpec):
        raise FormatError(f"{given!r} is neither an OperandSpec nor its text, such as 'int4.nearest.channel'")
    return given if isinstance(given, OperandSpec) else OperandSpec.parse(given)


def rounding_of(given: "str | Format | OperandSpec") -> tuple[Format, str, str]:
    """Format, rounding and scale. A format that is not registered may be given itself, and takes its first choices."""
    if isinstance(given, Format):
        assert given.scales is not None
        return given, given.roundings[0], given.scales[0]
    if isinstance(given, OperandSpec):
        return given.of, given.rounding, given.scale
    return _read(given)


def _read(text: str) -> tuple[Format, str, str]:
    """Plain operations only, not cached: Dynamo traces through this."""
    if not isinstance(text, str):
        raise FormatError(f"{text!r} is no format: give a name, such as 'int4.nearest.channel', or an OperandSpec")
    name, *words = text.split(".")
    fmt = get_format(name)
    assert fmt.scales is not None
    rounding = scale = ""
    for word in words:
        if word in fmt.roundings and not rounding:
            rounding = word
        elif word in fmt.scales and not scale:
            scale = word
        else:
            choices = listing([*fmt.roundings, *fmt.scales])
            raise FormatError(f"{text!r}: {word!r} does not fit format {fmt}. It knows {choices}")
    return fmt, rounding or fmt.roundings[0], scale or fmt.scales[0]
