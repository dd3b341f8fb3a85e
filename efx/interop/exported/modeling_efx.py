"""A language model of efx in PyTorch: Mixture of Depths, Mixture of Experts, learned dropout.

    tokenizer = AutoTokenizer.from_pretrained(PATH, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(PATH, trust_remote_code=True)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))

The file needs PyTorch and transformers>=4.57.1,<6 and nothing else. It computes what efx computes
when it evaluates and samples: nothing depends on later tokens.

A routed block (Raposo et al. 2024, arXiv 2404.02258) computes only the tokens that its router
selects, each with its own position, and its cache keeps only their keys and values. Of the first n
tokens a routed block or an expert computes at most ceil(rate * n) + 4, so a token has the same
logits in a short text as in a long one, with a cache as without. In a row of packed documents,
where `position_ids` restart at each document, n counts the tokens of the document.

Names of arrays end in their axes: B rows, T tokens, S keys, C tokens that a block computes, D
width, N heads, K heads of keys and values, H width of a head, E experts, R rotary frequencies.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

MASKED = -1e30
HEADROOM = 4  # tokens that a causal limit allows beyond its rate
GATES = {
    "identity": lambda score: score,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "twice_sigmoid": lambda score: 2.0 * torch.sigmoid(score),
    "one": torch.ones_like,
}


class EfxConfig(PretrainedConfig):
    """The contents of config.json.

    Args:
      block_kind: how attention A and MLP M make a block, which adds to its input x
        "pre_norm" a + M(norm(x + a)), a = A(norm x); "post_norm" a + norm(M(x + a)),
        a = norm(A(x)); "parallel" A(norm x) + M(norm x).
      hidden_act: "gelu", "gelu_tanh" or "swiglu".
      use_bias: in norms and MLPs. attention_bias: "none", "qkv" or "all".
      qk_norm: RMS norm of queries and keys over each "head", over the "width", or "none".
      attention_scale: factor on the scores. attention_window: positions that a query attends to,
        its own included; 0: all. attention_softcap, logit_softcap: x <- cap tanh(x / cap); 0: off.
      positions: "rope", "learned" or "none".
      rope: base `theta`, `size` of the rotated part of a head, `kind` of scaling, its numbers.
      blocks: of each block whether it has `rope` and `experts`, and its `capacity`, the
        fraction of a sequence that it computes; None: it is not routed.
      routing: of routed blocks. moe: of blocks with experts. masks: learned dropout. None: none.
    """

    model_type = "efx"

    def __init__(
        self,
        vocab_size=257,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        block_kind="pre_norm",
        hidden_act="gelu",
        norm="layernorm",
        norm_eps=1e-5,
        use_bias=False,
        attention_bias="none",
        qk_norm="none",
        attention_scale=1.0,
        attention_window=0,
        attention_softcap=0.0,
        positions="learned",
        rope=None,
        logit_scale=1.0,
        logit_softcap=0.0,
        blocks=(),
        routing=None,
        moe=None,
        masks=None,
        use_cache=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.block_kind = block_kind
        self.hidden_act = hidden_act
        self.norm = norm
        self.norm_eps = norm_eps
        self.use_bias = use_bias
        self.attention_bias = attention_bias
        self.qk_norm = qk_norm
        self.attention_scale = attention_scale
        self.attention_window = attention_window
        self.attention_softcap = attention_softcap
        self.positions = positions
        self.rope = rope
        self.logit_scale = logit_scale
        self.logit_softcap = logit_softcap
        self.blocks = blocks
        self.routing = routing
        self.moe = moe
        self.masks = masks
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


# ---- selected tokens ------------------------------------------------------------------------


def compact(selected_BT):
    """(indices [B, C] of the selected entries in order, mask [B, C] of the used slots). C is the
    largest number in a row."""
    slots = int(selected_BT.sum(dim=1).max())
    index_BC = torch.argsort((~selected_BT).int(), dim=1, stable=True)[:, :slots]
    return index_BC, selected_BT.gather(1, index_BC)


def take(x_BT, index_BC):
    """Entries of x [B, T, ...] at these indices, [B, C, ...]."""
    return x_BT.gather(1, _wide(index_BC, x_BT))


def add(x_BTD, index_BC, y_BCD):
    """x with y added at these indices."""
    return x_BTD.scatter_add(1, _wide(index_BC, x_BTD), y_BCD.to(x_BTD.dtype))


def _wide(index_BC, x):
    """index [B, C] with trailing axes broadcast to those of x."""
    return index_BC.reshape(*index_BC.shape, *(1,) * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])


class EfxCache:
    """KV cache with the interface of transformers' `Cache`.

    Every attention has its own keys, values and positions: in a routed block those of the tokens
    that it computed. Padding is not stored. Keys are names of modules such as "layers.1.attention",
    so that a copy of the cache serves the same model.
    """

    is_compileable = False  # `generate` reads it
    is_croppable = False

    def __init__(self):
        self.length = 0  # columns of the input that were read, padding included
        self.next_B1 = torch.zeros(1, 1, dtype=torch.long)  # position of each row's next token
        self.entries = {}  # {name of an attention: (positions [B, S], keys, values)}
        self.admitted = {}  # {name of a routed block or of experts: computed tokens, [B, 1, ...]}

    def advance(self, positions_BT):
        """Count new tokens at these positions, -1 for padding."""
        self.length += positions_BT.shape[1]
        last_B1 = positions_BT.amax(dim=1, keepdim=True)
        self.next_B1 = torch.maximum(last_B1 + 1, self.next_B1.to(last_B1.device))

    def extend(self, attention, positions_BT, *new):
        """Append new tokens to the entries of an attention. Returns all of them."""
        name, arrays = attention.cache_key, (positions_BT, *new)
        if name in self.entries:
            pairs = zip(self.entries[name], arrays, strict=True)
            arrays = tuple(torch.cat(pair, dim=1) for pair in pairs)
        if bool((arrays[0] < 0).any()):  # remove padding
            index_BS, is_real_BS = compact(arrays[0] >= 0)
            positions_BS, *rest = (take(y, index_BS) for y in arrays)
            arrays = (positions_BS.masked_fill(~is_real_BS, -1), *rest)
        self.entries[name] = arrays
        return arrays

    def get_seq_length(self, layer_idx=0):
        return self.length

    def reorder_cache(self, beam_idx):
        """Select rows, as beam search does."""
        self._change_rows(lambda array: array.index_select(0, beam_idx.to(array.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats):
        """Repeat each row so many times."""
        self._change_rows(lambda array: array.repeat_interleave(repeats, dim=0))

    def _change_rows(self, change):
        if self.length:
            self.next_B1 = change(self.next_B1)
        self.admitted = {name: change(count) for name, count in self.admitted.items()}
        self.entries = {name: tuple(map(change, arrays)) for name, arrays in self.entries.items()}

    def reset(self):
        """Forget all tokens."""
        self.__init__()

    def crop(self, *_):
        """Raises: NotImplementedError: routed blocks and experts do not record when they computed
        how many tokens."""
        raise NotImplementedError(
            "EfxCache.crop: this cache cannot forget tokens; copy.deepcopy it before they are read"
        )


def documents_of(positions_BT):
    """int [B, T]: number of each token's document in a packed row. A document begins where a
    position does not follow the previous one."""
    is_real_BT = positions_BT >= 0
    before_BT = F.pad(positions_BT.masked_fill(~is_real_BT, -2), (1, 0), value=-2)[:, :-1]
    return (is_real_BT & (positions_BT != before_BT + 1)).cumsum(dim=1)


class Tokens(NamedTuple):
    """The tokens of an activation.

    Attributes:
      positions_BT: positions in the text; -1 for padding and unused slots.
      cache: an `EfxCache`, or None.
      document_BT: number of each token's document in packed rows (which have no cache), or None.
      count_BT: number of tokens of the document up to and including this one that reach the
        layer; None: positions + 1.
      mask_input_BTD: input of learned dropout in place of the activations, or None.
    """

    positions_BT: torch.Tensor
    cache: EfxCache | None
    document_BT: Any = None
    count_BT: Any = None
    mask_input_BTD: Any = None

    def take(self, index_BC, is_real_BC):
        """The tokens at these indices."""
        document_BC, count_BC, mask_input_BCD = (
            None if y is None else take(y, index_BC)
            for y in (self.document_BT, self.count_BT, self.mask_input_BTD)
        )
        positions_BC = take(self.positions_BT, index_BC).masked_fill(~is_real_BC, -1)
        return Tokens(positions_BC, self.cache, document_BC, count_BC, mask_input_BCD)

    def with_cached(self, attention, k_BTKH, v_BTKH):
        """(positions, keys, values) of the tokens in the cache of an attention and these ones."""
        if self.cache is None:
            return self.positions_BT, k_BTKH, v_BTKH
        return self.cache.extend(attention, self.positions_BT, k_BTKH, v_BTKH)

    def same_document(self, others):
        """bool [B, T, S]: whether two tokens are of one document; None: all are."""
        if self.document_BT is None:
            return None
        return self.document_BT[:, :, None] == others.document_BT[:, None]

    def running_count(self, selected):
        """Number of selected tokens [B, T] or [B, T, E] of the document up to and including t."""
        count = selected.cumsum(dim=1)
        if self.document_BT is None:
            return count
        continues_BT = self.document_BT == F.pad(self.document_BT, (1, 0), value=-1)[:, :-1]
        before = (count - selected.long()).masked_fill(_wide(continues_BT, selected), 0)
        return count - before.cummax(dim=1).values

    def admit(self, module, selected):
        """(mask of the selected tokens [B, T] or [B, T, E] under the causal limit of a routed block
        or of experts, the earlier first; their running count)."""
        count_BT = self.positions_BT + 1 if self.count_BT is None else self.count_BT
        limit_BT = torch.ceil(module.rate * count_BT.float() - 1e-3).long()
        limit = _wide(limit_BT + (HEADROOM if self.document_BT is None else 0), selected)
        before = 0 if self.cache is None else self.cache.admitted.get(module.cache_key, 0)
        mask = selected
        if module.rate < 1:
            excess = self.running_count(selected) + before - limit
            excess = excess.clamp(min=0).masked_fill(~selected, 0)
            offset = torch.zeros_like(excess)
            if self.document_BT is not None:  # larger in each further document
                offset = _wide(self.document_BT, selected) * (selected.shape[1] + 1)
            refused = (excess + offset).cummax(dim=1).values
            earlier = torch.roll(refused, 1, dims=1)
            earlier[:, :1] = 0
            mask = selected & (refused == torch.maximum(earlier, offset))
        if self.cache is not None:
            self.cache.admitted[module.cache_key] = before + mask.sum(dim=1, keepdim=True)
        return mask, before + self.running_count(mask)


# ---- attention and MLP -------------------------------------------------------------------------


def make_norm(config):
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.use_bias)


def attend(q_BTNH, positions_BT, keys, scale, window, softcap=0.0, same_BTS=None, mask_probs=None):
    """Causal attention: a query attends to keys at its own and earlier positions.

    Args:
      keys: (positions [B, S], keys [B, S, K, H], values [B, S, K, H]), each for N / K heads.
      same_BTS: whether a key is of the query's document; None: all are.
      mask_probs: (probabilities [B, N, T, S], positions of the keys) -> probabilities, or None.
    """
    key_positions_BS, k_BSKH, v_BSKH = keys
    heads = q_BTNH.shape[2] // k_BSKH.shape[2]
    k_BSNH, v_BSNH = (y.repeat_interleave(heads, dim=2) for y in (k_BSKH, v_BSKH))
    back_BTS = positions_BT[:, :, None] - key_positions_BS[:, None]
    visible_BTS = (key_positions_BS[:, None] >= 0) & (back_BTS >= 0)
    if window:
        visible_BTS = visible_BTS & (back_BTS < window)
    if same_BTS is not None:
        visible_BTS = visible_BTS & same_BTS
    scores_BNTS = torch.einsum("btnh,bsnh->bnts", q_BTNH, k_BSNH).float() * scale
    if softcap:
        scores_BNTS = softcap * torch.tanh(scores_BNTS / softcap)
    probs_BNTS = scores_BNTS.masked_fill(~visible_BTS[:, None], MASKED).softmax(dim=-1)
    if mask_probs is not None:
        probs_BNTS = mask_probs(probs_BNTS, key_positions_BS)
    return torch.einsum("bnts,bsnh->btnh", probs_BNTS.to(v_BSNH.dtype), v_BSNH)


def apply_rope(x_BTNH, positions_BT, rope):
    """Rotate queries or keys by their positions (RoPE, Su et al. 2021, arXiv 2104.09864): feature i
    of the first `size` is paired with feature i + size / 2."""
    half = rope["size"] // 2
    exponent_R = torch.arange(half, dtype=torch.float32, device=x_BTNH.device) / half
    frequency_R = rope["theta"] ** -exponent_R
    if rope["kind"] == "linear":
        frequency_R = frequency_R / rope["factor"]
    elif rope["kind"] == "llama3":  # arXiv 2407.21783: only low frequencies are scaled
        turns_R = rope["original_context"] * frequency_R / (2 * math.pi)
        low, high = rope["low_frequency_factor"], rope["high_frequency_factor"]
        stays_R = ((turns_R - low) / (high - low)).clamp(0, 1)
        frequency_R = frequency_R * (stays_R + (1 - stays_R) / rope["factor"])
    angle_BT1R = (positions_BT[..., None].float() * frequency_R)[:, :, None]
    cos, sin = angle_BT1R.cos(), angle_BT1R.sin()
    a, b, rest = x_BTNH.float().split([half, half, x_BTNH.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x_BTNH.dtype)


class Attention(nn.Module):
    def __init__(self, config, has_rope):
        super().__init__()
        self.config, self.rope = config, config.rope if has_rope else None
        width, head_dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        bias = config.attention_bias != "none"
        self.query = nn.Linear(width, heads * head_dim, bias=bias)
        self.key = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.out = nn.Linear(heads * head_dim, width, bias=config.attention_bias == "all")
        self.norm_query = self.norm_key = None
        if config.qk_norm != "none":
            whole = config.qk_norm == "width"
            self.norm_query = nn.RMSNorm(heads * head_dim if whole else head_dim, config.norm_eps)
            self.norm_key = nn.RMSNorm(kv_heads * head_dim if whole else head_dim, config.norm_eps)
        self.probs_dropout = None
        if config.masks and "attention_probs" in config.masks["sites"]:
            self.probs_dropout = ElementwiseMask(config, config.max_position_embeddings)

    def heads(self, y_BTX, norm=None, positions_BT=None):
        """[B, T, heads * H] -> [B, T, heads, H], normalised and rotated."""
        if norm is not None and self.config.qk_norm == "width":
            y_BTX = norm(y_BTX)
        y_BTNH = y_BTX.unflatten(-1, (-1, self.config.head_dim))
        if norm is not None and self.config.qk_norm == "head":
            y_BTNH = norm(y_BTNH)
        if positions_BT is not None and self.rope is not None:
            y_BTNH = apply_rope(y_BTNH, positions_BT, self.rope)
        return y_BTNH

    def forward(self, x_BTD, tokens, read=None):
        """Attend to x, or to `read`: (other states [B, S, D], their `Tokens`)."""
        c, (x_BSD, read_tokens) = self.config, read or (x_BTD, tokens)
        q_BTNH = self.heads(self.query(x_BTD), self.norm_query, tokens.positions_BT)
        k_BSKH = self.heads(self.key(x_BSD), self.norm_key, read_tokens.positions_BT)
        v_BSKH = self.heads(self.value(x_BSD))
        out_BTNH = attend(
            q_BTNH,
            tokens.positions_BT,
            read_tokens.with_cached(self, k_BSKH, v_BSKH),
            c.attention_scale,
            c.attention_window,
            c.attention_softcap,
            tokens.same_document(read_tokens),
            None if self.probs_dropout is None else self.probs_dropout.mask_probs,
        )
        return self.out(out_BTNH.flatten(2))


class MLP(nn.Module):
    """Feed-forward layer.

    Args:
      linear: constructor of its linear layers. Further arguments of a call are passed to these.
    """

    def __init__(self, config, hidden, linear=nn.Linear):
        super().__init__()
        self.activation, width = config.hidden_act, config.hidden_size
        self.gate = None
        if self.activation == "swiglu":
            self.gate = linear(width, hidden, bias=config.use_bias)
        self.up = linear(width, hidden, bias=config.use_bias)
        self.down = linear(hidden, width, bias=config.use_bias)

    def forward(self, x, *expert):
        h = self.up(x, *expert)
        if self.gate is not None:
            return self.down(F.silu(self.gate(x, *expert)) * h, *expert)
        approximate = "tanh" if self.activation == "gelu_tanh" else "none"
        return self.down(F.gelu(h, approximate=approximate), *expert)


class SkipMLP(nn.Module):
    """A small MLP for tokens that a routed block skips."""

    def __init__(self, config, hidden):
        super().__init__()
        self.norm, self.mlp = make_norm(config), MLP(config, hidden)

    def forward(self, x_BTD):
        return self.mlp(self.norm(x_BTD))


# ---- Mixture of Experts ------------------------------------------------------------------------


class ExpertLinear(nn.Module):
    """A linear layer for each expert."""

    def __init__(self, count, inputs, outputs, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(count, outputs)) if bias else None

    def forward(self, x, expert):
        return F.linear(x, self.weight[expert], None if self.bias is None else self.bias[expert])


class MoE(nn.Module):
    """Experts in place of an MLP (Shazeer et al. 2017, arXiv 1701.06538).

    "token_choice": a token goes to the k experts of the largest probability. "expert_choice"
    (Zhou et al. 2022, arXiv 2202.09368): in training experts selected the best tokens; here an
    expert selects the tokens with a positive logit. The last `num_noop` choices add nothing.
    """

    def __init__(self, config):
        super().__init__()
        moe = self.moe = config.moe
        count = moe["num_experts"]
        self.router = nn.Parameter(torch.zeros(config.hidden_size, count + moe["num_noop"]))
        linear = functools.partial(ExpertLinear, count)
        self.experts = MLP(config, moe["expert_hidden"], linear)
        self.shared = None
        if moe["num_shared"]:
            self.shared = MLP(config, moe["num_shared"] * moe["expert_hidden"])
        self.rate = moe["rate"]

    def forward(self, x_BTD, tokens):
        moe = self.moe
        logits_BTE = x_BTD.float() @ self.router.float()
        if moe["router"] == "token_choice":
            best = logits_BTE.argsort(dim=-1, descending=True, stable=True)[..., : moe["top_k"]]
            selected_BTE = torch.zeros_like(logits_BTE).scatter(-1, best, 1.0) > 0
            weight_BTE = logits_BTE.softmax(dim=-1) * selected_BTE
            if moe["renormalise"]:
                weight_BTE = weight_BTE / weight_BTE.sum(dim=-1, keepdim=True)
        else:
            selected_BTE, weight_BTE = logits_BTE > 0, logits_BTE.sigmoid()
        selected_BTE = selected_BTE & (tokens.positions_BT >= 0)[..., None]
        admitted_BTE, _ = tokens.admit(self, selected_BTE[..., : moe["num_experts"]])
        y_BTD = torch.zeros_like(x_BTD)
        for expert in range(moe["num_experts"]):
            index = admitted_BTE[..., expert].nonzero(as_tuple=True)
            weight = weight_BTE[..., expert][index][:, None]
            y = self.experts(x_BTD[index], expert) * weight.to(x_BTD.dtype)
            y_BTD = y_BTD.index_put(index, y, accumulate=True)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)


# ---- learned dropout ---------------------------------------------------------------------------


def cosine(angle):
    return 0.5 * torch.cos(angle) + 0.5


class ElementwiseMask(nn.Module):
    """x * m, m = 0.5 cos(a x + b) + 0.5 with a and b per feature, or per position of a key."""

    def __init__(self, config, size):
        super().__init__()
        self.sharpness = config.masks["sharpness"]
        self.mask_frequency = nn.Parameter(torch.zeros(size))
        self.mask_phase = nn.Parameter(torch.zeros(size))

    def forward(self, x_BTD, tokens):
        return self.apply_mask(x_BTD, self.mask_frequency, self.mask_phase)

    def mask_probs(self, probs_BNTS, positions_BS):
        """Mask attention probabilities, without normalising them again."""
        a, b = (y[positions_BS.clamp(min=0)] for y in (self.mask_frequency, self.mask_phase))
        return self.apply_mask(probs_BNTS, a[:, None, None], b[:, None, None])

    def apply_mask(self, x, a, b):
        mask = cosine(a.float() * x.float() + b.float())
        if self.sharpness:
            mask = torch.sigmoid(self.sharpness * (mask - 0.5))
        return (x.float() * mask).to(x.dtype)


class MaskAttention(nn.Module):
    """Causal self-attention without positions and without an output matrix."""

    def __init__(self, config):
        super().__init__()
        self.heads, self.window = config.masks["num_heads"], config.attention_window
        self.scale, width = config.masks["attention_scale"], config.hidden_size
        for name in ("mask_query", "mask_key", "mask_value"):
            setattr(self, name, nn.Parameter(torch.zeros(width, width)))

    def forward(self, x_BTD, tokens):
        q_BTNH, k_BTNH, v_BTNH = (
            (x_BTD @ matrix).unflatten(-1, (self.heads, -1))
            for matrix in (self.mask_query, self.mask_key, self.mask_value)
        )
        keys, same_BTS = tokens.with_cached(self, k_BTNH, v_BTNH), tokens.same_document(tokens)
        options = dict(scale=self.scale, window=self.window, same_BTS=same_BTS)
        return attend(q_BTNH, tokens.positions_BT, keys, **options).flatten(2)


class AttentionMask(nn.Module):
    """x * m, m = 0.5 cos(u + b) + 0.5, rounded. u is a `MaskAttention` of x or of the `MaskInput`
    ("embedding"), or a linear layer of the latter ("embedding_linear")."""

    def __init__(self, config):
        super().__init__()
        masks = self.masks = config.masks
        width = config.hidden_size
        outputs = 1 if masks["granularity"] == "token" else width
        linear = masks["input"] == "embedding_linear"
        self.attention = None if linear else MaskAttention(config)
        self.mask_linear = None
        if linear or outputs == 1:
            self.mask_linear = nn.Parameter(torch.zeros(width, outputs))
        self.mask_shift = nn.Parameter(torch.zeros(outputs))

    def forward(self, x_BTD, tokens):
        u = x_BTD if self.masks["input"] == "hidden" else tokens.mask_input_BTD
        if self.attention is not None:
            u = self.attention(u, tokens)
        if self.mask_linear is not None:
            u = u @ self.mask_linear
        mask = cosine(u.float() + self.mask_shift.float())
        if self.masks["rounding"] == "stochastic":
            mask = (mask >= 0.5).float()
        elif self.masks["rounding"].startswith("sigmoid"):
            mask = torch.sigmoid(self.masks["sharpness"] * (mask - 0.5))
        return (x_BTD.float() * mask).to(x_BTD.dtype)


class MaskInput(nn.Module):
    """Input of the masks of all blocks, computed from the input embedding."""

    def __init__(self, config):
        super().__init__()
        self.attention, self.mask_linear = MaskAttention(config), None
        if config.masks["input"] == "embedding":
            width = config.hidden_size
            self.mask_linear = nn.Parameter(torch.zeros(width, width))

    def forward(self, embedded_BTD, tokens):
        y_BTD = self.attention(embedded_BTD, tokens)
        return y_BTD if self.mask_linear is None else y_BTD @ self.mask_linear


def make_mask(config, site):
    """The learned dropout at "embedding", "attention_output" or "mlp_output", or None."""
    if not config.masks or site not in config.masks["sites"]:
        return None
    if config.masks["kind"] == "elementwise":
        return ElementwiseMask(config, config.hidden_size)
    return AttentionMask(config)


# ---- blocks ------------------------------------------------------------------------------------


class Block(nn.Module):
    """x + attention + MLP."""

    def __init__(self, config, block):
        super().__init__()
        self.kind = config.block_kind
        self.norm_attention = make_norm(config)
        self.attention = Attention(config, block["rope"])
        self.dropout_attention_output = make_mask(config, "attention_output")
        self.norm_mlp = make_norm(config)
        self.mlp = MoE(config) if block["experts"] else MLP(config, config.intermediate_size)
        self.has_experts = block["experts"]
        self.dropout_mlp_output = make_mask(config, "mlp_output")

    def forward(self, x_BTD, tokens):
        return x_BTD + self.increment(x_BTD, tokens)

    def increment(self, x_BTD, tokens, read=None):
        """The increment of the residual. read: as in `Attention`."""
        a_BTD = self.attention_increment(x_BTD, tokens, read)
        y_BTD = x_BTD if self.kind == "parallel" else x_BTD + a_BTD
        return a_BTD + self.mlp_increment(y_BTD, tokens)

    def attention_increment(self, x_BTD, tokens, read=None):
        if self.kind == "post_norm":
            a_BTD = self.norm_attention(self.attention(x_BTD, tokens, read))
        else:
            if read is not None:
                read = self.norm_attention(read[0]), read[1]
            a_BTD = self.attention(self.norm_attention(x_BTD), tokens, read)
        masks = self.dropout_attention_output
        return a_BTD if masks is None else masks(a_BTD, tokens)

    def mlp_increment(self, x_BTD, tokens, read=None):
        y_BTD = x_BTD if self.kind == "post_norm" else self.norm_mlp(x_BTD)
        m_BTD = self.mlp(y_BTD, tokens) if self.has_experts else self.mlp(y_BTD)
        m_BTD = self.norm_mlp(m_BTD) if self.kind == "post_norm" else m_BTD
        masks = self.dropout_mlp_output
        return m_BTD if masks is None else masks(m_BTD, tokens)


class Predictor(nn.Module):
    """A small network that predicts whether a token is selected."""

    def __init__(self, width, hidden):
        super().__init__()
        self.kernel_in = nn.Parameter(torch.zeros(width, hidden))
        self.kernel_out = nn.Parameter(torch.zeros(hidden, 1))

    def forward(self, x_BTD):
        h_BTF = F.silu(x_BTD.float() @ self.kernel_in.float())
        return (h_BTF @ self.kernel_out.float())[..., 0]


class Threshold(nn.Module):
    """Running quantile of the scores in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("quantile", torch.zeros(()))


