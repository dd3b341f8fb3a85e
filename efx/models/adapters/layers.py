"""Adapters: small additions to the linear layers of a finished model, one or several composed.

They reach the layers through an interceptor of method calls and not through the layers' own code:
`Linear` is the one place where matrices are multiplied, so whoever watches its calls can add to any
of them, in any family. The interceptor runs inside the call, where the module may declare
parameters: an adapter's lie in the tree of its layer, `<path of the layer>/adapter/...`. Stacking
by scan, recomputation, the loop that decodes a routed block and sharding so treat them like the
parameters beside them, and a base checkpoint fits an adapted model but for what is named `adapter`.

    kind "lora"  adapter(u) = u A B                 (Hu et al. 2021, arXiv 2106.09685)
    kind "mlp"   adapter(u) = gelu(u A) B           (Houlsby et al. 2019, arXiv 1902.00751)

B starts at zero, so an adapted model starts as its base. For the gates and for what several
experts come to, see `Adapter`.
"""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from efx import flops, means
from efx.layers import kv_cache
from efx.layers.call import Call
from efx.layers.linear import Linear
from efx.layers.mlp import exact_gelu
from efx.layers.moe import ROUTER_STD
from efx.layers.report import Report, choices_requested, sow_choice
from efx.layers.stack import first_of_scanned
from efx.models.adapters.config import AdapterConfig
from efx.parameter import parameter
from efx.routing import plans

ADAPTERS = Report({"adapter/experts_per_token": "; {:.2f} experts a token"}, ("adapter/",))


def standardise(x):
    """Zero mean and unit variance over the last axis; a constant vector becomes 0."""
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-12)


def affinities(u_CD, gate_ED):
    """Of each token for each expert: the product of both, standardised; float32 [C, E]."""
    return _product(standardise(u_CD), standardise(gate_ED))


def _product(u_CD, gate_ED):
    return jnp.einsum(
        "CD,ED->CE", u_CD.astype(jnp.float32), gate_ED, precision=jax.lax.Precision.HIGHEST
    )


def topk_weights(affinity_CE, top_k, width):
    """softmax(affinity / sqrt(D)) over the k experts of largest affinity, 0 for the others."""
    best = plans.best(jax.lax.stop_gradient(affinity_CE), top_k)
    chosen_CE = jnp.any(jax.nn.one_hot(best, affinity_CE.shape[-1], dtype=bool), axis=-2)
    return jax.nn.softmax(jnp.where(chosen_CE, affinity_CE / width**0.5, -jnp.inf), axis=-1)


