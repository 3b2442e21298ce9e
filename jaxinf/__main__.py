"""``python -m jaxinf``: the console script, also if it is not installed."""

import sys

from jaxinf.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
