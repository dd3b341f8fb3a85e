"""Mixture-of-Depths and Mixture-of-Experts decoders of efx in PyTorch.

    tokenizer = AutoTokenizer.from_pretrained(PATH)
    model = AutoModelForCausalLM.from_pretrained(PATH, trust_remote_code=True)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))

Needs PyTorch and transformers>=4.57.1,<6. Works with transformers' Trainer and TRL.

Mixture-of-Depths (Raposo et al. 2024, arXiv 2404.02258): a routed block computes only the tokens
that its router selects, at their original positions, and caches only their keys and values. The
selection is causal, in training too: top-k, by which efx trains, looks ahead, so it would tune
another model than the one that `generate` runs. Routers learn through their gates, thresholds are
fixed, and no auxiliary loss is added.

Logits do not depend on later tokens, on padding, on other rows or documents, or on the chunks of a
prompt.

Suffixes of names are axes: B rows, T tokens, S keys, C selected tokens, D width, N heads, H head
width, E experts, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

# Name of the cache in arguments and outputs: transformers 5.24 renamed it.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"
GATES = {
    "identity": lambda score: score,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "twice_sigmoid": lambda score: 2 * torch.sigmoid(score),
    "one": torch.ones_like,
}


class EfxConfig(PretrainedConfig):
    model_type = "efx"
    keys_to_ignore_at_inference = [CACHE]

    vocab_size = 257
    hidden_size = 128
    intermediate_size = 512
    num_hidden_layers = 4
    num_attention_heads = 4
    num_key_value_heads = 4
    head_dim = 32
    max_position_embeddings = 256
    tie_word_embeddings = False
    use_cache = True
    # "pre_norm": y = x + attention(norm(x)), y + mlp(norm(y)); "post_norm": y = x +
    # norm(attention(x)), y + norm(mlp(y)); "parallel": x + attention(norm(x)) + mlp(norm(x)).
    block_kind = "pre_norm"
    hidden_act = "swiglu"  # or "gelu", "gelu_tanh"
    norm = "rmsnorm"  # or "layernorm"
    norm_eps = 1e-5
    use_bias = False  # in MLPs and layer norms
    attention_bias = "none"  # or "qkv", "all"
    qk_norm = "none"  # RMS norm of queries and keys over a "head", or over the "width"
    attention_scale = 32**-0.5
    attention_window = 0  # positions that a query attends to, its own included; 0: all
    positions = "rope"  # or "learned", "none"
    rope = None  # {"theta", "size": rotated features, "kind": "none", "linear" or "llama3", ...}
    logit_scale = 1.0
    logit_softcap = 0.0  # 0: none
    # A dict for each block: {"rope": bool, "experts": bool, "capacity": fraction of the tokens that
    # it computes, None if it is not routed}
    blocks = ()
    routing = None  # of routed blocks: see `EfxRoutedBlock`
    moe = None  # of blocks with experts: see `EfxMoE`


# ---- tokens and their cache ----------------------------------------------------------------------


def compact(mask_BT, least=0):
    """(indices of the True entries of each row [B, C], mask of the used slots [B, C]); C is at
    least `least`."""
    slots = max(least, int(mask_BT.sum(dim=1).max()))
    index_BC = torch.argsort((~mask_BT).int(), dim=1, stable=True)[:, :slots]
    return index_BC, mask_BT.gather(1, index_BC)


def in_float32(linear, x):
    """A linear layer without bias, in float32 under autocast, too."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), linear.weight.float())


def take(x, index_BC):
    """Entries of x [B, T, ...] at these indices: [B, C, ...]."""
    return x[torch.arange(len(x), device=x.device)[:, None], index_BC]


