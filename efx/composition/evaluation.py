"""Held-out loss of the cBTM ensemble under several weightings of its experts.

Every expert computes the log-probability of every scored token once; all mixtures are computed from
these. The weights for a token come from its document up to the last multiple of
`config.ensemble.every` tokens before it, also where the document was cut into rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from efx import io
from efx.composition.documents import SplitDocuments
from efx.composition.ensemble import Ensemble, load_run, log_weights
from efx.config.load import to_config
from efx.data.sources import document_digest
from efx.errors import UsageError
from efx.logging import tables
from efx.parallel import sharding
from efx.train import losses
from efx.train.evaluator import scored
from efx.train.step import evaluation_keys


class HeldOut:
    """The N scored tokens of a held-out split, with document and context.

    Args:
      data: `efx.data.Data`. documents: its held-out sources.Documents, in order.
      interval: `config.ensemble.every`. config: `config.evaluate`.
    Attributes:
      documents: those with tokens.
      document_N: index of each token's document.
      context_N: index in `contexts` of the text that decides the token's weights.
    """

    def __init__(self, data, documents, interval, config):
        self.data, self._config = data, config
        spans, tokenizer = data.documents("eval"), data.tokenizer
        if len(documents) != len(spans):
            documents = [document for document in documents if len(tokenizer.encode(document.text))]
        self.documents = documents
        positions_N = np.concatenate([x[x >= 0] for x in self.batches().target_positions()])
        self.document_N = np.searchsorted(spans[:, 0], positions_N, side="right") - 1
        context_length_N = (positions_N - spans[self.document_N, 0]) // interval * interval
        pairs, context_N = np.unique(
            np.stack([self.document_N, context_length_N]), axis=1, return_inverse=True
        )
        self.context_N, self.contexts = context_N.reshape(-1), []
        for document, length in pairs.T:
            start = spans[document, 0]
            self.contexts.append(tokenizer.decode(data.tokens("eval", start, start + length)))

    def batches(self):
        return self.data.eval_batches(self._config.batch_size, self._config.max_batches)

    def log_probs(self, loaded):
        """Return float32[N], log p of every scored token under a loaded run, decided causally."""
        e, _, params, variables = loaded
        step = _log_probs(e.model.clone(selection="causal"), e.mesh, e.rules)
        seed, found = np.uint32(e.config.seed), []
        with sharding.use(e.mesh, e.rules):
            placement = sharding.Placement(e.mesh, e.rules, self._config.batch_size)
            for i, batch in enumerate(self.batches()):
                log_p_BT = np.asarray(step(params, variables, placement(batch), seed, np.uint32(i)))
                found.append(log_p_BT[batch["weights"] > 0])
        return np.concatenate(found)

    def row(self, log_p_N, cluster_N, count, experts=1.0):
        """Return {column: number} of a model or mixture.

        The columns are experts a token, loss (nats), bits_per_byte, tokens, the loss of each
        component of a mixture, and that of each cluster (None without tokens).
        """
        nats_N = -log_p_N.astype(np.float64)
        loss = float(nats_N.mean())
        bits = losses.bits_per_byte(loss, self.data.bytes_per_token("eval"))
        row = {"experts": experts, "loss": loss, "bits_per_byte": bits, "tokens": len(nats_N)}
        component_D = np.array([document.component for document in self.documents])
        component_N = component_D[self.document_N]
        groups = {name: component_N == name for name in sorted(set(component_N) - {""})}
        groups |= {f"cluster {j}": cluster_N == j for j in range(count)}
        return row | {
            name: float(nats_N[chosen_N].mean()) if chosen_N.any() else None
            for name, chosen_N in groups.items()
        }


@functools.lru_cache(maxsize=8)
def _log_probs(model, mesh, rules):
    """Return a compiled function to log p [B, T] of a batch's targets, one for all experts."""

    @jax.jit
    def step(params, variables, batch, seed, index):
        logits_BTV = model.apply_to_batch(
            {"params": params, **variables}, batch, rngs=evaluation_keys(seed, index)
        )
        log_p_BTV = jax.nn.log_softmax(logits_BTV.astype(jnp.float32))
        return jnp.take_along_axis(log_p_BTV, batch["targets"][..., None], axis=-1)[..., 0]

    return step


