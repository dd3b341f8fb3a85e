"""--mode=evaluate and --mode=sample of a folder of experts, or of an ordinary run."""

import sys

import jax

from efx import inference, sharding
from efx.compose.corpus import Corpus
from efx.compose.evaluate import evaluate_ensemble, markdown, write
from efx.compose.members import Ensemble, is_ensemble
from efx.compose.sample import EnsembleTextSampler
from efx.errors import UsageError
from efx.metrics import quantity


def _open(config, workdir, step):
    if step is not None:
        raise UsageError(f"--step={step}: the experts of {workdir} have steps of their own")
    ensemble = Ensemble(config, workdir)
    for j, at, steps in ensemble.unfinished:
        print(f"efx: expert {j} is not finished: step {at} of {steps}", file=sys.stderr)
    return ensemble


def evaluate(config, workdir, step=None):
    """Print and return an evaluation: {metric: value} of a run, {mixture: summary} of experts.

    That of experts is also written into WORKDIR, as evaluation.json and evaluation.md.
    """
    if not is_ensemble(workdir):
        return inference.evaluate(config, workdir, step)
    ensemble = _open(config, workdir, step)
    others = [("seed model", ensemble.seed_folder)] if ensemble.seed_folder else []
    result = evaluate_ensemble(ensemble, Corpus(config.data), config, others)
    write(workdir, result)
    print(markdown(result))
    tokens, most = next(iter(result.values()))["tokens"], config.evaluate.max_batches
    part = f"{most} batches (config.evaluate.max_batches) of " if most else ""
    print(f"scored: {part}the held-out documents of {config.data.source!r}: {tokens:,} tokens")
    return result


def sample(config, workdir, step=None, stream=None):
    """Continue `config.sample.prompt` by a run or by the sparse ensemble of a folder of experts."""
    if not is_ensemble(workdir):
        return inference.sample(config, workdir, step, stream)
    stream = stream or sys.stdout
    ensemble = _open(config, workdir, step)
    experts = Experts(ensemble)
    sampler = EnsembleTextSampler(
        experts.model, ensemble.clustering, ensemble.tokenizer, config.sample, config.ensemble
    )
    for i in range(config.sample.num_samples):
        stream.write(config.sample.prompt)
        for piece in sampler.stream(experts, config.sample.prompt, seed=config.sample.seed + i):
            stream.write(piece)
            stream.flush()
        stream.write("\n")
    stats = sampler.stats
    shares = ", ".join(
        f"{j} for {n / max(1, sum(stats['experts'].values())) * config.ensemble.top_k:.0%}"
        for j, n in sorted(stats["experts"].items())
    )
    print(
        f"{quantity(stats['tokens_per_second'], 'tokens/s')}; experts of {ensemble.count} in use: "
        f"{shares} of the tokens; {stats['switches']} came in on the way",
        file=sys.stderr,
    )
    return stats


class Experts:
    """`experts[j]`: variables of expert j, read from its checkpoint when first asked for."""

    def __init__(self, ensemble):
        self._ensemble, self._read = ensemble, {}
        self.model = self._restore(0).model

    def _restore(self, j):
        experiment, _, params, variables = self._ensemble.restore(j)
        whole = sharding.local({"params": params, **variables})
        self._read[j] = jax.device_get(whole)  # in the host's memory until it is in use
        return experiment

    def __getitem__(self, j):
        if j not in self._read:
            self._restore(j)
        return self._read[j]