class EfxCache:
    """KV cache, used like transformers' `Cache`. Each layer caches the tokens that it computes."""

    is_compileable, is_linear = False, (False,)  # read by `generate`

    def __init__(self):
        self.attention_mask = None  # [B, S] of all tokens read
        self.entries = {}  # {layer: (places [B, S], -1 in unused slots; keys; values)}
        self.admitted = {}  # {(layer, expert or None): tokens admitted so far [B, 1]}

    def update(self, layer_idx, places_BT, k_BTKH, v_BTKH):
        """Append new tokens. Returns: (places, keys, values) of all cached tokens of the layer."""
        entry = places_BT, k_BTKH, v_BTKH
        if layer_idx in self.entries:
            pairs = zip(self.entries[layer_idx], entry, strict=True)
            entry = tuple(torch.cat(pair, dim=1) for pair in pairs)
        if bool((places_BT < 0).any()):
            index_BS, is_used_BS = compact(entry[0] >= 0)
            places_BS, k_BSKH, v_BSKH = (take(x, index_BS) for x in entry)
            entry = places_BS.masked_fill(~is_used_BS, -1), k_BSKH, v_BSKH
        self.entries[layer_idx] = entry
        return entry

    def get_seq_length(self, layer_idx=0):
        return 0 if self.attention_mask is None else self.attention_mask.shape[1]

    def reorder_cache(self, beam_idx):
        """Select rows, as beam search does; rows may repeat."""
        self.attention_mask = self.attention_mask[beam_idx]
        self.admitted = {key: count_B1[beam_idx] for key, count_B1 in self.admitted.items()}
        self.entries = {i: tuple(x[beam_idx] for x in entry) for i, entry in self.entries.items()}


@dataclass
class Tokens:
    """The tokens that reach a layer."""

    places_BT: torch.Tensor  # order in the row; -1 for padding and unused slots
    positions_BT: torch.Tensor  # in the document; equal to the place in rows that are not packed
    counts_BT: torch.Tensor  # tokens of the document, up to this one, that reach the layer
    cache: EfxCache | None

    @property
    def starts_BT(self):
        """Place of the first token of each token's document."""
        return self.places_BT - self.positions_BT

    def attention_mask(self, key_places_BS, window):
        """bool [B, 1, T, S]: whether a query sees a key, an earlier token of its document."""
        query_BT1, key_B1S = self.places_BT[:, :, None], key_places_BS[:, None]
        first_BT1 = self.starts_BT[:, :, None]
        if window:
            first_BT1 = torch.maximum(first_BT1, query_BT1 - window + 1)
        is_seen_BTS = (key_B1S >= 0) & (key_B1S <= query_BT1) & (key_B1S >= first_BT1)
        # Padding sees all keys, because the softmax over none is not a number.
        return (is_seen_BTS | (query_BT1 < 0))[:, None]

    def running_count(self, mask_BT):
        """Number of True entries in the token's document, up to this token."""
        count_BT = mask_BT.cumsum(dim=1)
        is_start_BT = self.starts_BT != F.pad(self.starts_BT, (1, 0), value=-1)[:, :-1]
        before_BT = (count_BT - mask_BT.long()).masked_fill(~is_start_BT, 0)
        return count_BT - before_BT.cummax(dim=1).values

    def admit(self, selected_BT, rate, key):
        """Admit at most ceil(rate * n) + 4 of the first n tokens of a document, the earlier first.

        With W_t selected tokens up to t and the limit R_t, max(0, max_{s <= t} (W_s - R_s)) tokens
        are refused up to t. The cache counts admitted tokens under `key`. Returns: (mask of the
        admitted tokens, their running count).
        """
        selected_BT = selected_BT & (self.places_BT >= 0)
        before_B1 = 0 if self.cache is None else self.cache.admitted.get(key, 0)
        admitted_BT = selected_BT
        if rate < 1:
            # Without the margin float32 would turn 0.07 * 100 into 8.
            limit_BT = torch.ceil(rate * self.counts_BT.float() - 1e-3).long() + 4
            excess_BT = self.running_count(selected_BT) + before_B1 - limit_BT
            excess_BT = excess_BT.clamp(min=0).masked_fill(~selected_BT, 0)
            # Larger than any excess, so that the maximum starts again in each document.
            offset_BT = self.starts_BT * (selected_BT.shape[1] + 1)
            refused_BT = (excess_BT + offset_BT).cummax(dim=1).values
            earlier_BT = torch.maximum(F.pad(refused_BT, (1, 0))[:, :-1], offset_BT)
            admitted_BT = selected_BT & (refused_BT == earlier_BT)
        if self.cache is not None:
            self.cache.admitted[key] = before_B1 + admitted_BT.sum(dim=1, keepdim=True)
        return admitted_BT, before_B1 + self.running_count(admitted_BT)


