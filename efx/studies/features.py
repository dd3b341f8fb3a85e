"""Which features each family has, as a page that is made by asking the code.

    python -m efx.studies.features

The settings of every feature are tried on a small model of each family, by building it, which
compiles nothing; then those of every two features that the family has. What cannot be is told in
the words of the UsageError. Writes docs/features.md, the same bytes each time.
"""

import functools
import itertools
import pathlib
import sys
import textwrap

from efx import models, run_settings, tables
from efx.errors import UsageError
from efx.models.adapters.config import AdapterConfig
from efx.models.bridged.config import BridgedConfig
from efx.models.families import FAMILIES, config_class
from efx.runfolder import write_atomic
from efx.settings import replaced
from efx.studies import cli

PAGE = "docs/features.md"
# A small model of each family; one of bridges is made of two decoders, which have the features.
SMALL = {
    "decoder": {"width": 8, "depth": 4},
    "encoder_decoder": {"width": 8, "depth": 4},
    "latent": {"width": 8, "depth": 4, "group_size": 4, "latents": (2,), "level_widths": (8,)},
    "bridged": {},
}
MEMBERS = "decoder"

MOD, RECURSION = ({"depth_routing.kind": kind} for kind in ("mod", "recursion"))
ROUTING = {
    "": {},
    ", of random tokens": {"depth_routing.train_selection": "stochastic"},
    ", of random positions": {"depth_routing.train_selection": "random_fixed"},
    ", of evenly spaced positions": {"depth_routing.train_selection": "position"},
    ", of some types of tokens": {"depth_routing.train_selection": "token_hash"},
    ", of rare types of tokens": {"depth_routing.train_selection": "token_frequency"},
    ", by a running threshold": {"depth_routing.train_selection": "threshold"},
    ", keys of skipped tokens": {"depth_routing.kv_for_skipped": True},
    ", a skip MLP": {"depth_routing.skip_mlp": 4},
    ", stages of the capacity": {"depth_routing.capacity_stages": ((0.5, 1.0),)},
}
EXPERTS = {"mlp.kind": "moe"}
MASKS = {"dropout.kind": "attention", "dropout.sites": ("attention_output", "mlp_output")}
ADAPTERS = {"adapter.kind": "lora", "adapter.experts": ("one", "other")}
INCLUSION = ADAPTERS | {"adapter.routing": "inclusion"}
# {feature: its settings, of `config.model` but for those of `config.adapter`}
FEATURES = {
    **{f"Mixture-of-Depths{name}": MOD | changes for name, changes in ROUTING.items()},
    **{f"recursion{name}": RECURSION | changes for name, changes in ROUTING.items()},
    "Mixture of Experts, token choice": EXPERTS,
    "Mixture of Experts, expert choice": EXPERTS | {"mlp.moe.router": "expert_choice"},
    "Mixture of Experts, no-op experts": EXPERTS | {"mlp.moe.num_noop": 2},
    "soft experts": {"soft_experts.num": 2},
    "DenseFormer averages": {"dense_former.on": True},
    "standard dropout": {"dropout.kind": "standard"},
    "learned dropout, elementwise": {"dropout.kind": "elementwise"},
    "learned dropout, attention": MASKS,
    "learned dropout, attention over the embedding": MASKS
    | {"dropout.attention.input": "embedding"},
    "learned positions": {"positions": "learned"},
    "rotary positions": {"positions": "rope"},
    "rotary positions, of half a head, scaled, in every second block": {
        "positions": "rope",
        "attention.num_heads": 2,
        "attention.rope_fraction": 0.5,
        "attention.rope_scaling.kind": "llama3",
        "attention.no_rope_every": 2,
    },
    "norms after attention and MLP": {"block_kind": "post_norm"},
    "attention and MLP in parallel": {"block_kind": "parallel"},
    "biases of queries, keys and values alone": {"attention.bias": "qkv"},
    "grouped keys and values": {"attention.num_kv_heads": 1},
    "heads of another width": {"attention.head_dim": 4},
    "a norm of queries and keys": {"attention.qk_norm": "head"},
    "sliding window": {"attention.window": 3},
    "softcap of scores and logits": {"attention.softcap": 5.0, "logit_softcap": 8.0},
    "muP": {"mup.base_width": 4},
    "an output layer of its own": {"tied": False},
    "scanned layers": {"scan_layers": True},
    "recomputed activations": {"remat": "full"},
    "an adapter": {"adapter.kind": "lora", "adapter.gate": True},
    "adapters of several experts, by token": ADAPTERS,
    "adapters of several experts, by slots": INCLUSION,
    "adapters of several experts, by slots, and Mixture-of-Depths": INCLUSION | MOD,
}
# {(family, feature): settings of the same meaning that have another name there}
NAMED_OTHERWISE = {("latent", "learned positions"): {"positions": "absolute"}}
# {feature: what refuses a model that cannot have it}
CHECKS = {
    "packed documents": lambda model: model.check_packing(),
    "bridges to a model of its own kind": lambda model: bridged(model),
}


