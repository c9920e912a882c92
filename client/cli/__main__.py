"""`python -m holdfast.client.cli`, for whoever has the interpreter and not the path."""

import sys

from holdfast.client.cli.main import main

sys.exit(main())