# ---- layers --------------------------------------------------------------------------------------


def make_norm(config):
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.use_bias)


def apply_rotary(x_BTNH, positions_BT, rope):
    """Rotate the first `size` features of each head (Su et al. 2021, arXiv 2104.09864)."""
    half = rope["size"] // 2
    frequency = rope["theta"] ** -(torch.arange(half, device=x_BTNH.device).float() / half)
    if rope["kind"] == "linear":
        frequency = frequency / rope["factor"]
    elif rope["kind"] == "llama3":  # scales low frequencies only
        turns = rope["original_context"] * frequency / (2 * math.pi)
        low, high = rope["low_frequency_factor"], rope["high_frequency_factor"]
        unscaled = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (unscaled + (1 - unscaled) / rope["factor"])
    angle = positions_BT[:, :, None, None].float() * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b, unrotated = x_BTNH.float().split([half, half, x_BTNH.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, unrotated], dim=-1).to(x_BTNH.dtype)


class EfxAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.rope = config.rope if config.blocks[layer_idx]["rope"] else None
        width, bias = config.hidden_size, config.attention_bias
        q_width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, q_width, bias=bias != "none")
        self.k_proj = nn.Linear(width, kv_width, bias=bias != "none")
        self.v_proj = nn.Linear(width, kv_width, bias=bias != "none")
        self.o_proj = nn.Linear(q_width, width, bias=bias == "all")
        if config.qk_norm != "none":
            per_head = config.qk_norm == "head"
            self.q_norm = nn.RMSNorm(config.head_dim if per_head else q_width, config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim if per_head else kv_width, config.norm_eps)

    def forward(self, x_BTD, tokens, context=None):
        """`context` = (input [B, S, D], its tokens): attend to these instead of to x."""
        c = self.config
        context_BSD, context_tokens = context or (x_BTD, tokens)
        q, k, v = self.q_proj(x_BTD), self.k_proj(context_BSD), self.v_proj(context_BSD)
        if c.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, c.head_dim)) for y in (q, k, v))
        if c.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q = apply_rotary(q, tokens.positions_BT, self.rope)
            k = apply_rotary(k, context_tokens.positions_BT, self.rope)
        places_BS = context_tokens.places_BT
        if tokens.cache is not None:
            places_BS, k, v = tokens.cache.update(self.layer_idx, places_BS, k, v)
        groups = c.num_attention_heads // c.num_key_value_heads
        k, v = (y.repeat_interleave(groups, dim=2) for y in (k, v))
        out_BNTH = F.scaled_dot_product_attention(
            *(y.transpose(1, 2) for y in (q, k, v)),
            attn_mask=tokens.attention_mask(places_BS, c.attention_window),
            scale=c.attention_scale,
        )
        return self.o_proj(out_BNTH.transpose(1, 2).flatten(2))


class EfxMLP(nn.Module):
    def __init__(self, config, hidden):
        super().__init__()
        self.hidden_act, bias = config.hidden_act, config.use_bias
        if self.hidden_act == "swiglu":
            self.gate_proj = nn.Linear(config.hidden_size, hidden, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, config.hidden_size, bias=bias)

    def forward(self, x, tokens=None):
        h = self.up_proj(x)
        if self.hidden_act == "swiglu":
            return self.down_proj(F.silu(self.gate_proj(x)) * h)
        approximate = "tanh" if self.hidden_act == "gelu_tanh" else "none"
        return self.down_proj(F.gelu(h, approximate=approximate))


