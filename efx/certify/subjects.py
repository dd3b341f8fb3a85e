"""A `Subject` of a model of efx, a run directory, a callable, or a folder of transformers."""

import contextlib
import dataclasses
import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from efx import io, models
from efx.certify.properties import BATCH, TOLERANCES, Subject, random_tokens, rows_of
from efx.config.load import config_of_run
from efx.config.names import apply
from efx.errors import UsageError, extra, first_line
from efx.layers import flops
from efx.layers.block import Block
from efx.layers.report import label
from efx.models.parts import find_parts, switch_parts
from efx.parallel import sharding
from efx.run_dir import RunDir
from efx.train import inference

# The method of a block that depth routing computes for selected tokens, by `depth_routing.target`.
ROUTED_METHODS = {
    "block": "__call__",
    "mlp_only": "__call__",
    "attention": "attention_increment",
    "mlp": "mlp_increment",
}


# ---- models of efx -----------------------------------------------------------------------------


def of_model(model, variables):
    """The `Subject` of a model of efx, as it is called; `of_model_with_parts` has all of it."""
    options = dict(rngs={"routing": jax.random.key(0)})

    @jax.jit
    def logits(variables, tokens_BT, *layout):
        return model.apply(variables, tokens_BT, *layout, **options)

    @functools.partial(jax.jit, static_argnums=4)
    def decode(variables, cache, tokens_BT, positions_BT, size):
        variables = {**variables, "cache": cache}
        decoding = dict(decode=True, cache_size=size, mutable=["cache"], **options)
        logits_BTV, mutated = model.apply(variables, tokens_BT, positions_BT, **decoding)
        return logits_BTV, mutated["cache"]

    def step(cache, tokens_BT, positions_BT):
        logits_BTV, tree = decode(variables, cache["tree"], tokens_BT, positions_BT, cache["size"])
        return logits_BTV, {"tree": tree, "size": cache["size"]}

    try:
        model.check_packing()
        layouts = frozenset({"padding", "packing"})
    except UsageError:
        layouts = frozenset()
    return Subject(
        functools.partial(logits, variables),
        model.vocab_size,
        layouts=layouts,
        context=model.context,
        document_multiple=getattr(model.config, "group_size", 1),
        dtype=str(jnp.dtype(model.dtype)),
        init_cache=lambda batch, size: {
            "tree": models.init_cache(model, batch, size),
            "size": size,
        },
        decode=step,
        ragged=True,
    )


def of_model_with_parts(model, variables):
    """The `Subject` of a model of efx with unrolled layers, with all that it claims."""
    subject = with_parts(of_model(model, variables), model, variables)

    def claimed(tokens_BT):
        batch, length = tokens_BT.shape
        return batch * sum(model.ledger(length, "causal").nominal.values())

    def count(function):
        """Of the model itself, in which no kernel hides its products."""
        return flops.executed(model, subject.length, BATCH, train=False)

    # A program is compiled for `work` with its counters: nothing else may compile it before.
    work = counted_work(of_model(model, variables), model)
    return dataclasses.replace(subject, claimed_flops=claimed, count_flops=count, work=work)


def with_parts(subject, model, variables):
    """The `Subject` of a model with unrolled layers with its parts."""
    parts = {part.name: part.off for part in find_parts(model, subject.length)}
    all_on = {path: np.ones_like(x) for off in parts.values() for path, x in off.items()}
    off = {}

    @jax.jit
    def partial_logits(variables, on, tokens_BT):
        with switch_parts(on):
            return model.apply(variables, tokens_BT, rngs={"routing": jax.random.key(0)})

    def logits(tokens_BT, *layout):
        if off:
            return partial_logits(variables, {**all_on, **off}, tokens_BT)
        return subject.logits(tokens_BT, *layout)

    @contextlib.contextmanager
    def without(names):
        for name in names:
            off.update(parts[name])
        try:
            yield
        finally:
            off.clear()

    # A small MLP for skipped tokens is no part: without its parts such a layer is not the identity.
    inside = {name: () for name in parts}
    for path, spec in model.blocks().items():
        layer = label(path)
        if layer in parts and not (spec.routing and spec.routing.skip_mlp):
            increments = ("attention", "cross_attention", "mlp")
            inside[layer] = [f"{layer}/{x}" for x in increments if f"{layer}/{x}" in parts]
    return dataclasses.replace(subject, logits=logits, parts=inside, without=without)


