"""Adapters on the linear layers of a finished model, one or several composed (PHATGOOSE).

    y = W u + scale * adapter(u)
    kind "lora"  adapter(u) = u A B                 (Hu et al. 2021, arXiv 2106.09685)
    kind "mlp"   adapter(u) = gelu(u A) B           (Houlsby et al. 2019, arXiv 1902.00751)

B starts at zero, so an adapted model starts as its base. Gates and the composition of experts are
those of Muqeeth et al. 2024 (arXiv 2402.05859, section 3); see `Adapter`.

An interceptor of Flax method calls adds the adapters to a model of any family: every matrix product
of a layer is a call of `Linear`, and a module made inside that call has its parameters at
`<layer>/adapter/...`. Scans, remat, sharding and routed blocks therefore treat adapters like the
parameters beside them, and the base keeps its paths.
"""

import dataclasses
import functools
import re
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from efx import flops, means
from efx.errors import UsageError
from efx.layers.call import Call
from efx.layers.linear import Linear
from efx.layers.mlp import exact_gelu
from efx.layers.moe import ROUTER_STD
from efx.layers.report import Report, sow_choice
from efx.layers.stack import first_of_scanned, first_of_unrolled, period
from efx.models.language_model import unrolled
from efx.routing import selection
from efx.routing.admission import admit_new_tokens
from efx.settings import AtLeastOne, Count, Fraction, Number, block, check_regex
from efx.sharding import only_shapes, parameter

ADAPTERS = Report({"adapter/experts_per_token": "; {:.2f} experts a token"}, ("adapter/",))


@block("config.adapter")
class AdapterConfig:
    """Adapters on the linear layers of a finished model, configs/phatgoose.py."""

    kind: Literal["none", "lora", "mlp"] = "none"  # "lora": u A B; "mlp": gelu(u A) B
    rank: Count = 16
    scale: Number = 1.0
    # Regex of the adapted linear layers; it must match the whole path in the unrolled model.
    sites: str = r".*/(query|key|value|out|gate|up|down)"
    gate: bool = False  # single adapter: multiply it by sigmoid(v.u) and train v
    experts: tuple[str, ...] = ()  # run folders of adapters of one base (init.run) to compose
    # Weights of the experts, per token and layer: "topk" by their gates, "uniform" 1 / E,
    # "inclusion" by an entrance of each expert that may leave it out.
    routing: Literal["topk", "uniform", "inclusion"] = "topk"
    top_k: Count = 2
    capacity: Fraction = 0.5  # inclusion: fraction of a sequence that an expert computes
    slack: AtLeastOne = 1.5  # inclusion: multiple of the capacity that the causal limit allows

    def check(self):
        if self.kind == "none" and (self.experts or self.gate):
            name = "experts" if self.experts else "gate"
            self.refuse(name, "needs config.adapter.kind='lora' or 'mlp'")
        if self.scale == 0:
            self.refuse("scale", "must not be 0: adapters would have no effect")
        if len({*self.experts}) < len(self.experts):
            self.refuse("experts", "names a run twice")
        if self.experts and self.routing == "topk" and self.top_k > self.num_experts:
            self.refuse("top_k", f"must be at most {self.num_experts}, one for each of the experts")
        check_regex(self.sites, f"{self.where}.sites")

    def refuse(self, name, reason):
        raise UsageError(f"config.adapter.{name}={getattr(self, name)!r}: {reason}")

    @property
    def num_experts(self):
        """E; 0 for a single adapter."""
        return len(self.experts)

    @property
    def has_entrances(self):
        return bool(self.experts) and self.routing == "inclusion"

    def slots(self, length, looks_ahead):
        """C: the number of tokens of a sequence that an expert can compute ("inclusion")."""
        if looks_ahead:
            return selection.num_slots(self.capacity, length)
        return selection.num_causal_slots(self.capacity * self.slack, length)

    def flops(self, tokens, width, features, looks_ahead):
        """Nominal FLOPs of the adapters of one linear layer for `tokens` tokens of a sequence."""
        experts = self.num_experts or 1
        computed = self.slots(tokens, looks_ahead) if self.has_entrances else tokens
        total = experts * flops.matmul(computed, self.rank, width + features)
        has_gates = self.routing != "uniform" if self.experts else self.gate
        return total + has_gates * flops.matmul(tokens, width, experts)