class EfxMoE(nn.Module):
    """Token-choice Mixture-of-Experts (Shazeer et al. 2017, arXiv 1701.06538).

    A token goes to the `top_k` experts of the largest probability; with `renormalise` their weights
    sum to 1. An expert of width `expert_hidden` computes its tokens up to the causal limit of
    `Tokens.admit` at `rate`. The last `num_noop` choices of the router add nothing. All tokens pass
    `num_shared` further experts.
    """

    def __init__(self, config, layer_idx):
        super().__init__()
        self.moe, self.layer_idx = config.moe, layer_idx
        count, hidden = self.moe["num_experts"], self.moe["expert_hidden"]
        self.router = nn.Linear(config.hidden_size, count + self.moe["num_noop"], bias=False)
        self.experts = nn.ModuleList(EfxMLP(config, hidden) for _ in range(count))
        self.shared = None
        if self.moe["num_shared"]:
            self.shared = EfxMLP(config, self.moe["num_shared"] * hidden)

    def forward(self, x_BTD, tokens):
        logits_BTE = in_float32(self.router, x_BTD)
        best = logits_BTE.argsort(dim=-1, descending=True, stable=True)[..., : self.moe["top_k"]]
        selected_BTE = torch.zeros_like(logits_BTE, dtype=torch.bool).scatter(-1, best, True)
        weight_BTE = logits_BTE.softmax(dim=-1) * selected_BTE
        if self.moe["renormalise"]:
            weight_BTE = weight_BTE / weight_BTE.sum(dim=-1, keepdim=True)
        y_BTD = torch.zeros_like(x_BTD) if self.shared is None else self.shared(x_BTD)
        for i, expert in enumerate(self.experts):
            key, selected_BT = (self.layer_idx, i), selected_BTE[..., i]
            index = tokens.admit(selected_BT, self.moe["rate"], key)[0].nonzero(as_tuple=True)
            y = expert(x_BTD[index]) * weight_BTE[..., i][index][:, None]
            y_BTD = y_BTD.index_put(index, y.to(y_BTD.dtype), accumulate=True)
        return y_BTD


