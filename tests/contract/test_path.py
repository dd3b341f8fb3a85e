"""How many functions and files of efx a routed layer and a training step pass: what a reader has to
follow."""

import pathlib
import sys

import families
import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from run_files import tiny

import efx
from efx.layers.token_context import CacheView, TokenContext
from efx.models.stack import Layer
from efx.train.run_log import RunLog
from efx.train.trainer import train_and_evaluate

ROOT = pathlib.Path(efx.__file__).parent
LENGTH = 16
# (files, functions) at most; the goal is 8 and 40. The eight files that compute are stack, mod,
# selection, block, attention, attend, mlp and linear. The others:
#   token_context, config, routing/config   what a layer gets, and settings: read once
#   routing/decisions                       the causal decision
#   norms, parameter                        used by every layer alike
#   sharding                                no effect on one device
#   batch_means, report                     losses and statistics; not in decoding
#   admission, kv_cache                     decoding alone
BUDGETS = {"training": (19, 95), "evaluation": (19, 98), "decoding": (18, 86)}
CALLS = {
    "training": dict(train=True, selection="train"),
    "evaluation": dict(selection="causal"),
    "decoding": dict(selection="causal", cache=CacheView(size=LENGTH)),
}


def functions_passed(trace):
    """{(file, qualified name)} of the functions of efx that `trace` calls. Comprehensions, lambdas
    and code that a dataclass generates are parts of the function that holds them."""
    seen = set()

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            if code.co_qualname.rpartition(".")[2][0] != "<":
                path = pathlib.Path(code.co_filename).relative_to(ROOT)
                seen.add((str(path), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        trace()
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.parametrize("name", CALLS)
def test_a_routed_layer_passes_few_functions_and_files(name):
    model = families.make({"depth": 1, "depth_routing.kind": "mod", "depth_routing.every": 1})
    layer, variables = Layer(model.specs()[0]), families.variable_shapes(model)
    params = variables["params"]["layers"]["block_0"]
    state = {"state": variables["state"]["layers"]["block_0"]}
    x_BTD = jax.ShapeDtypeStruct((2, LENGTH, model.config.width), jnp.float32)
    call = TokenContext(jnp.arange(LENGTH)[None], **CALLS[name])
    mutable, cache = ["losses", "stats", "means"] + ["state"] * call.train, {}
    if call.decode:
        made = jax.eval_shape(lambda x_BTD: layer.init(jax.random.key(0), x_BTD, call), x_BTD)
        mutable, cache = ["cache"], {"cache": nn.unbox(made["cache"])}

    def apply(variables, x_BTD):
        return layer.apply(variables, x_BTD, call, mutable=mutable)

    passed = functions_passed(
        lambda: jax.eval_shape(apply, {"params": params, **state, **cache}, x_BTD)
    )
    files = sorted({file for file, _ in passed})
    print(f"{name}: {len(files)} files, {len(passed)} functions")
    for file in files:
        print(f"  {file}:", *sorted(function for where, function in passed if where == file))
    most_files, most_functions = BUDGETS[name]
    assert len(files) <= most_files and len(passed) <= most_functions


def test_a_training_step_passes_ten_files(tmp_path, monkeypatch):
    """From the command to the end of a step, without what is traced into the step."""
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 100)
    changes = {"steps": 4, "log.every": 4, "checkpoint.every": 0, "train.max_nonfinite": 3}
    config = tiny(tmp_path / "a.txt", **changes)
    passed, push = set(), RunLog.push

    def profile(frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ROOT)):
            passed.add(str(pathlib.Path(path).relative_to(ROOT)))

    def pushed(log, step, metrics):
        push(log, step, metrics)
        if step in (2, 3):  # between these the loop does nothing but a step
            sys.setprofile(profile if step == 2 else None)

    monkeypatch.setattr(RunLog, "push", pushed)
    train_and_evaluate(config, tmp_path / "run")
    files = {"main.py", "train/step.py", *passed}
    print(*sorted(files))
    assert "data/batches.py" in files and len(files) <= 10
