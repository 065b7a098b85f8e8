"""`python -m dpquant_compile.cli` is `dpquant`."""

import sys

from dpquant_compile.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