class RoutedBlock(Block):
    """Mixture of Depths: x + gate(r) * increment for selected tokens, x for others, with the
    router's score r = w n(x) and n the identity or an RMS norm.

    A token is selected if r > 0 ("aux_loss"), r > theta ("threshold") or by a small network
    ("predictor"), under the limit of `Tokens.admit`. With the target "attention" or "mlp" only this
    part of the block is routed, and all tokens pass the other part.
    """

    def __init__(self, config, block):
        super().__init__(config, block)
        self.routing, width = config.routing, config.hidden_size
        self.rate = min(1.0, block["capacity"] * self.routing["slack"])
        self.router = nn.Parameter(torch.zeros(width))
        self.norm_router = self.predictor = self.threshold = self.skip_mlp = None
        if self.routing["router_norm"] == "rms":
            self.norm_router = nn.RMSNorm(width, config.norm_eps)
        if self.routing["decision"] == "predictor":
            self.predictor = Predictor(width, self.routing["predictor_hidden"])
        if self.routing["decision"] == "threshold":
            self.threshold = Threshold()
        if self.routing["skip_mlp"]:
            self.skip_mlp = SkipMLP(config, self.routing["skip_mlp"])

    def forward(self, x_BTD, tokens):
        target = self.routing["target"]
        if target == "block":
            return self.route(x_BTD, x_BTD, tokens, self.increment)
        if target == "attention":
            out_BTD = self.route(x_BTD, x_BTD, tokens, self.attention_increment)
            read_BTD = x_BTD if self.kind == "parallel" else out_BTD
            return out_BTD + self.mlp_increment(read_BTD, tokens)
        attended_BTD = x_BTD + self.attention_increment(x_BTD, tokens)
        read_BTD = x_BTD if self.kind == "parallel" else attended_BTD
        return self.route(attended_BTD, read_BTD, tokens, self.mlp_increment)

    def route(self, start_BTD, x_BTD, tokens, part):
        """start + gate(r) * part(x) for the selected tokens."""
        n_BTD = x_BTD if self.norm_router is None else self.norm_router(x_BTD.float())
        score_BT = n_BTD.float() @ self.router.float()
        selected_BT = (self.decision(n_BTD, score_BT) > 0) & (tokens.positions_BT >= 0)
        mask_BT, count_BT = tokens.admit(self, selected_BT)
        out_BTD = start_BTD
        if self.skip_mlp is not None:
            out_BTD = out_BTD + self.skip_mlp(x_BTD).masked_fill(mask_BT[..., None], 0)
        # C is 0 without selected tokens: nothing is computed.
        index_BC, is_real_BC = compact(mask_BT)
        inner = tokens._replace(count_BT=count_BT).take(index_BC, is_real_BC)
        read = (x_BTD, tokens) if self.routing["kv_for_skipped"] else None
        delta_BCD = part(take(x_BTD, index_BC), inner, read)
        gate_BC = GATES[self.routing["gate"]](take(score_BT, index_BC)) * is_real_BC
        return add(out_BTD, index_BC, delta_BCD * gate_BC[..., None].to(delta_BCD.dtype))

    def decision(self, x_BTD, score_BT):
        if self.predictor is not None:
            return self.predictor(x_BTD)
        return score_BT if self.threshold is None else score_BT - self.threshold.quantile


