"""At which token's time the places of a latent transformer are computed: a level of P places a
group computes when one of the last P tokens of the group comes, see `groups.py`."""

import numpy as np

from efx.models.latent import ledger


def of_places(c, path, positions_RS, length):
    """See `Model.times`; c: the resolved `LatentConfig`."""
    first, *inside = path.split("/")
    stack = first in ("layers", "dropout_embedding")
    if not stack and not first.startswith(("encoder", "decoder")):
        return positions_RS
    whole = stack or any(name.startswith("global_") for name in inside)
    local = any(name.startswith("local_") for name in inside)
    memory = c.memory_global if whole else c.memory_local * local
    if stack:
        size = c.latents[-1]
    elif whole:
        size = (positions_RS.shape[1] - memory) // ledger.groups_of(c, length)
    else:
        size = positions_RS.shape[1] - memory
    place_RS = positions_RS - memory
    group_RS = place_RS // size if whole else np.arange(len(positions_RS))[:, None]
    time_RS = group_RS * c.group_size + c.group_size - size + place_RS % size
    return np.where((place_RS >= 0) & (time_RS < length), time_RS, -1)
