"""`python -m triforce`: the same as the command `triforce`."""

import sys

from triforce.cli import main

sys.exit(main())
