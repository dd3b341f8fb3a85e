"""`python -m efx` is the command `efx`."""

import sys

from efx.main import main

sys.exit(main())
