"""Adapters on the linear layers of a finished model, one or several composed (PHATGOOSE).

    y = W u + scale * adapter(u)
    kind "lora"  adapter(u) = u A B                 (Hu et al. 2021, arXiv 2106.09685)
    kind "mlp"   adapter(u) = gelu(u A) B           (Houlsby et al. 2019, arXiv 1902.00751)

B starts at zero, so an adapted model starts as its base. Gates and the composition of experts are
those of Muqeeth et al. 2024 (arXiv 2402.05859, section 3); see `Adapter`.

An interceptor of Flax method calls adds the adapters to a model of any family: every matrix product
of a layer is a call of `Linear`, and a module made inside that call has its parameters at
`<layer>/adapter/...`. So scans, remat, sharding and routed blocks treat adapters like the other
parameters of the layer, and the parameters of the base keep their paths.
"""

import dataclasses
import functools
import re
from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx.config.schema import AtLeastOne, Count, Fraction, Number, block, check_regex
from efx.layers import admission, batch_means, flops, selection
from efx.layers.linear import Linear, dot_float32
from efx.layers.mlp import exact_gelu
from efx.layers.moe import ROUTER_STD, largest_indices
from efx.layers.norms import LayerNorm
from efx.layers.report import Report, health_requested, sow_choice
from efx.layers.token_context import TokenContext
from efx.models.language_model import unrolled
from efx.models.stack import first_of_scanned, first_of_unrolled, period
from efx.parallel.sharding import only_shapes, parameter

ADAPTERS = Report(
    {"adapter/experts_per_token": "\n  adapters: {:.2f} experts a token"}, ("adapter/",)
)


@block("config.adapter")
class AdapterConfig:
    """Adapters on the linear layers of a finished model, configs/phatgoose.py."""

    kind: Literal["none", "lora", "mlp"] = "none"  # "lora": u A B; "mlp": gelu(u A) B
    rank: Count = 16  # inner width of an adapter
    scale: Number = 1.0  # factor on its output
    # Regex of the adapted linear layers; it must match the whole path in the unrolled model.
    sites: str = r".*/(query|key|value|out|gate|up|down)"
    gate: bool = False  # single adapter: multiply it by sigmoid(v.u) and train v
    experts: tuple[str, ...] = ()  # adapters to compose: run directories with the base `init.run`
    # Weights of the experts, per token and layer: "topk": by their gates; "uniform": 1 / E;
    # "inclusion": each expert has an entrance that selects its tokens.
    routing: Literal["topk", "uniform", "inclusion"] = "topk"
    top_k: Count = 2  # topk: experts of a token
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


# ---- the adapter of one linear layer -----------------------------------------------------------


def dot_products(x_BTD, vectors_ED):
    """float32 [B, T, E], whatever the dtype of x."""
    return jax.vmap(dot_float32, in_axes=(0, None), out_axes=-1)(vectors_ED, x_BTD)


