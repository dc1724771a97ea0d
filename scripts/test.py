#!/usr/bin/env python3
"""All checks of this repository: python3 scripts/test.py; or some tests: python3 scripts/test.py [pytest arguments]

`--quick`, for the inner loop: ruff, and the tests that need no processes and no long trainings; less than a minute.
`--all-extras`, before anything else: with the libraries of every integration (2 GB), so that none of their tests skips.

Uses the .venv of scripts/run.py with the development tools added. Without arguments: ruff, mypy and the whole test
suite; every step runs even if one before it failed, and the exit code is not 0 if any did.
"""

import sys

from run import _bootstrap  # first the version of Python, then this

if __name__ == "__main__":
    sys.exit(_bootstrap.run_checks(sys.argv[1:]))
