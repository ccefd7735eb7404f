"""``python -m meshwright``: the command line."""

import sys

from meshwright.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