def weights_of_mixtures(held_out, cluster_D, ensemble, train, settings):
    """Yield (name, log w [N, E]) of every mixture.

    Args:
      cluster_D: cluster of each held-out document as a whole; only an oracle knows it.
      train: the training documents. They give the clusters of each component to an oracle, which
        is left out if a held-out document is of another component.
      settings: `config.ensemble`.
    """
    count, document_N = ensemble.count, held_out.document_N
    distances = ensemble.clustering.distances(held_out.contexts)
    for top_k in sorted({1, min(2, count), settings.top_k, count}):
        log_w = log_weights(distances, settings.tau, top_k)
        yield f"top {top_k}", log_w[held_out.context_N]
    yield "uniform", np.full((len(document_N), count), -np.log(count), np.float32)
    yield "oracle cluster", _log(np.eye(count))[cluster_D[document_N]]
    components = sorted({document.component for document in train} - {""})
    if components and {document.component for document in held_out.documents} <= set(components):
        cluster_of = {d: j for j in range(count) for d in ensemble.members[j].digests}
        counts = np.zeros((len(components), count))
        for document in train:
            j = cluster_of[document_digest(document.data).hex()]
            counts[components.index(document.component), j] += 1
        component_D = np.array([components.index(d.component) for d in held_out.documents])
        fractions = counts / counts.sum(1, keepdims=True)
        yield "oracle domain", _log(fractions)[component_D[document_N]]


def _log(x):
    with np.errstate(divide="ignore"):
        return np.log(x).astype(np.float32)


def score(ensemble, config, other_runs):
    """Return ({mixture or model: `HeldOut.row`}, HeldOut).

    Args:
      config: for `config.data`, `config.ensemble` and `config.evaluate`.
      other_runs: {name: run directory} of further models to score, such as the seed model.
    """
    if jax.process_count() > 1:
        raise UsageError("an ensemble is evaluated in one process; start it without several")
    documents, count = SplitDocuments(config.data), ensemble.count
    if documents.key != ensemble.clustering.about["documents"]:
        raise UsageError(
            f"{ensemble.workdir}: its clustering is of other documents than those of config.data; "
            "use the settings of the clustering"
        )
    loaded = ensemble.load_expert(0, splits=("eval",))
    held_out = HeldOut(loaded[0].data, documents.held_out, config.ensemble.every, config.evaluate)
    texts = (document.text for document in held_out.documents)
    cluster_D = ensemble.clustering.distances(texts).argmin(1)
    cluster_N = cluster_D[held_out.document_N]
    columns = [held_out.log_probs(loaded)]
    del loaded  # only one model at a time is on the device
    columns += [held_out.log_probs(ensemble.load_expert(j)) for j in range(1, count)]
    log_p_NE, rows = np.stack(columns, axis=-1), {}
    for name, log_w_NE in weights_of_mixtures(
        held_out, cluster_D, ensemble, documents.train, config.ensemble
    ):
        log_p_N = logsumexp(log_p_NE + log_w_NE, axis=-1)
        experts = float(np.isfinite(log_w_NE).sum(-1).mean())
        rows[name] = held_out.row(log_p_N, cluster_N, count, experts)
    for j in range(count):
        rows[f"expert {j}"] = held_out.row(log_p_NE[:, j], cluster_N, count)
    for name, folder in other_runs.items():
        loaded = load_run(folder, config)
        if loaded[0].tokenizer.fingerprint != ensemble.tokenizer.fingerprint:
            raise UsageError(f"{folder}: has another vocabulary than the experts; use their runs")
        rows[name] = held_out.row(held_out.log_probs(loaded), cluster_N, count)
    return rows, held_out


def write(workdir, rows):
    """Write WORKDIR/evaluation.md and evaluation.csv; returns the Markdown."""
    import pandas as pd

    table = pd.DataFrame.from_dict(rows, orient="index").drop(columns="tokens")
    table = table.dropna(axis="columns", how="all")  # clusters without held-out documents
    cells = [
        [name, f"{values['experts']:.3g}", *(f"{x:.4f}" for x in values.drop("experts"))]
        for name, values in table.iterrows()
    ]
    text = tables.markdown(["held-out loss (nats)", *table.columns], cells)
    folder = io.folder(workdir)
    io.write_atomic(folder / "evaluation.md", text + "\n")
    io.write_atomic(folder / "evaluation.csv", table.to_csv(index_label="name"))
    return text


def evaluate(config, workdir, step=None):
    """Score an ensemble and its experts; prints, writes and returns the rows of `score`."""
    config = to_config(config)
    ensemble = Ensemble(config, workdir, step)
    seed = ensemble.seed_folder()
    rows, held_out = score(ensemble, config, {"seed model": seed} if seed else {})
    print(write(workdir, rows))
    print(scored(held_out.data, config.evaluate, len(held_out.document_N)))
    return rows