class Adapter(nn.Module):
    """The term added to one linear layer: scale * sum_e w_e adapter_e(u).

    A single adapter has w = 1, or sigmoid(v.u) with `gate`. Several experts have, by `routing`:

    `topk`: w = softmax(v.u / sqrt(D)) over the k experts of largest v.u, where v and u are
      standardised over features.
    `uniform`: w_e = 1 / E.
    `inclusion`: the routing of Mixture-of-Depths (arXiv 2404.02258) for each expert, with the score
      r = v.u + b. In training an expert computes the top-k tokens of a sequence by r; in evaluation
      and sampling those with r > 0 that the causal limit admits. w_e = sigmoid(r). The loss
      `inclusion_bce` trains r > 0 to agree with top-k.

    Sows `stats`: experts_per_token; usage of each expert (fraction of the tokens);
    effective_experts = exp(entropy of w) (`topk`); overflow_fraction, of the selected tokens those
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
        """[..., D] -> [..., F]; `call` is the TokenContext of these tokens, None if unknown."""
        c, width = self.config, x.shape[-1]
        experts = (c.num_experts,) if c.experts else ()
        down = self._param("down", width**-0.5, (*experts, width, c.rank), (self.axes[0], None))
        up = self._param("up", 0.0, (*experts, c.rank, self.features), (None, self.axes[1]))
        down_EDR = down.astype(self.dtype).reshape(-1, *down.shape[-2:])
        up_ERF = up.astype(self.dtype).reshape(-1, *up.shape[-2:])
        x_BTD = x.astype(self.dtype).reshape(-1, *x.shape[-2:])  # learned vectors are [T, D]
        if c.has_entrances:
            y_BTF = self._included_experts(x_BTD, call, down_EDR, up_ERF)
        else:
            # All experts on all tokens: at low rank this costs less than gathering tokens.
            y_BTF = self._weighted_sum(x_BTD, self._weights(x_BTD, call), down_EDR, up_ERF)
        return (c.scale * y_BTF).reshape(*x.shape[:-1], self.features).astype(self.dtype)

    def _param(self, name, std, shape, axes):
        init = nn.initializers.normal(std) if std else nn.initializers.zeros
        return parameter(self, name, init, shape, (None,) * (len(shape) - len(axes)) + axes)

    def _weighted_sum(self, x_BTD, weight_BTE, down_EDR, up_ERF):
        """sum_e w_e adapter_e(x), [B, T, F]; without weights (None) w = 1."""
        batch, length, width = x_BTD.shape
        # One leading axis, as in `Linear`: on CPUs this halves the time of the gradients.
        h_NER = jnp.einsum("ND,EDR->NER", x_BTD.reshape(-1, width), down_EDR)
        if self.config.kind == "mlp":
            h_NER = exact_gelu(h_NER)
        if weight_BTE is not None:
            weight_NE = weight_BTE.reshape(-1, weight_BTE.shape[-1])
            h_NER = selection.scale(h_NER, weight_NE).astype(h_NER.dtype)
        return jnp.einsum("NER,ERF->NF", h_NER, up_ERF).reshape(batch, length, self.features)

    def _weights(self, x_BTD, call):
        """The weights w, float32 [B, T, E]; None: 1."""
        c, (batch, length, width) = self.config, x_BTD.shape
        if not c.experts:
            if not c.gate:
                return None
            v_D = self._param("gate", 0.0, (width,), self.axes[:1])
            logit_BT = dot_float32(v_D, x_BTD)
            self.sow("intermediates", "gate_logits", logit_BT)
            gate_BT = jax.nn.sigmoid(logit_BT)
            sow_choice(self, "gate", gate_BT, call)
            if call is not None and health_requested(self, call):
                mean = batch_means.over(gate_BT, call.valid_mask(batch))
                batch_means.sow(self, "stats", "adapter/gate", mean)
            return gate_BT[..., None]
        if c.routing == "uniform":
            return jnp.full((batch, length, c.num_experts), 1.0 / c.num_experts)
        v_ED = self._param("gate", 0.0, (c.num_experts, width), self.axes[:1])
        standardise = LayerNorm(eps=1e-12, use_bias=False, use_scale=False)
        affinity_BTE = dot_products(standardise(x_BTD), standardise(v_ED))
        best_BTK = largest_indices(affinity_BTE, c.top_k)
        is_best_BTE = jnp.any(jax.nn.one_hot(best_BTK, c.num_experts, dtype=bool), axis=-2)
        scaled_BTE = jnp.where(is_best_BTE, affinity_BTE / width**0.5, -jnp.inf)
        weight_BTE = jax.nn.softmax(scaled_BTE, axis=-1)
        self._report(weight_BTE, call)
        return weight_BTE

    def _included_experts(self, x_BTD, call, down_EDR, up_ERF):
        """The sum over experts [B, T, F], each on the tokens that its entrance selects."""
        c, (batch, length, width) = self.config, x_BTD.shape
        # From zero, every expert would select the first C tokens.
        std = ROUTER_STD * self.mup_ratio
        v_ED = self._param("entrance", std, (c.num_experts, width), self.axes[:1])
        b_E = self._param("entrance_bias", 0.0, (c.num_experts,), ("norm",))
        logit_BTE = dot_products(x_BTD, v_ED) + b_E[None, None]
        limit = c.capacity * c.slack, c.slots(length, looks_ahead=False)
        run_BTE, selected_BTE, admitted_BTE, _ = admission.choose_by_sign(
            self, logit_BTE, c.capacity, *limit, call, loss="inclusion_bce"
        )
        weight_BTE = jnp.where(run_BTE, jax.nn.sigmoid(logit_BTE), 0.0)
        if call.decode:
            return self._weighted_sum(x_BTD, weight_BTE, down_EDR, up_ERF)
        self._report(weight_BTE, call)
        if batch_means.is_collecting(self):
            selected = jnp.sum(selected_BTE, dtype=jnp.float32)
            overflow = selected - jnp.sum(admitted_BTE, dtype=jnp.float32)
            batch_means.sow(
                self, "stats", "adapter/overflow_fraction", batch_means.Mean(overflow, selected)
            )
        slots = c.slots(length, call.looks_ahead)
        index_EBC = jax.vmap(selection.compact, in_axes=(2, None))(run_BTE, slots)
        wide_BTD = x_BTD.astype(jnp.float32)  # the gradient of x is a sum over experts

        def add_expert(y_BTF, expert):
            index_BC, weight_BT, down_DR, up_RF = expert
            x_BCD = selection.gather(wide_BTD, index_BC).astype(self.dtype)
            weight_BC1 = selection.gather(weight_BT, index_BC)[..., None]
            y_BCF = self._weighted_sum(x_BCD, weight_BC1, down_DR[None], up_RF[None])
            return selection.scatter_add(y_BTF, index_BC, y_BCF), None

        zeros_BTF = jnp.zeros((batch, length, self.features), jnp.float32)
        experts = index_EBC, jnp.moveaxis(weight_BTE, 2, 0), down_EDR, up_ERF
        return jax.lax.scan(add_expert, zeros_BTF, experts)[0]

    def _report(self, weight_BTE, call):
        """Sow statistics of the weights; experts with weight 0 are not used."""
        shape = weight_BTE.shape[:2]
        valid_BT = jnp.ones(shape, bool) if call is None else call.valid_mask(len(weight_BTE))
        sow_choice(self, "weights", jnp.where(valid_BT[..., None], weight_BTE, 0.0), call)
        if not batch_means.is_collecting(self):
            return
        used_BTE = (weight_BTE > 0).astype(jnp.float32)
        stats = {"experts_per_token": jnp.sum(used_BTE, axis=-1)}
        for e in range(self.config.num_experts):
            stats[f"usage/expert_{e}"] = used_BTE[..., e]
        if self.config.routing == "topk":
            entropy_BT = jnp.sum(jax.scipy.special.entr(weight_BTE), axis=-1)
            stats["effective_experts"] = jnp.exp(entropy_BT)
        for name, value_BT in stats.items():
            batch_means.sow(self, "stats", f"adapter/{name}", batch_means.over(value_BT, valid_BT))


# ---- the model ---------------------------------------------------------------------------------


def intercept_linear(replace_output):
    """Context manager in which each linear layer returns replace_output(linear, x, y, calls).

    Args of `replace_output`: the layer, its input and output, and the enclosing method calls, the
    outermost first: (path of the module, arguments).
    """
    calls = []

    def intercept(next_fun, args, kwargs, context):
        module = context.module
        if isinstance(module, Linear) and context.method_name == "__call__":
            return replace_output(module, args[0], next_fun(*args, **kwargs), calls)
        calls.append(("/".join(module.path), args))
        result = next_fun(*args, **kwargs)
        calls.pop()
        return result

    return nn.intercept_methods(intercept)


def call_of(x, calls):
    """The `TokenContext` of the tokens x: an argument of the innermost method call that has one;
    None if that is of other tokens, for instance where tokens become latents."""
    for _, args in reversed(calls):
        for value in args:
            if isinstance(value, TokenContext):
                return value if value.positions_BT.shape[-1] == x.shape[-2] else None
    return None


@functools.lru_cache(maxsize=64)
def linear_calls(model, length):
    """The calls of linear layers in `features` of an unrolled model for one sequence.

    Returns: tuples (path, number of tokens, input size, output size, path of the routed block that
      selected these tokens or "") in the order of execution.
    """
    found = []
    routed = {path for path, spec in model.blocks().items() if spec.routing is not None}

    def record(linear, x, y, calls):
        call, block = call_of(x, calls), ""
        # A routed block may compute keys and values of all tokens; their call has no gaps.
        if call is not None and call.has_gaps:
            block = next(path for path, _ in calls if path in routed)
        width = x.shape[-1]
        found.append(("/".join(linear.path), x.size // width, width, linear.features, block))
        return y

    def init_features(key):
        with intercept_linear(record):
            tokens_BT = jnp.zeros((1, length), jnp.int32)
            keys = {"params": key, "dropout": key, "routing": key}
            return model.init(keys, tokens_BT, method="features")

    with only_shapes():
        jax.eval_shape(init_features, jax.random.key(0))
    return tuple(found)


def adapt(model, config):
    """The model, of any family, with the adapters of an `AdapterConfig`.

    Raises: UsageError if they do not fit, for instance if no layer matches `config.sites`.
    """
    if config.kind == "none":
        return model
    _check(model, config)
    names = {field.name for field in dataclasses.fields(model) if field.init} - {"parent", "name"}
    values = {name: getattr(model, name) for name in names}
    return adapted_family(type(model))(**values, adapter=config)


@functools.cache
def adapted_family(family):
    """Subclass of a family with adapters; its field `adapter` is an `AdapterConfig`."""

    class AdaptedFamily(family):
        adapter: AdapterConfig | None = None

        def features(self, *args, **kwargs):
            """As in the family, with adapters on its linear layers."""

            def add_adapter(linear, x, y, calls):
                # Bridges to this model may run inside this call; they have no adapters.
                start, below = linear.path[: len(self.path)], linear.path[len(self.path) :]
                path = first_of_scanned("/".join(below))
                if start != self.path or not re.fullmatch(self.adapter.sites, path):
                    return y
                mup_ratio = self.config.mup_ratio
                fields = self.adapter, linear.features, linear.axes, linear.dtype, mup_ratio
                return y + Adapter(*fields, name="adapter")(x, call_of(x, calls))

            with intercept_linear(add_adapter):
                return super().features(*args, **kwargs)

        @nn.nowrap
        def ledger(self, length, selection="train", shares=None):
            """Nominal FLOPs of the family and of the adapters."""
            total, model = 0, unrolled(self).clone(selection=selection)
            for path, tokens, width, features, routed in linear_calls(model, length):
                if re.fullmatch(self.adapter.sites, path):
                    if shares and routed in shares:
                        tokens = self.stack_length(length) * shares[routed][0]
                    total += self.adapter.flops(tokens, width, features, selection == "train")
            nominal = super().ledger(length, selection, shares).nominal
            return flops.Ledger(length, {**nominal, "adapters": total})

    AdaptedFamily.__name__ = AdaptedFamily.__qualname__ = f"Adapted{family.__name__}"
    return AdaptedFamily


def _check(model, config):
    """Raise UsageError unless the model and the layers at `config.sites` can have adapters."""
    m = model.config
    if model.members:
        config.refuse("kind", f"not with config.model.family={m.family!r}; adapt its member runs")
    if config.has_entrances and m.family == "latent":
        config.refuse("routing", "not with config.model.family='latent'; use 'topk'")
    if config.has_entrances and m.depth_routing.kind != "none":
        kind = m.depth_routing.kind
        config.refuse("routing", f"not with config.model.depth_routing.kind={kind!r}; use 'topk'")

    calls = linear_calls(unrolled(model).clone(selection="causal"), 1)
    paths = sorted({path for path, *_ in calls})
    sites = [path for path in paths if re.fullmatch(config.sites, path)]
    if not sites:
        examples = ", ".join(paths[:: max(1, len(paths) // 4)][:4])
        config.refuse("sites", f"must match a whole path of a linear layer, such as {examples}")
    for path in paths if m.scan_layers else ():
        first = first_of_unrolled(path, period(model.specs()))
        if (path in sites) != (first in sites):
            config.refuse(
                "sites",
                f"matches only one of {first} and {path}, and config.model.scan_layers=True "
                "computes both as one; match both or neither, or use scan_layers=False",
            )
