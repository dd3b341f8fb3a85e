"""A GPT in eager PyTorch: what efx's dense training step is measured against.

The model of Radford et al. 2019 in the form in which small GPTs are commonly trained: learned
positions, pre-norm blocks, one matrix for queries, keys and values, PyTorch's own causal attention
kernel, exact GELU, output layer tied to the token embedding. Weights are taken from efx, so that
both sides compute the same function and the same loss.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width, heads, bias):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width, bias=bias)
        self.query_key_value = nn.Linear(width, 3 * width, bias=bias)
        self.attention_out = nn.Linear(width, width, bias=bias)
        self.norm_mlp = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.query_key_value(self.norm_attention(x)).chunk(3, dim=-1)
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in parts
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """Token ids [B, T] to logits [B, T, V].

    Args:
      vocab_size, context, width, depth, heads: sizes; the MLP is four times as wide.
      bias: whether linear layers and norms have one.
    """

    def __init__(self, *, vocab_size, context, width, depth, heads, bias):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, bias) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=bias)

    def forward(self, ids):
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def loss(self, ids, targets):
        """Mean cross-entropy in nats."""
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


def load(model, params):
    """Copy efx parameters of an unrolled gpt2-preset decoder: {path: numpy array}."""
    state = {
        "tokens.weight": params["embed/embedding"],
        "positions.weight": params["positions_embed/embedding"],
        **_norm(params, "norm_final", "norm"),
    }
    for i in range(len(model.blocks)):
        source, target = f"layers/block_{i}", f"blocks.{i}"
        attention = f"{source}/attention"
        qkv = [_linear(params, f"{attention}/{name}") for name in ("query", "key", "value")]
        state |= {
            f"{target}.query_key_value.{kind}": torch.cat([part[kind] for part in qkv])
            for kind in qkv[0]
        }
        for path, name in (
            (f"{attention}/out", "attention_out"),
            (f"{source}/mlp/up", "up"),
            (f"{source}/mlp/down", "down"),
        ):
            state |= {f"{target}.{name}.{k}": v for k, v in _linear(params, path).items()}
        for name in ("norm_attention", "norm_mlp"):
            state |= _norm(params, f"{source}/{name}", f"{target}.{name}")
    model.load_state_dict({name: torch.as_tensor(value).clone() for name, value in state.items()})


def _linear(params, path):
    found = {"weight": torch.as_tensor(params[f"{path}/kernel"]).T}
    if f"{path}/bias" in params:
        found["bias"] = torch.as_tensor(params[f"{path}/bias"])
    return found


def _norm(params, path, name):
    found = {f"{name}.weight": params[f"{path}/scale"]}
    if f"{path}/bias" in params:
        found[f"{name}.bias"] = params[f"{path}/bias"]
    return found


def make_adamw(model, *, learning_rate, b1, b2, weight_decay, fused=False):
    """AdamW that decays matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # None leaves the choice of the implementation to PyTorch.
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(b1, b2), fused=fused or None)


def train_step(model, optimizer, ids, targets, clip_norm):
    """One step; returns the loss before it as a float."""
    loss = model.loss(ids, targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    return loss.item()
