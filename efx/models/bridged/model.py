"""CALM: a finished model that reads the layers of others through bridges, all of them frozen.

Composition to Augment Language Models (Bansal et al. 2024, arXiv 2401.02412, section 3): anchor m_B
and augmenting models m_A read the same tokens. At n evenly spaced pairs of layers (i of A, j of B)
    H_B,j <- H_B,j + CrossAttn(q = H_B,j, kv = H_A,i W_proj),
which layer j + 1 of B then reads. Only the bridges train. Their output projections start at zero,
so that the whole starts as the anchor. Query t sees the states of A at tokens <= t.

The members are models of any family whose layers are called one after another, `layers/block_<i>`,
each with a state for every token (latents have other times than the tokens that would read them);
an interceptor of method calls reads the states that leave the layers of A and adds to those that
leave the layers of B, so that no family knows of it. Of a family with two streams that is the last
one, the decoder's. Members run unrolled, nothing recomputed, as in evaluation.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from efx import flops, means
from efx.errors import UsageError
from efx.layers import norms
from efx.layers.attention import Attention
from efx.layers.call import Call
from efx.layers.config import AttentionConfig
from efx.layers.linear import Linear
from efx.models.language_model import LanguageModel
from efx.parameter import only_shapes
from efx.settings import replaced


class Bridge(nn.Module):
    """What one layer of the anchor gets from one layer of an augmenting model: [B, T, D]."""

    attention: AttentionConfig
    norm: str
    std: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, h_BTD, a_BTD, call):
        """h: the anchor's state, q; a: the other's, of its own width, k and v."""
        width = h_BTD.shape[-1]
        if self.norm != "none":
            options = dict(use_bias=True, eps=1e-5, dtype=self.dtype)
            h_BTD = norms.make_norm(self.norm, **options, name="norm_query")(h_BTD)
            a_BTD = norms.make_norm(self.norm, **options, name="norm_context")(a_BTD)
        project = Linear(width, ("embed", "table"), self.std, dtype=self.dtype, name="project")
        attention = Attention(
            config=self.attention,
            std=self.std,
            std_out=0.0,  # the anchor as it was, to begin with
            norm_eps=1e-5,
            probs_dropout=None,
            dtype=self.dtype,
            width=width,
            name="attention",
        )
        return attention(h_BTD, call, (project(a_BTD), None))


class Bridged(LanguageModel):
    """Tokens to logits; see `efx.models` for the contract and `BridgedConfig` for each knob.

    `anchor` and `augment` are the run folders that `anchor_model` and `augment_models` were made
    from; whoever builds the model reads those, and `efx.checkpoint.start_from` their parameters.
    """

    anchor_model: nn.Module = None
    augment_models: tuple = ()

    @classmethod
    def of(cls, members, config, vocab_size, dtype):
        """Of the anchor and those that augment it."""
        if len(members) != 1 + len(config.augment):
            raise UsageError(
                "config.model.family='bridged' needs run folders: config.model.anchor and "
                "config.model.augment"
            )
        check(config, members[0], members[1:])
        members = [_without_skips(member) for member in members]
        models = dict(anchor_model=members[0], augment_models=tuple(members[1:]))
        return cls(config, vocab_size, dtype, **models)

    @property
    def members(self):
        """See `Model.members`. The output layer of a model that augments another is not used."""
        augment = {f"augment_models_{i}": (m, "head/.*") for i, m in enumerate(self.augment_models)}
        return {"anchor_model": (self.anchor_model, "")} | augment

    def setup(self):
        c = self.config
        attention = c.attention(self.anchor_model.config.width)
        # bridges_<a * pairs + k>: of augmenting model a at pair k.
        self.bridges = [
            Bridge(attention, c.norm, c.init_std, self.dtype)
            for _ in range(len(self.augment_models) * c.pairs)
        ]

    def features(
        self,
        tokens_BT,
        positions_BT=None,
        segment_ids_BT=None,
        train=False,
        decode=False,
        cache_size=0,
    ):
        """The anchor's normalised state [B, T, D]; see `Model.features`, but that
        `train` changes nothing: the members are what they are in evaluation."""
        arguments = tokens_BT, positions_BT, segment_ids_BT, False, decode, cache_size
        read = []  # [augmenting model][pair]
        for model in self.augment_models:
            states = {}
            layers = nn.intercept_methods(_AtLayers(model.path, states.__setitem__))
            with layers, means.without_losses():
                model.features(*arguments)
            read.append([states[i][0] for i in spaced(self.config.pairs, depth_of(model))])
        places = spaced(self.config.pairs, depth_of(self.anchor_model))

        def add(layer, state):
            if layer not in places:
                return None
            h_BTD, call = state
            pair = places.index(layer)
            delta_BTD = jnp.zeros_like(h_BTD)
            for a, states in enumerate(read):
                bridge = self.bridges[a * self.config.pairs + pair]
                delta_BTD = delta_BTD + bridge(h_BTD, states[pair], call)
            return h_BTD + delta_BTD

        # Bridges learn by the cross-entropy alone. Through the anchor they would by what its
        # routers and masks were trained by, too.
        layers = nn.intercept_methods(_AtLayers(self.anchor_model.path, add))
        with layers, means.without_losses():
            return self.anchor_model.features(*arguments)

    def logits(self, x):
        """The anchor's."""
        return self.anchor_model.logits(x)

    @nn.nowrap
    def head_params(self, params):
        return self.anchor_model.head_params(params["anchor_model"])

    @nn.nowrap
    def sum_head_gradients(self, gradients):
        return self.anchor_model.sum_head_gradients(gradients)

    @nn.nowrap
    def head_fn(self, head_params, x_ND):
        return self.anchor_model.head_fn(head_params, x_ND)

    @nn.nowrap
    def specs(self):
        """None that decide anything of their own: the members' layers are the members'."""
        return ()

    @nn.nowrap
    def ledger(self, length, selection="train", shares=None):
        """Nominal FLOPs of one sequence, see `flops.Ledger`; members compute what they do in
        evaluation.

        Training costs less than three times as much: frozen parameters need no gradients."""
        c, width = self.config, self.anchor_model.config.width
        pairs = flops.causal_pairs(length, c.window)
        parts = [self.anchor_model.ledger(length, "causal").nominal]
        for model in self.augment_models:
            parts.append({**model.ledger(length, "causal").nominal, "head": 0})
            bridge = flops.matmul(length, model.config.width, width)
            bridge += 4 * flops.matmul(length, width, width)
            scores = flops.attention_scores(pairs, c.num_heads, width // c.num_heads)
            parts += [{"bridges": bridge, "attention_scores": scores}] * c.pairs
        return flops.Ledger(length, flops.add(parts))


def _without_skips(member):
    """The member with all tokens in its MLPs: to compute the open ones alone changes no result, but
    has no gradient, and that of the bridges goes through members."""
    if not member.config.dropout.skips:
        return member
    return member.clone(config=replaced(member.config, {"dropout.attention.skip_tile": 0}))


def depth_of(model):
    """How many layers there are to bridge."""
    return len(model.specs())


def spaced(pairs, depth):
    """Layers (from 0), `pairs` of them, after which a bridge stands; the last is always one."""
    return [-(-(k + 1) * depth // pairs) - 1 for k in range(pairs)]


class _AtLayers:
    """Interceptor that shows what leaves each layer of a member to `visit(layer, (x, call))`, and
    puts what that returns, unless None, in its place."""

    def __init__(self, path, visit):
        self._start, self._visit, self._inside = path, visit, False

    def __call__(self, next_fun, args, kwargs, context):
        if context.method_name != "__call__":
            return next_fun(*args, **kwargs)
        path, size = context.module.path, len(self._start)
        below = path[size:]
        # A layer shares its scope with the block in it: the outer call is the layer's.
        layer = len(below) == 2 and below[0] == "layers" and below[1].startswith("block_")
        if path[:size] != self._start or not layer or self._inside:
            return next_fun(*args, **kwargs)
        self._inside = True
        try:
            out = next_fun(*args, **kwargs)
        finally:
            self._inside = False
        call = next(value for value in args if isinstance(value, Call))
        streams = out if isinstance(out, tuple) else (out,)
        new = self._visit(int(below[1].removeprefix("block_")), (streams[-1], call))
        if new is None:
            return out
        return (*streams[:-1], new) if isinstance(out, tuple) else new


def check(c, anchor_model, augment_models):
    """UsageError unless a resolved `BridgedConfig` and the models of its runs go together."""
    members = [("anchor", c.anchor, anchor_model)]
    members += [("augment", *pair) for pair in zip(c.augment, augment_models, strict=True)]
    for key, run, model in members:
        if model.members:
            raise UsageError(
                f"config.model.{key}={run}: this run is itself made of other "
                "runs; use a run of one model"
            )
    width = anchor_model.config.width
    if width % c.num_heads:
        raise UsageError(
            f"config.model.num_heads={c.num_heads}: the anchor's width of {width} is not "
            "divisible by it"
        )
    for key, run, model in members:
        if model.context < c.context:
            raise UsageError(
                f"config.model.{key}={run}: its context is {model.context} tokens, less than "
                f"{c.context} here; lower config.data.seq_len"
            )
        if not _has_layers(model):
            raise UsageError(
                f"config.model.{key}={run}: a {type(model).__name__} cannot have bridges, "
                "because its layers do not run once each, one after another, with a state for "
                "each token"
            )
        if not 1 <= c.pairs <= depth_of(model):
            raise UsageError(
                f"config.model.pairs={c.pairs}: must be from 1 to {depth_of(model)}, the layers of "
                f"config.model.{key}={run}"
            )


@functools.lru_cache(maxsize=64)
def _has_layers(model):
    """Whether every layer is called exactly once and gives a state for each token."""

    def seen(length):
        """[(layer, rank of its state, its tokens)] in the order of the calls."""
        shapes = []

        def visit(layer, state):
            shapes.append((layer, state[0].ndim, state[0].shape[1]))

        def run(key):
            tokens_BT = jnp.zeros((1, length), jnp.int32)
            with nn.intercept_methods(_AtLayers((), visit)):
                return model.init({"params": key, "dropout": key, "routing": key}, tokens_BT)

        with only_shapes():
            jax.eval_shape(run, jax.random.key(0))
        return shapes

    # Two lengths, since the latents of a group may be as many as the tokens of one of them.
    layers = range(depth_of(model))
    return all(seen(length) == [(i, 3, length) for i in layers] for length in (1, 2))
