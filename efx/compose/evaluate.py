"""Held-out loss of an ensemble, by document: what each way to weigh its experts comes to.

A held-out document is read as training reads packed documents: in pieces of seq_len that each start
from position 0. Every expert is asked once for the log-probability of every token; all mixtures are
then computed from those. The weights for a token come from the document's text up to the last
multiple of `config.ensemble.every` tokens before it, be it longer than a piece or not.
"""

import dataclasses
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from efx import runfolder, sharding
from efx.compose.members import restore
from efx.errors import UsageError
from efx.metrics import portion
from efx.models import ensemble as mixtures
from efx.step import evaluation_keys

FILE = "evaluation"


@dataclasses.dataclass
class HeldOut:
    """Held-out documents in rows of seq_len, and where each row and token belongs.

    Attributes:
      batch: inputs, targets, positions, segment_ids int32[R, T], weights float32[R, T]; padded to
        whole batches with rows of weight 0.
      documents: the Texts; document_R: number of each row's document.
      block_RT: which context decides on a token; contexts: the text of each, by block.
      fraction: of the text of all held-out documents, how much is in these.
    """

    batch: dict
    documents: list
    document_R: np.ndarray
    block_RT: np.ndarray
    contexts: list
    fraction: float


def held_out(documents, tokenizer, seq_len, every, rows_at_once, max_rows=0):
    """HeldOut of `documents`; with max_rows of documents spread evenly, about so many rows."""
    pairs = [(text.name, text.data) for text in documents]
    encoded = list(zip(documents, tokenizer.encode_documents(pairs), strict=True))
    encoded = [(text, ids) for text, ids in encoded if len(ids)]
    rows = sum(-(-(len(ids) + 1) // seq_len) for _, ids in encoded)
    size = sum(len(ids) for _, ids in encoded)
    if max_rows and rows > max_rows:
        count = max(1, len(encoded) * max_rows // rows)
        encoded = [encoded[i] for i in np.linspace(0, len(encoded) - 1, count).astype(int)]
    names = ("inputs", "targets", "positions", "segment_ids")
    columns, document, block, weights, contexts = {n: [] for n in names}, [], [], [], []
    for d, (_, ids) in enumerate(encoded):
        ids, eot = np.asarray(ids, np.int32), tokenizer.eot
        framed = ids if eot is None else np.concatenate([[eot], ids, [eot]]).astype(np.int32)
        first, total = len(contexts), len(framed) - 1
        contexts += [tokenizer.decode(ids[:n]) for n in range(0, total, every)]
        for start in range(0, total, seq_len):
            piece = framed[start : start + seq_len + 1]
            length, pad = len(piece) - 1, seq_len + 1 - len(piece)
            columns["inputs"].append(np.pad(piece[:-1], (0, pad)))
            columns["targets"].append(np.pad(piece[1:], (0, pad)))
            columns["positions"].append(np.pad(np.arange(length, dtype=np.int32), (0, pad)))
            columns["segment_ids"].append(np.pad(np.ones(length, np.int32), (0, pad)))
            weights.append(np.pad(np.ones(length, np.float32), (0, pad)))
            place = np.minimum(start + np.arange(seq_len), total - 1)
            block.append(first + place // every)
            document.append(d)
    if not weights:
        raise UsageError("no held-out document has two tokens; raise config.data.eval_fraction")
    batch = {name: np.stack(column) for name, column in columns.items()}
    batch["weights"] = np.stack(weights)
    extra = -len(weights) % rows_at_once
    batch = {name: np.pad(x, ((0, extra), (0, 0))) for name, x in batch.items()}
    texts = [text for text, _ in encoded]
    fraction = sum(len(ids) for _, ids in encoded) / size
    return HeldOut(batch, texts, np.array(document), np.stack(block), contexts, fraction)


def log_probs(restored, batch, rows_at_once):
    """float32[R, T]: log p of every target under one model, which decides causally throughout."""
    e, _, params, variables = restored
    model = e.model.clone(selection="causal")

    @jax.jit
    def step(params, variables, batch, index):
        logits_BTV = model.apply(
            {"params": params, **variables},
            batch["inputs"],
            batch["positions"],
            batch["segment_ids"],
            rngs=evaluation_keys(e.config.seed, index),
        ).astype(jnp.float32)
        column_BTV = jax.lax.broadcasted_iota(jnp.int32, logits_BTV.shape, 2)
        hit_BTV = column_BTV == batch["targets"][..., None]
        target_BT = jnp.sum(jnp.where(hit_BTV, logits_BTV, 0.0), axis=-1)
        return target_BT - jax.nn.logsumexp(logits_BTV, axis=-1)

    found = []
    with sharding.use(e.mesh, e.rules):
        placement = sharding.Placement(e.mesh, e.rules, rows_at_once)
        for i in range(0, len(batch["inputs"]), rows_at_once):
            rows = {name: x[i : i + rows_at_once] for name, x in batch.items()}
            index = np.uint32(i // rows_at_once)
            found.append(step(params, variables, placement(rows), index))
            if len(found) > 2:
                found[-3] = np.asarray(found[-3])
    return np.concatenate([np.asarray(x) for x in found])


def document_weights(held, clustering, documents, train, settings):
    """{name: (log w [blocks or documents, E], per "block" or "document")} of every mixture."""
    count, tau = clustering.count, settings.tau
    distances = clustering.distances(held.contexts)
    whole = clustering.distances(text.text for text in held.documents).argmin(1)
    found = {}
    for top_k in sorted({1, min(2, count), settings.top_k, count}):
        found[f"top {top_k}"] = (_log_weights(distances, tau, top_k), "block")
    blocks = len(held.contexts)
    found["uniform"] = (np.full((blocks, count), -math.log(count), np.float32), "block")
    one = np.where(np.eye(count, dtype=bool), 0.0, -np.inf).astype(np.float32)
    found["oracle cluster"] = (one[whole], "document")
    parts = sorted({text.part for text in train} - {""})
    if parts:
        shares = np.zeros((len(parts), count))
        for text in train:
            shares[parts.index(text.part), documents.clusters[text.digest.hex()]] += 1
        with np.errstate(divide="ignore"):
            log_shares = np.log(shares / shares.sum(1, keepdims=True)).astype(np.float32)
        of = [parts.index(text.part) for text in held.documents]
        found["oracle domain"] = (log_shares[of], "document")
    for j in range(count):
        found[f"expert {j}"] = (np.broadcast_to(one[j], (blocks, count)), "block")
    return found, whole


def _log_weights(distances, tau, top_k):
    with sharding.single_device():
        return np.asarray(mixtures.log_weights(jnp.asarray(distances), tau, top_k))


def summary(log_probs_RT, held, cluster_D, count):
    """{"loss", "bits_per_byte", "tokens", "fraction" of the held-out text that these are, "parts":
    {part: loss}, "clusters": [loss or None]}."""
    rows = len(held.document_R)
    weights_RT = held.batch["weights"][:rows].astype(np.float64)
    nats_R, tokens_R = -(log_probs_RT[:rows] * weights_RT).sum(1), weights_RT.sum(1)

    def mean(chosen_R):
        tokens = tokens_R[chosen_R].sum()
        return float(nats_R[chosen_R].sum() / tokens) if tokens else None

    parts = np.array([held.documents[d].part for d in held.document_R])
    cluster_R = cluster_D[held.document_R]
    size = sum(len(text.data) for text in held.documents)
    return {
        "loss": mean(slice(None)),
        "bits_per_byte": float(nats_R.sum() / (math.log(2) * size)),
        "tokens": int(tokens_R.sum()),
        "fraction": held.fraction,
        "parts": {part: mean(parts == part) for part in sorted(set(parts) - {""})},
        "clusters": [mean(cluster_R == j) for j in range(count)],
    }


def evaluate_ensemble(ensemble, corpus, config, others=()):
    """{name: summary with "experts", how many a token takes} of every mixture and model.

    Args:
      ensemble: `members.Ensemble`.
      corpus: `corpus.Corpus` of its documents.
      config: for `config.ensemble` and `config.evaluate`.
      others: (name, run folder) of further models on the same text, such as the seed model.
    """
    if jax.process_count() > 1:
        raise UsageError("an ensemble is evaluated by one process; start it without others")
    if corpus.key != ensemble.documents.corpus:
        raise UsageError(
            f"{ensemble.workdir} holds a clustering of other documents than config.data names now"
        )
    settings, c = config.ensemble, config.evaluate
    restored = ensemble.restore(0)
    held = held_out(
        corpus.eval,
        ensemble.tokenizer,
        restored[0].config.data.seq_len,
        settings.every,
        c.batch_size,
        c.max_batches * c.batch_size,
    )
    mixed, whole = document_weights(
        held, ensemble.clustering, ensemble.documents, corpus.train, settings
    )
    columns = []
    for j in range(ensemble.count):
        restored = restored if j == 0 else ensemble.restore(j)
        columns.append(log_probs(restored, held.batch, c.batch_size)[: len(held.document_R)])
    log_probs_RTE = np.stack(columns, -1)
    result = {}
    for name, (log_w, per) in mixed.items():
        if per == "block":
            log_w_RTE = log_w[held.block_RT]
        else:
            log_w_RTE = np.broadcast_to(log_w[held.document_R][:, None], log_probs_RTE.shape)
        with sharding.single_device():
            value = mixtures.mix(
                jnp.asarray(log_probs_RTE.reshape(-1, ensemble.count)),
                jnp.asarray(log_w_RTE.reshape(-1, ensemble.count)),
            )
        value = np.asarray(value).reshape(log_probs_RTE.shape[:2])
        result[name] = summary(value, held, whole, ensemble.count)
        result[name]["experts"] = float(np.isfinite(log_w_RTE).sum(-1).mean())
    for name, folder in others:
        other = restore(folder, config)
        if other[0].data.tokenizer.fingerprint != ensemble.tokenizer.fingerprint:
            raise UsageError(f"{folder} has another vocabulary than the experts")
        value = log_probs(other, held.batch, c.batch_size)
        result[name] = summary(value, held, whole, ensemble.count) | {"experts": 1.0}
    return result


def markdown(result):
    """The table of an evaluation."""
    first = next(iter(result.values()))
    clusters = [j for j, loss in enumerate(first["clusters"]) if loss is not None]
    titles = ["mixture", "experts a token", "loss (nats)", "bits per byte", *first["parts"]]
    titles += [f"cluster {j}" for j in clusters]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for name, row in result.items():
        cells = [f"{row['loss']:.4f}", f"{row['bits_per_byte']:.4f}"]
        cells += [f"{loss:.4f}" for loss in row["parts"].values()]
        cells += [f"{row['clusters'][j]:.4f}" for j in clusters]
        lines.append(f"| {name} | {row['experts']:.3g} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"Scored: {portion([first['fraction']], 'documents')}."]) + "\n"


def write(workdir, result):
    """WORKDIR/evaluation.json and evaluation.md."""
    folder = pathlib.Path(workdir)
    runfolder.write_atomic(folder / f"{FILE}.json", json.dumps(result, indent=1) + "\n")
    runfolder.write_atomic(folder / f"{FILE}.md", markdown(result))
