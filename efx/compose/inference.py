"""--mode=evaluate and --mode=sample, of a run or of a folder of experts."""

from efx import inference


def evaluate(config, workdir, step=None):
    return inference.evaluate(config, workdir, step)


def sample(config, workdir, step=None):
    return inference.sample(config, workdir, step)
