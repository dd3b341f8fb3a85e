"""Export of decoders that no architecture of transformers computes: config.json and arrays for
modeling_efx.py, which is exported with them."""

import functools
import re
from pathlib import Path

import numpy as np
from flax.traverse_util import flatten_dict

from efx import models
from efx.errors import UsageError
from efx.interop.weights import NewArray
from efx.routing import parameters

# Copied into exports; never imported by efx, because it needs torch and transformers.
CODE = Path(__file__).parent / "exported/modeling_efx.py"
# Names of parameters in modeling_efx.py that differ from those of efx.
_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
# Paths in efx of all arrays that modeling_efx.py reads.
_MLP, _NORM = r"(gate|up|down)/(kernel|bias)", r"(scale|bias)"
_MASK = r"(attention/mask_(query|key|value)|mask_(frequency|phase|shift|linear))"
_IN_BLOCK = "|".join(
    (
        rf"norm_(attention|mlp)/{_NORM}",
        r"attention/((query|key|value|out)/(kernel|bias)|norm_(query|key)/scale)",
        rf"(attention/probs_dropout|dropout_(attention|mlp)_output)/{_MASK}",
        rf"mlp/(router|((experts|shared)/)?{_MLP})",
        rf"router|norm_router/scale|threshold/quantile|predictor/kernel_(in|out)|skip_mlp/(norm/{_NORM}|mlp/{_MLP})",
    )
)
_READ = re.compile(
    rf"(embed|positions_embed)/embedding|head/kernel|norm_final/{_NORM}"
    rf"|(dropout_embedding|mask_input)/{_MASK}|layers/block_\d+/({_IN_BLOCK})"
)


def check(c, adapter):
    """Raise UsageError for a model that cannot be exported.

    Args:
      c: `config.model`, resolved or not. adapter: kind of the adapters.
    """
    if c.family != "decoder":
        _refuse("family", c.family, "only decoders are exported")
    if adapter != "none":
        raise UsageError(
            f"config.adapter.kind={adapter!r}: adapters are not exported; export their base"
        )
    routing = c.depth_routing
    if routing.kind == "recursion":
        _refuse("depth_routing.kind", routing.kind, "shared blocks are not exported")
    if routing.kind == "mod" and routing.is_control:
        selection = routing.train_selection
        _refuse("depth_routing.train_selection", selection, "a control has no router to export")
    for row in parameters.TABLE if routing.kind != "none" else ():
        if row.exported is None and row.exists(routing):
            key = f"depth_routing.{row.setting}"
            _refuse(key, getattr(routing, row.setting), f"{CODE.name} has no {row.name}")
    if c.soft_experts.num:
        _refuse("soft_experts.num", c.soft_experts.num, "soft experts are not exported")
    if c.dense_former.on:
        _refuse("dense_former.on", True, "averages of earlier states are not exported")


def _refuse(key, value, why):
    raise UsageError(f"config.model.{key}={value!r}: {why}")


def config_of(model):
    """The contents of config.json, see `EfxConfig` in modeling_efx.py."""
    c = model.config
    check(c, model.adapter.kind if hasattr(model, "adapter") else "none")
    a, capacities = c.attention, c.depth_routing.routed_blocks(c.depth)
    return dict(
        model_type="efx",
        architectures=["EfxForCausalLM"],
        auto_map={
            "AutoConfig": f"{CODE.stem}.EfxConfig",
            "AutoModelForCausalLM": f"{CODE.stem}.EfxForCausalLM",
        },
        vocab_size=model.vocab_size,
        hidden_size=c.width,
        intermediate_size=c.mlp.hidden_size(c.width),
        num_hidden_layers=c.depth,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        max_position_embeddings=c.context,
        tie_word_embeddings=c.tied,
        block_kind=c.block_kind,
        hidden_act=c.mlp.activation,
        norm=c.norm,
        norm_eps=c.norm_eps,
        use_bias=c.use_bias,
        attention_bias=a.bias,
        qk_norm=a.qk_norm,
        attention_scale=a.factor,
        attention_window=a.window,
        attention_softcap=a.softcap,
        positions=c.positions,
        rope=rope_of(a) if c.positions == "rope" else None,
        logit_scale=model.logit_scale,
        logit_softcap=c.logit_softcap,
        blocks=[
            dict(
                rope=a.of_block(i).rope_theta > 0,
                experts=c.mlp.kind == "moe" and c.mlp.moe.in_block(i),
                capacity=capacities.get(i),
            )
            for i in range(c.depth)
        ],
        routing=_routing(c) if capacities else None,
        moe=_moe(c) if c.mlp.kind == "moe" else None,
        masks=_masks(c) if c.dropout.learned else None,
    )


