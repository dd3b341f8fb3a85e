"""The settings of soft experts, and what follows from them by arithmetic alone."""

import dataclasses

from efx.errors import UsageError

MERGES = ("softmax", "mean", "max")


@dataclasses.dataclass(frozen=True)
class SoftExpertsConfig:
    """`config.model.soft_experts`; see `soft_experts.SoftBlock`.

    Attributes:
      num: s, channels of a block, each with an attention and an MLP of its own; 0: none.
      every: one block in `every` has them, starting with block every - 1.
      shared: MLPs that are added to every channel's, as one of `shared` times the inner width.
      multiple: m; an expert gives ceil(m * D / s) features, which one matrix takes back to D.
      hidden_multiple: inner width of an expert's MLP over the width of the model.
      shared_kv: all channels read the same keys and values; only the queries are their own.
      merge: one of `MERGES`.
    """

    num: int
    every: int
    shared: int
    multiple: int
    hidden_multiple: float
    shared_kv: bool
    merge: str

    def in_block(self, index):
        return self.num > 0 and index % self.every == self.every - 1

    def hidden(self, width):
        """Inner width of one expert's MLP."""
        return max(1, round(self.hidden_multiple * width))

    def features(self, width):
        """What one expert's MLP gives: ceil(m * D / s)."""
        return -(-self.multiple * width // self.num)


def block_kinds(config, blocks):
    """The blocks (`BlockConfig`) of a stack, every n-th of them with soft experts."""
    return tuple(
        dataclasses.replace(block, soft=config, hidden=config.hidden(block.width))
        if config.in_block(i)
        else block
        for i, block in enumerate(blocks)
    )


def check(c, mlp, depth):
    """Raise UsageError for a bad value of `config.model.soft_experts`, used or not.

    Args:
      mlp: `MLPConfig` of the blocks. depth: how many blocks the stack has.
    """
    where = "config.model.soft_experts"
    if c.merge not in MERGES:
        raise UsageError(f"{where}.merge={c.merge!r}: expected one of {', '.join(MERGES)}")
    for name, least in (("num", 0), ("every", 1), ("shared", 0), ("multiple", 1)):
        if getattr(c, name) < least:
            raise UsageError(f"{where}.{name}={getattr(c, name)}: must be at least {least}")
    if not c.hidden_multiple > 0:
        raise UsageError(f"{where}.hidden_multiple={c.hidden_multiple}: must be more than 0")
    if c.num and c.every > depth:
        raise UsageError(
            f"{where}.every={c.every}: the stack has {depth} blocks, so none would have soft "
            f"experts; set {where}.num=0 if that is meant"
        )
    both = [i for i in range(depth) if c.in_block(i) and mlp.moe.in_block(i)]
    if mlp.kind == "moe" and both:
        raise UsageError(
            f"{where}.every={c.every} and config.model.mlp.moe.every={mlp.moe.every}: block "
            f"{both[0]} would have both soft experts and a Mixture of Experts"
        )
