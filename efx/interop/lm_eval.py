"""A run in EleutherAI's lm-eval, the harness of most published scores.

    python -m efx.interop.lm_eval --workdir runs/mod --tasks hellaswag,arc_easy,wikitext

    --workdir RUN           run directory, of any model family
    --step N                step of the checkpoint (default: the newest)
    --config.<key>=<value>  settings of the run, such as --config.train.dtype=bfloat16
    --output_path PATH      folder of results_<time>.json, or PATH.json for PATH_<time>.json
                            (default: RUN/lm_eval)

All other flags are those of lm-eval's own command (`lm-eval run --help`): --tasks, --batch_size
(default: 8), --limit, --num_fewshot, --log_samples, ... The model answers by the causal decisions
of sampling, so that a score depends neither on other rows of the batch nor on padding. Needs the
extra `eval`.
"""

import argparse
import json
import os
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from efx import io, run_dir
from efx.config import flags
from efx.data.tokenizers import find_loss
from efx.errors import UsageError, extra, first_line, nearest, warn
from efx.layers.flops import count_params
from efx.logging import tables
from efx.parallel import sharding
from efx.sampling import ROUTING, Sampler
from efx.train import inference

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    message = f"this command needs {extra('eval')}: {error.name} is not installed"
    if __name__ == "__main__":
        print(f"efx: error: {message}", file=sys.stderr)
        sys.exit(2)
    raise UsageError(message) from None

SHORTEST = 32  # tokens of the shortest padded row
_LOGITS = 64  # positions of all rows whose logits are in memory at once
# Supported generation_kwargs of a task, besides `until` and `max_gen_toks`.
_GENERATION = ("do_sample", "temperature", "top_k", "top_p")


