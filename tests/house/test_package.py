"""efx as an installed package: the wheel, its command, its configs and the library."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from refusals import refused

import efx
from efx import api
from efx.config.load import find_file
from efx.configs import common

# A config of a user, who has a folder `configs` too.
OWN = """
from efx.configs import common

def get_config(arg=""):
    return common.apply(common.base(), {**common.SMOKE, "model.depth": 1})
"""
OUTSIDE = """
import json, sys
from efx import api, main
from efx.config.load import load_config
from efx.studies import isoflop, runs, sweep

own, tiny, block = json.loads(sys.argv[1])
assert main.main(["efx", "--config=mdo:smoke", "--workdir=w"]) == 2
assert load_config("mod:smoke,dense") == load_config("configs/mod.py:smoke,dense")
assert load_config(own).model.depth == 1
for name in ("latent_table", "configs/sweeps/mod_table.py"):
    runs.check(sweep.make_runs(sweep.load_sweep(name), "w", ["--config.log.every=9"]))
isoflop.load_grid("isoflop")
load = api.load_config
api.load_config = lambda source, changes: load(source, {**changes, **tiny})
exec(block)
assert last["train/loss"] > 0 and scores["eval/tokens"] > 0
"""


def wheel_of(root, folder):
    """Path of the wheel of a checkout, built without network in a copy of it."""
    source = folder / "source"
    for name in ("efx", "configs"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(root, tmp_path_factory):
    pytest.importorskip("setuptools", "77", reason="setuptools 77 is not installed (extra dev)")
    return wheel_of(root, tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_has_all_of_efx_and_its_configs(root, wheel):
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        dist = f"efx-{efx.__version__}.dist-info"
        metadata = email.message_from_bytes(file.read(f"{dist}/METADATA"))
        scripts = file.read(f"{dist}/entry_points.txt").decode()
    expected = {f"{path.relative_to(root)}" for path in (root / "efx").rglob("*.py")}
    expected |= {f"efx/{path.relative_to(root)}" for path in (root / "configs").rglob("*.py")}
    expected |= {f"{path.relative_to(root)}" for path in (root / "efx/studies").glob("*.html")}
    assert {name for name in names if not name.startswith(dist)} == expected
    assert metadata["Version"] == efx.__version__ and f"{dist}/licenses/LICENSE" in names
    assert scripts.split() == ["[console_scripts]", "efx", "=", "efx.main:main"]


@pytest.mark.slow
def test_the_example_of_the_library_runs_outside_a_checkout(root, wheel, tmp_path):
    """The example of docs/guide.md, at a tiny size, from the wheel alone."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "site")
    here = tmp_path / "here"
    (here / "configs").mkdir(parents=True)
    (here / "configs/__init__.py").write_text("raise ImportError('a folder of the user')")
    (here / "mine.py").write_text(OWN)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    tiny = common.SMOKE | {
        "steps": 1, "optim.schedule.warmup_steps": 0, "data.source": "text:../text.txt",
        "data.seq_len": 16, "model.depth": 1, "model.depth_routing.kind": "none",
        "evaluate.every": 0, "sample.every": 0, "log.every": 1, "data.cache_dir": "cache",
    }  # fmt: skip
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs/guide.md").read_text(), flags=re.S)
    (block,) = [block for block in blocks if "api.train" in block]
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE, json.dumps(["mine.py", tiny, block])],
        cwd=here,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "efx: error: --config=mdo" in done.stderr
    assert " def " in done.stdout and (here / "runs/library/config.json").is_file()


def test_importing_efx_does_not_import_jax(root):
    script = "import sys, efx, efx.api; print({'jax', 'flax', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stdout + done.stderr


def test_a_path_object_names_a_config(root):
    assert api.load_config(root / "configs/mod.py") == api.load_config("mod")


@pytest.mark.parametrize("wrong", ["", None])
def test_a_name_that_is_no_config_or_folder_is_refused(wrong, tmp_path, monkeypatch):
    """An empty name would be the current folder."""
    monkeypatch.chdir(tmp_path)
    refused(lambda: api.load_config(wrong), f"={wrong!r}")
    refused(lambda: api.train(api.load_config("mod:smoke"), wrong), f"={wrong!r}")
    refused(lambda: api.evaluate(wrong), f"={wrong!r}")
    assert not list(tmp_path.iterdir())


def test_wrong_arguments_of_the_library_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(api.load_config("mod:smoke").to_json())
    changes = [("sample.max_new_tokens", 3)]
    refused(lambda: api.evaluate(tmp_path, changes=changes), "changes=[")
    refused(lambda: api.sample(tmp_path, changes=changes), "changes=[")
    refused(lambda: api.sample(tmp_path, 3), "config.sample.prompt=3")


def test_a_misspelt_file_is_refused_with_the_nearest():
    refused(lambda: find_file("config", "configs/llma.py"), "'configs/llama.py'")
    refused(lambda: find_file("sweep", "mod_tble", "sweeps"), "'mod_table'")


def test_a_path_of_the_user_comes_before_one_of_efx(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_file("config", "configs/mod.py") == find_file("config", "mod")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/mod.py").write_text(OWN)
    assert find_file("config", "configs/mod.py").resolve() == tmp_path / "configs/mod.py"
    assert find_file("config", "mod").resolve() != tmp_path / "configs/mod.py"
