"""Measurements of a probe: held-out tokens of a run, and the decisions of its routed blocks."""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from efx import models, run_dir
from efx.composition import CLUSTERS
from efx.config.load import config_of_run
from efx.errors import UsageError
from efx.layers.report import CHOICES
from efx.layers.stack import RecursionStep
from efx.parallel import sharding
from efx.studies.router_probe import analysis
from efx.studies.token_choices import model_parts, row_name
from efx.train import setup
from efx.train.step import evaluation_keys

COUNTED = 1 << 19  # tokens of the training text that are counted for frequencies


def measure(workdir, num_tokens, selection="causal", step=None):
    """(Tokens, {block: Block}, plain data about the run) of a finished run.

    Args:
      num_tokens: approximate number of held-out tokens, whole rows spread evenly over the split;
        at most all of them.
      selection: as in `Call`.
    """
    if (pathlib.Path(workdir) / CLUSTERS).is_dir():
        raise UsageError(f"--workdir={workdir} is a folder of cBTM; use the run of one expert")
    config = config_of_run(workdir)
    built, step, params, variables = setup.finished(config, workdir, step, ("train", "eval"))
    length, packed = built.config.data.seq_len, built.config.data.packing
    routed = routed_blocks(built.model, length)
    if not routed:
        raise UsageError(
            f"--workdir={workdir} has no routed blocks "
            "(config.model.depth_routing.kind='none'); use a run with depth routing"
        )
    if packed and any(len(tokens_S) != length for _, tokens_S, _ in routed.values()):
        raise UsageError(
            f"--workdir={workdir}: in packed rows (config.data.packing=True) latents do not "
            "belong to single tokens; probe a run without packing"
        )
    variables = sharding.gather({"params": params, **variables})
    batches = _batches(built, num_tokens)
    outputs = passes(built.model, variables, batches, selection, routed, built.config.seed)
    rarity_V = rarity(built.data, built.config.data, built.tokenizer.vocab_size)
    tokens, blocks = assemble(batches, outputs, routed, selection, rarity_V)
    data = built.data
    about = {
        "run": pathlib.Path(workdir).resolve().name,
        "step": step,
        "selection": next(spec.routing.train_selection for spec, _, _ in routed.values()),
        "text": data.describe_held_out(),
        "of": {"the text": data.fingerprint, "the tokenizer": built.tokenizer.fingerprint},
        **_provenance(workdir),
    }
    return tokens, blocks, about


def _provenance(workdir):
    """Seed, config, machine and revision of a run."""
    launches = run_dir.run_record(workdir).get("launches", [])
    if not launches:
        raise UsageError(f"--workdir={workdir}: its run.json does not record the code revision")
    line = launches[-1]["command_line"]
    named = [arg.partition("=")[2] for arg in line if arg.startswith("--config=")]
    named += [arg for flag, arg in itertools.pairwise(line) if flag == "--config"]
    return {
        "seed": run_dir.recorded_setting(workdir, "seed"),
        "config": named[0] if named else "",
        "machine": run_dir.machine_of(launches[-1]),
        "revision": run_dir.revision_of(launches[-1]),
    }


def routed_blocks(model, length):
    """{path: (spec, token [S] of each place or -1, path of the previous recursion step or "")}"""
    model, routed = models.unrolled(model), {}
    for prefix, part in model_parts(model):
        specs = part.blocks()
        before = ""
        for path, spec in specs.items():
            if spec.routing is not None:
                follows = before if isinstance(spec, RecursionStep) else ""
                positions_1S = np.arange(part.stack_length(length))[None]
                time_S = part.token_of_place(path, positions_1S, length)[0]
                routed[prefix + path] = (spec, time_S, follows)
                before = prefix + path
    return routed


# ---- passes --------------------------------------------------------------------------------------