# ---- weights of the experts: pure functions ----------------------------------------------------


def standardise(x):
    """Zero mean and unit variance over the last axis; a constant vector becomes 0."""
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-12)


def dot_products(u_ND, v_ED):
    """float32 [N, E], whatever the dtype of u."""
    return jnp.einsum(
        "ND,ED->NE", u_ND.astype(jnp.float32), v_ED, precision=jax.lax.Precision.HIGHEST
    )


def topk_weights(affinity_NE, top_k, width):
    """softmax(affinity / sqrt(D)) over the top-k experts, 0 for the others."""
    num_experts = affinity_NE.shape[-1]
    # Ranks by comparison: E is small, and a sort would gather tokens that a mesh splits.
    own_NE1, other_N1E = affinity_NE[:, :, None], affinity_NE[:, None, :]
    earlier_1EE = jnp.tril(jnp.ones((1, num_experts, num_experts), bool), k=-1)
    ahead_NEE = (other_N1E > own_NE1) | ((other_N1E == own_NE1) & earlier_1EE)
    selected_NE = jnp.sum(ahead_NEE, axis=-1) < top_k
    return jax.nn.softmax(jnp.where(selected_NE, affinity_NE / width**0.5, -jnp.inf), axis=-1)


# ---- the adapter of one linear layer -----------------------------------------------------------


