"""What evaluation reports of models, feature by feature: see `efx.layers.report`."""

from efx.layers.mask_dropout.reports import MASKS
from efx.models.adapters.layers import ADAPTERS
from efx.routing.reports import DEPTH, EXPERTS

# In the order in which the line about an evaluation speaks of them.
REPORTS = (DEPTH, EXPERTS, ADAPTERS, MASKS)
