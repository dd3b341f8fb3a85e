"""`config.adapter`."""

from typing import Literal

from efx.errors import UsageError
from efx.routing import plans
from efx.settings import AtLeastOne, Count, Fraction, Number, block, check_regex


@block("config.adapter")
class AdapterConfig:
    """Small additions to linear layers of a finished model of any family, configs/phatgoose.py."""

    kind: Literal["none", "lora", "mlp"] = "none"  # "lora": u A B; "mlp": gelu(u A) B
    rank: Count = 16
    scale: Number = 1.0
    # Regex (whole path) of the linear layers that have one, as they are called when unrolled.
    sites: str = r".*/(query|key|value|out|gate|up|down)"
    gate: bool = False  # one adapter: times sigmoid(v.u), v trained when the adapter is
    # Run folders of experts, adapters of one base model (init.run), to be composed.
    experts: tuple[str, ...] = ()
    # Of several experts: "topk" for each token and layer, by their gates; "uniform": the mean
    # of all; "inclusion": an entrance of each expert may leave it out.
    routing: Literal["topk", "uniform", "inclusion"] = "topk"
    top_k: Count = 2
    capacity: Fraction = 0.5  # inclusion: fraction of a sequence that an expert takes
    slack: AtLeastOne = 1.5  # inclusion: room of the causal decision, as a multiple of the capacity

    def check(self):
        def require(holds, name, rule):
            if not holds:
                raise UsageError(f"config.adapter.{name}={getattr(self, name)!r}: {rule}")

        if self.kind == "none":
            rule = "needs the config.adapter.kind of these experts"
            require(not self.experts, "experts", rule)
            require(not self.gate, "gate", "needs a config.adapter.kind other than 'none'")
        require(self.scale != 0, "scale", "must not be 0: adapters would have no effect")
        require(len(set(self.experts)) == len(self.experts), "experts", "has a run twice")
        if self.experts and self.routing == "topk":
            rule = f"must be from 1 to the number of config.adapter.experts, {self.choices}"
            require(self.top_k <= self.choices, "top_k", rule)
        check_regex(self.sites, f"{self.where}.sites")

    @property
    def choices(self):
        """Of the several experts: how many; 0 for a single adapter."""
        return len(self.experts)

    @property
    def looks_ahead(self):
        return bool(self.experts) and self.routing == "inclusion"

    def budget(self, length, selection, documents=None):
        """Inclusion: `plans.Budget` of an expert."""
        fraction = self.capacity if selection == "train" else self.capacity * self.slack
        return plans.Budget(fraction, length, documents)

    def slots(self, length, selection):
        """Inclusion: tokens of a sequence that an expert has room for."""
        return self.budget(length, selection).size
