"""``python -m mojolearn``: the command line."""

import sys

from mojolearn.cli import main

if __name__ == "__main__":
    sys.exit(main())
