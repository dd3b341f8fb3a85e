"""Every command, setting, file and test that README and docs name exists.

A shell command is taken from fenced blocks (bash) and from code within a line, and runs up to the
point where it would compute: `efx.main` resolves its config and builds the model, a study checks
all of its runs and ends where the first would start, other programs parse their flags, launch
scripts run with a Python that only prints its arguments, or with --dry-run. A command without a
rule fails. A line `<!-- not run: why -->` exempts the block below it.
"""

import argparse
import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from test_launch import STUB, script
from test_layout import CONFIGS, project_files

from efx import main, models
from efx.config import flags
from efx.data import prepare
from efx.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?:<!-- not run: (.+) -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
PROGRAMS = [*CONFIGS, ROOT / "efx/main.py"]  # with commands in their docstrings
# What a command within a line of text begins with.
COMMAND = r"(?:[A-Z_]+=\S+ )?(?:python -m|efx|\./launch/\S+|pip|git|sbatch|kubectl|hf|\w+-cli) \S"
# Studies that check the command line of every run before the first one starts.
CHECKED_STUDIES = ("sweep", "isoflop", "phatgoose", "calm", "cbtm", "conversion")
SHELLS = ("bash", "sh", "console")


class Started(Exception):
    """A program has checked what it was given and would begin."""


def prose(text):
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def spans(text):
    """Code within the lines of a page."""
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(text))]


def blocks(text):
    """(why it is not run or "", commands) of the fenced shell blocks of a page; a command is a
    line with those that continue it, or with the text that it reads up to END."""
    for why, language, body in FENCE.findall(text):
        if language in SHELLS:
            parts = re.findall(r"[^\n]*<<'END'\n.*?^END$|(?:[^\n]*\\\n)*[^\n]+", body, re.M | re.S)
            yield why, [part for part in parts if not part.lstrip().startswith("#")]


def documented():
    """(page, command) of all that are checked, also of the docstrings of configs."""
    for page in PAGES:
        text = page.read_text()
        yield from ((page, one) for why, found in blocks(text) if not why for one in found)
        yield from ((page, span) for span in spans(text) if re.match(COMMAND, span))
    for page in PROGRAMS:
        docstring = ast.get_docstring(tree(page))
        found = re.findall(r"^    ((?:python -m|efx) (?:.*\\\n)*.*)", docstring, re.M)
        yield from ((page, one) for one in found)


@functools.cache
def tree(path):
    return ast.parse(path.read_text(), str(path))


# ---- how far a command goes --------------------------------------------------------------------


def check(command, stub):
    """Raises what is wrong with a shell command; in a folder that looks like the checkout."""
    head, _, body = command.partition("\n")
    if head == "python - <<'END'":
        with contextlib.redirect_stdout(io.StringIO()):
            exec(body.removesuffix("END"), {})
        return
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    program, *words = words
    if program == "python" and words[0] == "-m":
        python(words[1], words[2:])
    elif program == "efx":
        python("efx.main", words)
    elif program.startswith("./launch/"):
        launch(program, words, stub)
    elif program == "pip":
        install(words)
    elif program == ".venv/bin/python":
        python(words[1], words[2:])
    elif program == "sbatch":
        where = next(i for i, word in enumerate(words) if not word.startswith("-"))
        assert Path(words[where]).is_file(), command
        efx_main(words[where + 1 :])
    elif program == "kubectl":
        assert words[:2] == ["apply", "-f"] and Path(words[2]).is_file(), command
    elif program == "source":  # where environment.sh makes the environment
        assert words == [".venv/bin/activate"], command
    elif program == "git":
        assert words[0] == "clone", command
    elif program == "hf" or program.endswith("-cli"):
        scripts = importlib.metadata.distribution("huggingface_hub").entry_points
        assert program in scripts.select(group="console_scripts").names, f"there is no {program}"
        assert words[0] == "download" and "--local-dir" in words, command
    else:
        assert program == "cd", f"there is no rule for {command!r}"


def python(module, argv):
    """What `python -m module argv` does before it computes."""
    if module == "pytest":
        for word in argv:
            path = Path(word.partition("::")[0])
            assert path.suffix != ".py" or path.exists(), word
    elif module == "efx.main":
        efx_main(argv)
    elif module == "efx.data.prepare":
        assert prepare.arguments_of(["prepare", *argv])
    elif module == "tensorboard.main":
        assert argv[0] == "--logdir", argv
    elif not argv:
        assert importlib.util.find_spec(module), module
    else:
        program(importlib.import_module(module), argv)


