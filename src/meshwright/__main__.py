"""``python -m meshwright``: the command line."""

import sys

from meshwright.cli import main

if __name__ == "__main__":
    sys.exit(main())
