"""The page of features by family is what the code says, in its own words."""

import re

import jax
import jax.numpy as jnp
import pytest

from efx.errors import UsageError
from efx.parameter import only_shapes
from efx.studies import features


def cells_of(text):
    """(rows of the first table, of the second, {number: reason}) of the page."""
    first, second = text.split("## Two at a time")

    def rows(part):
        lines = [line[2:-2].split(" | ") for line in part.splitlines() if line.startswith("| ")]
        return lines[0], lines[1:]

    return rows(first), rows(second), dict(re.findall(r"^(\d+)\. (.+)$", first, re.M))


def test_the_page_is_what_the_code_says(root):
    """It is written by `python -m efx.studies.features`, after any change of what can be."""
    assert (root / features.PAGE).read_text() == features.page()


def test_the_page_is_written_in_a_checkout_alone(tmp_path, capsys):
    assert features.main([f"--root={tmp_path}"]) == 2
    assert "not a checkout of efx: it has no docs/features.md" in capsys.readouterr().err


def test_what_the_page_refuses_is_a_usage_error_in_its_own_words(root):
    """For each reason the first model that it is given for."""
    (titles, rows), (_, pairs), reasons = cells_of((root / features.PAGE).read_text())
    families, refused = titles[2:], {}
    assert len(rows) == len(features.FEATURES) + len(features.CHECKS) and len(reasons) > 5
    for feature, _, *marks in rows:
        for family, mark in zip(families, marks, strict=True):
            if mark != "yes":
                number = re.fullmatch(r"no \((\d+)\)", mark)[1]
                refused.setdefault(reasons[number], (family, [feature]))
    assert len(refused) == len(reasons)
    for two, among, reason in pairs:
        first = next(name for name in features.FEATURES if two.startswith(f"{name} and "))
        refused[reason] = among.split(", ")[0], [first, two.removeprefix(f"{first} and ")]
    for reason, (family, names) in refused.items():
        changes = {}
        for name in names:
            changes |= features.settings_of(family, name)
        with pytest.raises(UsageError) as error:
            model = features.build(family, changes)
            features.CHECKS[names[0]](model)
        assert str(error.value) == reason


@pytest.mark.parametrize("family", [name for name in features.SMALL if name != "bridged"])
def test_what_a_family_has_changes_what_it_computes(family):
    """A yes is no setting that nothing reads: the traced program is another one, unless the small
    model is such already."""

    def program(model):
        def run(key):
            keys = {"params": key, "dropout": key, "routing": key}
            return model.init(keys, jnp.zeros((1, 8), jnp.int32), train=True)

        with only_shapes():
            return str(jax.make_jaxpr(run)(jax.random.key(0)))

    # The least of blocks: recursion repeats one between two others.
    small = {"depth": 3}
    if family == "latent":
        small |= {"encoder_local": 0, "decoder_global": 0}
    plain = features.build(family, small)
    before, changed = program(plain), 0
    for feature in features.FEATURES:
        if not features.refusal(family, feature):
            model = features.build(family, features.settings_of(family, feature) | small)
            same = model.config == plain.config and not hasattr(model, "adapter")
            assert (program(model) == before) == same, feature
            changed += not same
    assert changed > 10