class Adapter(nn.Module):
    """The term added to one linear layer: scale * adapter(u), or scale * sum_e w_e adapter_e(u).

    `topk`: v and u are standardised over features; w = softmax(v.u / sqrt(D)) over the k experts
      of largest affinity v.u.
    `uniform`: w_e = 1 / E.
    `inclusion`: the routing of Mixture-of-Depths (arXiv 2404.02258) at the entrance of each expert.
      With r = v.u + b, an expert computes the top-k tokens of a sequence by r in training; in
      evaluation and sampling those with r > 0 that the causal limit admits. w_e = sigmoid(r). The
      loss `inclusion_bce` trains r > 0 to agree with top-k.

    Sows `stats`: experts_per_token; usage of each expert (fraction of the tokens);
    effective_experts = exp(entropy of w) (`topk`); dropped_fraction, of the selected tokens those
    that were not admitted (`inclusion`).

    Attributes:
      features, axes, dtype: those of the linear layer.
      mup_ratio: base_width / width of muP; 1: no muP.
    """

    config: AdapterConfig
    features: int
    axes: tuple
    dtype: jnp.dtype
    mup_ratio: float = 1.0

    @nn.compact
    def __call__(self, x, call):
        """[..., D] -> [..., F]; `call` is the Call of these tokens, None if unknown."""
        c, width = self.config, x.shape[-1]
        stack = (c.num_experts,) if c.experts else ()
        down = self._param("down", width**-0.5, (*stack, width, c.rank), (self.axes[0], None))
        up = self._param("up", 0.0, (*stack, c.rank, self.features), (None, self.axes[1]))
        down, up, x = down.astype(self.dtype), up.astype(self.dtype), x.astype(self.dtype)
        if not c.experts:
            y = self._single(x, call, down, up)
        elif c.has_entrances:
            y = self._included_experts(x, call, down, up)
        else:
            y = self._all_experts(x, self._weights(x, call), down, up)
        return (c.scale * y).reshape(*x.shape[:-1], self.features).astype(self.dtype)

    def _param(self, name, std, shape, axes):
        init = nn.initializers.normal(std) if std else nn.initializers.zeros
        return parameter(self, name, init, shape, (None,) * (len(shape) - len(axes)) + axes)

    def _activation(self, h):
        return exact_gelu(h) if self.config.kind == "mlp" else h

    def _single(self, x, call, down_DR, up_RF):
        u_ND = x.reshape(-1, x.shape[-1])
        y_NF = self._activation(u_ND @ down_DR) @ up_RF
        if not self.config.gate:
            return y_NF
        v_D = self._param("gate", 0.0, x.shape[-1:], self.axes[:1])
        logit_N1 = dot_products(u_ND, v_D[None])
        self.sow("intermediates", "gate_logits", logit_N1)
        gate_N1 = jax.nn.sigmoid(logit_N1)
        sow_choice(self, "gate", gate_N1.reshape(-1, x.shape[-2]), call)
        return selection.weighted(y_NF, gate_N1[:, 0])

    def _all_experts(self, x, weight, down_EDR, up_ERF):
        """Every expert on every token: at low rank this costs less than gathering tokens."""
        x_ND, weight_NE = x.reshape(-1, x.shape[-1]), weight.reshape(-1, weight.shape[-1])
        h_NER = self._activation(jnp.einsum("ND,EDR->NER", x_ND, down_EDR))
        h_NER = selection.weighted(h_NER, weight_NE).astype(h_NER.dtype)
        return jnp.einsum("NER,ERF->NF", h_NER, up_ERF)

    def _weights(self, x, call):
        c, width = self.config, x.shape[-1]
        if c.routing == "uniform":
            return jnp.full((*x.shape[:-1], c.num_experts), 1.0 / c.num_experts)
        gate_ED = self._param("gate", 0.0, (c.num_experts, width), self.axes[:1])
        affinity_NE = dot_products(standardise(x.reshape(-1, width)), standardise(gate_ED))
        weight_NE = topk_weights(affinity_NE, c.top_k, width)
        weight_BTE = weight_NE.reshape(*x.shape[:-1], c.num_experts)
        valid_BT = jnp.ones(x.shape[:-1], bool) if call is None else call.real(x.shape[0])
        self._report(weight_BTE, valid_BT, call)
        return weight_BTE

    def _included_experts(self, x_BTD, call, down_EDR, up_ERF):
        c, (batch, length, width) = self.config, x_BTD.shape
        # From zero, the first selection would be the first C tokens for every expert.
        std = ROUTER_STD * self.mup_ratio
        entrance_ED = self._param("entrance", std, (c.num_experts, width), self.axes[:1])
        bias_E = self._param("entrance_bias", 0.0, (c.num_experts,), ("norm",))
        logit_NE = dot_products(x_BTD.reshape(-1, width), entrance_ED) + bias_E[None]
        logit_BTE = logit_NE.reshape(batch, length, c.num_experts)
        weight_BTE, valid_BT = jax.nn.sigmoid(logit_BTE), call.real(batch)
        selected_BTE = (logit_BTE > 0) & valid_BT[..., None]
        causal_rate = c.capacity * c.slack
        if call.decode:
            names = "admitted", "overflow"
            run_BTE, _ = admit_new_tokens(self, selected_BTE, causal_rate, call, names)
            return self._all_experts(x_BTD, jnp.where(run_BTE, weight_BTE, 0.0), down_EDR, up_ERF)

        topk_BTE = jax.vmap(
            lambda logit_BT: selection.select_topk(
                logit_BT, c.capacity, valid_BT, call.segment_ids_BT
            ),
            2,
            2,
        )(jax.lax.stop_gradient(logit_BTE))
        admitted_BTE = selection.admit(selected_BTE, causal_rate, call)
        if means.wanted(self):
            bce_BTE = optax.sigmoid_binary_cross_entropy(logit_BTE, topk_BTE.astype(jnp.float32))
            bce = means.over(jnp.mean(bce_BTE, axis=-1), valid_BT)
            means.sow(self, "losses", "inclusion_bce", bce)
            selected = jnp.sum(selected_BTE, dtype=jnp.float32)
            dropped = selected - jnp.sum(admitted_BTE, dtype=jnp.float32)
            means.sow(self, "stats", "adapter/dropped_fraction", means.Mean(dropped, selected))
        run_BTE = topk_BTE if call.looks_ahead else admitted_BTE
        self._report(jnp.where(run_BTE, weight_BTE, 0.0), valid_BT, call)
        return self._routed_experts(x_BTD, call, run_BTE, weight_BTE, down_EDR, up_ERF)

    def _routed_experts(self, x_BTD, call, run_BTE, weight_BTE, down_EDR, up_ERF):
        """Every expert on its tokens; float32 [B, T, F], summed in the order of the experts."""
        batch, length, width = x_BTD.shape
        slots = self.config.slots(length, call.looks_ahead)
        index_EBC = jax.vmap(lambda run_BT: selection.compact(run_BT, slots), in_axes=2)(run_BTE)
        # In float32, because the gradient of x sums over experts.
        x_BTD = x_BTD.astype(jnp.float32)

        def add_expert(y_BTF, expert):
            index_BC, weight_BT, down_DR, up_RF = expert
            x_ND = selection.take(x_BTD, index_BC).reshape(-1, width).astype(self.dtype)
            h_NR = self._activation(x_ND @ down_DR)
            h_NR = selection.weighted(h_NR, selection.take(weight_BT, index_BC).reshape(-1)).astype(
                h_NR.dtype
            )
            y_BCF = (h_NR @ up_RF).reshape(batch, slots, self.features)
            return selection.add(y_BTF, index_BC, y_BCF), None

        start_BTF = jnp.zeros((batch, length, self.features), jnp.float32)
        weight_EBT = jnp.moveaxis(weight_BTE, 2, 0)
        return jax.lax.scan(add_expert, start_BTF, (index_EBC, weight_EBT, down_EDR, up_ERF))[0]

    def _report(self, weight_BTE, valid_BT, call):
        """Sow statistics of the weights; experts with weight 0 are not used."""
        weights = jnp.where(valid_BT[..., None], weight_BTE, 0.0)
        sow_choice(self, "weights", weights.reshape(-1, *weights.shape[-2:]), call)
        if not means.wanted(self):
            return

        def report(name, value_BT):
            means.sow(self, "stats", f"adapter/{name}", means.over(value_BT, valid_BT))

        used_BTE = (weight_BTE > 0).astype(jnp.float32)
        report("experts_per_token", jnp.sum(used_BTE, axis=-1))
        for e in range(self.config.num_experts):
            report(f"usage/expert_{e}", used_BTE[..., e])
        if self.config.routing == "topk":
            entropy_BT = -jnp.sum(jax.scipy.special.xlogy(weight_BTE, weight_BTE), axis=-1)
            report("effective_experts", jnp.exp(entropy_BT))


