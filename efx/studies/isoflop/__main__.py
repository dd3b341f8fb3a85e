"""`python -m efx.studies.isoflop`."""

import sys

from efx.studies.isoflop import main

sys.exit(main())