# ---- asking the code ---------------------------------------------------------------------------


def refusal(family, *features):
    """Why a small model of this family cannot have these features together; "" where it can."""
    changes = {}
    for feature in features:
        changes |= settings_of(family, feature)
    try:
        model = build(family, changes)
        for feature in features:
            if feature in CHECKS:
                CHECKS[feature](model)
    except UsageError as error:
        return str(error)
    return ""


def settings_of(family, feature):
    return NAMED_OTHERWISE.get((family, feature), FEATURES.get(feature, {}))


def build(family, changes):
    """The small model of a family with these settings; UsageError where there is none."""
    prefix = "adapter."
    adapter = {key: value for key, value in changes.items() if key.startswith(prefix)}
    changes = {key: value for key, value in changes.items() if key not in adapter}
    adapter = replaced(
        AdapterConfig(), {key.removeprefix(prefix): value for key, value in adapter.items()}
    )
    if family == "bridged":
        return bridged(build(MEMBERS, changes), adapter)
    for key in changes:
        run_settings.require(every_setting(family), f"model.{key}")
    if family not in SMALL:
        raise UsageError(
            f"the family {family!r} has no small model: add one to SMALL in {__file__}"
        )
    return small(replaced(config_class(family)(), SMALL[family] | changes), adapter)


def bridged(member, adapter=None):
    """Two such models with bridges between them."""
    config = BridgedConfig(anchor="anchor", augment=("augment",), pairs=1, num_heads=1)
    return small(config, adapter, (member, member))


def small(config, adapter=None, members=()):
    size = dict(vocab_size=16, context=8, dtype="float32")
    return models.build(config, **size, adapter=adapter, members=members)


@functools.cache
def every_setting(family):
    return run_settings.known(family)


def table():
    """{feature: {family: why not, or ""}}"""
    return {
        feature: {family: refusal(family, feature) for family in FAMILIES}
        for feature in (*FEATURES, *CHECKS)
    }


def pairs(alone):
    """{why two features cannot be together: (features, families)}, of those that a family has by
    themselves, the first such two for each reason. alone: what `table` says.

    Members of bridges have what they have without, and adapters go with all that has linear layers.
    """
    found = {}
    for family in SMALL:
        had = [name for name in FEATURES if not alone[name][family]]
        had = [name for name in had if not any("adapter." in key for key in FEATURES[name])]
        for two in itertools.combinations(had, 2) if family != "bridged" else ():
            first, second = (settings_of(family, feature) for feature in two)
            if all(first[key] == second[key] for key in first.keys() & second.keys()):
                if why := refusal(family, *two):
                    found.setdefault(why, (two, {}))[1][family] = None
    return found


# ---- the page ----------------------------------------------------------------------------------


def page():
    """docs/features.md as text."""
    alone, reasons, rows = table(), [], []
    for feature, cells in alone.items():
        marks = []
        for why in cells.values():
            if why and why not in reasons:
                reasons.append(why)
            marks.append(f"no ({reasons.index(why) + 1})" if why else "yes")
        given = ", ".join(f"`{key}={value!r}`" for key, value in FEATURES.get(feature, {}).items())
        rows.append([feature, given, *marks])
    together = [
        [" and ".join(two), ", ".join(families), why]
        for why, (two, families) in pairs(alone).items()
    ]
    intro = (
        "A feature is a few settings of `config.model`, or of `config.adapter`, the same in "
        "every family that has it. A model of bridges has the features of its members, here "
        "decoders. In a cell with a no, the number is that of efx's error message."
    )
    parts = [
        "# Features by family",
        "<!-- Written by `python -m efx.studies.features` from the code. -->",
        textwrap.fill(intro, 115),
        tables.markdown(["feature", "settings", *FAMILIES], rows),
        "\n".join(f"{number}. {why}" for number, why in enumerate(reasons, 1)),
        "## Two at a time",
        "Any two features of a family can be combined, except these.",
        tables.markdown(["features", "families", "message of efx"], together),
    ]
    return "\n\n".join(parts) + "\n"


def write(arguments):
    path = pathlib.Path(arguments.root) / PAGE
    if not path.is_file():
        raise UsageError(f"--root={arguments.root}: not a checkout of efx: it has no {PAGE}")
    write_atomic(path, page())
    print(f"wrote {path}")


def main(argv=None):
    parser = cli.Parser("efx.studies.features", __doc__)
    parser.add_argument("--root", default=".", help="of the checkout (default: this folder)")
    return parser.run(write, argv)


if __name__ == "__main__":
    sys.exit(main())