def efx_main(argv):
    """Everything up to the start of JAX, then the model; run directories stay for the next ones."""
    if "--mode=import" in argv:  # without it, no further command of the page finds its run
        pytest.importorskip("transformers", reason="the extra `interop` is not installed")
    for before, word in itertools.pairwise(["", *argv]):
        if re.fullmatch(r"models/.*", word):
            leave_model(word)
        folder = re.fullmatch(r"(?:--workdir=)?(runs/.*)", word)
        if folder and not (Path(folder[1]) / "config.json").exists():
            variant = ":dense" if before == "--from" else ""
            leave_run(folder[1], values_of(f"configs/mod.py{variant}"))
    if not argv or argv == ["--list"]:
        return
    starts = r"--config|--config=.*|--mode=(import|convert)"
    fresh = any(re.fullmatch(starts, word) for word in argv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "start_jax", lambda values: (_ for _ in ()).throw(Started(values)))
        with pytest.raises(Started) as start:
            main.run(["efx", *argv])
    values = start.value.args[0]
    build(values.config)
    if fresh and values.workdir:
        leave_run(values.workdir, values)


def values_of(config):
    """The flags of a run with this config and nothing else."""
    return flags.parse(["efx", f"--config={config}", "--workdir=x"])


def leave_run(folder, values):
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "config.json").write_text(values.config.to_json())


def leave_model(folder):
    """What --mode=import reads of a Hugging Face folder before it starts JAX."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    contents = {"model_type": "llama", "rope_theta": 10000.0, "num_hidden_layers": 4}
    (Path(folder) / "config.json").write_text(json.dumps(contents))


def build(config):
    if config.model.family != "bridged" and not config.adapter.experts:  # made of other runs
        models.build(
            config.model, vocab_size=257, context=config.data.seq_len, dtype=config.train.dtype
        )


def program(module, argv):
    """A study that starts runs checks them all; of others the flags are parsed. The config is
    loaded in either case."""
    if module.__name__ == "efx.config.reference":
        return
    parsed = parsed_flags(module, argv)
    if isinstance(config := vars(parsed).get("config"), str):
        values_of(config)
    if module.__name__.rpartition(".")[2] not in CHECKED_STUDIES:
        return
    for text in re.findall(r"=text:(\S+)", " ".join(argv)):  # the reader's own
        Path(text).touch()
    from efx.studies import runs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "run_all", lambda *_, **__: (_ for _ in ()).throw(Started()))
        stderr = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(stderr):
            try:
                status = module.main(argv)
            except Started:
                return
    assert status == 0, stderr.getvalue()


def parsed_flags(module, argv):
    """What the module's own parser makes of argv; nothing that comes after it runs."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self, *arguments, **options):
        self.allow_abbrev = False  # documentation spells flags out
        raise Started(parse(self, *arguments, **options))

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        try:
            module.main(argv)
        except Started as start:
            return start.args[0]
        except SystemExit:
            pass
    raise UsageError(said.getvalue().strip() or f"{module.__name__} parses no flags")


def launch(path, words, stub):
    name = Path(path).name
    assert Path(path).is_file(), path
    if name == "multiprocess.sh":  # which starts so many local.sh
        assert words[0].isdigit(), words
        name, words = "local.sh", words[1:]
    if name == "tpu_pod.sh":
        own = words[: words.index("--")] if "--" in words else words
        dry = own if {"--dry-run", "--help"} & set(own) else [*own, "--dry-run"]
        assert "gcloud" in run("launch/tpu_pod.sh", *dry), words
        efx_main(words[len(own) + 1 :])
        return
    if name == "environment.sh":
        assert run(path, EFX_VENV=str(stub)).strip() == f"{stub}/bin/python"
        return
    if name == "gpu_slurm.sbatch":
        assert words[0] == "--dry-run" and "srun" in run(path, *words), words
        efx_main(words[1:])
        return
    shown = run(f"launch/{name}", *words, EFX_VENV=str(stub)).splitlines()
    where = shown.index("-m")
    python(shown[where + 1], shown[where + 2 : -1])  # the last line is the extras'