def _batches(built, num_tokens):
    """Held-out batches with about this number of tokens."""
    c, length = built.config.evaluate, built.config.data.seq_len
    rows = max(1, -(-num_tokens // length))
    size = min(c.batch_size, rows)
    return list(built.data.eval_batches(size, -(-rows // size)))


def passes(model, variables, batches, selection, routed, seed):
    """For each batch {"entropy", "loss": [B, T]; "routed", "selected", "score" (which the decision
    compares with 0) and "router" (the router's score): {path: [B, S]}}."""
    variables = models.unroll_variables(model, variables)
    model = models.unrolled(model).clone(selection=selection)
    head = model.head_params(variables["params"])

    def prediction(row):
        """(entropy [T], loss [T]) of one row, so that only its logits are in memory."""
        x_TD, target_T = row
        log_p_TV = jax.nn.log_softmax(model.head_fn(head, x_TD).astype(jnp.float32))
        p_TV = jnp.exp(log_p_TV)
        entropy_T = -jnp.sum(jnp.where(p_TV > 0, p_TV * log_p_TV, 0.0), axis=-1)
        return entropy_T, -jnp.take_along_axis(log_p_TV, target_T[:, None], axis=-1)[:, 0]

    @jax.jit
    def run(variables, batch, index):
        x_BTD, sown = model.apply_to_batch(
            variables,
            batch,
            method="features",
            rngs=evaluation_keys(seed, index),
            mutable=[CHOICES, "intermediates"],
        )
        entropy_BT, loss_BT = jax.lax.map(prediction, (x_BTD, batch["targets"]))
        result = {"entropy": entropy_BT, "loss": loss_BT}
        for name in ("routed", "selected", "score"):
            found = {path: _sown(sown[CHOICES], path, name) for path in routed}
            result[name] = {path: choice.value for path, choice in found.items() if choice}
        scores = {p: _sown(sown.get("intermediates", {}), p, "router_logits") for p in routed}
        return result | {"router": {p: score for p, score in scores.items() if score is not None}}

    return [
        jax.device_get(run(variables, batch, np.uint32(index)))
        for index, batch in enumerate(batches)
    ]


def _sown(tree, path, name):
    """The value that was sown at a path under a name, or None."""
    for key in path.split("/"):
        tree = tree.get(key, {})
    (value,) = tree.get(name, (None,))
    return value


# ---- tokens --------------------------------------------------------------------------------------


def assemble(batches, outputs, routed, selection, rarity_V):
    """(Tokens, {block: Block}) of all batches.

    Args:
      outputs: of `passes` with this selection. routed: of `routed_blocks`. rarity_V: of `rarity`.
    """
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    scored_BT = joined["weights"] > 0
    rows, length = scored_BT.shape
    token_BT, place_T = joined["inputs"], np.arange(length)
    position_BT = joined.get("positions", np.broadcast_to(place_T, scored_BT.shape))
    previous_BT = np.where(position_BT > 0, np.roll(token_BT, 1, axis=1), -1)
    tokens = analysis.Tokens(
        row_N=np.broadcast_to(np.arange(rows)[:, None], scored_BT.shape)[scored_BT],
        position_N=position_BT[scored_BT],
        token_N=token_BT[scored_BT],
        previous_N=previous_BT[scored_BT],
        rarity_N=rarity_V[token_BT][scored_BT],
        entropy_N=_joined(outputs, "entropy")[scored_BT],
        loss_N=_joined(outputs, "loss")[scored_BT],
    )

    def at_tokens(name, path):
        """float64 [N], NaN for tokens without a decision; None if the block has no such values."""
        if path not in outputs[0][name]:
            return None
        tokens_S, value_BT = routed[path][1], np.full(scored_BT.shape, np.nan)
        there_S = tokens_S >= 0
        value_BS = np.concatenate([of_batch[name][path] for of_batch in outputs])
        value_BT[:, tokens_S[there_S]] = value_BS[:, there_S]
        return value_BT[scored_BT]

    blocks = {}
    for path, (spec, _, follows) in routed.items():
        routed_N, router_N = at_tokens("routed", path), at_tokens("router", path)
        if follows:  # a step decides about the tokens that the previous step computed
            routed_N = np.where(at_tokens("routed", follows) > 0, routed_N, np.nan)
        selected_N = threshold = None
        if selection == "causal":
            selected_N = at_tokens("selected", path)
            if router_N is not None and spec.routing.causal != "predictor":
                # The decision compares score - threshold with 0.
                threshold = float(np.nanmean(router_N - at_tokens("score", path)))
        blocks[row_name(path)] = analysis.Block(routed_N, selected_N, router_N, threshold)
    return tokens, blocks


def _joined(outputs, name):
    return np.concatenate([of_batch[name] for of_batch in outputs]).astype(np.float64)


def rarity(data, config, vocab_size):
    """bits [V]: -log2 of the frequency of each token in the first `COUNTED` training tokens, where
    a token that does not occur counts as half an occurrence."""
    batches, count_V = data.train_iterator(), np.zeros(vocab_size)
    for _ in range(-(-COUNTED // (config.batch_size * config.seq_len))):
        batch = next(batches)
        real = batch["segment_ids"] > 0 if "segment_ids" in batch else slice(None)
        count_V += np.bincount(batch["inputs"][real].ravel(), minlength=vocab_size)
    return -np.log2(np.maximum(count_V, 0.5) / count_V.sum())