class EfxLM(TemplateLM):
    """A run as a model of lm-eval.

    Args:
      workdir: run directory. step: of the checkpoint; None: the newest.
      batch_size: rows computed together, rounded up to a multiple of the mesh's batch axes.
      settings: flags that replace the run's settings, ["--config.<key>=<value>"].
      others: arguments that lm-eval has for every model.
    """

    def __init__(self, workdir, step=None, batch_size=8, settings=(), **others):
        super().__init__()
        if run_dir.RunDir(workdir).has_clustering:
            raise UsageError(f"--workdir={workdir}: an ensemble; use one of the runs in it")
        config = flags.parse(["efx", "--mode=evaluate", f"--workdir={workdir}", *settings]).config
        built, self.step, params, variables = inference.restore(config, workdir, step)
        if warning := inference.model_change_warning(built.config, run_dir.RunDir(workdir)):
            warn(warning)
        self.model, self.efx_tokenizer = built.model, built.tokenizer
        self.variables = {"params": params, **variables}
        self.mesh, self.rules = built.mesh, sharding.unsplit(built.rules, "length")
        self.max_length = self.model.context
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise UsageError(f"--batch_size={batch_size}: must be a number of at least 1")
        shards = sharding.shard_count("batch", self.mesh, self.rules)
        self.batch_size = -(-int(batch_size) // shards) * shards
        self._placement = sharding.Placement(self.mesh, self.rules, self.batch_size)
        self._jitted_score = jax.jit(self._score, out_shardings=sharding.replicated(self.mesh))
        self._info = {
            "workdir": str(workdir),
            "step": self.step,
            "parameters": count_params(params),
            "flops_per_token": self.model.ledger(self.model.context, "causal").nominal_per_token,
        }

    def get_model_info(self):
        """Return entries for `config` in the results."""
        return dict(self._info)

    # ---- tokens ----------------------------------------------------------------------------------

    @property
    def eot_token_id(self):
        return self.efx_tokenizer.eot

    @property
    def prefix_token_id(self):
        """Context of a text without one: the start token of documents, their end token, or 0."""
        return next(iter(self.efx_tokenizer.start), self.efx_tokenizer.eot or 0)

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        start = () if add_special_tokens is False else self.efx_tokenizer.start
        return [*map(int, start), *self.efx_tokenizer.encode(string).tolist()]

    def _batches(self, lengths, title, disable_tqdm):
        """[(padded length, indices of up to `batch_size` rows)], the longest first.

        Padding to a power of two compiles few programs.
        """
        padded = [min(self.max_length, max(SHORTEST, 1 << (n - 1).bit_length())) for n in lengths]
        batches = []
        for length in sorted(set(padded), reverse=True):
            indices = [i for i, other in enumerate(padded) if other == length]
            for start in range(0, len(indices), self.batch_size):
                batches.append((length, indices[start : start + self.batch_size]))
        return tqdm(batches, desc=title, disable=disable_tqdm)

    # ---- log-likelihoods -------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        pairs = [(context, continuation) for _, context, continuation in requests]
        return self.score(pairs, disable_tqdm)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Return the log-probabilities of whole texts, in windows that predict each token once.

        lm-eval divides them by the bytes of the texts, so the tokens have to hold all of a text.
        """
        pairs, owners = [], []
        for i, request in enumerate(requests):
            text = request.args[0].encode("utf-8", "surrogatepass")
            if loss := find_loss(self.efx_tokenizer, f"text {i}", text):
                raise UsageError(
                    f"the run's tokenizer loses text: {loss}; use tasks without perplexities"
                )
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs += [make_disjoint_window(window) for window in windows]
            owners += [i] * (len(pairs) - len(owners))
        totals = [0.0] * len(requests)
        for i, (logprob, _) in zip(owners, self.score(pairs, disable_tqdm), strict=True):
            totals[i] += logprob
        return totals

    def score(self, pairs, disable_tqdm=True):
        """Return [(log-probability in nats, whether it is the greedy text)] of continuations.

        Args:
          pairs: (context, continuation), non-empty lists of token ids. A pair longer than the
            longest row loses its first tokens.
        """
        rows = [[*context, *tokens][-self.max_length - 1 :] for context, tokens in pairs]
        counts, scores = [len(continuation) for _, continuation in pairs], [None] * len(pairs)
        for count in counts:
            if not 1 <= count <= self.max_length:
                raise UsageError(
                    f"a continuation of {count} tokens: must have from 1 to {self.max_length}, the "
                    "length of a row"
                )
        lengths = [len(row) - 1 for row in rows]
        for length, indices in self._batches(lengths, "efx: log-likelihoods", disable_tqdm):
            shape = self.batch_size, length
            tokens_BT, targets_BT = np.zeros((2, *shape), np.int32)
            scored_BT = np.zeros(shape, bool)
            for b, i in enumerate(indices):
                n = lengths[i]
                tokens_BT[b, :n], targets_BT[b, :n] = rows[i][:-1], rows[i][1:]
                scored_BT[b, n - counts[i] : n] = True
            batch = dict(tokens=tokens_BT, targets=targets_BT, scored=scored_BT)
            with sharding.use(self.mesh, self.rules):
                arrays = self._jitted_score(self.variables, self._placement(batch))
            logprob_BT, greedy_B = jax.device_get(arrays)
            logprob_B = np.sum(logprob_BT, axis=1, dtype=np.float64)
            for b, i in enumerate(indices):
                scores[i] = float(logprob_B[b]), bool(greedy_B[b])
        return scores

    def _score(self, variables, batch):
        """Log-probabilities [B, T] of the scored targets, and whether all of a row are greedy."""
        # Stochastic routing draws the same numbers in every batch.
        keys = {"routing": jax.random.fold_in(jax.random.key(0), ROUTING)}
        # No token depends on the padding after it.
        x_BTD = self.model.apply(variables, batch["tokens"], method="features", rngs=keys)
        head = self.model.head_params(variables["params"])

        def at_position(position):
            x_BD, target_B, scored_B = position
            logits_BV = self.model.head_fn(head, x_BD)[:, : self.model.vocab_size]
            target_logit_B = jnp.take_along_axis(logits_BV, target_B[:, None], axis=1)[:, 0]
            logprob_B = target_logit_B - jax.nn.logsumexp(logits_BV, axis=1)
            greedy_B = jnp.argmax(logits_BV, axis=1) == target_B
            return jnp.where(scored_B, logprob_B, 0.0), greedy_B | ~scored_B

        # Logits of all positions at once would be the largest array by far.
        by_position = [jnp.swapaxes(y, 0, 1) for y in (x_BTD, batch["targets"], batch["scored"])]
        batch_size = min(_LOGITS, len(by_position[0]))
        logprob_TB, greedy_TB = jax.lax.map(at_position, by_position, batch_size=batch_size)
        return logprob_TB.T, jnp.all(greedy_TB, axis=0)

    # ---- generated texts -------------------------------------------------------------------------

    def generate_until(self, requests, disable_tqdm=False):
        """Return generated texts; requests with equal settings are batched together."""
        groups, texts = {}, [None] * len(requests)
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        for indices in groups.values():
            settings = normalize_gen_kwargs(requests[indices[0]].args[1])
            stops, count = list(filter(None, settings.pop("until"))), settings.pop("max_gen_toks")
            options = _sampling_options(settings)
            if not 1 <= count < self.max_length:
                raise UsageError(
                    f"generation_kwargs: max_gen_toks={count}: must be from 1 to "
                    f"{self.max_length - 1}, one less than the longest row"
                )
            prompts = []
            for i in indices:
                ids = self.tok_encode(requests[i].args[0]) or [self.prefix_token_id]
                prompts.append(ids[count - self.max_length :])
            lengths = [len(prompt) + count for prompt in prompts]
            for size, batch in self._batches(lengths, "efx: texts", disable_tqdm):
                rows, seeds = [prompts[j] for j in batch], [indices[j] for j in batch]
                for seed, text in zip(
                    seeds, self._generate(size, rows, seeds, count, stops, options), strict=True
                ):
                    texts[seed] = text
        return texts

    def _generate(self, cache_size, prompts, seeds, count, stops, options):
        """Return the texts, up to the first of `stops`, after up to `batch_size` prompts."""
        eot, num_rows = self.eot_token_id, len(prompts)
        sampler = Sampler(
            self.model,
            batch_size=self.batch_size,
            cache_size=cache_size,
            stop_ids=() if eot is None else (eot,),
            rules=self.rules,
            **options,
        )
        # Copies of the first prompt fill the batch; they end at once.
        missing, ended = self.batch_size - num_rows, set(range(num_rows, self.batch_size))
        prompts, seeds = prompts + prompts[:1] * missing, seeds + seeds[:1] * missing
        ids, tokenizer = [[] for _ in range(num_rows)], self.efx_tokenizer
        for new in sampler.tokens(
            self.variables, prompts, max_new_tokens=count, seeds=seeds, ended=ended
        ):
            for b, row in enumerate(ids):
                row += new[b]
                if any(stop in tokenizer.decode(row) for stop in stops):
                    ended.add(b)
        texts = [tokenizer.decode(row) for row in ids]
        for stop in stops:
            texts = [text.split(stop)[0] for text in texts]
        return texts


def _sampling_options(settings):
    """Arguments of `Sampler` from a task's generation_kwargs."""
    for name in settings:
        if name not in _GENERATION:
            raise UsageError(
                f"generation_kwargs: {name}={settings[name]!r} is not supported"
                f"{nearest(name, _GENERATION)}; use {', '.join(_GENERATION)}"
            )
    options = {"temperature": 1.0} | settings
    return options if options.pop("do_sample") else {"temperature": 0.0}


def table_of(results, column="results"):
    """Return a Markdown table of the results of lm-eval. column: or "groups"."""
    rows = []
    for task, values in results[column].items():
        for key, value in values.items():
            metric, _, kind = key.partition(",")  # "acc,none": the metric and lm-eval's filter
            if kind and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{kind}", "")
                shots = results["n-shot"].get(task, "")
                rows.append([task, metric, value, error, kind, shots])
    return tables.markdown(["task", "metric", "value", "stderr", "filter", "shots"], rows)


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m efx.interop.lm_eval",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--step", type=int)
    parser.add_argument("--output_path")
    argv = sys.argv[1:] if argv is None else argv
    settings = [flag for flag in argv if flag.startswith("--config.")]
    given, others = parser.parse_known_args([flag for flag in argv if flag not in settings])
    try:
        evaluate(given, settings, others)
    except UsageError as error:
        print(f"efx: error: {error}", file=sys.stderr)
        return error.status
    except (ValueError, OSError) as error:  # of lm-eval: data that cannot be read
        print(f"efx: error: lm-eval: {first_line(error)}", file=sys.stderr)
        return 2
    return 0


def evaluate(given, settings, others):
    """Evaluate a run by lm-eval's command and write the results.

    Args:
      given: flags, see the module. settings: of the run, see `EfxLM`. others: flags of lm-eval.
    """
    os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")
    out = io.local_path(given.output_path or f"{given.workdir}/lm_eval", "--output_path")
    out = out if out.suffix == ".json" else out / "results.json"
    with io.report_write_errors(out):  # lm-eval would only warn, at the end
        out.parent.mkdir(parents=True, exist_ok=True)
    model = {"workdir": given.workdir, "step": given.step, "settings": settings}
    register_model("efx")(EfxLM)
    argv = ["lm-eval", "--model=efx", f"--model_args={json.dumps(model)}", "--batch_size=8"]
    argv += [f"--output_path={out}", *others]
    # lm-eval forks to compute error bars and to write a table: with the threads of JAX it may hang.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with mock.patch("lm_eval.utils.make_table", table_of), mock.patch("sys.argv", argv):
        cli_evaluate()


if __name__ == "__main__":
    sys.exit(main())
