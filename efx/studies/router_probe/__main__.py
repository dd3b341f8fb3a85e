"""`python -m efx.studies.router_probe`."""

import sys

from efx.studies.router_probe import main

sys.exit(main())
