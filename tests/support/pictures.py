"""The pictures of README.md and docs/: `python -m tests.support.pictures out/demo` after `make demo`.

Writes report.png and graph.png to docs/assets, or to a second folder, at a width that reads well on a page.
"""

import sys
from pathlib import Path

from tests.support.chromium import browse, find_chromium

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
SIZES = {"report": (1000, 860), "graph": (1000, 620)}  # of the page's top, in pixels


def main(pages: Path, target: Path) -> None:
    binary = find_chromium()
    assert binary is not None, "no chromium, chromium-browser or google-chrome on PATH"
    with browse(binary) as page:
        page.prefer("light")
        for name, size in SIZES.items():
            page.resize(*size)
            page.open((pages / f"{name}.html").resolve().as_uri())
            (target / f"{name}.png").write_bytes(page.screenshot())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else ASSETS)
