"""`python -m tests.kernels.audit`: see `audit_kernels`."""

import sys

from tests.kernels.audit.audit_kernels import main

if __name__ == "__main__":
    sys.exit(main())
