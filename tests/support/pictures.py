"""The picture of README.md and docs/: `python -m tests.support.pictures out/demo` after `make demo`."""

import sys
from pathlib import Path

from tests.support.chromium import browse, find_chromium

PICTURE = Path(__file__).parents[2] / "docs" / "assets" / "graph.png"
WIDTH, HEIGHT = 1000, 620  # pixels


def main(pages: Path) -> None:
    binary = find_chromium()
    assert binary is not None, "no chromium, chromium-browser or google-chrome on PATH"
    with browse(binary) as page:
        page.prefer("light")
        page.resize(WIDTH, HEIGHT)
        page.open((pages / "graph.html").resolve().as_uri())
        PICTURE.write_bytes(page.screenshot())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
