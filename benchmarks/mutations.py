"""Faults: does the suite notice when one line of efx is wrong?

    python -m benchmarks.mutations
    python -m benchmarks.mutations --only=cache --jobs=1

Each fault of `FAULTS` is made in a copy of this checkout, and the cheapest file of tests that
should notice runs there. Prints a table; exit status 1 if a fault survives.
"""

import argparse
import concurrent.futures
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time

from benchmarks.common import table

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROUTING, LAYERS, MODELS = "efx/routing/", "efx/layers/", "efx/models/"

# (what is wrong, file, text that occurs once, text in its place, arguments of pytest)
FAULTS = [
    # ---- routing
    ("selection: the smallest scores", ROUTING + "selection.py",
     "largest(scores_BT, slots)[:, -1:]", "-largest(-scores_BT, slots)[:, -1:]",
     "layers/test_selection.py"),
    ("admission: a limit of the row, not of the position", ROUTING + "selection.py",
     "causal_limit(jnp, rate, count_BT).astype",
     "causal_limit(jnp, rate, jnp.full_like(count_BT, selected_BT.shape[1])).astype",
     "layers/test_selection.py contract/test_prefix.py"),
    ("admission: refused tokens use the limit", ROUTING + "selection.py",
     "excess_BT = running_count(selected_BT, call.segment_ids_BT) - limit_BT",
     "return selected_BT & (running_count(selected_BT, call.segment_ids_BT) <= limit_BT)",
     "layers/test_selection.py layers/test_routing.py"),
    ("admission: documents share a limit", ROUTING + "selection.py",
     "running_count(selected_BT, call.segment_ids_BT) - limit_BT",
     "running_count(selected_BT) - limit_BT",
     "layers/test_selection.py contract/test_documents.py"),
    ("routing: unused slots share an index", ROUTING + "selection.py",
     "unused_C = length + jnp.arange(slots, dtype=jnp.int32)",
     "unused_C = length + jnp.zeros(slots, jnp.int32)",
     "layers/test_selection.py"),
    ("routing: positions are renumbered", LAYERS + "call.py",
     "positions_BT=gathered(self.positions_BT, fill=-1),\n            segment",
     "positions_BT=jnp.arange(index_BC.shape[1])[None] + 0 * index_BC,\n            segment",
     "layers/test_routing.py layers/test_public_bugs.py"),
    ("routing: no gate", ROUTING + "mod.py",
     "selection.weighted(delta_BCD, selection.take(gate_BT, index_BC))", "delta_BCD",
     "layers/test_routing.py"),
    ("routing: the skip MLP on routed tokens", ROUTING + "mod.py",
     "jnp.where(selected_BT[..., None], 0, self.skip_mlp(x_BTD))",
     "jnp.where(selected_BT[..., None], self.skip_mlp(x_BTD), 0)",
     "layers/test_routing.py"),
    ("routing: the router's loss reaches the input", ROUTING + "mod.py",
     "dot_float32(self.router, jax.lax.stop_gradient(x_BTD))", "dot_float32(self.router, x_BTD)",
     "layers/test_routing.py"),
    ("routing: the predictor trains the block's input", ROUTING + "decisions.py",
     "jax.lax.stop_gradient(x_BTD).astype(jnp.float32)", "x_BTD.astype(jnp.float32)",
     "layers/test_public_bugs.py"),
    ("threshold: old and new change weights", ROUTING + "decisions.py",
     "decay * old + (1.0 - decay) * new", "decay * new + (1.0 - decay) * old",
     "layers/test_decisions.py"),
    ("recursion: survivors are not nested", ROUTING + "mod.py",
     "real_BT if call.selectable_BT is None else real_BT & call.selectable_BT", "real_BT",
     "layers/test_recursion.py"),
    # ---- caches and attention
    ("cache: refused tokens are counted as admitted", ROUTING + "admission.py",
     "jnp.sum(mask, axis=1), rows_B)", "jnp.sum(selected, axis=1), rows_B)",
     "contract/test_decode.py contract/test_prefix.py"),
    ("cache: padding takes slots", LAYERS + "kv_cache.py",
     "add_to_rows(cache[\"used\"], jnp.sum(is_real_BT, axis=1), rows_B)",
     "add_to_rows(cache[\"used\"], jnp.full(len(is_real_BT), is_real_BT.shape[1]), rows_B)",
     "contract/test_decode.py"),
    ("cache: no window", LAYERS + "attend.py",
     "visible_BTS & (distance_BTS < window) if window else visible_BTS", "visible_BTS",
     "contract/test_decode.py"),
    ("attention: a window too wide by one", LAYERS + "attend.py",
     "k_tokens[\"position\"] < window", "k_tokens[\"position\"] <= window",
     "layers/test_attention.py"),
    ("attention: the future is visible", LAYERS + "attend.py",
     "k_tokens[\"index\"] <= q_tokens[\"index\"]", "k_tokens[\"index\"] <= q_tokens[\"index\"] + 1",
     "layers/test_attention.py"),
    ("attention: documents see each other", LAYERS + "attend.py",
     "q_tokens[\"segment\"] == k_tokens", "q_tokens[\"segment\"] >= k_tokens",
     "layers/test_attention.py"),
    ("attention: the gradient of the softcap", LAYERS + "attend.py",
     "1.0 - jnp.square(scores_BKGCS / softcap)", "1.0 - jnp.abs(scores_BKGCS / softcap)",
     "layers/test_attention.py"),
    # ---- experts, masks, latents, two streams
    ("experts: weights do not sum to 1", LAYERS + "moe.py",
     "weight_BTK / jnp.sum(weight_BTK, axis=-1, keepdims=True)", "weight_BTK / c.top_k",
     "layers/test_moe.py"),
    ("experts: unweighted while decoding", LAYERS + "moe.py",
     "            return jnp.sum(selection.weighted(y_BTKD, weight_BTK), axis=2)",
     "            return jnp.sum(y_BTKD.astype(jnp.float32), axis=2)",
     "layers/test_moe.py -k prefix"),
    ("experts: the balancing loss of a micro-batch", "efx/layers/batch_means.py",
     "self.replace(count=whole.count).mean()", "self.mean()",
     "runs/test_means.py runs/test_accumulation.py"),
    ("masks: the penalty of the complement", LAYERS + "learned_dropout.py",
     "entropy(1.0 - m)", "entropy(m)", "layers/test_learned_dropout.py"),
    ("masks: no straight-through gradient", LAYERS + "learned_dropout.py",
     "jax.lax.stop_gradient(hard) + (m - jax.lax.stop_gradient(m))", "jax.lax.stop_gradient(hard)",
     "layers/test_learned_dropout.py"),
    ("latents: early tokens read their own group", MODELS + "latent.py",
     "repeat_latents(z_BMPD[:, :-1], num_early", "repeat_latents(z_BMPD[:, 1:], num_early",
     "models/test_latent.py"),
    ("latents: targets get a gradient", MODELS + "latent.py",
     "if not c.target_gradient:", "if c.target_gradient:", "models/test_latent_loss.py"),
    ("cross-attention: reads the next encoder state", MODELS + "encoder_decoder.py",
     "if not self.spec.parallel:", "if True:", "models/test_encoder_decoder.py"),
    ("cross-attention: no mask", LAYERS + "attend.py",
     "visible_BTS = (distance_BTS >= 0)", "visible_BTS = (distance_BTS >= distance_BTS.min())",
     "contract/test_families.py -k streams"),
    # ---- training
    ("loss: z-loss without the square", "efx/train/losses.py",
     "weighted_sum(jnp.square(lse_BT))", "weighted_sum(lse_BT)", "runs/test_losses.py"),
    ("step: the same random numbers in each step", "efx/train/step.py",
     "jax.random.fold_in(jax.random.key(seed), state.step)", "jax.random.key(seed)",
     "runs/test_train.py runs/test_accumulation.py models/test_models.py"),
    ("accumulation: other keys for the batch's means", "efx/train/step.py",
     "forward(state.params, batch, index)", "forward(state.params, batch, index + 1)",
     "runs/test_accumulation.py"),
    ("step: an overflowing gradient is applied", "efx/train/step.py",
     "jnp.isfinite(value) & jnp.isfinite(norm)", "jnp.isfinite(value)", "runs/test_train.py"),
    ("optimiser: everything decays", "efx/train/optim.py",
     "not is_frozen and path in decayed and", "not is_frozen and", "runs/test_optim.py"),
    ("optimiser: the warm-up starts at 0", "efx/train/optim.py",
     "optax.linear_schedule(peak / (warmup + 1), peak, warmup)",
     "optax.linear_schedule(0.0, peak, warmup)", "runs/test_optim.py"),
    ("optimiser: muP's rate", LAYERS + "mup.py",
     "return width_ratio if leaf", "return 1.0 if leaf",
     "layers/test_mup.py"),
    ("mesh: MLPs are not split", "efx/parallel/sharding.py",
     "    (\"mlp\", \"tensor\"),\n", "    (\"mlp\", None),\n", "runs/test_sharding.py"),
    # ---- data
    ("data: each epoch in one order", "efx/data/windows.py",
     "np.random.default_rng([self._seed, epoch])", "np.random.default_rng([self._seed])",
     "data/test_data.py"),
    ("packing: one document a row", "efx/data/packing.py",
     "segment_ids_BT[b, begin:end] = segment", "segment_ids_BT[b, begin:end] = 1",
     "data/test_data.py"),
    ("tokenizer: unknown characters become id 0", "efx/data/tokenizers.py",
     "np.full(_CODE_POINTS, -1, np.int32)", "np.full(_CODE_POINTS, 0, np.int32)",
     "data/test_tokenizers.py"),
    ("data: held-out documents are trained on", "efx/data/held_out.py",
     "document_digest(document.data) in digests", "document_digest(document.data) is None",
     "data/test_data_changes.py"),
    # ---- runs
    ("manifest: checksums are not compared", "efx/checkpoint/manifest.py",
     "if _digest(path) == recorded else", "if True else",
     "runs/test_checkpoint_damage.py"),
    ("retention: the oldest are kept", "efx/checkpoint/checkpointer.py",
     "sorted(usable)[-self._keep_last :]", "sorted(usable)[: self._keep_last]",
     "runs/test_checkpoint.py"),
    ("record: a run resumes with any settings", "efx/run_dir.py",
     "        if any(re.fullmatch(pattern, key) for pattern in may_differ):\n            changed",
     "        if True:\n            changed", "runs/test_run_dir.py"),
    ("record: a run resumes on another text", "efx/train/run_files.py",
     "if path_changed and \"text\" in record and", "if False and", "runs/test_launches.py -k move"),
    ("loop: an evaluation that was missed is not made up", "efx/train/trainer.py",
     "if name in due and is_missing[name]", "if False", "runs/test_train.py -k failing"),
    ("loop: evaluates before it saves", "efx/train/trainer.py",
     'if "checkpoint" in due:\n                        self._save()\n'
     "                    self._evaluate_and_sample(due)",
     "self._evaluate_and_sample(due)\n                    self._save()",
     "runs/test_train.py -k failing"),
    ("lock: two launches share it", "efx/run_dir.py",
     "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB", "runs/test_run_dir.py"),
    ("signals: nobody stops", "efx/parallel/signals.py",
     "return bool(self.name)", "return False", "runs/test_stopping.py"),
    ("sampling: the nucleus without its last token", "efx/sampling.py",
     "jnp.cumsum(probs_BV, axis=-1) - probs_BV", "jnp.cumsum(probs_BV, axis=-1)",
     "runs/test_sample.py -k nucleus"),
    ("sampling: the same noise at each token", "efx/sampling.py",
     "jax.random.fold_in(key, index), logits_BV", "key, logits_BV", "runs/test_sample.py"),
    # ---- interop and studies
    ("import: matrices as stored", "efx/interop/architectures.py",
     "array = array.T if transposed else array", "array = array.T if False else array",
     "models/test_import.py models/test_interop.py"),
    ("export: halves of rotary pairs", "efx/interop/exported/modeling_efx.py",
     "[a * cos - b * sin, b * cos + a * sin, rest]", "[a * cos + b * sin, b * cos - a * sin, rest]",
     "models/test_export.py"),
    ("isoFLOP: the vertex of the parabola", "efx/studies/isoflop/parabola.py",
     "centre - slope_R / (2 * bend_R)", "centre - slope_R / bend_R",
     "studies/test_isoflop_fits.py"),
    ("isoFLOP: the law's exponent of tokens", "efx/studies/isoflop/law.py",
     "self.B * np.power(tokens, -self.b)", "self.B * np.power(tokens, -self.a)",
     "studies/test_isoflop_fits.py"),
]  # fmt: skip


