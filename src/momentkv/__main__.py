"""`python -m momentkv`: the command line where no script directory is on the path."""

import sys

from momentkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
