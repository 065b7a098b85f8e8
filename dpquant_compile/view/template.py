"""Pages that are one file: a template of a package, filled with text and with the files beside it."""

import re
from collections.abc import Mapping
from importlib.resources import files

__all__ = ["fill_template", "read_resource"]


def read_resource(package: str, name: str) -> str:
    """A text file that lies in a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def fill_template(package: str, name: str, parts: Mapping[str, str]) -> str:
    """The template `name` with `parts[x]` in the place of each {{x}}, as it is: escape what is not markup."""
    # One pass over the template, so that text put in is never itself taken for a slot.
    return re.sub(r"\{\{(\w+)\}\}", lambda slot: parts[slot[1]], read_resource(package, name))
