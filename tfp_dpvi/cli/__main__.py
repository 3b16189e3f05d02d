"""`python -m tfp_dpvi.cli`."""

import sys

from tfp_dpvi.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
