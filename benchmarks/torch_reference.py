"""A GPT in eager PyTorch, the reference for efx's dense training step.

The model of Radford et al. 2019 in the common form of small GPTs: learned
positions, pre-norm blocks, one matrix for queries, keys and values, PyTorch's own causal attention
kernel, exact GELU, output layer tied to the token embedding. Weights are taken from efx, so that
both sides compute the same function and the same loss.
"""

import numpy as np
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
        projections = self.query_key_value(self.norm_attention(x)).chunk(3, dim=-1)
        query, key, value = (
            projection.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for projection in projections
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
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def loss(self, ids, targets):
        """Mean cross-entropy in nats."""
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())


class TrainStep:
    """A training step: loss, gradients, clipping, AdamW with decay on matrices.

    Args:
      parameters: of an unrolled efx decoder with the gpt2 preset, {path: numpy array}.
      optim: `config.optim`.
      fused: PyTorch's fused AdamW instead of its default implementation.
      sizes: of `GPT`.
    """

    def __init__(self, parameters, *, optim, fused=False, **sizes):
        self.model = GPT(**sizes)
        load(self.model, parameters)
        self.clip_norm = optim.clip_norm
        groups = [
            {
                "params": [p for p in self.model.parameters() if p.dim() >= 2],
                "weight_decay": optim.weight_decay,
            },
            {"params": [p for p in self.model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=optim.learning_rate,
            betas=(optim.b1, optim.b2),
            eps=optim.eps,
            fused=fused or None,  # None: PyTorch's own choice
        )

    def __call__(self, tokens_BT1):
        """One step on numpy rows of context + 1 tokens; returns the loss before it."""
        tokens_BT1 = torch.as_tensor(tokens_BT1, dtype=torch.int64)
        loss = self.model.loss(tokens_BT1[:, :-1], tokens_BT1[:, 1:])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        return loss.item()


def load(model, parameters):
    """Copy efx parameters into a `GPT`."""
    state = {
        "tokens.weight": parameters["embed/embedding"],
        "positions.weight": parameters["positions_embed/embedding"],
        **_norm(parameters, "norm_final", "norm"),
    }
    for i in range(len(model.blocks)):
        source, target = f"layers/block_{i}", f"blocks.{i}"
        projections = [
            _linear(parameters, f"{source}/attention/{n}") for n in ("query", "key", "value")
        ]
        linear = {
            "query_key_value": {
                kind: np.concatenate([projection[kind] for projection in projections])
                for kind in projections[0]
            },
            "attention_out": _linear(parameters, f"{source}/attention/out"),
            "up": _linear(parameters, f"{source}/mlp/up"),
            "down": _linear(parameters, f"{source}/mlp/down"),
        }
        for name, arrays in linear.items():
            state |= {f"{target}.{name}.{kind}": value for kind, value in arrays.items()}
        for name in ("norm_attention", "norm_mlp"):
            state |= _norm(parameters, f"{source}/{name}", f"{target}.{name}")
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()})


def _linear(parameters, path):
    arrays = {"weight": parameters[f"{path}/kernel"].T}
    if f"{path}/bias" in parameters:
        arrays["bias"] = parameters[f"{path}/bias"]
    return arrays


def _norm(parameters, path, name):
    arrays = {f"{name}.weight": parameters[f"{path}/scale"]}
    if f"{path}/bias" in parameters:
        arrays[f"{name}.bias"] = parameters[f"{path}/bias"]
    return arrays
