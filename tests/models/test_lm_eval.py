"""A run in lm-eval: log-likelihoods and texts equal those of lm-eval's model `hf` on the export."""

import importlib
import json
import re
import runpy
import sys
import types

import jax
import numpy as np
import pytest
from refusals import refused
from test_import import folder, imported, routed, run  # noqa: F401
from test_interop import transformers  # noqa: F401

from efx.config.load import config_of_run
from efx.data import bpe
from efx.train import inference

pytestmark = pytest.mark.usefixtures("one_device")
QUESTIONS = [
    {"q": "The quick brown fox", "choices": ["jumps over", "the lazy dog", "x"], "answer": 0},
    {"q": "over the lazy ", "choices": ["dog. The quick", "fox"], "answer": 1},  # a space moves
    {"q": "brown fox jumps " * 9, "choices": ["over", "The", "lazy dog over the"], "answer": 2},
    {"q": "", "choices": ["The quick", "lazy"], "answer": 0},
]
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: " "
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "whole": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}}{{q}} {{choices[0]}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "written": """
output_type: generate_until
doc_to_text: "{{q}} and"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory):
    """The module, with lm-eval in a cache of its own and without network."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")
    import datasets

    from efx.interop import lm_eval

    tasks = importlib.import_module("lm_eval.tasks")
    manager = tasks.TaskManager
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("datasets")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        # Describing the machine takes half a minute, indexing lm-eval's own tasks seconds.
        evaluator = importlib.import_module("lm_eval.evaluator")
        patch.setattr(evaluator, "add_env_info", lambda results: None)
        patch.setattr(
            tasks,
            "TaskManager",
            lambda *args, **options: manager(*args, **options | {"include_defaults": False}),
        )
        patch.setattr(lm_eval, "SHORTEST", 16)
        yield lm_eval


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Files of the tasks."""
    path = tmp_path_factory.mktemp("tasks")
    (path / "data.json").write_text("\n".join(map(json.dumps, QUESTIONS)))
    head = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {path / 'data.json'}}}}}\n"
    for name, text in TASKS.items():
        (path / f"{name}.yaml").write_text(f"task: {name}\n{head}test_split: test{text}")
    return [str(path / f"{name}.yaml") for name in TASKS]


# (row of the tokens, begin and end of the continuation)
CUTS = ((0, 3, 8), (1, 1, 6), (2, 20, 32), (3, 1, 2), (1, 7, 9), (2, 1, 33), (0, 1, 17))


def test_scores_depend_neither_on_padding_nor_on_batch_mates(lm_eval, routed):  # noqa: F811
    """They are those of the logits of whole rows."""
    model = lm_eval.EfxLM(routed, batch_size=4)
    built, _, params, variables = inference.restore(config_of_run(routed), routed)
    tokens_BT = np.random.default_rng(0).integers(0, 280, (4, 33))
    logits_BTV = built.model.apply({"params": params, **variables}, tokens_BT[:, :-1])
    tokens_BT[3, 1] = logits_BTV[3, 0].argmax()
    logprob_BTV = np.asarray(jax.nn.log_softmax(logits_BTV))
    pairs = [(tokens_BT[b, :i].tolist(), tokens_BT[b, i:j].tolist()) for b, i, j in CUTS]
    for (b, i, j), (logprob, is_greedy) in zip(CUTS, model.score(pairs), strict=True):
        rows_TV, targets_T = logprob_BTV[b, i - 1 : j - 1], tokens_BT[b, i:j]
        expected = rows_TV[np.arange(j - i), targets_T].sum()
        assert logprob == pytest.approx(expected, abs=2e-4)
        assert is_greedy == (rows_TV.argmax(-1) == targets_T).all()
    assert model.score(pairs)[3][1]
    row = [*tokens_BT[0].tolist(), *tokens_BT[1].tolist()]
    cut, whole = model.score([(row[:40], row[40:45]), (row[12:40], row[40:45])])
    assert cut == whole
    refused(lambda: model.score([(row[:1], row[1:34])]), "continuation of 33 tokens")


def test_texts_that_the_tokenizer_loses_are_not_scored_by_their_bytes(lm_eval, routed):  # noqa: F811
    model, library = lm_eval.EfxLM(routed), importlib.import_module("tokenizers")
    inner = library.Tokenizer(library.models.BPE({"a": 0, "b": 1}, []))
    inner.decoder = library.decoders.Fuse()
    model.efx_tokenizer = bpe.LibraryTokenizer(inner.to_str())
    texts = [types.SimpleNamespace(args=(text,)) for text in ("abba", "abcba")]
    assert len(model.loglikelihood_rolling(texts[:1])) == 1
    refused(lambda: model.loglikelihood_rolling(texts), "'cba' at 2 of text 1")


def answers(samples):
    return {sample["doc_id"]: sample["resps"] for sample in samples}


def numbers(responses):
    """The log-probabilities, and how many continuations are greedy."""
    found = re.findall(r"-?\d+\.\d+", str(responses))
    return [*map(float, found), str(responses).count("True")]


def command(lm_eval, workdir, *flags):
    return lm_eval.main(["--workdir", str(workdir), *flags])


@pytest.mark.slow
def test_answers_are_those_of_lm_evals_own_model(
    lm_eval,
    tasks,
    imported,  # noqa: F811
    routed,  # noqa: F811
    tmp_path,
    transformers,  # noqa: F811
    recwarn,
    capsys,
):
    """Of a dense run and of a Mixture-of-Depths: by the command, and by `hf` on their exports."""
    pytest.importorskip("accelerate", reason="accelerate is not installed (extra interop)")
    library = importlib.import_module("lm_eval")
    manager = importlib.import_module("lm_eval.tasks").TaskManager()
    hf_model = importlib.import_module("lm_eval.models.huggingface").HFLM
    with pytest.MonkeyPatch.context() as patch:
        modules = str(tmp_path / "modules")
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
        patch.syspath_prepend(modules)
        for workdir in (imported, routed):
            out = tmp_path / workdir.name
            flags = ["--tasks", ",".join(tasks), "--batch_size=3", "--log_samples"]
            assert command(lm_eval, workdir, *flags, "--output_path", f"{out}/ours.json") == 0
            printed = capsys.readouterr().out
            exported = str(out / "exported")
            assert run("--mode=export", "--workdir", workdir, "--to", exported) == 0
            options = dict(device="cpu", dtype="float32", batch_size=3, trust_remote_code=True)
            model = hf_model(pretrained=exported, **options)
            options = dict(tasks=tasks, log_samples=True, bootstrap_iters=0)
            theirs = library.simple_evaluate(model=model, task_manager=manager, **options)
            (results,) = out.glob("ours_*.json")
            ours = json.loads(results.read_text())
            assert ours["config"]["step"] == 0 and ours["config"]["flops_per_token"] > 0
            assert "| task | metric |" in printed
            for task in TASKS:
                for name, value in theirs["results"][task].items():
                    if isinstance(value, float) and not name.endswith("_stderr,none"):
                        assert ours["results"][task][name] == pytest.approx(value, rel=1e-4)
                        metric, mine = name.partition(",")[0], ours["results"][task][name]
                        assert f"| {task} | {metric} | {mine:.4f} |" in printed
                (samples,) = out.glob(f"samples_{task}_*.jsonl")
                mine = answers(map(json.loads, samples.read_text().splitlines()))
                other = answers(theirs["samples"][task])
                if task == "written":
                    assert mine == other and not any("e" in mine[i][0][0] for i in mine)
                    continue
                for i, expected in other.items():
                    assert numbers(mine[i]) == pytest.approx(numbers(expected), abs=1e-3)
    assert not [warning for warning in recwarn if "fork" in str(warning.message)]


def test_a_limit_and_a_default_output(lm_eval, tasks, routed):  # noqa: F811
    assert command(lm_eval, routed, "--tasks", tasks[0], "--limit=2", "--num_fewshot=1") == 0
    (results,) = (routed / "lm_eval").glob("results_*.json")
    results = json.loads(results.read_text())
    assert results["n-samples"]["choice"]["effective"] == 2 and results["n-shot"]["choice"] == 1


def test_a_missing_extra_is_status_2(monkeypatch, capsys):
    for name in ("lm_eval", "lm_eval.__main__"):
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    with pytest.raises(SystemExit) as end:
        runpy.run_module("efx.interop.lm_eval", run_name="__main__")
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and line.startswith("efx: error: ") and "`eval`" in line


def test_bad_commands_are_refused(lm_eval, tasks, routed, capsys):  # noqa: F811
    for flag, name in (
        ("--tasks=choicee", "choicee"),
        ("--batch_size=auto", "--batch_size=auto"),
        ("--config.model.dept=2", "config.model.dept"),
        ("--step=3", "3"),
        ("--output_path=/dev/null/x", "/dev/null"),
    ):
        assert command(lm_eval, routed, f"--tasks={tasks[0]}", flag) == 2, flag
        (line,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("efx: error"))
        assert name in line