def run(*command, **env):
    done = subprocess.run(
        ["bash", *command], capture_output=True, text=True, env=os.environ | env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def install(words):
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    where = [word for word in words[1:] if not word.startswith("-")]
    assert words[0] == "install" and len(where) == 1, words
    found = re.fullmatch(r"\.(?:\[([\w,]+)\])?", where[0])  # a checkout; no index has efx
    assert found or Path(where[0]).is_file(), where
    assert not found or set(filter(None, (found[1] or "").split(","))) <= set(extras), where


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder with everything that the checkout has, but for runs."""
    folder = tmp_path_factory.mktemp("checkout")
    guide = (ROOT / "docs/guide.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        for name in ("config", "sweep"):  # the reader's own files
            if f"def get_{name}" in block:
                (folder / {"config": "mine.py", "sweep": "rates.py"}[name]).write_text(block)
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".git", ".venv"):
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def stub(checkout, monkeypatch):
    """An EFX_VENV whose Python shows what it is asked to run."""
    monkeypatch.chdir(checkout)
    return script(checkout / "stub/bin/python", STUB).parent.parent


@pytest.mark.parametrize("page", [*PAGES, *PROGRAMS], ids=lambda page: page.name)
def test_every_command_is_accepted_by_its_program(page, stub):
    wrong, untried = [], []
    for where, command in documented():
        if where == page:
            try:
                check(command, stub)
            except (Exception, SystemExit) as error:
                kept = untried if "the extra `" in str(error) else wrong
                kept.append(f"{command}\n    {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    if untried:
        pytest.skip(f"not tried, for want of an extra: {untried[0].splitlines()[0]}")


def test_every_sweep_is_documented():
    """In its docstring, so that its runs are checked above."""
    for path in (ROOT / "configs/sweeps").glob("[a-z]*.py"):
        assert f"configs/sweeps/{path.name}" in ast.get_docstring(tree(path)), path.name


def test_blocks_of_shells_are_well_formed():
    for page in PAGES:
        text = page.read_text()
        assert text.count("\n```") == 2 * len(FENCE.findall(text)), f"{page.name}: fences"
        assert text.count("<!-- not run") == len([why for why, _ in blocks(text) if why]), page.name
        for _, commands in blocks(text):
            text = "\n".join(commands)
            parsed = subprocess.run(["bash", "-n"], input=text, text=True, check=False)
            assert parsed.returncode == 0, (page.name, text)


# ---- what is named in the text -----------------------------------------------------------------


def anchors(path):
    """The headings of a page, as links name them."""
    found = re.findall(r"^#+ (.+)$", prose(path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if not target.startswith("http"):
            path, _, heading = target.partition("#")
            path = page.parent / path if path else page
            assert path.exists(), target
            assert not heading or heading in anchors(path), target


@functools.cache
def names_of_tests():
    """{file name: names of the functions in it} of all tests."""
    return {
        path.name: set(re.findall(r"def (\w+)", path.read_text()))
        for path in (ROOT / "tests").rglob("test_*.py")
    }


@functools.cache
def settings_and_variants():
    """(dotted names of all settings and blocks, {config file: its variants}) of all configs."""
    keys, variants = set(), {}

    def add(block, prefix):
        for key, value in block.items():
            keys.add(f"{prefix}.{key}")
            if hasattr(value, "items"):
                add(value, f"{prefix}.{key}")

    for path in CONFIGS:
        add(values_of(path).config, "config")
        variants[path.name] = set(importlib.import_module(f"efx.configs.{path.stem}").VARIANTS)
    return keys, variants


@functools.cache
def words_of_the_code():
    """Every word in efx, its configs and extras."""
    paths = [path for folder in ("efx", "configs") for path in (ROOT / folder).rglob("*.py")]
    paths.append(ROOT / "pyproject.toml")
    return set(re.findall(r"\w+", " ".join(path.read_text() for path in paths)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_code_spans_exist(page):
    """Settings (`config.a.b`, `name=value`), variants of configs, tests, files, names in code."""
    keys, variants = settings_and_variants()
    tests, wrong = names_of_tests(), []
    for span in spans(page.read_text()):
        good = True
        if dotted := re.fullmatch(r"(?:--)?(config(?:\.\w+)+)(?:=.*)?", span):
            good = dotted[1] in keys or dotted[1] == "config.json"
        elif name := re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)*)=\S.*", span):
            good = any(key.endswith(f".{name[1]}") for key in keys)
        elif config := re.fullmatch(r"configs/(\w+\.py)(?::([\w,]+))?", span):
            known = variants.get(config[1])
            good = config[1] == "common.py" or known is not None
            good = good and set(filter(None, (config[2] or "").split(","))) <= (known or set())
        elif test := re.fullmatch(r"(?:\S*/)?(test_\w+\.py)?(?:::)?(test_\w+)?", span):
            inside = tests.get(test[1], set()) if test[1] else set().union(*tests.values())
            good = (not test[1] or test[1] in tests) and (not test[2] or test[2] in inside)
        elif path := re.fullmatch(r"(\w+/[\w./]+\.\w+)(?:::(\w+))?", span):
            good = (ROOT / path[1]).exists() or path[1].startswith("runs/")
            good = good and (not path[2] or f"def {path[2]}(" in (ROOT / path[1]).read_text())
        elif code := re.fullmatch(r"[a-z]\w+(?:[./]\w+)*", span):
            good = set(re.split("[./]", code[0])) <= words_of_the_code() or (ROOT / span).exists()
        if not good:
            wrong.append(span)
    assert not wrong


def test_tests_named_in_any_file_exist():
    for path, text in project_files():
        if path.name not in ("CHANGELOG.md", "test_docs.py"):
            for name in re.findall(r"tests/[\w/]+\.py", text):
                assert (ROOT / name).is_file(), f"{path.relative_to(ROOT)}: {name}"