def counted_work(subject, model):
    """`Subject.work` in tokens that routed blocks compute and admit; None without such blocks."""
    routed = {
        path: ROUTED_METHODS[spec.routing.target]
        for path, spec in model.blocks().items()
        if spec.routing is not None and spec.routing.kind == "mod"
    }
    if not routed:
        return None
    ran = []

    def count(next_function, args, kwargs, context):
        path = "/".join(context.module.path)
        is_routed = isinstance(context.module, Block) and path in routed
        if is_routed and context.method_name == routed[path] and args[1].access != "write":
            jax.debug.callback(lambda: ran.append(path))
        return next_function(*args, **kwargs)

    def admitted(cache):
        leaves = jax.tree_util.tree_leaves_with_path(cache["tree"])
        paths = {f"{path}/admitted" for path in routed}
        named = ((jax.tree_util.keystr(path, simple=True, separator="/"), x) for path, x in leaves)
        return sum(int(np.sum(x)) for name, x in named if name in paths)

    def work(tokens_1T):
        cache = subject.init_cache(1, subject.length)
        executed, claimed = [], []
        for t in range(tokens_1T.shape[1]):
            ran.clear()
            before, position = admitted(cache), np.full((1, 1), t, np.int32)
            with nn.intercept_methods(count):
                _, cache = subject.decode(cache, tokens_1T[:, t : t + 1], position)
            jax.block_until_ready(cache["tree"])
            jax.effects_barrier()
            executed.append(len(ran))
            claimed.append(admitted(cache) - before)
        return executed, claimed

    return work


def of_run(workdir, text=None, dtype="float32"):
    """The `Subject` of the newest checkpoint of a run directory.

    Args:
      text: str, for `sleeping_parts`; None: the held-out split.
    """
    if RunDir(workdir).has_clustering:
        raise UsageError(f"{workdir} is an ensemble of cBTM; use the run directory of one expert")
    config = apply(config_of_run(workdir), {"train.dtype": dtype}, f"{workdir}: ")
    splits = ("eval",) if text is None else ()
    built, _, params, variables = inference.restore(config, workdir, splits=splits)
    variables = jax.device_get({"params": params, **variables})
    variables = models.unroll_variables(built.model, variables)
    subject = of_model_with_parts(models.unrolled(built.model), variables)
    ids = _held_out_tokens(built) if text is None else built.tokenizer.encode(text)
    return dataclasses.replace(subject, text=rows_of(ids, subject))


def _held_out_tokens(experiment):
    """int [n]: the tokens of the first batch of the held-out split."""
    size = experiment.config.evaluate.batch_size
    rows = sharding.Placement(experiment.mesh, experiment.rules, size).rows
    batch = next(iter(experiment.data.eval_batches(size, 1, rows)))
    return np.ravel(batch["inputs"])


# ---- callables and folders of transformers -----------------------------------------------------


def of_function(target, vocab_size=None, dtype="float32"):
    """The `Subject` of "module:function", see efx/certify/command.py."""
    module_name, _, name = target.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), name)()
    except Exception as error:
        raise UsageError(f"{target}: cannot be imported and called: {first_line(error)}") from error
    if isinstance(made, Subject):
        return made
    if not callable(made):
        raise UsageError(f"{target} returned {type(made).__name__}: expected a callable or Subject")
    if vocab_size is None:
        raise UsageError(f"{target}: --vocab-size is missing: the number of token ids of the model")
    return of_callable(made, vocab_size, dtype)


def of_callable(function, vocab_size, dtype="float32"):
    """The `Subject` of (tokens [B, T]) -> logits [B, T, V] in JAX, PyTorch or numpy.

    PyTorch gets tensors, the others arrays of numpy.
    """
    subject = Subject(function, vocab_size, dtype=dtype)
    tokens_BT = random_tokens(subject, 0)
    try:
        kind = type(function(tokens_BT)).__module__.partition(".")[0]
    except Exception:
        if "torch" not in sys.modules:
            return subject  # `certify` reports the error
        kind = "torch"
    if kind == "torch":
        from efx.certify import torch_models

        return torch_models.of_callable(function, vocab_size, dtype)
    if kind.startswith("jax"):
        return dataclasses.replace(subject, count_flops=_traced_flops)
    return subject


def _traced_flops(function):
    """FLOPs of a function; None if JAX cannot trace it."""
    try:
        return flops.jaxpr_flops(function)
    except Exception:
        return None


def of_transformers(folder, trust_remote_code=False, text=None, dtype="float32"):
    """The `Subject` of a folder that transformers loads."""
    try:
        from efx.certify import torch_models

        return torch_models.of_folder(folder, trust_remote_code, text, dtype)
    except ImportError as error:
        raise UsageError(
            f"{folder}: this needs {extra('interop')}: {error.name} is not installed"
        ) from None


def of_target(target, vocab_size=None, trust_remote_code=False, text=None, dtype="float32"):
    """The `Subject` of a TARGET of the command line."""
    if dtype not in TOLERANCES:
        raise UsageError(f"--dtype={dtype}: expected one of {', '.join(TOLERANCES)}")
    folder = io.folder(target)
    if (folder / "run.json").exists():
        return of_run(target, text, dtype)
    if folder.is_dir():
        return of_transformers(target, trust_remote_code, text, dtype)
    if ":" not in target:
        raise UsageError(f"{target}: is no run directory, no folder and no `module:function`")
    if text is not None:
        raise UsageError("--text: a callable has no tokenizer; return a Subject with `text`")
    return of_function(target, vocab_size, dtype)