class Adapter(nn.Module):
    """What is added to one linear layer y = W u.

    One adapter: adapter(u), or with a gate sigmoid(v.u) adapter(u), v starting at 0 (PHATGOOSE,
    Muqeeth et al. 2024, arXiv 2402.05859, section 3).

    Several experts: sum over e of w_e adapter_e(u).
      `topk`: standardise v and u over features; with the affinities v.u, w is the softmax of
        affinity / sqrt(D) over the k experts of largest affinity (same paper).
      `uniform`: w_e = 1 / E.
      `inclusion`: an expert's entrance, a linear layer and a sigmoid, may leave it out, so that
        the number of experts differs from token to token. It is the routing of
        Mixture-of-Depths (arXiv 2404.02258): with r = v.u + b, an expert computes the C tokens of
        a sequence with the largest r in training, and those with r > 0, at most `slack` times as
        many in order of time, in evaluation and sampling; w_e = sigmoid(r). The loss
        `inclusion_bce` makes the two agree. Each document of a packed row has its own share of the
        slots.

    Sows into `stats`: experts_per_token, usage of each expert (share of the tokens), and for
    `topk` effective_experts = exp(entropy of w), for `inclusion` dropped_fraction, the choices of
    an expert that found no room. Choices that it reports: the `weights` [B, T, E] of several
    experts, the `gate` [B, T] of one.

    Attributes:
      features, axes, dtype: those of the linear layer.
      mup_base: `config.model.mup.base_width` of the model; 0: none.
    """

    config: AdapterConfig
    features: int
    axes: tuple
    dtype: jnp.dtype
    mup_base: int = 0

    @nn.compact
    def __call__(self, x, call):
        """[..., D] -> [..., F]; `call` is the Call of these tokens, or None if not known."""
        c, width = self.config, x.shape[-1]
        stack = (c.choices,) if c.experts else ()
        down = self._param("down", width**-0.5, (*stack, width, c.rank), (self.axes[0], None))
        up = self._param("up", 0.0, (*stack, c.rank, self.features), (None, self.axes[1]))
        down, up = down.astype(self.dtype), up.astype(self.dtype)
        x = x.astype(self.dtype)
        if not c.experts:
            y = self._one(x, call, down, up)
        elif c.routing == "inclusion":
            y = self._included(x, call, down, up)
        else:
            y = self._all(x.reshape(-1, width), self._weights(x, call), down, up)
        return (c.scale * y).reshape(*x.shape[:-1], self.features).astype(self.dtype)

    def _param(self, name, std, shape, axes):
        init = nn.initializers.normal(std) if std else nn.initializers.zeros
        axes = (None,) * (len(shape) - len(axes)) + axes
        return parameter(self, name, init, shape, axes)

    def _gates(self, name, std, width):
        return self._param(name, std, (self.config.choices, width), (self.axes[0],))

    def _inner(self, h):
        return exact_gelu(h) if self.config.kind == "mlp" else h

    def _one(self, x, call, down_DR, up_RF):
        u_CD = x.reshape(-1, x.shape[-1])
        y_CF = self._inner(u_CD @ down_DR) @ up_RF
        if self.config.gate:
            gate_D = self._param("gate", 0.0, u_CD.shape[-1:], (self.axes[0],))
            logit_C1 = _product(u_CD, gate_D[None])
            self.sow("intermediates", "gate_logits", logit_C1)
            gate_C1 = jax.nn.sigmoid(logit_C1)
            if choices_requested(self):
                sow_choice(self, "gate", gate_C1.reshape(-1, x.shape[-2]), call)
            y_CF = plans.weighed(y_CF, gate_C1[:, 0])
        return y_CF

    def _all(self, u_CD, weight_CE, down_EDR, up_ERF):
        """Every expert on every token: so low a rank costs less than gathering the tokens would."""
        h_CER = self._inner(jnp.einsum("CD,EDR->CER", u_CD, down_EDR))
        h_CER = plans.weighed(h_CER, weight_CE).astype(h_CER.dtype)
        return jnp.einsum("CER,ERF->CF", h_CER, up_ERF)

    def _weights(self, x, call):
        c, width = self.config, x.shape[-1]
        u_CD = x.reshape(-1, width)
        if c.routing == "uniform":
            return jnp.full((len(u_CD), c.choices), 1.0 / c.choices)
        affinity_CE = affinities(u_CD, self._gates("gate", 0.0, width))
        weight_CE = topk_weights(affinity_CE, c.top_k, width)
        self._report(weight_CE.reshape(*x.shape[:-1], c.choices), _valid(x, call), call)
        return weight_CE

    def _report(self, weight_BTE, valid_BT, call):
        weights = jnp.where(valid_BT[..., None], weight_BTE, 0.0)
        sow_choice(self, "weights", weights.reshape(-1, *weights.shape[-2:]), call)
        if not means.wanted(self):
            return

        def report(name, value_BT):
            means.sow(self, "stats", f"adapter/{name}", means.over(value_BT, valid_BT))

        used_BTE = (weight_BTE > 0).astype(jnp.float32)
        report("experts_per_token", jnp.sum(used_BTE, axis=-1))
        for e in range(self.config.choices):
            report(f"usage/expert_{e}", used_BTE[..., e])
        if self.config.routing == "topk":
            # w log w, 0 at 0.
            entropy_BT = -jnp.sum(jax.scipy.special.xlogy(weight_BTE, weight_BTE), axis=-1)
            report("effective_experts", jnp.exp(entropy_BT))

    def _included(self, x_BTD, call, down_EDR, up_ERF):
        c, (batch, length, width) = self.config, x_BTD.shape
        # Starting at zero would make the first selection the first C tokens, for every expert.
        std = ROUTER_STD * (self.mup_base / width if self.mup_base else 1.0)
        entrance_ED = self._gates("entrance", std, width)
        bias_E = self._param("entrance_bias", 0.0, (c.choices,), ("norm",))
        logits_CE = _product(x_BTD.reshape(-1, width), entrance_ED) + bias_E[None]
        logits_BTE = logits_CE.reshape(batch, length, c.choices)
        self.sow("intermediates", "entrance_logits", logits_BTE)
        valid_BT = _valid(x_BTD, call)
        wanted_BTE = (logits_BTE > 0) & valid_BT[..., None]
        weight_BTE = jax.nn.sigmoid(logits_BTE)
        if call.decode:
            room = c.slots(call.cache.size, "causal")
            run_BTE = kv_cache.admit(self, wanted_BTE, room, call, "taken", "dropped")
            weight_BTE = jnp.where(run_BTE, weight_BTE, 0.0)
            weight_CE = weight_BTE.reshape(-1, c.choices)
            return self._all(x_BTD.reshape(-1, width), weight_CE, down_EDR, up_ERF)

        documents = call.documents()
        ahead = c.budget(length, "train", documents)
        top = plans.for_each_expert(ahead.top, jax.lax.stop_gradient(logits_BTE), valid_BT)
        plan = plans.for_each_expert(c.budget(length, "causal", documents).first, wanted_BTE)
        if means.wanted(self):
            target_BTE = plans.selected_by_experts(top, length).astype(jnp.float32)
            bce_BTE = optax.sigmoid_binary_cross_entropy(logits_BTE, target_BTE)
            bce = means.over(jnp.mean(bce_BTE, axis=-1), valid_BT)
            means.sow(self, "losses", "inclusion_bce", bce)
            # Of the decision, in training too, where it does not choose what is computed.
            wanted = jnp.sum(wanted_BTE, dtype=jnp.float32)
            lost = jnp.sum(wanted_BTE & ~plans.selected_by_experts(plan, length), dtype=jnp.float32)
            means.sow(self, "stats", "adapter/dropped_fraction", means.Mean(lost, wanted))
        plan = top if call.looks_ahead else plan
        run_BTE = plans.selected_by_experts(plan, length)
        self._report(jnp.where(run_BTE, weight_BTE, 0.0), valid_BT, call)
        return self._at_places(x_BTD, weight_BTE, plan, down_EDR, up_ERF)

    def _at_places(self, x_BTD, weight_BTE, plan, down_EDR, up_ERF):
        """Sum over experts of weight * expert(x) at the slots of a plan [E, B, C]."""
        length, width = x_BTD.shape[1:]
        experts, batch, slots = plan.indices_BC.shape
        x_EBCD = plans.take_for_experts(x_BTD, plan)
        weight_EBC = jax.vmap(plans.gather, in_axes=(2, 0))(weight_BTE, plan)
        x_ECD = x_EBCD.reshape(experts, batch * slots, width)
        h_ECR = self._inner(jnp.einsum("ECD,EDR->ECR", x_ECD, down_EDR))
        # Weighed here and not where they are added: what the gradient of a weight is made of is
        # kept, and R numbers a token are less than F.
        h_ECR = plans.weighed(h_ECR, weight_EBC.reshape(experts, -1)).astype(h_ECR.dtype)
        y_ECF = jnp.einsum("ECR,ERF->ECF", h_ECR, up_ERF)
        y_EBCF = y_ECF.reshape(experts, batch, slots, self.features)
        start_BTF = jnp.zeros((batch, length, self.features), y_EBCF.dtype)
        return plans.add_weighed(start_BTF, plan.indices_BC, y_EBCF)


