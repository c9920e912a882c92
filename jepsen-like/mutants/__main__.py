"""`python -m holdfast.jepsen.mutants`."""

import sys

from holdfast.jepsen.mutants.run import main

if __name__ == "__main__":
    sys.exit(main())
