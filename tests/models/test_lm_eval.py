"""A run in lm-eval: log-likelihoods and generated texts equal those of lm-eval's model `hf` on the
exported weights; scores without lm-eval equal those of whole rows."""

import importlib
import json
import pathlib
import sys
from types import SimpleNamespace

import families
import jax
import numpy as np
import pytest
from refusals import refused
from test_import import folder, routed, run  # noqa: F401
from test_interop import transformers  # noqa: F401

from efx.data.tokenizers import ByteTokenizer
from efx.interop import lm_eval, scoring
from efx.parallel import sharding
from efx.train import setup

pytestmark = pytest.mark.usefixtures("one_device")
T = families.LENGTH


def scorer(model, params, state=(), devices=1, **options):
    axes = {**dict.fromkeys(sharding.MESH_AXES, 1), "data": devices}
    mesh = sharding.make_mesh(axes, jax.local_devices()[:devices])
    built = setup.Setup(None, ByteTokenizer(), model, mesh, sharding.DEFAULT_RULES)
    options = {"batch_size": 4, **options}
    return scoring.Scorer(built, {"params": params, **dict(state)}, **options)


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    """Rows of 16 and 32 tokens."""
    monkeypatch.setattr(scoring, "SHORTEST", 16)


# ---- without lm-eval -----------------------------------------------------------------------------

# (row of the tokens, begin and end of the continuation); after a row's last token comes its first.
CUTS = ((0, 3, 8), (1, 1, 6), (2, 20, 32), (3, 1, 2), (4, 7, 9), (5, 1, T + 1), (6, 1, 17))


def expected_scores(logits_BTV, tokens_BT):
    """[(log-probability, whether each is the most likely)] by logits of whole rows."""
    logits_BTV = np.asarray(logits_BTV, np.float64)
    logprob_BTV = logits_BTV - np.logaddexp.reduce(logits_BTV, axis=-1, keepdims=True)
    for b, start, end in CUTS:
        rows, chosen = logprob_BTV[b, start - 1 : end - 1], tokens_BT[b, start:end]
        yield rows[np.arange(end - start), chosen].sum(), (rows.argmax(-1) == chosen).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mod_options", "moe", "latent"])
def test_scores_are_those_of_the_whole_row(name):
    """Although each is computed in a row that is hardly longer than itself."""
    model, params, state = families.build(name), families.params_of(name), families.state_of(name)
    logits_BTV = families.logits_of(name, families.tokens())
    tokens_BT = np.array(families.tokens())
    tokens_BT = np.concatenate([tokens_BT, tokens_BT[:, :1]], axis=1)
    tokens_BT[3, 1] = logits_BTV[3, 0].argmax()
    devices = 2 if name == "mod_options" else 1
    found = scorer(model, params, state, devices).score(
        [(tokens_BT[b, :i].tolist(), tokens_BT[b, i:j].tolist()) for b, i, j in CUTS]
    )
    expected = list(expected_scores(logits_BTV, tokens_BT))
    np.testing.assert_allclose([s.logprob for s in found], [e[0] for e in expected], atol=2e-4)
    assert [s.is_greedy for s in found] == [e[1] for e in expected] and found[3].is_greedy
    assert [s.tokens for s in found] == [end - 1 for _, _, end in CUTS]
    at_most = [sum(model.ledger(s.tokens, "causal").nominal.values()) for s in found]
    share = [score.flops / most for score, most in zip(found, at_most, strict=True)]
    assert set(share) == {1} if name == "latent" else min(share) < 0.999  # it has no routers


def test_texts_that_are_too_long_lose_their_beginning():
    model, params = families.build("llama_options"), families.params_of("llama_options")
    row = np.asarray(families.tokens())[:2].reshape(-1).tolist()
    scoring_model = scorer(model, params, max_length=16)
    found = scoring_model.score(
        [(row[:30], row[30:35]), (row[:1], row[1:17]), (row[18:30], row[30:35])]
    )
    assert found[0].logprob == pytest.approx(found[2].logprob, abs=1e-4)
    assert [s.tokens for s in found] == [16, 16, 16] and scoring_model.score([]) == []
    refused(lambda: scoring_model.score([(row[:1], row[1:18])]), "continuation of 17 tokens")
    refused(lambda: scoring_model.score([(row, [])]), "continuation of 0 tokens")
    refused(lambda: scorer(model, params, devices=2, batch_size=3), "--batch-size=3")


@pytest.mark.parametrize("start, eot, prefix", [((7,), 2, 7), ((), None, 0)])
def test_texts_begin_as_documents_do(start, eot, prefix):
    """One without any context begins with a token too."""
    tokenizer = ByteTokenizer()
    tokenizer.start, tokenizer.eot = start, eot
    model = SimpleNamespace(_tokenizer=tokenizer)
    assert lm_eval._Model.prefix_token_id.fget(model) == prefix
    assert lm_eval._Model.tok_encode(model, "ab") == [*start, 97, 98]
    assert lm_eval._Model.tok_encode(model, "ab", add_special_tokens=False) == [97, 98]


