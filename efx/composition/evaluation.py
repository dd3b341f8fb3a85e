"""Held-out loss of the ensemble under several ways to weigh its experts.

The batches are those that evaluate any run. Every expert computes the log-probability of every
scored token once, and all mixtures are computed from these. The weights for a token come from its
document's text up to the last multiple of `config.ensemble.every` tokens before it, whether that
text is in the same row or not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from efx.composition.documents import SplitDocuments
from efx.composition.ensemble import Ensemble, load_run, log_weights, mix
from efx.config.load import to_config
from efx.data.sources import document_digest
from efx.errors import UsageError
from efx.logging import portion, tables
from efx.parallel import sharding
from efx.train import losses
from efx.train.evaluator import scored
from efx.train.step import evaluation_keys

FILE = "evaluation"


class HeldOut:
    """The N scored tokens of a held-out split, with the document and the context of each.

    Args:
      data: `efx.data.Data`. documents: the sources.Document of its held-out split, in order.
      interval: `config.ensemble.every`. config: `config.evaluate`.
    Attributes:
      documents: those of them that have tokens.
      document_N: number of each token's document.
      context_N: number, in `contexts`, of the text that decides its weights.
      fraction: of all tokens of the split, the fraction that is scored.
    """

    def __init__(self, data, documents, interval, config):
        self.data, self.config = data, config
        spans, tokenizer = data.documents("eval"), data.tokenizer
        if len(documents) != len(spans):
            documents = [document for document in documents if len(tokenizer.encode(document.text))]
        self.documents = documents
        positions = [x[x >= 0] for x in self.batches().target_positions()]
        positions_N = np.concatenate(positions)
        self.document_N = np.searchsorted(spans[:, 0], positions_N, side="right") - 1
        context_length_N = (positions_N - spans[self.document_N, 0]) // interval * interval
        pairs, context_N = np.unique(
            np.stack([self.document_N, context_length_N]), axis=1, return_inverse=True
        )
        self.context_N = context_N.reshape(-1)
        self.contexts = [
            tokenizer.decode(data.tokens("eval", spans[document, 0], spans[document, 0] + length))
            for document, length in pairs.T
        ]
        self.fraction = len(positions_N) / data.scored_tokens("eval")
        self._bytes_per_token = data.bytes_per_token("eval")

    def batches(self):
        return self.data.eval_batches(self.config.batch_size, self.config.max_batches)

    def log_probs(self, loaded):
        """float32[N]: log p of every scored token under one model, with causal decisions."""
        experiment, _, params, variables = loaded
        model, seed = experiment.model.clone(selection="causal"), np.uint32(experiment.config.seed)
        step = _scores(model, experiment.mesh, experiment.rules)
        scored_rows = []
        with sharding.use(experiment.mesh, experiment.rules):
            batch_size = self.config.batch_size
            placement = sharding.Placement(experiment.mesh, experiment.rules, batch_size)
            for i, batch in enumerate(self.batches()):
                log_p_BT = np.asarray(step(params, variables, placement(batch), seed, np.uint32(i)))
                scored_rows.append(log_p_BT[batch["weights"] > 0])
        return np.concatenate(scored_rows)

    def summary(self, log_p_N, cluster_N, count, experts=1.0):
        """{"loss", "bits_per_byte", "tokens", "fraction": that these are of the held-out text,
        "parts": {component: loss}, "clusters": [loss or None], "experts": used by a token}."""
        nats_N = -log_p_N.astype(np.float64)

        def mean(chosen_N):
            return float(nats_N[chosen_N].mean()) if chosen_N.any() else None

        component_D = np.array([document.component for document in self.documents])
        component_N = component_D[self.document_N]
        loss = float(nats_N.mean())
        return {
            "loss": loss,
            "bits_per_byte": losses.bits_per_byte(loss, self._bytes_per_token),
            "tokens": len(nats_N),
            "fraction": self.fraction,
            "parts": {name: mean(component_N == name) for name in sorted(set(component_N) - {""})},
            "clusters": [mean(cluster_N == j) for j in range(count)],
            "experts": experts,
        }


@functools.lru_cache(maxsize=8)
def _scores(model, mesh, rules):
    """Compiled (params, variables, batch, seed, index) -> log p [B, T] of the targets, under this
    mesh and these rules. Experts are one architecture: there is one program for all of them."""

    @jax.jit
    def step(params, variables, batch, seed, index):
        logits_BTV = model.apply_to_batch(
            {"params": params, **variables}, batch, rngs=evaluation_keys(seed, index)
        )
        log_p_BTV = jax.nn.log_softmax(logits_BTV.astype(jnp.float32))
        return jnp.take_along_axis(log_p_BTV, batch["targets"][..., None], axis=-1)[..., 0]

    return step


def weights_of_mixtures(held_out, cluster_D, ensemble, train, settings):
    """Yields (name, log w [N, E]) of every mixture.

    Args:
      cluster_D: of each held-out document as a whole, which only an oracle knows.
      ensemble: for its `clustering`, `count` and `members`.
      train: the training documents, from which an oracle knows the clusters of each component; it
        is left out if a held-out document is of another one.
      settings: `config.ensemble`.
    """
    count, document_N = ensemble.count, held_out.document_N
    distances = ensemble.clustering.distances(held_out.contexts)
    for top_k in sorted({1, min(2, count), settings.top_k, count}):
        with sharding.single_device():
            log_w = np.asarray(log_weights(jnp.asarray(distances), settings.tau, top_k))
        yield f"top {top_k}", log_w[held_out.context_N]
    yield "uniform", np.full((len(document_N), count), -np.log(count), np.float32)
    yield "oracle cluster", _log(np.eye(count))[cluster_D[document_N]]
    components = sorted({document.component for document in train} - {""})
    # A component may be held out as a whole, as may a text of its own: nothing of the training
    # documents says which clusters it has.
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
    """({"mixtures": {name: `HeldOut.summary`}, "models": the same of each model alone}, HeldOut).

    Args:
      config: for `config.data`, `config.ensemble` and `config.evaluate`.
      other_runs: {name: run directory} of further models on the same text, such as the seed model.
    """
    if jax.process_count() > 1:
        raise UsageError(
            "an ensemble is evaluated by one process; start it without several processes"
        )
    documents, count = SplitDocuments(config.data), ensemble.count
    if documents.key != ensemble.clustering.about["documents"]:
        raise UsageError(
            f"{ensemble.workdir}: its clustering is of other documents than those of config.data"
        )
    first_expert = ensemble.load_expert(0, splits=("eval",))
    data, interval = first_expert[0].data, config.ensemble.every
    held_out = HeldOut(data, documents.held_out, interval, config.evaluate)
    texts = (document.text for document in held_out.documents)
    cluster_D = ensemble.clustering.distances(texts).argmin(1)
    cluster_N = cluster_D[held_out.document_N]

    def summary(log_p_N, experts=1.0):
        return held_out.summary(log_p_N, cluster_N, count, experts)

    columns = [held_out.log_probs(first_expert)]
    del first_expert  # one model at a time has its parameters on the device
    columns += [held_out.log_probs(ensemble.load_expert(j)) for j in range(1, count)]
    log_p_NE = np.stack(columns, axis=-1)
    models = {f"expert {j}": summary(log_p_NE[:, j]) for j in range(count)}
    for name, folder in other_runs.items():
        loaded = load_run(folder, config)
        if loaded[0].tokenizer.fingerprint != ensemble.tokenizer.fingerprint:
            raise UsageError(f"{folder}: its vocabulary differs from that of the experts")
        models[name] = summary(held_out.log_probs(loaded))
    mixtures = {}
    for name, log_w_NE in weights_of_mixtures(
        held_out, cluster_D, ensemble, documents.train, config.ensemble
    ):
        with sharding.single_device():
            log_p_N = np.asarray(mix(jnp.asarray(log_p_NE), jnp.asarray(log_w_NE)))
        mixtures[name] = summary(log_p_N, float(np.isfinite(log_w_NE).sum(-1).mean()))
    return {"mixtures": mixtures, "models": models}, held_out


def markdown(scores):
    """The table of an evaluation."""
    rows = scores["mixtures"] | scores["models"]
    any_row = next(iter(rows.values()))
    clusters = [j for j, loss in enumerate(any_row["clusters"]) if loss is not None]
    titles = ["mixture", "experts a token", "loss (nats)", "bits per byte", *any_row["parts"]]
    titles += [f"cluster {j}" for j in clusters]
    table_rows = []
    for name, row in rows.items():
        values = [row["loss"], row["bits_per_byte"], *row["parts"].values()]
        values += [row["clusters"][j] for j in clusters]
        table_rows.append([name, f"{row['experts']:.3g}", *(f"{value:.4f}" for value in values)])
    return f"{tables.markdown(titles, table_rows)}\n\nScored: {portion([any_row['fraction']])}.\n"


def write(workdir, scores):
    """WORKDIR/evaluation.json and evaluation.md."""
    tables.write(workdir, FILE, markdown(scores), scores)


def evaluate(config, workdir, step=None):
    """Prints, writes into WORKDIR and returns the `score` of a folder of experts."""
    config = to_config(config)
    ensemble = Ensemble(config, workdir, step)
    seed = ensemble.seed_folder
    scores, held_out = score(ensemble, config, {"seed model": seed} if seed else {})
    write(workdir, scores)
    print(markdown(scores))
    print(scored(held_out.data, config.evaluate, len(held_out.document_N)))
    return scores
