"""`python -m fasttrain` is the same as `fasttrain`."""

from __future__ import annotations

import sys

from fasttrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
