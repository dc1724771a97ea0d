#!/usr/bin/env python3
"""fasttrain without installing anything by hand: python3 scripts/run.py [command] [overrides]

The first use makes .venv beside pyproject.toml and installs fasttrain into it; later uses start at once. Arguments,
terminal, working directory and exit code are those of `python -m fasttrain`.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  an older Python must be able to parse this file
    sys.stderr.write("fasttrain needs Python 3.10 or newer, this is " + sys.version.split()[0] + "\n")
    sys.exit(2)

import _bootstrap

if __name__ == "__main__":
    sys.exit(_bootstrap.run_fasttrain(sys.argv[1:]))
