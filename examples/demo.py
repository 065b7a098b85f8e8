"""What `make demo` and `dpquant demo` run: a private run beside float32 and Opacus, and a private step timed here.

    python examples/demo.py [--out out/demo] [--quick]

The data are the 1,797 digits that come with scikit-learn. Training is DP-SGD: Poisson batches, per-sample clipping,
Gaussian noise. Every second epoch a private analysis measures which layers bear low precision badly, and the scheduler
avoids those. The code is `dpquant_compile/lab/demo.py`; plain_loop.py has the whole loop. Noise and batches are new in
every run, so accuracies differ by a point or two. Writes report.html (begin there) and graph.html.
"""

import sys

from dpquant_compile.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
