"""`python -m efx.certify`, see `efx.certify.command`."""

import sys

from efx.certify.command import main

sys.exit(main())