class EfxBlock(GradientCheckpointingLayer):
    """x + attention + MLP."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.kind, self.layer_idx = config.block_kind, layer_idx
        self.input_layernorm = make_norm(config)
        self.self_attn = EfxAttention(config, layer_idx)
        self.post_attention_layernorm = make_norm(config)
        is_moe, hidden = config.blocks[layer_idx]["experts"], config.intermediate_size
        self.mlp = EfxMoE(config, layer_idx) if is_moe else EfxMLP(config, hidden)

    def forward(self, x_BTD, tokens):
        return x_BTD + self.increment(x_BTD, tokens)

    def increment(self, x_BTD, tokens, context=None):
        """`context` = (states [B, S, D], their tokens): attend to these instead of to x."""
        norm_attention, norm_mlp = self.input_layernorm, self.post_attention_layernorm
        if self.kind == "post_norm":
            a_BTD = norm_attention(self.self_attn(x_BTD, tokens, context))
            return a_BTD + norm_mlp(self.mlp(x_BTD + a_BTD, tokens))
        if context is not None:
            context = norm_attention(context[0]), context[1]
        a_BTD = self.self_attn(norm_attention(x_BTD), tokens, context)
        mlp_in_BTD = x_BTD if self.kind == "parallel" else x_BTD + a_BTD
        return a_BTD + self.mlp(norm_mlp(mlp_in_BTD), tokens)


class EfxRoutedBlock(EfxBlock):
    """Mixture-of-Depths: x + gate(r) * increment for selected tokens, x for all others.

    `config.routing` has
      decision: a token is selected if r > 0 ("aux_loss"), r > a quantile of the scores in efx's
        training ("threshold"), or by a network of width `predictor_hidden` ("predictor").
      slack: the rate of `Tokens.admit` is slack times the block's capacity.
      router_norm: of the router's input, "none" or "rms". gate: of `GATES`.
      kv_for_skipped: selected tokens attend to all tokens, not only to selected ones.
    """

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.routing, width = config.routing, config.hidden_size
        self.rate = min(1.0, config.blocks[layer_idx]["capacity"] * self.routing["slack"])
        self.router = nn.Linear(width, 1, bias=False)
        has_norm = self.routing["router_norm"] == "rms"
        self.router_norm = nn.RMSNorm(width, config.norm_eps) if has_norm else nn.Identity()
        if self.routing["decision"] == "threshold":
            self.register_buffer("threshold", torch.zeros(()))
        if self.routing["decision"] == "predictor":
            hidden = self.routing["predictor_hidden"]
            first, last = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, 1, bias=False)
            self.predictor = nn.Sequential(first, nn.SiLU(), last)

    def forward(self, x_BTD, tokens):
        router_in_BTD = self.router_norm(x_BTD.float())
        score_BT = in_float32(self.router, router_in_BTD)[..., 0]
        logit_BT = score_BT
        if self.routing["decision"] == "threshold":
            logit_BT = score_BT - self.threshold
        elif self.routing["decision"] == "predictor":
            first, activation, last = self.predictor
            logit_BT = in_float32(last, activation(in_float32(first, router_in_BTD)))[..., 0]
        admitted_BT, count_BT = tokens.admit(logit_BT > 0, self.rate, (self.layer_idx, None))
        # At least one slot in training, so that all parameters have gradients, as
        # DistributedDataParallel requires, and where skipped tokens write keys and values.
        needs_slot = torch.is_grad_enabled() or self.routing["kv_for_skipped"]
        index_BC, is_used_BC = compact(admitted_BT, least=int(needs_slot))
        if index_BC.shape[1] == 0:
            return x_BTD
        places_BC = take(tokens.places_BT, index_BC).masked_fill(~is_used_BC, -1)
        positions_BC, count_BC = take(tokens.positions_BT, index_BC), take(count_BT, index_BC)
        selected = Tokens(places_BC, positions_BC, count_BC, tokens.cache)
        context = (x_BTD, tokens) if self.routing["kv_for_skipped"] else None
        delta_BCD = self.increment(take(x_BTD, index_BC), selected, context)
        gate_BC = GATES[self.routing["gate"]](take(score_BT, index_BC)) * is_used_BC
        gate_BC = gate_BC + 0 * take(logit_BT, index_BC)  # a gradient of 0 for the decision
        delta_BCD = (delta_BCD * gate_BC[..., None]).to(x_BTD.dtype)
        return x_BTD.scatter_add(1, index_BC[..., None].expand_as(delta_BCD), delta_BCD)


# ---- the model -----------------------------------------------------------------------------------


class EfxModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = None
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(
            (EfxBlock if block["capacity"] is None else EfxRoutedBlock)(config, i)
            for i, block in enumerate(config.blocks)
        )
        self.norm = make_norm(config)

    def forward(self, x_BTD, tokens, output_hidden_states=False):
        """Features [B, T, D], and None or a tuple: the embeddings, the output of each block but
        the last, and the features."""
        if self.embed_positions is not None:
            x_BTD = x_BTD + self.embed_positions(tokens.positions_BT.clamp(min=0))
        states = []
        for layer in self.layers:
            if output_hidden_states:
                states.append(x_BTD)
            x_BTD = layer(x_BTD, tokens)
        x_BTD = self.norm(x_BTD)
        return x_BTD, (*states, x_BTD) if output_hidden_states else None


class EfxForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = EfxConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EfxBlock", "EfxRoutedBlock"]
    _supports_sdpa = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _is_stateful = True  # refuses assisted generation, which removes tokens from the cache

    def __init__(self, config):
        super().__init__(config)
        self.model = EfxModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args):
        """Let `generate` hold an `EfxCache` from the start."""
        if generation_config.use_cache is not False and model_kwargs.get(CACHE) is None:
            model_kwargs[CACHE] = EfxCache()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        output_hidden_states=None,
        output_attentions=None,
        cache=None,
        **kwargs,
    ):
        """Logits [B, T, V] in float32, the cache, the hidden states if they are requested, and the
        loss if there are labels.

        Args:
          attention_mask: [B, S] of cached and new tokens; 0 for padding, on either side.
          position_ids: [B, T] or [1, T]. Where they restart a row packs independent documents; such
            rows are not cached.
          use_cache: None: `config.use_cache`, but not in training and not for packed rows.
          logits_to_keep: number of last tokens, or indices of tokens; 0: all.
          cache: another name of `past_key_values`.
          kwargs: of transformers' loss, such as `num_items_in_batch`, the number of labels by which
            the sum of the losses is divided; without it, those of this batch.
        """
        if output_attentions or self.config.output_attentions:
            raise ValueError("output_attentions=True: not supported; leave it out")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        cache = past_key_values if cache is None else cache
        x_BTD = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        tokens = self.tokens(x_BTD, attention_mask, position_ids, cache, use_cache)
        x_BTD, states = self.model(x_BTD, tokens, output_hidden_states)
        if isinstance(logits_to_keep, int):
            logits_to_keep = slice(-logits_to_keep, None)
        logits_BTV = self.lm_head(x_BTD[:, logits_to_keep]).float() * self.config.logit_scale
        cap = self.config.logit_softcap
        if cap:
            logits_BTV = cap * torch.tanh(logits_BTV / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits_BTV, labels, self.config.vocab_size, **kwargs)
        outputs = dict(loss=loss, logits=logits_BTV, hidden_states=states)
        return CausalLMOutputWithPast(**outputs, **{CACHE: tokens.cache})

    def tokens(self, x_BTD, attention_mask, position_ids, cache, use_cache):
        """The `Tokens` of these embeddings; arguments as of `forward`."""
        if not isinstance(cache, EfxCache):  # an empty cache of transformers is replaced
            if cache is not None and cache.get_seq_length():
                raise ValueError(f"past_key_values={type(cache).__name__}: pass an EfxCache")
            cache = None
        mask_BS = x_BTD.new_ones(x_BTD.shape[:2], dtype=torch.long)
        if cache is not None and cache.attention_mask is not None:
            mask_BS = torch.cat([cache.attention_mask, mask_BS], dim=1)
        if attention_mask is not None:
            if attention_mask.shape != mask_BS.shape:
                shape, expected = [*attention_mask.shape], [*mask_BS.shape]
                raise ValueError(f"attention_mask has shape {shape}; expected {expected}")
            mask_BS = attention_mask.long()
        places_BT = (mask_BS.cumsum(dim=1) - 1).masked_fill(mask_BS == 0, -1)[:, -x_BTD.shape[1] :]
        positions_BT = places_BT if position_ids is None else position_ids.expand_as(places_BT)
        positions_BT = positions_BT.masked_fill(places_BT < 0, -1)
        is_packed = not torch.equal(positions_BT, places_BT)
        if is_packed and (use_cache or cache is not None):
            raise ValueError("position_ids restart: pass packed rows with use_cache=False")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not is_packed
        # Under gradient checkpointing the backward pass would append the tokens again.
        if cache is None and use_cache and not (self.training and self.is_gradient_checkpointing):
            cache = EfxCache()
        if cache is not None:
            cache.attention_mask = mask_BS
        return Tokens(places_BT, positions_BT, positions_BT + 1, cache)
