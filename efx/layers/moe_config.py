"""The settings of a Mixture of Experts, and what follows from them by arithmetic alone."""

import dataclasses

from efx import flops
from efx.errors import UsageError
from efx.layers import routing

ROUTERS = ("token_choice", "expert_choice")


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """`config.model.mlp.moe`, used when `config.model.mlp.kind` is "moe".

    Attributes:
      every: one block in `every` has experts, starting with block every - 1; the others are dense.
      num_experts: E.
      expert_hidden: F of one expert; 0: that of the dense MLP.
      router: "token_choice" (a token picks its top k experts) or "expert_choice" (an expert picks
        its top C tokens).
      top_k: token_choice: k.
      renormalise: token_choice: the weights of the chosen k sum to one. With top_k=1 they then are
        one, and the router learns from its losses only; False keeps the probabilities, as Switch.
      capacity_factor: token_choice: an expert has room for ceil(k * T * factor / (E + num_noop))
        tokens of a sequence.
      capacity: expert_choice: c; an expert takes ceil(c * T) tokens of a sequence.
      slack: expert_choice: the causal decision is not bound to c; an expert has room for
        ceil(c * T * slack) tokens of a sequence.
      num_shared: shared experts, which see every token, as one MLP of num_shared times the width.
      num_noop: token_choice: experts that compute nothing; a token sent there keeps its residual.
      computed_fraction: token_choice: share of the choices (k a token) by which FLOPs are counted:
        those that go to an expert, not a no-op one, which has room. Routers are free to like some
        better, so this is measured (`moe/computed_fraction`); None: as if all were equally liked
        and none were full.
    """

    every: int
    num_experts: int
    expert_hidden: int
    router: str
    top_k: int
    renormalise: bool
    capacity_factor: float
    capacity: float
    slack: float
    num_shared: int
    num_noop: int
    computed_fraction: float | None

    @property
    def choices(self):
        """What a token chooses from: experts, then no-op experts."""
        return self.num_experts + self.num_noop

    @property
    def counted_fraction(self):
        """`computed_fraction`, or what it is taken for."""
        if self.computed_fraction is None:
            return self.num_experts / self.choices
        return self.computed_fraction

    @property
    def looks_ahead(self):
        """Whether the selection in training depends on later tokens."""
        return self.router == "expert_choice"

    def budget(self, length, selection, documents=None):
        """`routing.Budget` of one expert: of a sequence of `length`, or of each document of it.

        Args:
          selection: as in `TokenInfo`: "train" or "causal".
        """
        if self.router == "token_choice":
            fraction = self.top_k * self.capacity_factor / self.choices
        else:
            fraction = self.capacity * (1 if selection == "train" else self.slack)
        return routing.Budget(fraction, length, documents)

    def places(self, length, selection):
        """C: tokens of a sequence of `length` that one expert has room for, at most all."""
        return self.budget(length, selection).size

    def in_block(self, index):
        return index % self.every == self.every - 1


def check(mlp, depth):
    """Raise UsageError for a bad value of `config.model.mlp.moe`, used or not.

    Args:
      mlp: `MLPConfig` of the blocks. depth: how many blocks the longest stack has.
    """
    c, where = mlp.moe, "config.model.mlp.moe"
    if mlp.kind not in ("dense", "moe"):
        raise UsageError(f"config.model.mlp.kind={mlp.kind!r}: expected one of dense, moe")
    if c.router not in ROUTERS:
        raise UsageError(f"{where}.router={c.router!r}: expected one of {', '.join(ROUTERS)}")
    for name in ("every", "num_experts", "top_k"):
        if getattr(c, name) < 1:
            raise UsageError(f"{where}.{name}={getattr(c, name)}: must be at least 1")
    if mlp.kind == "moe" and c.every > depth:
        raise UsageError(
            f"{where}.every={c.every}: the stack has {depth} blocks, so none would have experts; "
            "set config.model.mlp.kind='dense' if that is meant"
        )
    for name in ("expert_hidden", "num_shared", "num_noop"):
        if getattr(c, name) < 0:
            raise UsageError(f"{where}.{name}={getattr(c, name)}: must be at least 0")
    if not c.capacity_factor > 0:
        raise UsageError(f"{where}.capacity_factor={c.capacity_factor}: must be more than 0")
    if not 0 < c.capacity <= 1:
        raise UsageError(
            f"{where}.capacity={c.capacity}: must be in (0, 1], the fraction of a sequence that "
            "an expert takes"
        )
    if not c.slack >= 1:
        raise UsageError(f"{where}.slack={c.slack}: must be at least 1")
    if c.computed_fraction is not None:
        if not 0 < c.computed_fraction <= 1:
            raise UsageError(
                f"{where}.computed_fraction={c.computed_fraction}: must be in (0, 1], the share of "
                "the choices that experts compute"
            )
        if c.router == "expert_choice":
            raise UsageError(
                f"{where}.computed_fraction={c.computed_fraction}: expert_choice always fills its "
                "places; leave it out"
            )
    if c.router == "expert_choice" and c.num_noop:
        raise UsageError(
            f"{where}.num_noop={c.num_noop}: expert_choice has no no-op experts (a token that no "
            "expert picks keeps its residual anyway); set it to 0"
        )
    if c.router == "token_choice" and c.top_k > c.choices:
        raise UsageError(
            f"{where}.top_k={c.top_k}: there are only {c.choices} experts, no-op ones included"
        )


def block_flops(block, tokens, selection, nominal):
    """{component: forward FLOPs} of a block's MLP on `tokens` tokens; {} if it has no experts.

    As executed, every place of every expert counts, filled or not. By the papers' convention
    (`nominal`) a token meets k experts, of which no-op ones cost nothing: `computed_fraction` says
    how many are left. Expert choice fills all its places.
    """
    c = block.moe
    if c is None:
        return {}
    rows = c.num_experts * c.places(tokens, selection)
    if nominal and c.router == "token_choice":
        rows = c.top_k * tokens * c.counted_fraction
    matrices = 3 if block.activation == "swiglu" else 2
    return {
        "mlp": matrices * flops.matmul(rows + c.num_shared * tokens, block.width, block.hidden),
        "moe_router": flops.matmul(tokens, block.width, c.choices),
    }


def block_params(block):
    """{component: parameters} of a block's MLP; {} if it has no experts."""
    c = block.moe
    if c is None:
        return {}
    matrices = 3 if block.activation == "swiglu" else 2
    copies, widened = c.num_experts, c.num_shared * block.hidden
    count = matrices * block.width * (copies * block.hidden + widened)
    if block.use_bias:
        count += copies * ((matrices - 1) * block.hidden + block.width)
        count += ((matrices - 1) * widened + block.width) if widened else 0
    return {"mlp": count, "moe_router": block.width * c.choices}


def active_params(block):
    """Parameters of a block's MLP that one token meets; in the mean, where that varies."""
    c = block.moe
    share = c.top_k / c.choices if c.router == "token_choice" else c.capacity
    shared = dataclasses.replace(block, moe=dataclasses.replace(c, num_experts=0))
    every_token = block_params(shared)["mlp"]
    whole = block_params(block)
    return every_token + share * (whole["mlp"] - every_token) + whole["moe_router"]
