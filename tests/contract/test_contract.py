"""Every family keeps the contract of models, and nobody asks more of a model than that."""

import ast
import inspect
import pathlib

import families
import pytest
from test_calm import CASES, bridged

from efx import models
from efx.models.contract import Model, Settings
from efx.models.reports import REPORTS

# What linen gives to every module.
LINEN = {"apply", "init", "init_with_output", "clone", "path"}
MEMBERS = {name for name in (*vars(Model), *Model.__annotations__) if not name.startswith("_")}
# Where models are used, not made.
SPINE = [*pathlib.Path("efx").glob("*.py"), *pathlib.Path("efx/checkpoint").glob("*.py")]


def made():
    first = {}
    for name, row in families.FAMILIES.items():
        first.setdefault((row.changes.get("family"), "adapter.kind" in row.changes), name)
    return [*first.values(), "bridged"]


@pytest.mark.parametrize("name", made())
def test_a_family_keeps_it(name):
    case = next(iter(CASES.values()))
    model = bridged(*case) if name == "bridged" else families.build(name)
    assert isinstance(model.config, Settings) and isinstance(model, Model)
    assert model.config.family in models.FAMILIES
    for method in ("__call__", "features", "logits", "head_params", "head_fn",
                   "sum_head_gradients", "specs", "blocks", "ledger", "check_packing"):  # fmt: skip
        wanted = inspect.signature(getattr(Model, method)).parameters
        given = inspect.signature(getattr(type(model), method)).parameters
        kinds = {parameter.kind for parameter in given.values()}
        if inspect.Parameter.VAR_POSITIONAL in kinds:  # hands on what it is given
            continue
        assert [(p.name, p.default) for p in given.values()] == [
            (p.name, p.default) for p in wanted.values()
        ], method


def test_every_config_resolves_to_itself():
    """What `build` made out is complete: making it out again changes nothing."""
    for name in families.NAMES:
        config = families.build(name).config
        assert config.resolved() == config, name


def asked(path):
    """{attribute: line} of what is read from something that is called a model."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = getattr(owner, "id", getattr(owner, "attr", ""))
            outer = getattr(getattr(owner, "value", None), "id", "")
            # `config.model` is a block of settings, not a model.
            if name.strip("_") == "model" and "config" not in outer and outer != "c":
                found[node.attr] = f"{path}:{node.lineno}"
    return found


def test_the_rest_of_efx_asks_nothing_else(root, monkeypatch):
    monkeypatch.chdir(root)
    assert len(SPINE) > 25
    asks = [asked(path) for path in SPINE]
    assert {"ledger", "blocks", "context"} <= {name for found in asks for name in found}
    beyond = {where: name for found in asks for name, where in found.items()
              if name not in MEMBERS | LINEN}  # fmt: skip
    assert not beyond


def test_the_rest_of_efx_asks_for_no_feature_by_name(root, monkeypatch):
    """What evaluation reports of a feature is said beside the feature."""
    monkeypatch.chdir(root)
    rows = [name for report in REPORTS for name in (*report.words, *report.statistics)]
    features = {name.partition("/")[0] for name in rows}
    assert features >= {"router", "moe", "adapter", "dropout", "mlp"}
    for path in SPINE:
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and "\n" not in text:  # a docstring may give an example
                first, slash, _ = text.removeprefix("eval/").partition("/")
                assert not slash or first not in features, f"{path}:{node.lineno}"