def make_copy(folder):
    """A copy of the tracked files of this checkout, beside what lies beside it."""
    copy = pathlib.Path(tempfile.mkdtemp(dir=folder)) / ROOT.name
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    if (shared := ROOT.parent / "shared").is_dir():
        (copy.parent / "shared").symlink_to(shared)
    return copy


def try_fault(fault, copies):
    """(what is wrong, the tests that ran, the test that failed or "SURVIVED", seconds)."""
    name, file, old, new, arguments = fault
    original = (ROOT / file).read_text()
    count = original.count(old)
    if count != 1:
        raise SystemExit(f"{name}: {file} contains {count} times, expected once: {old}")
    files, _, expression = arguments.partition(" -k ")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/{path}" for path in files.split()]
    command += ["-k", expression] if expression else []
    copy, start = copies.get(), time.monotonic()
    try:
        (copy / file).write_text(original.replace(old, new))
        ended = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    finally:
        (copy / file).write_text(original)
        copies.put(copy)
    caught = re.search(r"^(?:FAILED|ERROR) tests/\S+?::(.*?)(?: - .*)?$", ended.stdout, re.M)
    if ended.returncode not in (0, 1):
        output = ended.stdout[-2000:] + ended.stderr[-2000:]
        raise SystemExit(f"{name}: {' '.join(command)} ended with {ended.returncode}\n{output}")
    result = caught[1] if caught else "SURVIVED"
    print(f"{name}: {result}", file=sys.stderr, flush=True)
    return name, arguments, result, f"{time.monotonic() - start:.0f}"


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="only faults with this text in their description"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if options.only in fault[0]]
    copies = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.jobs):
            copies.put(make_copy(folder))
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            rows = list(pool.map(lambda fault: try_fault(fault, copies), faults))
    survived = sum(row[2] == "SURVIVED" for row in rows)
    print(table(("fault", "tests", "caught by", "seconds"), *rows))
    print(f"{len(rows) - survived} of {len(rows)} faults are caught")
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main())
