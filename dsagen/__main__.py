"""`python -m dsagen` is the command line."""

import sys

from dsagen.cli import main

sys.exit(main())