def rope_of(a):
    """Entry `rope` of config.json."""
    scaling = a.rope_scaling
    rope = dict(theta=a.rope_theta, size=a.rotary_size(a.head_dim), kind=scaling.kind)
    if scaling.kind != "none":
        rope["factor"] = scaling.factor
    if scaling.kind == "llama3":
        names = ("original_context", "low_frequency_factor", "high_frequency_factor")
        rope |= {name: getattr(scaling, name) for name in names}
    return rope


def _routing(c):
    r = c.depth_routing
    return dict(
        decision=r.causal,
        target=r.target,
        router_norm=r.router_norm,
        gate=r.gate,
        slack=r.slack,
        kv_for_skipped=r.kv_for_skipped,
        skip_mlp=r.skip_mlp,
        predictor_hidden=r.predictor_hidden or max(1, c.width // 2),
    )


def _moe(c):
    moe = c.mlp.moe
    return dict(
        num_experts=moe.num_experts,
        num_noop=moe.num_noop,
        num_shared=moe.num_shared,
        expert_hidden=moe.expert_hidden or c.mlp.hidden_size(c.width),
        router=moe.router,
        top_k=moe.top_k,
        renormalise=moe.renormalise,
        rate=moe.rate(),
    )


def _masks(c):
    d = c.dropout
    masks = dict(kind=d.kind, sites=list(d.sites))
    if d.kind == "elementwise":
        return masks | {"sharpness": d.elementwise.sharpen_scale if d.elementwise.sharpen else 0.0}
    a = d.attention
    head_dim = c.width // a.num_heads
    return masks | dict(
        input=a.input,
        num_heads=a.num_heads,
        attention_scale=c.attention.score_factor * head_dim**-0.5,
        rounding=a.rounding,
        sharpness=a.sigmoid_scale,
        granularity=a.granularity,
    )


def arrays_of(params, state, model):
    """`NewArray`s for modeling_efx.py, with its names. Kernels are transposed; parameters of
    decisions that evaluation does not use are left out.

    Raises: UsageError for an array that modeling_efx.py does not read, or one that is missing.
    """
    variables = {"params": params, "state": state} if state else {"params": params}
    flat, routing, arrays = {}, model.config.depth_routing, []
    for tree in models.unroll_variables(model, variables).values():
        flat |= flatten_dict(tree, sep="/")
    _check_routing(flat, model.config)
    for path, array in flat.items():
        row = parameters.find(path)
        if row is not None and not row.exported(routing):
            continue
        if not _READ.fullmatch(path):
            key, value = "family", model.config.family
            if row is not None:
                key, value = f"depth_routing.{row.setting}", getattr(routing, row.setting)
            elif routing.kind != "none":
                key, value = "depth_routing.kind", routing.kind
            _refuse(key, value, f"{CODE.name} does not read the parameter {path}")
        *parents, leaf = path.split("/")
        parents = [part.removeprefix("block_") for part in parents]
        shape = list(array.shape)
        if path == "embed/embedding":
            shape[0] = model.vocab_size
        if path == "head/kernel":
            shape[1] = model.vocab_size
        keep = tuple(map(slice, shape))
        if leaf == "kernel":
            shape[-2:] = reversed(shape[-2:])
        name = ".".join([*parents, _LEAVES.get(leaf, leaf)])
        read = functools.partial(_read, array, keep, leaf == "kernel")
        arrays.append(NewArray(name, tuple(shape), read))
    return arrays


def _check_routing(paths, c):
    """Raise UsageError unless routed blocks have exactly the variables of `parameters.TABLE`."""
    routing = c.depth_routing
    routed = [f"layers/block_{i}" for i in routing.routed_blocks(c.depth)]
    for row in parameters.TABLE:
        found = {"/".join(path.split("/")[:2]) for path in paths if re.fullmatch(row.pattern, path)}
        expected = set(routed) if row.exists(routing) else set()
        for block in sorted(found ^ expected):
            verb = "lacks" if block in expected else "has"
            raise UsageError(
                f"config.model.depth_routing.{row.setting}={getattr(routing, row.setting)!r}: "
                f"{block} {verb} {row.name}"
            )


def _read(array, keep, transposed):
    numbers = np.asarray(array)[keep]
    return np.swapaxes(numbers, -1, -2) if transposed else numbers
