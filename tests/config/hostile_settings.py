"""Every setting with values of all kinds: the generator of benchmarks/fuzz.py and of the tests of
ranges.

For each setting of each family it gives, by the declared type, values of another type, of both
signs, zero, huge ones, nan, inf, nothing, names of no choice, and the ends of its range.
"""

import contextlib
import json
import math
import types
import typing
from typing import Annotated, Literal
from unittest import mock

import jax
import jax.numpy as jnp

from efx.config import schema
from efx.config.load import to_config
from efx.configs import common
from efx.data.tokenizers import ByteTokenizer
from efx.parallel import sharding
from efx.train import setup

NOT_FINITE = (math.nan, math.inf, -math.inf)
# Of each type: values of other types, and those that a number, name or text may not be.
HOSTILE = {
    int: ("many", 1.5, True, (), None, -1, 0, 2**31, 10**400, *NOT_FINITE),
    float: ("much", True, (), None, -1.0, 0.0, 1e39, 10**400, *NOT_FINITE),
    bool: (1, "yes", (), None),
    str: (3, (), None, "", "nothing", "(", "\ud800", "\0", "a" * 300),
}
HOSTILE[object] = (*(value for values in HOSTILE.values() for value in values), {})
LARGEST = {int: 2**31 - 1, float: 3e38}  # what a range without an end has

TINY = {
    "steps": 20,
    "data.seq_len": 8,
    "data.batch_size": 8,
    "optim.schedule.warmup_steps": 1,
    "evaluate.batch_size": 8,
    "log.tensorboard": False,
    "model.depth": 1,
    "model.width": 8,
    "model.depth_routing.every": 1,
    "model.attention.num_heads": 2,
}
# What is walked over: a family, what is changed of it, so that the settings say something, and the
# beginnings of their names.
CASES = {
    "run": (
        "decoder",
        {},
        "seed steps train_flops data init losses train optim mesh rules checkpoint log evaluate"
        " sample cluster ensemble",
    ),
    "adapter": ("decoder", {"adapter.kind": "lora", "init.run": "MEMBER"}, "adapter"),
    "decoder": ("decoder", {}, "model"),
    "mod": ("decoder", {"depth_routing.kind": "mod"}, "model.depth_routing"),
    "recursion": (
        "decoder",
        {"depth_routing.kind": "recursion", "depth": 3},
        "model.depth_routing.recursions model.depth_routing.capacity",
    ),
    "moe": ("decoder", {"mlp.kind": "moe"}, "model.mlp.moe"),
    "soft_experts": ("decoder", {"soft_experts.num": 2}, "model.soft_experts"),
    "dropout": ("decoder", {"dropout.kind": "elementwise"}, "model.dropout"),
    "masks": (
        "decoder",
        {"dropout.kind": "attention", "dropout.sites": ("embedding", "mlp_output")},
        "model.dropout.attention",
    ),
    "encoder_decoder": ("encoder_decoder", {"depth": 2}, "model"),
    "latent": (
        "latent",
        {
            "group_size": 4,
            "latents": (2,),
            "level_widths": (8,),
            "latent_loss.kind": "cosine",
            "decoder_local": 0,
            "decoder_global": 0,
        },
        "model",
    ),
    "bridged": ("bridged", {"anchor": "MEMBER", "augment": ("MEMBER",), "pairs": 1}, "model"),
}
# What has a case of its own; what the families have in common, which the decoder's cases walk over.
OWN_CASE = ("depth_routing", "mlp.moe", "soft_experts", "dropout")
COMMON = (*OWN_CASE, "attention", "mlp", "mup", "norm_eps", "init_std", "logit_softcap")


def hostile(hint):
    """Values to try of a setting of this declared type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [value for option in arguments for value in hostile(option)]
    if origin is Annotated:
        kind, allowed = arguments
        # More pieces than these are traced for minutes.
        ends = [x for x in (allowed.least, allowed.most) if x is not None and x < 100]
        return [
            *HOSTILE[kind],
            *map(kind, ends),
            *([LARGEST[kind]] if allowed.is_unbounded else []),
        ]
    if origin is Literal:
        return HOSTILE[str]
    if origin is tuple:
        return [(), 5, "text", None, *((value,) for value in hostile(arguments[0]))]
    return HOSTILE.get(hint, ())


def walked(case, config):
    """{name: type} of the settings that a case walks over."""
    family, _, beginnings = CASES[case]
    left = () if beginnings != "model" else OWN_CASE if family == "decoder" else COMMON
    found = {}
    for name, hint, _ in schema.leaves(config):
        key = name.removeprefix("config.")
        begins = any(f"{key}.".startswith(f"{beginning}.") for beginning in beginnings.split())
        if begins and not any(f"{key}.".startswith(f"model.{name}.") for name in left):
            found[key] = hint
    return found


def write_folder(folder):
    """Writes what a config of `configured` names: a text, and the config and tokenizer of another
    run, which can be a member of a model."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    (folder / "member").mkdir()
    member = schema.as_dict(configured("decoder", {}, folder))
    (folder / "member/config.json").write_text(json.dumps(member))
    ByteTokenizer().save(folder / "member/tokenizer.json")


def configured(family, changes, folder):
    """A tiny `Config`; MEMBER in the changes is the folder of another run."""
    config, member = common.base(family), str(folder / "member")
    tiny = {**TINY, "data.source": f"text:{folder / 'text.txt'}", "data.cache_dir": str(folder)}
    if family == "bridged":
        tiny = {key: value for key, value in tiny.items() if not key.startswith("model.")}
    changes = {
        key if key.partition(".")[0] in config else f"model.{key}": (member,)
        if value == ("MEMBER",)
        else member
        if value == "MEMBER"
        else value
        for key, value in changes.items()
    }
    return to_config(common.apply(config, {**tiny, **changes}))


@contextlib.contextmanager
def remembered():
    """Texts are read once for equal settings."""
    texts, load = {}, setup.load

    def load_once(config_data, **options):
        key = config_data, repr(options)
        if key not in texts:
            texts[key] = load(config_data, **options)
        return texts[key]

    with mock.patch.object(setup, "load", load_once):
        yield


def trace_step(launch, traced):
    """Trace a training step of a launch, unless that was done; of one with a new model its forward
    pass alone, which is a third of the work."""
    e, c, t = launch.experiment, launch.config, launch.training
    step = c.train, c.optim, c.data.batch_size, c.data.seq_len
    if {e.model, step} <= traced:
        return
    is_new = e.model not in traced
    traced.update((e.model, step))
    if is_new:
        tokens_BT = jax.ShapeDtypeStruct((8, 8), jnp.int32)
        keys = dict.fromkeys(("params", "dropout", "routing"), jax.random.key(0))
        jax.eval_shape(lambda tokens_BT: e.model.init(keys, tokens_BT, train=True), tokens_BT)
        return
    with sharding.use(e.mesh, e.rules):
        t.trace_step(e.model)
