"""What only the model of a run shows, looked at before the first run of a study trains.

`cli.check_command` checks settings one by one. Whether they go together, whether the model can be
built, has room and can be trained for its steps, needs shapes, and so JAX: a process of its own
looks, which takes no device that the runs need. No text is opened.
"""

import glob
import json
import math
import subprocess
import sys

from efx.config.load import to_config
from efx.errors import UsageError

# Where systems show their accelerators. With one, memory is not that of this machine's CPU.
_ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/accel*", "/dev/vfio/[0-9]*")
_ANY_VOCABULARY = 64  # ids that a tokenizer at least has which is made of the text
_NO_END = 2**31 - 1  # steps of a run that may have any number


def check(runs, in_order=False):
    """UsageError, which names the run, for the first of the runs that `efx.main` would refuse once
    it has built the model.

    Args:
      runs: [(name, arguments of `efx.main`, whether it gets the FLOPs of the run before it that
        does not)].
      in_order: whether the study makes each of them before it makes those that name it.
    """
    if not runs:
        return
    command = [sys.executable, "-m", "efx.studies.rehearsal"]
    done = subprocess.run(
        command,
        input=json.dumps([runs, in_order]),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == 2 and done.stdout:
        raise UsageError(done.stdout.splitlines()[-1])
    if done.returncode:  # the runs will say themselves what is wrong with them
        line = f"efx: warning: the runs could not be checked (status {done.returncode}); continuing"
        print(line, file=sys.stderr, flush=True)


def main():
    """Reads the runs of `check`; the status is 2 after the line of one that is refused."""
    try:
        runs, in_order = json.load(sys.stdin)
    except ValueError:
        print("efx: error: this module is started by studies; it has no command line")
        return 2
    import jax

    from efx.config import flags
    from efx.parallel import compile_cache

    parsed, configs = [], {}
    try:
        for name, arguments, gets_flops in runs:
            values = flags.parse(["efx", *arguments])
            config = to_config(values.config)
            configs[values.workdir] = config
            parsed.append((name, config, _device_count(config, values.cpu_devices), gets_flops))
        jax.config.update("jax_platforms", "cpu")
        if (most := max(count for _, _, count, _ in parsed)) > 1:
            jax.config.update("jax_num_cpu_devices", most)
        jax.config.update("jax_compilation_cache_dir", compile_cache.cache_folder())
        flops, made = None, configs if in_order else {}
        for name, config, count, gets_flops in parsed:
            try:
                of_this = flops_of(config, count, flops if gets_flops else 0.0, made)
            except UsageError as error:
                raise UsageError(f"the run {name!r}: {error}") from error
            flops = flops if gets_flops else of_this
    except UsageError as error:
        print(error, flush=True)
        return 2
    return 0


def _device_count(config, cpu_devices):
    """How many devices a mesh has at least: with a size of -1 it takes all that there are."""
    from efx.config import schema
    from efx.parallel import sharding

    mesh = schema.as_dict(config.mesh)
    sizes = [mesh[name] for name in sharding.MESH_AXES]
    return cpu_devices or math.prod(size for size in sizes if size > 0)


def flops_of(config, count, budget, made):
    """Training FLOPs of a run that is as it should be; None where they depend on its text.

    Args:
      count: devices of its mesh. budget: FLOPs that the study gives to the run; 0: none, None: not
        known. made: {folder: `Config`} of runs that are still to be made.
    Raises: UsageError for a run that is not.
    """
    import jax

    from efx.config import schema
    from efx.parallel import sharding
    from efx.train import other_runs, setup
    from efx.train.evaluator import Evaluator

    other_runs.check_runs(config, made)
    vocab_size, is_known = _vocab_size(config, made)
    changes = {"mesh.dcn_data": 0}
    if has_accelerators():  # which the kernel may be for
        changes |= {
            name.removeprefix("config."): "auto"
            for name, _, _ in schema.leaves(config)
            if name.endswith(".attention.kernel")
        }
    if budget and is_known:
        changes |= {"steps": 0, "train_flops": budget}
    elif budget != 0.0 or not (config.steps or is_known):
        changes |= {"steps": _NO_END, "train_flops": 0.0}
    config = schema.replaced(config, changes)
    e = setup.without_text(config, vocab_size, jax.devices()[:count], of_run=True, planned=made)
    training = setup.Training(e)
    if count == jax.device_count() and not has_accelerators():
        training.check_memory()
        with sharding.use(e.mesh, e.rules):
            evaluator = Evaluator(e.model, config, _NoText(config.data), e.mesh, e.rules)
            if config.checkpoint.keep_best:
                metric, shapes = config.checkpoint.best_metric, training.shapes
                evaluator.check_metric(metric, shapes.params, shapes.variables)
    return e.flops(e.steps) if is_known and e.steps < _NO_END else None


def has_accelerators():
    """Whether runs may find other devices than CPUs."""
    return any(glob.glob(pattern) for pattern in _ACCELERATORS)


def _vocab_size(config, made):
    """(number of token ids, at least; whether it is that) without the text."""
    from efx.data import load_tokenizer, tokenizers
    from efx.train import other_runs

    c = config.data
    if saved := other_runs.saved_tokenizer(config, planned=made):
        return load_tokenizer(saved).vocab_size, True
    if any(run in made for run in (config.init.run, *(run for _, run in config.model.member_runs))):
        return _ANY_VOCABULARY, False
    tokenizer = tokenizers.pretrained_tokenizer(c.tokenizer)
    of_tokens = any(source.startswith("tokens:") for source in (c.source, c.eval_source))
    if tokenizer and not of_tokens:
        return tokenizer.vocab_size, True
    return _ANY_VOCABULARY, False


class _NoText:
    """What tracing an evaluation asks of its `Data`."""

    def __init__(self, config_data):
        self._config = config_data

    def eval_batches(self, batch_size, max_batches=0, rows=None):
        import numpy as np

        c, shape = self._config, (batch_size, self._config.seq_len)
        batch = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}
        if c.packing:
            batch |= {"positions": np.int32, "segment_ids": np.int32}
        return [{name: np.broadcast_to(dtype(0), shape) for name, dtype in batch.items()}]

    def scored_tokens(self, split):
        return 1


if __name__ == "__main__":
    sys.exit(main())
