"""Held-out loss of the cBTM ensemble under several weightings of its experts.

Every expert computes the log-probability of every scored token once; all mixtures are computed from
these. The weights for a token come from its document up to the last multiple of
`config.ensemble.every` tokens before it, also where the document was cut into rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from scipy.special import logsumexp

from efx import io
from efx.composition.cluster import split_documents
from efx.composition.ensemble import Ensemble, load_run, log_weights
from efx.config.load import to_config
from efx.data.sources import document_digest
from efx.errors import UsageError
from efx.logging import tables
from efx.parallel import sharding
from efx.train import losses
from efx.train.eval_step import evaluation_keys
from efx.train.evaluator import describe_scored_text


def evaluate(config, workdir, step=None, as_json=False):
    """Score an ensemble and its experts; prints and writes the table.

    Args:
      as_json: print JSON instead of Markdown.

    Returns: {mixture or model: {column: number}}.
    """
    ensemble = Ensemble(to_config(config), workdir, step)
    runs = {"seed model": (ensemble.seed_folder, ensemble.seed_step)}
    table = score(ensemble, runs if ensemble.seed_folder else {})
    if as_json:
        print(table.to_json(orient="index"))
    else:
        tables.show((ensemble.workdir / "evaluation.md").read_text())
    return table.to_dict("index")


def score(ensemble, other_runs):
    """Write WORKDIR/evaluation.md and evaluation.csv; returns the latter as a DataFrame.

    A row is a mixture or a model. The columns are experts a token, loss (nats), bits_per_byte if
    the bytes are known, the loss of each component of a mixture of sources, and that of each
    cluster.

    Args:
      other_runs: {name: (run directory, step)} of further models, such as the seed model.
    """
    config = ensemble.config
    train, held_out, key = split_documents(config.data)
    if key != ensemble.clustering.about["documents"]:
        raise UsageError(
            f"{ensemble.workdir}: its clustering is of other documents than those of config.data; "
            "use the settings of the clustering"
        )
    loaded = ensemble.load_expert(0, splits=("eval",))
    data = loaded[0].data
    limits = config.evaluate.batch_size, config.evaluate.max_batches
    batches = data.eval_batches(*limits)
    columns = [log_probs(loaded, batches)]
    del loaded  # only one model at a time is on the device
    for j in range(1, ensemble.count):
        columns.append(log_probs(ensemble.load_expert(j), batches))
    log_p_NE = np.stack(columns, axis=-1)
    held_out = [document for document in held_out if len(data.tokenizer.encode(document.text))]
    document_N, context_N, contexts = token_contexts(data, batches, config.ensemble.every)
    cluster_D = ensemble.clustering.distances(d.text for d in held_out).argmin(1)
    component_D = np.array([document.component for document in held_out])
    nats, experts = {}, {}

    def add(name, log_w_NE):
        nats[name] = -logsumexp(log_p_NE + log_w_NE, axis=-1)
        experts[name] = np.isfinite(log_w_NE).sum(-1).mean()

    c, distances = config.ensemble, ensemble.clustering.distances(contexts)
    for top_k in sorted({1, min(2, ensemble.count), c.top_k, ensemble.count}):
        add(f"top {top_k}", log_weights(distances, c.tau, top_k)[context_N])
    for name, weights_DE in document_weights(ensemble, cluster_D, component_D, train).items():
        with np.errstate(divide="ignore"):
            add(name, np.log(weights_DE, dtype=np.float32)[document_N])
    nats |= {f"expert {j}": -log_p_NE[:, j] for j in range(ensemble.count)}
    for name, (folder, step) in other_runs.items():
        nats[name] = -log_probs(load_run(folder, config, step), batches)

    nats = pd.DataFrame(nats, dtype=np.float64)
    table = pd.DataFrame({"experts": pd.Series(experts), "loss": nats.mean()}, nats.columns)
    table.experts = table.experts.fillna(1)
    if scored_bytes := data.scored_bytes(*limits):
        table["bits_per_byte"] = losses.bits_per_byte(table.loss, scored_bytes / len(nats))
    by_component = nats.groupby(component_D[document_N]).mean().T
    by_cluster = nats.groupby(cluster_D[document_N]).mean().T.add_prefix("cluster ")
    table = table.join([by_component.drop(columns="", errors="ignore"), by_cluster])
    rows = table.assign(experts=table.experts.map("{:.3g}".format)).itertuples()
    text = tables.markdown(["held-out loss (nats)", *table.columns], rows)
    text += f"\n\n{describe_scored_text(data, config.evaluate, len(nats))}\n"
    io.write_atomic(ensemble.workdir / "evaluation.md", text)
    io.write_atomic(ensemble.workdir / "evaluation.csv", table.to_csv(index_label="name"))
    return table


def token_contexts(data, batches, interval):
    """Return (document_N, context_N, contexts) of the N scored tokens of a held-out split.

    Args:
      data: `efx.data.Data`. interval: `config.ensemble.every`.
    Returns:
      document_N: index of each token's document among those with tokens.
      context_N: index in `contexts` of the text that decides the token's weights.
    """
    spans = data.documents("eval")
    positions_N = np.concatenate([x[x >= 0] for x in batches.target_positions()])
    document_N = np.searchsorted(spans[:, 0], positions_N, side="right") - 1
    length_N = (positions_N - spans[document_N, 0]) // interval * interval
    pairs, context_N = np.unique(np.stack([document_N, length_N]), axis=1, return_inverse=True)
    starts = spans[pairs[0], 0]
    tokens = [data.tokens("eval", *span) for span in zip(starts, starts + pairs[1], strict=True)]
    return document_N, context_N.reshape(-1), [data.tokenizer.decode(ids) for ids in tokens]


def log_probs(loaded, batches):
    """Return float32[N], log p of every scored token under a loaded run, decided causally."""
    e, _, params, variables = loaded
    model, seed, found = e.model.clone(selection="causal"), np.uint32(e.config.seed), []
    placement = sharding.Placement(e.mesh, e.rules, e.config.evaluate.batch_size)
    with sharding.use(e.mesh, e.rules):
        for i, batch in enumerate(batches):
            keys = evaluation_keys(seed, np.uint32(i))
            log_p_BT = _log_probs(model, {"params": params, **variables}, placement(batch), keys)
            found.append(np.asarray(log_p_BT)[batch["weights"] > 0])
    return np.concatenate(found)


@functools.partial(jax.jit, static_argnums=0)  # compiled once for all experts
def _log_probs(model, variables, batch, keys):
    """Return log p [B, T] of a batch's targets."""
    logits_BTV = model.apply_to_batch(variables, batch, rngs=keys)
    log_p_BTV = jax.nn.log_softmax(logits_BTV.astype(jnp.float32))
    return jnp.take_along_axis(log_p_BTV, batch["targets"][..., None], axis=-1)[..., 0]


def document_weights(ensemble, cluster_D, component_D, train):
    """Return {mixture: w [D, E]} of the mixtures with one weight vector per document.

    Args:
      cluster_D, component_D: cluster and component of each held-out document; only an oracle knows
        them.
      train: the training documents. They give the clusters of each component to an oracle, which
        is left out if a held-out document is of another component.
    """
    uniform_DE = np.full((len(cluster_D), ensemble.count), 1 / ensemble.count)
    mixtures = {"uniform": uniform_DE, "oracle cluster": np.eye(ensemble.count)[cluster_D]}
    cluster_of = {d: j for j in range(ensemble.count) for d in ensemble.members[j].digests}
    clusters = [cluster_of[document_digest(document.data).hex()] for document in train]
    components = np.array([document.component for document in train])
    if any(components) and set(component_D) <= set(components):
        fractions = pd.crosstab(components, clusters, normalize="index")
        fractions = fractions.reindex(columns=range(ensemble.count), fill_value=0)
        mixtures["oracle domain"] = fractions.loc[component_D].to_numpy()
    return mixtures