# ---- the model ---------------------------------------------------------------------------------


class LinearInterceptor:
    """Replaces the output y of each linear layer by visit(linear, x, y), x its input.

    For `flax.linen.intercept_methods`. `frames` are the enclosing method calls: (path, arguments).
    """

    def __init__(self, visit):
        self.frames, self._visit = [], visit

    def __call__(self, next_fun, args, kwargs, context):
        module = context.module
        if isinstance(module, Linear) and context.method_name == "__call__":
            return self._visit(module, args[0], next_fun(*args, **kwargs))
        self.frames.append(("/".join(module.path), args))
        try:
            return next_fun(*args, **kwargs)
        finally:
            self.frames.pop()

    def call_of(self, x):
        """The `Call` of the tokens x: the argument of the innermost method call that has one. None
        if x has other rows, as where tokens become latents."""
        for _, args in reversed(self.frames):
            for value in args:
                if isinstance(value, Call):
                    return value if value.positions_BT.shape[-1] == x.shape[-2] else None
        return None


class LinearCall(NamedTuple):
    """One call of a linear layer [..., D] -> [..., F] in a forward pass over one sequence."""

    path: str
    tokens: int  # rows of the input
    width: int
    features: int
    block: str  # path of the routed block that selected these tokens; "": none
    block_tokens: int  # the number of tokens that it selected from


@functools.lru_cache(maxsize=64)
def linear_calls(model, length):
    """(LinearCall, ...) of an unrolled model in the order of execution; only shapes are traced."""
    found = []
    routed = {path for path, spec in model.blocks().items() if spec.routing is not None}

    def record(linear, x, y):
        call, block = interceptor.call_of(x), ("", 0)
        # The keys and values of a routed block may be those of all tokens, which have no gaps.
        if call is not None and call.has_gaps:
            frames = ((path, args[0]) for path, args in interceptor.frames if path in routed)
            path, state = next(frames)
            block = path, state.size // state.shape[-1]
        sizes = x.size // x.shape[-1], x.shape[-1], linear.features
        found.append(LinearCall("/".join(linear.path), *sizes, *block))
        return y

    def run(key):
        with nn.intercept_methods(interceptor):
            tokens_BT = jnp.zeros((1, length), jnp.int32)
            return model.init({"params": key, "dropout": key, "routing": key}, tokens_BT)

    interceptor = LinearInterceptor(record)
    with only_shapes():
        jax.eval_shape(run, jax.random.key(0))
    return tuple(found)


