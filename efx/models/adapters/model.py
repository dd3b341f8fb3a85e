"""Any family with adapters on its linear layers, and several adapted experts composed (PHATGOOSE).

`adapt(model, config)` gives the same model of the same family, with the same parameters at the same
paths and an adapter's beside each layer that has one; see `efx.models.adapters.layers`. It is a
subclass that `features` of the family runs in, so whatever works on a family works on it: training,
sharding, evaluation, decoding with caches, scanned and unrolled layers.
"""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx import flops
from efx.errors import UsageError
from efx.layers.linear import Linear
from efx.layers.stack import RecursionStep, first_of_unrolled, layer_of, period
from efx.models.adapters.config import AdapterConfig
from efx.models.adapters.layers import Adapter, Interceptor, Site, TokensOfCalls
from efx.models.language_model import unrolled
from efx.parameter import only_shapes


def adapt(model, config):
    """The model with adapters, or itself where `config.kind` is "none".

    Args:
      model: a resolved model of any family.
      config: an `AdapterConfig`.
    Raises: UsageError, e.g. where no layer matches `config.sites`.
    """
    if config.kind == "none":
        return model
    if model.members:
        raise UsageError(
            f"config.adapter.kind={config.kind!r}: not with "
            f"config.model.family={model.config.family!r}; adapt its member runs"
        )
    routing = model.config.depth_routing
    if config.looks_ahead and routing.kind != "none":
        raise UsageError(
            "config.adapter.routing='inclusion': not with "
            f"config.model.depth_routing.kind={routing.kind!r}, because both would select "
            "among the same tokens"
        )
    fields = {
        f.name: getattr(model, f.name)
        for f in dataclasses.fields(model)
        if f.init and f.name not in ("parent", "name")
    }
    linears = _linears(unrolled(model).clone(selection="causal"))
    found = [path for path in linears if re.fullmatch(config.sites, path)]
    if not found:
        paths = list(linears)
        raise UsageError(
            f"config.adapter.sites={config.sites!r} matches none of the {len(paths)} linear "
            f"layers of this model, such as {', '.join(paths[:: max(1, len(paths) // 4)][:4])}; "
            "it must match a whole path"
        )
    if model.config.scan_layers:
        _check_scanned(config.sites, linears, {*found}, period(model.specs()))
    for path in found:
        if config.looks_ahead and not linears[path]:
            raise UsageError(
                f"config.adapter.sites={config.sites!r} matches {path}, outside of the layers: "
                "config.adapter.routing='inclusion' cannot see padding there"
            )
    tile, reports = model.config.dropout.attention.skip_tile, config.experts or config.gate
    if model.config.dropout.skips and reports:
        for path in found:
            if "/mlp/" in path:
                raise UsageError(
                    f"config.adapter.sites={config.sites!r} matches {path}, in an MLP that "
                    f"skips closed tokens (config.model.dropout.attention.skip_tile={tile}), "
                    "so adapters cannot tell its tokens apart; use skip_tile=0"
                )
    return adapted_family(type(model))(**fields, adapter=config)


def _check_scanned(sites, paths, found, size):
    """UsageError unless layers that a scan computes as one have their adapters in common."""
    for path in paths:
        first = first_of_unrolled(path, size)
        if (path in found) != (first in found):
            has, lacks = (path, first) if path in found else (first, path)
            raise UsageError(
                f"config.adapter.sites={sites!r} matches {has} but not {lacks}, and "
                "config.model.scan_layers=True computes both as one; match both or neither, "
                "or use scan_layers=False"
            )


class Adapted:
    """What every model with adapters is: it has `adapter`, an `AdapterConfig`, and `sites`."""


@functools.cache
def adapted_family(cls):
    """The family `cls` with a field `adapter`, an `AdapterConfig`."""

    class AdaptedFamily(cls, Adapted):
        adapter: AdapterConfig | None = None

        def features(self, *args, **kwargs):
            """See the family; adapters are added to every layer that it calls."""
            base_width = self.config.mup.base_width
            interceptor = Interceptor(self.adapter, self.path, base_width)
            with nn.intercept_methods(interceptor):
                return super().features(*args, **kwargs)

        @nn.nowrap
        def sites(self, length, selection):
            """The adapted layers of the unrolled model, for one sequence of so many tokens."""
            return _sites(unrolled(self).clone(selection=selection), length)

        @nn.nowrap
        def ledger(self, length, selection="train", shares=None):
            """That of the family, and what the adapters add."""
            base, routed = super().ledger(length, selection, shares), shares or {}
            places = {stage.path: len(stage.tokens_S) for stage in self.stages(length)}
            steps = [p for p, spec in self.blocks().items() if isinstance(spec, RecursionStep)]
            added, calls = 0, collections.Counter()
            for s in self.sites(length, selection):
                block = _block_of(s.path, places)
                if block is None and steps and layer_of(s.path) != s.path:
                    # In a layer that the steps share; they call it one after the other.
                    block, calls[s.path] = steps[calls[s.path]], calls[s.path] + 1
                # Keys and values of a routed block may be those of all tokens.
                measured = block in routed and s.rows < places[block]
                rows = [places[block] * routed[block][0]] if measured else []
                added += s.flops(self.adapter, selection, *rows)
            return flops.Ledger(length, flops.add([base.nominal, {"adapters": added}]))

    AdaptedFamily.__name__ = AdaptedFamily.__qualname__ = f"Adapted{cls.__name__}"
    return AdaptedFamily


def _block_of(path, blocks):
    """That of the paths `blocks` which a layer's path is in; None if there is none."""
    return next((block for block in blocks if path.startswith(f"{block}/")), None)


def _trace(model, length, interceptor):
    """Run the model's initialisation on shapes alone, under an interceptor of its calls."""

    def run(key):
        with nn.intercept_methods(interceptor):
            tokens_BT = jnp.zeros((1, length), jnp.int32)
            return model.init({"params": key, "dropout": key, "routing": key}, tokens_BT)

    with only_shapes():
        jax.eval_shape(run, jax.random.key(0))


@functools.lru_cache(maxsize=64)
def _sites(model, length):
    sites = []

    def watch(next_fun, args, kwargs, context):
        module = context.module
        if isinstance(module, Adapter) and context.method_name == "__call__":
            *_, length, width = args[0].shape
            path, rows = "/".join(module.path[:-1]), args[0].size // width
            sites.append(Site(path, rows, length, width, module.features))
        return next_fun(*args, **kwargs)

    _trace(model, length, watch)
    return tuple(sites)


@functools.lru_cache(maxsize=64)
def _linears(model):
    """{path: whether it is known which of the tokens that it maps are padding} of the linear layers
    that can have adapters. They are found without any: with them a model takes several times as
    long to trace."""
    found, tokens = {}, TokensOfCalls()

    def watch(next_fun, args, kwargs, context):
        module = context.module
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        if isinstance(module, Linear):
            found["/".join(module.path)] = tokens.of(module, args[0]) is not None
        with tokens.told(args):
            return next_fun(*args, **kwargs)

    _trace(model, 1, watch)
    return {path: found[path] for path in sorted(found.keys() - {"head"})}