def _valid(x, call):
    """bool [B, T]: which tokens count."""
    if call is None:
        return jnp.ones(x.shape[:-1], bool)
    return call.real(x.shape[0])


class Interceptor:
    """Adds adapters to the linear layers below a module; for `flax.linen.intercept_methods`.

    It also remembers which Call the layers around have been given, because linear layers are
    given none: that of the innermost call.

    Args:
      config: an `AdapterConfig`. path: that module's. mup_base: see `Adapter`.
    """

    def __init__(self, config, path, mup_base):
        self._config, self._path, self._mup_base = config, path, mup_base
        self._tokens = TokensOfCalls()

    def __call__(self, next_fun, args, kwargs, context):
        module = context.module
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        if isinstance(module, Linear):
            y = next_fun(*args, **kwargs)
            # Whoever watches the same calls may run layers of its own in between, as bridges do.
            size = len(self._path)
            below = module.path[:size] == self._path
            # Sites are named as of unrolled layers, which is how a model samples.
            path = first_of_scanned("/".join(module.path[size:]))
            if not (below and re.fullmatch(self._config.sites, path)):
                return y
            adapter = Adapter(
                self._config,
                module.features,
                module.axes,
                module.dtype,
                self._mup_base,
                name="adapter",
            )
            return y + adapter(args[0], self._tokens.of(module, args[0]))
        with self._tokens.told(args):
            return next_fun(*args, **kwargs)


class TokensOfCalls:
    """What the calls that a model is in are told about tokens, and which of it is of a linear layer
    that one of them calls."""

    def __init__(self):
        self._calls = []

    @contextlib.contextmanager
    def told(self, args):
        """Within a call with these arguments."""
        calls = [value for value in args if isinstance(value, Call)]
        contexts = [value[1] for value in args if _is_context(value)]
        if calls:
            self._calls.append((calls[0], *contexts))
        try:
            yield
        finally:
            if calls:
                self._calls.pop()

    def of(self, module, x_BTD):
        """The Call of what a linear layer maps; None outside of all such calls, and if it maps
        other tokens than the call is told about, as where tokens become latents."""
        if not self._calls:
            return None
        # Keys and values are made of the context, where attention is over other tokens.
        call = self._calls[-1][-1 if module.name in ("key", "value") else 0]
        return call if call.positions_BT.shape[-1] == x_BTD.shape[-2] else None


def _is_context(value):
    return isinstance(value, tuple) and len(value) > 1 and isinstance(value[1], Call)


@dataclasses.dataclass(frozen=True)
class Site:
    """One adapted linear layer: D to F for so many tokens of a sequence, which lie in rows of
    `length`: groups of latents have slots of their own."""

    path: str
    rows: int
    length: int
    width: int
    features: int

    def flops(self, c, selection, rows=None):
        """Of the adapters of a sequence; `rows` in place of the site's own."""
        experts = c.choices or 1
        tokens = self.rows
        if c.looks_ahead:
            tokens = self.rows // self.length * c.slots(self.length, selection)
        total = experts * flops.matmul(tokens, c.rank, self.width + self.features)
        if c.routing != "uniform" if c.experts else c.gate:
            total += flops.matmul(self.rows, self.width, experts)
        return total if rows is None else total * rows / self.rows