def adapt(model, config):
    """The model, of any family, with adapters as an `AdapterConfig` says.

    Raises: UsageError, e.g. where no layer matches `config.sites`.
    """
    if config.kind == "none":
        return model
    _check(model, config)
    return adapted_family(type(model))(**_fields(model, type(model)), adapter=config)


def _fields(model, family):
    names = [field.name for field in dataclasses.fields(family) if field.init]
    return {name: getattr(model, name) for name in names if name not in ("parent", "name")}


@functools.cache
def adapted_family(family):
    """The family (a class) with a field `adapter`, an `AdapterConfig`."""

    class AdaptedFamily(family):
        adapter: AdapterConfig | None = None

        def features(self, *args, **kwargs):
            """See the family; the linear layers that it calls have adapters."""

            def add_adapter(linear, x, y):
                # Other interceptors may call layers of their own meanwhile, as bridges do.
                start, below = linear.path[: len(self.path)], linear.path[len(self.path) :]
                path = first_of_scanned("/".join(below))
                if start != self.path or not re.fullmatch(self.adapter.sites, path):
                    return y
                mup_ratio = self.config.mup_ratio
                fields = self.adapter, linear.features, linear.axes, linear.dtype, mup_ratio
                return y + Adapter(*fields, name="adapter")(x, interceptor.call_of(x))

            interceptor = LinearInterceptor(add_adapter)
            with nn.intercept_methods(interceptor):
                return super().features(*args, **kwargs)

        @nn.nowrap
        def ledger(self, length, selection="train", shares=None):
            """Nominal FLOPs of the family and of the adapters."""
            nominal, added = super().ledger(length, selection, shares).nominal, 0
            base = unrolled(family(**_fields(self, family))).clone(selection=selection)
            for call in linear_calls(base, length):
                if re.fullmatch(self.adapter.sites, call.path):
                    tokens = call.tokens
                    if shares and call.block in shares:
                        tokens = call.block_tokens * shares[call.block][0]
                    looks_ahead = selection == "train"
                    added += self.adapter.flops(tokens, call.width, call.features, looks_ahead)
            return flops.Ledger(length, flops.add([nominal, {"adapters": added}]))

    AdaptedFamily.__name__ = AdaptedFamily.__qualname__ = f"Adapted{family.__name__}"
    return AdaptedFamily


def _check(model, config):
    """UsageError unless the model and all layers that `config.sites` matches can have adapters."""
    m, has_gates = model.config, bool(config.experts) or config.gate
    if model.members:
        config.refuse("kind", f"not with config.model.family={m.family!r}; adapt its member runs")
    if config.has_entrances and m.family == "latent":
        config.refuse("routing", "not with config.model.family='latent'; use 'topk'")
    if config.has_entrances and m.depth_routing.kind != "none":
        kind = m.depth_routing.kind
        config.refuse("routing", f"not with config.model.depth_routing.kind={kind!r}; use 'topk'")

    calls = linear_calls(unrolled(model).clone(selection="causal"), 1)
    paths = sorted({call.path for call in calls} - {"head"})
    matches = {path: bool(re.fullmatch(config.sites, path)) for path in paths}
    if not any(matches.values()):
        examples = ", ".join(paths[:: max(1, len(paths) // 4)][:4])
        config.refuse("sites", f"must match a whole path of a linear layer, such as {examples}")
    size = period(model.specs()) if m.scan_layers else 0
    for path in paths:
        first = first_of_unrolled(path, size) if size else path
        if matches[path] != matches[first]:
            config.refuse(
                "sites",
                f"matches only one of {first} and {path}, and config.model.scan_layers=True "
                "computes both as one; match both or neither, or use scan_layers=False",
            )
        if matches[path] and config.has_entrances and not path.startswith("layers/"):
            # There is no Call, so padding is unknown.
            config.refuse("sites", f"matches {path}; routing='inclusion' needs sites in layers/")
        if matches[path] and has_gates and m.dropout.skips and "/mlp/" in path:
            config.refuse(
                "sites",
                f"matches {path}, where gates cannot tell tokens apart with config.model.dropout."
                f"attention.skip_tile={m.dropout.attention.skip_tile}; use skip_tile=0",
            )
