"""What each token of a text costs: nominal FLOPs by the model's own ledger, token by token.

A ledger is linear in how many tokens a block computes and in how many (query, key) pairs they make.
So the cost of a token is what the ledger says of its blocks with the tokens that were measured,
divided among these: attention scores by how many keys a token sees, the rest evenly. What no block
accounts for, such as the output layer, is divided among all tokens. The costs of all tokens add up
to the ledger of the sequence with what was measured.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from efx import flops
from efx.layers import costs
from efx.layers.stack import RecursionStep
from efx.models.adapters.model import Adapted

# Components that grow with pairs of tokens.
_SCORES = ("attention_scores", "mask_scores")


class Costs(NamedTuple):
    """Of T tokens.

    Attributes:
      flops_T: FLOPs of each. dense_T: what it would cost if everything computed it, with all the
        choices that it has.
      shares: {path of a stage: FLOPs of each token there, of those if it computed the token}, of
        the stages where these differ.
    """

    flops_T: np.ndarray
    dense_T: np.ndarray
    shares: dict


def parts(model):
    """[(beginning of its paths, model)] of a model, or of those that it is made of."""
    if not model.members:
        return [("", model)]
    return [(f"{name}/", member) for name, (member, _) in model.members.items()]


def of_tokens(model, length, choices):
    """`Costs` of a pass.

    Args:
      model: unrolled. choices: of `token_choices.Made`.
    """
    flops_T, dense_T, shares, rest = np.zeros(length), np.zeros(length), {}, 0.0
    measured = {}
    for prefix, part in parts(model):
        blocks = part.blocks()
        for stage in part.stages(length):
            path, size, there_S = prefix + stage.path, len(stage.tokens_S), stage.tokens_S >= 0
            if stage.nominal is None:
                spec = blocks[stage.path]
                block = _Block(spec, stage.path, prefix, size, choices)
                cost_S, dense_S = block.costs()
                if spec.routing is not None and not model.members:
                    measured[stage.path] = block.shares()
                nominal = _ledger(spec, size, measured.get(stage.path))
            else:
                nominal = stage.nominal
                cost_S = dense_S = np.full(size, sum(nominal.values()) / size)
            # What pads the last group, and memory, is no token's.
            rest += cost_S[~there_S].sum() - sum(nominal.values())
            if not there_S.any():
                continue
            # At a token that has no place here it would cost what it costs on average.
            cost_T, own_T = np.zeros(length), np.full(length, dense_S[there_S].mean())
            cost_T[stage.tokens_S[there_S]] = cost_S[there_S]
            own_T[stage.tokens_S[there_S]] = dense_S[there_S]
            flops_T, dense_T = flops_T + cost_T, dense_T + own_T
            if not np.allclose(cost_T, own_T):
                shares[path] = cost_T / own_T
    ledger = dict(model.ledger(length, "causal", measured).nominal)
    if isinstance(model, Adapted) and model.adapter.looks_ahead:
        del ledger["adapters"]
        for time_N, cost_N, dense_N in _inclusion(model, length, choices):
            there_N = time_N >= 0
            np.add.at(flops_T, time_N[there_N], cost_N[there_N])
            np.add.at(dense_T, time_N[there_N], dense_N[there_N])
            rest += cost_N[~there_N].sum()
    rest += sum(ledger.values())
    return Costs(flops_T + rest / length, dense_T + rest / length, shares)


def _inclusion(model, length, choices):
    """Of each adapted layer: (the token of each of its inputs, its FLOPs, those of a token that as
    many experts compute as they have room for in training)."""
    c, seen = model.adapter, {}
    for site in model.sites(length, "causal"):
        path = f"{site.path}/adapter"
        call = seen.setdefault(path, 0)
        seen[path] += 1
        choice = choices[path, "weights"][call]
        time_RS = model.token_of_place(path, np.asarray(choice.positions_BT), length)
        one = flops.matmul(1, c.rank, site.width + site.features)
        gates = flops.matmul(1, site.width, c.choices)
        count_RS = (np.asarray(choice.value) > 0).sum(axis=-1)
        dense_RS = np.full(time_RS.shape, c.capacity * c.choices * one + gates)
        yield time_RS.ravel(), (count_RS * one + gates).ravel(), dense_RS.ravel()


def _ledger(spec, size, shares):
    measured = None if shares is None else {"": shares}
    return costs.stack_flops({"": spec}, size, "causal", measured)


@dataclasses.dataclass
class _Block:
    """One entry of `Model.blocks` in a pass: its spec, and what was reported of it.

    Attributes:
      path: of it in its model, whose paths begin with `prefix`. size: S, how many places it has.
    """

    spec: object
    path: str
    prefix: str
    size: int
    choices: dict

    def __post_init__(self):
        self.run_S = np.ones(self.size)
        if self.spec.routing is not None:
            self.run_S = self._reported(self.path, "routed")
        self.rank_S = np.cumsum(self.run_S) * self.run_S

    def _reported(self, path, name):
        """[S] of a choice, summed over experts; 0 where there is none, None if it was not made."""
        calls = self.choices.get((self.prefix + path, name))
        if calls is None:
            return None
        step = isinstance(self.spec, RecursionStep) and len(calls) > 1
        choice = calls[self.spec.number if step else 0]
        value_S, place_S = np.asarray(choice.value, float)[0], np.asarray(choice.positions_BT)[0]
        value_S = value_S.reshape(len(place_S), -1).sum(axis=-1)
        result_S = np.zeros(self.size)
        result_S[place_S[place_S >= 0]] = value_S[place_S >= 0]
        return result_S

    def shares(self):
        """(share of the places, share of the causal pairs) that it computes, see `Model.ledger`."""
        return self.run_S.mean(), self.rank_S.sum() / (self.size * (self.size + 1) / 2)

    def costs(self):
        """[S] FLOPs of each place, and those if it were computed with all choices."""
        size, window = self.size, self.spec.blocks[0].attention.window
        seen_S = np.minimum(np.arange(1, size + 1), window or size)
        fixed, token, pairs = self._without_mlp()
        dense_S = (fixed + token) / size + pairs * seen_S / seen_S.sum()
        cost_S = dense_S
        if self.spec.routing is not None:
            pairs_S = self.rank_S / (size * (size + 1) / 2)
            cost_S = (fixed + self.run_S * token) / size + pairs * pairs_S
        for i, block in enumerate(self.spec.blocks, 1):
            recursion = isinstance(self.spec, RecursionStep)
            cost, dense = self._mlp(block, f"layers/block_{i}" if recursion else self.path)
            cost_S, dense_S = cost_S + self.run_S * cost, dense_S + dense
        return cost_S, dense_S

    def _mlp(self, block, path):
        """FLOPs a place of one MLP, or of its experts: as computed, and with all choices."""
        one, moe = costs.mlp_flops(dataclasses.replace(block, moe=None), 1)["mlp"], block.moe
        if moe is None:
            open_S = self._reported(path, "mlp_computed")
            return (one if open_S is None else one * open_S), one
        router = costs.mlp_flops(block, 1)["moe_router"]
        most = moe.top_k if moe.router == "token_choice" else moe.capacity * moe.num_experts
        served_S = self._reported(f"{path}/mlp", "served")
        return (one * (rows + moe.num_shared) + router for rows in (served_S, most))

    def _without_mlp(self):
        """FLOPs of the sequence without MLPs: (whatever is routed, for all tokens, for all
        pairs)."""

        def ledger(shares):
            every = _ledger(self.spec, self.size, shares)
            return {name: n for name, n in every.items() if name not in ("mlp", "moe_router")}

        if self.spec.routing is None:
            every = ledger(None)
            pairs = sum(every.get(name, 0) for name in _SCORES)
            return 0.0, sum(every.values()) - pairs, pairs
        fixed, token, pairs = (sum(ledger(s).values()) for s in ((0, 0), (1, 0), (0, 1)))
        return fixed, token - fixed, pairs - fixed