# ---- the model ---------------------------------------------------------------------------------


class EfxForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = EfxConfig
    _no_split_modules = ["Block", "RoutedBlock"]
    _is_stateful = True  # refuses assisted generation, which removes tokens from the cache

    def __init__(self, config):
        super().__init__(config)
        length, width = config.max_position_embeddings, config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, width)
        self.positions_embed = None
        if config.positions == "learned":
            self.positions_embed = nn.Embedding(length, width)
        masks = config.masks
        self.mask_input = None
        if masks and masks["kind"] == "attention" and masks["input"] != "hidden":
            self.mask_input = MaskInput(config)
        self.dropout_embedding = make_mask(config, "embedding")
        self.layers = nn.ModuleList(
            (Block if block["capacity"] is None else RoutedBlock)(config, block)
            for block in config.blocks
        )
        self.norm_final = make_norm(config)
        self.head = None  # the token embedding, if tied
        if not config.tie_word_embeddings:
            self.head = nn.Linear(width, config.vocab_size, bias=False)
        for name, module in self.named_modules():
            module.cache_key = name
        self.post_init()

    @classmethod
    def from_pretrained(cls, path, *args, output_loading_info=False, **kwargs):
        """Load as transformers does. Raises: ValueError for missing or unknown parameters."""
        model, info = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        for kind in ("missing_keys", "unexpected_keys"):
            if info[kind]:
                raise ValueError(f"{path} has {kind}: {', '.join(sorted(info[kind]))}")
        return (model, info) if output_loading_info else model

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=None,
        labels=None,
        logits_to_keep=0,
        return_dict=None,
        **kwargs,
    ):
        """Logits [B, T, V] in float32, or of the last `logits_to_keep` tokens.

        Args:
          input_ids: the new tokens [B, T].
          attention_mask: 1 for tokens and 0 for padding, on either side, of all tokens so far.
          position_ids: positions [B, T] of the new tokens. A row packs several documents if they
            restart in it: no document depends on another one. Such rows are not cached.
          past_key_values: the `EfxCache` of the tokens before, or None.
          labels: ids [B, T], -100 for no loss; the loss is that of predicting the next token.
          kwargs: passed to transformers' loss, such as `num_items_in_batch`.
        """
        c, cache = self.config, past_key_values
        if cache is not None and not isinstance(cache, EfxCache):
            if cache.get_seq_length():
                raise ValueError(f"past_key_values: expected an EfxCache, got {type(cache)}")
            cache = None
        if position_ids is None and not kwargs.keys().isdisjoint(("cu_seq_lens_q", "seq_idx")):
            raise ValueError("packed documents need position_ids: pass them too")
        positions_BT, document_BT = self.positions_of(
            input_ids, attention_mask, position_ids, cache
        )
        if document_BT is not None and (use_cache or cache is not None):
            raise ValueError(
                "position_ids do not continue the rows, and a cache holds one document a row: pass "
                "packed documents with use_cache=False and without past_key_values"
            )
        use_cache = c.use_cache if use_cache is None else use_cache
        if use_cache and cache is None and document_BT is None:
            cache = EfxCache()
        if cache is not None:
            cache.advance(positions_BT)
        tokens = Tokens(positions_BT, cache, document_BT)
        x_BTD = self.embed(input_ids)
        if self.positions_embed is not None:
            x_BTD = x_BTD + self.positions_embed(tokens.positions_BT.clamp(min=0))
        if self.mask_input is not None:
            tokens = tokens._replace(mask_input_BTD=self.mask_input(x_BTD, tokens))
        if self.dropout_embedding is not None:
            x_BTD = self.dropout_embedding(x_BTD, tokens)
        for layer in self.layers:
            x_BTD = layer(x_BTD, tokens)
        x_BTD = self.norm_final(x_BTD[:, -logits_to_keep:])
        head_VD = self.embed.weight if self.head is None else self.head.weight
        logits_BTV = F.linear(x_BTD, head_VD).float() * c.logit_scale
        if c.logit_softcap:
            logits_BTV = c.logit_softcap * torch.tanh(logits_BTV / c.logit_softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits_BTV, labels, vocab_size=c.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV, past_key_values=cache)

    def positions_of(self, input_ids, attention_mask, position_ids, cache):
        """(position of each new token, -1 for padding; documents of packed rows, or None)."""
        length = input_ids.shape[1]
        if attention_mask is None:
            start_B1 = 0 if cache is None else cache.next_B1.to(input_ids.device)
            positions_BT = start_B1 + torch.arange(length, device=input_ids.device)
            positions_BT = positions_BT.expand(len(input_ids), -1)
        else:
            whole = length + (0 if cache is None else cache.length)
            if attention_mask.shape[1] != whole:
                raise ValueError(
                    f"attention_mask has {attention_mask.shape[1]} columns for {whole} tokens"
                )
            positions_BT = attention_mask.long().cumsum(dim=1) - 1
            positions_BT = positions_BT.masked_fill(attention_mask == 0, -1)[:, -length:]
        document_BT = None
        if position_ids is not None:
            given_BT = position_ids.long().expand_as(positions_BT)
            given_BT = given_BT.masked_fill(positions_BT < 0, -1)
            if not torch.equal(given_BT, positions_BT):
                positions_BT, document_BT = given_BT, documents_of(given_BT)
        if int(positions_BT.max()) >= self.config.max_position_embeddings:
            raise ValueError(
                f"more than max_position_embeddings={self.config.max_position_embeddings} tokens: "
                "shorten the text, or, with rotary positions, load the model with a larger number"
            )
        return positions_BT, document_BT

    def prepare_inputs_for_generation(
        self,
        input_ids,
        past_key_values=None,
        attention_mask=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """The arguments of `forward` that `generate` passes."""
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )
        # Not every version derives them from the attention mask, as `forward` does.
        inputs.pop("position_ids", None)
        return inputs

    def generate(self, *args, position_ids=None, **kwargs):
        if position_ids is not None:
            raise ValueError(
                "position_ids: generate derives them from the attention mask; leave them out"
            )
        return super().generate(*args, **kwargs)
