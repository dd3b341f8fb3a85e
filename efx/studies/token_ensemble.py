"""Token map of a cBTM ensemble: which experts predict the token after each token.

As in its evaluation, the weights of experts for the next token come from the text up to the last
multiple of `config.ensemble.every` tokens before it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from efx.composition.ensemble import log_weights
from efx.parallel import sharding
from efx.studies.token_choices import Row, TokenMap, predictions, rows_of, summary
from efx.train.step import evaluation_keys


def weights(ensemble, settings, ids):
    """log w [T, E] for the token after each of these."""
    # A row of held-out text begins with the end-of-document token of the previous document.
    text = ids[1:] if ids[0] == ensemble.tokenizer.eot else ids
    before_T = np.arange(1, len(ids) + 1) - (len(ids) - len(text))
    lengths, index_T = np.unique(before_T // settings.every, return_inverse=True)
    texts = [ensemble.tokenizer.decode(text[: n * settings.every]) for n in lengths]
    distances = jnp.asarray(ensemble.clustering.distances(texts))
    with sharding.single_device():
        return np.asarray(log_weights(distances, settings.tau, settings.top_k))[index_T]


def token_map(ensemble, config, ids, next_id=None):
    """The `TokenMap` of a text, see `token_choices.token_map`. Unused experts are not loaded.

    Args:
      ensemble: `efx.composition.ensemble.Ensemble`. config: its `Config`.
    """
    log_w_TE = weights(ensemble, config.ensemble, ids)
    w_TE, length = np.exp(log_w_TE.astype(np.float64)), len(ids)
    rows = [Row("experts", "experts", (w_TE > 0).sum(axis=-1).astype(np.float64))]
    rows += [Row("experts", "expert", w_TE.argmax(axis=-1).astype(np.float64))]
    expert_rows, served, mixed_TV = [], {}, None
    served["experts"] = [
        [(int(e), float(w_TE[t, e])) for e in np.flatnonzero(w_TE[t])] for t in range(length)
    ]
    for j in range(ensemble.count):
        used_T = w_TE[:, j] > 0
        rows += [
            Row(f"expert {j}", "computed", used_T.astype(np.float64)),
            Row(f"expert {j}", "weight", w_TE[:, j]),
        ]
        if not used_T.any():
            continue
        experiment, _, params, variables = ensemble.load_expert(j)
        variables = sharding.gather({"params": params, **variables})
        keys = evaluation_keys(experiment.config.seed, 0)
        log_p_TV, decisions = predictions(experiment.model, variables, ids, keys)
        log_p_TV = log_p_TV + log_w_TE[:, j, None]
        mixed_TV = log_p_TV if mixed_TV is None else jnp.logaddexp(mixed_TV, log_p_TV)
        for row in rows_of(experiment.model, decisions, length)[0]:
            values_T = np.where(used_T, row.values_T, np.nan)
            expert_rows.append(Row(f"expert {j} {row.name}", row.quantity, values_T))
    entropy_T, loss_T = summary(jax.device_put(mixed_TV), ids, next_id)
    return TokenMap([*rows, *expert_rows], served, entropy_T, loss_T)