def test_lm_eval_that_is_not_installed_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    lm_eval.model_class.cache_clear()
    assert lm_eval.main(["--workdir", str(tmp_path), "--tasks", "hellaswag"]) == 2
    error = capsys.readouterr().err
    assert "lm-eval is not installed" in error and error.count("\n") == 1


# ---- with lm-eval --------------------------------------------------------------------------------

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
    "last": """
output_type: loglikelihood
doc_to_text: "{{q}}"
doc_to_target: " {{choices[answer]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "whole": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}}{{q}} {{choices[0]}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
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
def library(tmp_path_factory):
    """lm-eval, which keeps what it reads in a folder of its own and asks no network."""
    module = pytest.importorskip("lm_eval", reason="lm-eval is not installed (extra eval)")
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("datasets")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        # Its description of the machine takes half a minute.
        evaluator = importlib.import_module("lm_eval.evaluator")
        patch.setattr(evaluator, "add_env_info", lambda results: None)
        yield module


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Files of the tasks, and of their data."""
    path = tmp_path_factory.mktemp("tasks")
    (path / "data.json").write_text("\n".join(map(json.dumps, QUESTIONS)))
    head = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {path / 'data.json'}}}}}\n"
    for name, text in TASKS.items():
        (path / f"{name}.yaml").write_text(f"task: {name}\n{head}test_split: test{text}")
    return [str(path / f"{name}.yaml") for name in TASKS]


def answers(results):
    """{(task, document): answers of the model}"""
    return {
        (task, sample["doc_id"]): sample["resps"]
        for task, samples in results["samples"].items()
        for sample in samples
    }


@pytest.mark.slow
def test_scores_are_those_of_transformers(
    library,
    tasks,
    routed,  # noqa: F811
    tmp_path,
    transformers,  # noqa: F811
    recwarn,
):
    """Choices, last words, whole texts longer than the context, texts up to a stop: of a
    Mixture-of-Depths, by the command, and of its export, by lm-eval's own model `hf`."""
    pytest.importorskip("accelerate", reason="accelerate is not installed (extra interop)")
    flags = ["--workdir", str(routed), "--tasks", ",".join(tasks), "--batch-size=3"]
    assert lm_eval.main([*flags, "--log-samples"]) == 0
    (file,) = (routed / "lm_eval").glob("results_*.json")
    ours = json.loads(file.read_text())
    assert not [warning for warning in recwarn if "fork" in str(warning.message)]

    exported = tmp_path / "exported"
    assert run("--mode=export", "--workdir", routed, "--to", exported) == 0
    theirs = importlib.import_module("lm_eval.models.huggingface").HFLM
    with pytest.MonkeyPatch.context() as patch:
        modules = str(tmp_path / "modules")
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
        patch.syspath_prepend(modules)
        options = dict(device="cpu", dtype="float32", batch_size=3, trust_remote_code=True)
        model = theirs(pretrained=str(exported), **options)
        options = dict(tasks=tasks, log_samples=True, bootstrap_iters=0)
        manager = library.tasks.TaskManager(include_defaults=False)
        theirs = library.simple_evaluate(model=model, task_manager=manager, **options)

    assert set(ours["results"]) == set(TASKS)
    for task in TASKS:
        for name, value in theirs["results"][task].items():
            if isinstance(value, float) and not name.endswith("_stderr,none"):
                assert ours["results"][task][name] == pytest.approx(value, rel=1e-4), (task, name)
    mine, other = answers(ours), answers(theirs)
    assert mine.keys() == other.keys()
    for (task, document), found in mine.items():
        if task == "written":
            assert found == other[task, document]
        else:
            expected = np.asarray(other[task, document], float)
            np.testing.assert_allclose(np.asarray(found, float), expected, atol=1e-3)
    written = [mine["written", document][0][0] for document in range(4)]
    assert len(set(written)) == 4 and not any("e" in text for text in written)
    costs = ours["efx"]
    assert [costs[task]["answers"] for task in TASKS] == [4] * 4
    assert costs["choice"]["flops_per_answer"] > 2 * costs["last"]["flops_per_answer"]
    assert ours["config"]["step"] == 0 and ours["config"]["workdir"] == str(routed)


@pytest.mark.slow
def test_bad_commands_are_refused(
    library,
    tasks,
    routed,  # noqa: F811
    capsys,
    monkeypatch,
):
    everything = library.tasks.TaskManager

    def few(include_defaults=True):  # those that come with lm-eval take seconds to find
        return everything(include_path=str(pathlib.Path(tasks[0]).parent), include_defaults=False)

    monkeypatch.setattr(library.tasks, "TaskManager", few)
    for flag, name in (
        ("--tasks=choicee,last", "choicee"),
        ("--limit=0", "--limit=0"),
        ("--max-length=33", "--max-length=33"),
        ("--config.model.dept=2", "config.model.dept"),
        ("--step=3", "--step=3"),
    ):
        flags = ["--workdir", str(routed), "--tasks", tasks[0]]
        flags += ["--", flag] if flag.startswith(("--config", "--step")) else [flag]
        assert lm_eval.main(flags) == 2, flag
        error = capsys.readouterr().err
        assert name in error and error.count("\n") == 1
