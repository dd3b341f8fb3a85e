"""A `Subject` of a model of efx, a run directory, a callable, or a folder of transformers."""

import dataclasses
import functools
import importlib
import sys

import jax
import numpy as np
from flax import linen as nn
from flax import traverse_util

from efx import io, models
from efx.certify.properties import Subject, chunks, random_tokens, read, rows_of
from efx.config.load import config_of_model
from efx.config.names import apply
from efx.errors import UsageError, extra, first_line
from efx.layers import flops
from efx.layers.block import Block
from efx.layers.report import label
from efx.models.parts import find_parts, switch_parts
from efx.parallel import sharding
from efx.train import inference

# ---- models of efx -----------------------------------------------------------------------------


def of_model(model, variables):
    """The `Subject` of a model of efx, as it is called; `of_model_with_parts` has all of it."""
    options = dict(rngs={"routing": jax.random.key(0)})

    @jax.jit
    def logits(variables, tokens_BT, *layout):
        return model.apply(variables, tokens_BT, *layout, **options)

    @functools.partial(jax.jit, static_argnums=4)
    def step(variables, cache, tokens_BT, positions_BT, size):
        variables = {**variables, "cache": cache}
        decoding = dict(decode=True, cache_size=size, mutable=["cache"], **options)
        logits_BTV, mutated = model.apply(variables, tokens_BT, positions_BT, **decoding)
        return logits_BTV, mutated["cache"]

    def decode(cache, tokens_BT, positions_BT):
        tree, size = cache
        logits_BTV, tree = step(variables, tree, tokens_BT, positions_BT, size)
        return logits_BTV, (tree, size)

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
        init_cache=lambda batch, size: (models.init_cache(model, batch, size), size),
        decode=decode,
        ragged=True,
    )


def of_model_with_parts(model, variables):
    """The `Subject` of a model of efx with unrolled layers, with its parts and all that it
    claims."""
    subject = of_model(model, variables)
    parts = {part.name: part.off for part in find_parts(model, subject.length)}
    all_on = {path: np.ones_like(x) for off in parts.values() for path, x in off.items()}

    @jax.jit
    def logits(variables, on, tokens_BT):
        with switch_parts(on):
            return model.apply(variables, tokens_BT, rngs={"routing": jax.random.key(0)})

    def without(names, tokens_BT):
        off = {path: x for name in names for path, x in parts[name].items()}
        return logits(variables, {**all_on, **off}, tokens_BT)

    def count_flops(tokens_BT):
        """Of the model itself, in which no kernel hides its products."""
        batch, length = tokens_BT.shape
        claimed = batch * sum(model.ledger(length, "causal").nominal.values())
        return flops.executed(model, length, batch, train=False), claimed

    # A small MLP for skipped tokens is no part: without its parts such a layer is not the identity.
    inside = {name: () for name in parts}
    for path, spec in model.blocks().items():
        layer = label(path)
        if layer in parts and not (spec.routing and spec.routing.skip_mlp):
            increments = (f"{layer}/{x}" for x in ("attention", "cross_attention", "mlp"))
            inside[layer] = [name for name in increments if name in parts]
    work = _counted_work(model, variables)
    return dataclasses.replace(subject, flops=count_flops, work=work, parts=inside, without=without)


def _counted_work(model, variables):
    """`Subject.work` in tokens that routed blocks compute and admit; None without such blocks."""
    methods = {"attention": "attention_increment", "mlp": "mlp_increment"}
    routed = {
        path: methods.get(spec.routing.target, "__call__")
        for path, spec in model.blocks().items()
        if spec.routing is not None and spec.routing.kind == "mod"
    }
    if not routed:
        return None
    # Its program is compiled with the counters: nothing else may compile it before.
    subject, ran = of_model(model, variables), []

    def count(next_function, args, kwargs, context):
        path = "/".join(context.module.path)
        is_routed = isinstance(context.module, Block) and routed.get(path) == context.method_name
        if is_routed and args[1].access != "write":
            jax.debug.callback(lambda: ran.append(path))
        return next_function(*args, **kwargs)

    def work(tokens_1T):
        length_1 = np.full(1, tokens_1T.shape[1])
        ran.clear()
        with nn.intercept_methods(count):
            cache, calls = subject.init_cache(1, subject.length), chunks(length_1, length_1, 1)
            _, (tree, _) = read(subject.decode, cache, tokens_1T, calls)
        jax.effects_barrier()
        counts = traverse_util.flatten_dict(tree, sep="/")
        return len(ran), sum(int(np.sum(counts[f"{path}/admitted"])) for path in routed)

    return work


def of_run(workdir, text=None):
    """The `Subject` of the newest checkpoint of a run directory, in float32.

    Args:
      text: str, for `sleeping_parts`; None: the held-out split.
    """
    config = apply(config_of_model(workdir), {"train.dtype": "float32"}, f"{workdir}: ")
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


def of_function(target, vocab_size=None):
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
    return of_callable(made, vocab_size)


def of_callable(function, vocab_size):
    """The `Subject` of (tokens [B, T]) -> logits [B, T, V] in JAX, PyTorch or numpy.

    PyTorch gets tensors, the others arrays of numpy.
    """
    subject = Subject(function, vocab_size)
    try:
        function(random_tokens(subject, 0))
    except Exception:
        if "torch" in sys.modules:
            from efx.certify import torch_models

            return torch_models.of_callable(function, vocab_size)
    return subject  # `certify` reports an error


def of_target(target, vocab_size=None, trust_remote_code=False, text=None):
    """The `Subject` of a TARGET of the command line."""
    folder = io.folder(target)
    if (folder / "run.json").exists():
        return of_run(target, text)
    if folder.is_dir():
        try:
            from efx.certify import torch_models

            return torch_models.of_folder(target, trust_remote_code, text)
        except ImportError as error:
            needed = f"{extra('interop')}: {error.name} is not installed"
            raise UsageError(f"{target}: this needs {needed}") from None
    if ":" not in target:
        raise UsageError(f"{target}: is no run directory, no folder and no `module:function`")
    if text is not None:
        raise UsageError("--text: a callable has no tokenizer; return a Subject with `text`")
    return of_function(target, vocab_size)
