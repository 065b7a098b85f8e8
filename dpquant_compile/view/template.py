"""Pages in one file: a template of a package, filled with text and with the files beside it."""

import re
from collections.abc import Mapping
from importlib.resources import files

__all__ = ["fill_template", "read_resource"]


def read_resource(package: str, name: str) -> str:
    """A text file of a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def fill_template(package: str, name: str, parts: Mapping[str, str]) -> str:
    """The template `name` with each {{x}} replaced by `parts[x]`, unescaped: escape what is not markup."""
    # One pass over the template, so that a slot inside inserted text is not filled.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], read_resource(package, name))
