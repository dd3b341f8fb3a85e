"""A run in EleutherAI's lm-eval, the harness that most published scores come from.

    python -m efx.interop.lm_eval --workdir runs/mod --tasks hellaswag,arc_easy,wikitext

Tasks are lm-eval's, or YAML files in its format; lm-eval makes the prompts, computes the scores and
downloads the data of its tasks. A run of any family answers by the causal decisions, as it samples.
Prints lm-eval's table and a table of costs: nominal FLOPs of an answer, with the tokens that routed
blocks and token-choice experts computed. Both go to WORKDIR/lm_eval/results_<time>.json. Settings
of the run can be overridden after `--`: `-- --config.train.dtype=bfloat16`. Needs the extra `eval`.
"""

import contextlib
import datetime
import functools
import json
import logging
import multiprocessing
import os
import pathlib
import sys

import jax
from rich.console import Console
from rich.progress import track

from efx import io, run_dir
from efx.config import flags
from efx.config.load import config_of_run, to_config
from efx.errors import UsageError, nearest
from efx.interop.scoring import Scorer
from efx.layers.flops import count_params
from efx.logging import tables
from efx.studies import cli
from efx.train import finished_run, setup

# Bootstrap resamples for standard errors of perplexities and the like.
_RESAMPLES = 1000
# Supported generation_kwargs of a task, beside `until` and `max_gen_toks`.
_GENERATION = ("do_sample", "temperature", "top_k", "top_p")


class Costs:
    """Cost of the answers of each task. An answer is all requests about one document, such as every
    choice of a question.

    Attributes:
      totals: {task: {"answers", "tokens", "flops"}}
    """

    def __init__(self):
        self.totals, self._documents = {}, set()

    def add(self, requests, spent):
        """Args:
        requests: lm-eval's `Instance`s. spent: (tokens, FLOPs) of each.
        """
        for request, (tokens, flops) in zip(requests, spent, strict=True):
            names = ("answers", "tokens", "flops")
            total = self.totals.setdefault(request.task_name, dict.fromkeys(names, 0))
            document = request.task_name, request.doc_id
            total["answers"] += document not in self._documents
            self._documents.add(document)
            total["tokens"] += tokens
            total["flops"] += flops

    def per_answer(self):
        """{task: {"answers": their number, "tokens_per_answer", "flops_per_answer"}}"""
        return {
            task: {"answers": total["answers"]}
            | {f"{name}_per_answer": total[name] / total["answers"] for name in ("tokens", "flops")}
            for task, total in self.totals.items()
        }


class _Model:
    """lm-eval's interface of a model; `model_class` adds lm-eval's base class `TemplateLM`.

    Args:
      workdir: run directory. step: of the checkpoint; None: the newest.
      batch_size: rows that are computed together.
      max_length: tokens of the longest row; None: the model's context.
      config: ConfigDict that replaces the run's; None: the run's.
    Attributes:
      costs: `Costs` of all requests so far.
    """

    def __init__(self, workdir, *, step=None, batch_size=8, max_length=None, config=None):
        super().__init__()
        if jax.process_count() > 1:
            raise UsageError("lm-eval runs in one process: start it without several processes")
        if run_dir.holds_clustering(workdir):
            raise UsageError(
                f"--workdir={workdir} is an ensemble, and lm-eval does not run on these; use "
                "one of the run directories in it"
            )
        config = to_config(config_of_run(workdir) if config is None else config)
        built, self.step, params, variables = setup.finished(config, workdir, step)
        self._info = {
            "workdir": str(workdir),
            "step": self.step,
            "family": built.model.config.family,
            "parameters": count_params(params),
        }
        if other := finished_run.model_change_warning(built.config, workdir):
            self._info["other_model"] = other
        self._scorer = Scorer(
            built, {"params": params, **variables}, batch_size=batch_size, max_length=max_length
        )
        self._tokenizer, self._spent, self.costs = built.tokenizer, [], Costs()

    def get_model_info(self):
        """Entries for `config` in the results."""
        return dict(self._info)

    # ---- tokens ----------------------------------------------------------------------------------

    @property
    def eot_token_id(self):
        return self._tokenizer.eot

    @property
    def prefix_token_id(self):
        """Context of a text without one: the start token of documents, their end token, or 0."""
        t = self._tokenizer
        return next(iter(t.start), 0 if t.eot is None else t.eot)

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        start = () if add_special_tokens is False else self._tokenizer.start
        return [*map(int, start), *self._tokenizer.encode(string).tolist()]

    # ---- answers ---------------------------------------------------------------------------------

    def loglikelihood(self, requests, disable_tqdm=False):
        found = super().loglikelihood(requests, disable_tqdm=True)
        self.costs.add(requests, self._spent)
        return found

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        pairs = [(context, continuation) for _, context, continuation in requests]
        scores = self._scorer.score(pairs, _progress("continuations"))
        self._spent = [(score.tokens, score.flops) for score in scores]
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Score whole texts, in windows as long as the longest row that predict each token once."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        pairs, owners = [], []
        for i, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._scorer.max_length,
                context_len=1,
            )
            windows = [make_disjoint_window(window) for window in windows]
            pairs += windows
            owners += [i] * len(windows)
        found, spent = [0.0] * len(requests), [(0, 0.0)] * len(requests)
        scores = self._scorer.score(pairs, _progress("windows"))
        for i, score in zip(owners, scores, strict=True):
            found[i] += score.logprob
            spent[i] = spent[i][0] + score.tokens, spent[i][1] + score.flops
        self.costs.add(requests, spent)
        return found

    def generate_until(self, requests, disable_tqdm=False):
        """Generate texts; requests with equal settings are batched together."""
        groups = {}
        for i, request in enumerate(requests):
            key = json.dumps(request.args[1], sort_keys=True)
            groups.setdefault(key, []).append(i)
        found, spent = [None] * len(requests), [None] * len(requests)
        for indices in groups.values():
            prompts = [
                self.tok_encode(requests[i].args[0]) or [self.prefix_token_id] for i in indices
            ]
            options = _generation_options(requests[indices[0]].args[1])
            texts = self._scorer.generate(
                prompts, seeds=indices, progress=_progress("texts"), **options
            )
            for i, text in zip(indices, texts, strict=True):
                found[i], spent[i] = text.text, (text.tokens, text.flops)
        self.costs.add(requests, spent)
        return found


def _generation_options(settings):
    """Arguments of `Scorer.generate` from a task's generation_kwargs."""
    from lm_eval.models.utils import normalize_gen_kwargs

    settings = normalize_gen_kwargs(settings)
    until, count = settings.pop("until"), settings.pop("max_gen_toks")
    for name in settings:
        if name not in _GENERATION:
            known = ", ".join(("until", "max_gen_toks", *_GENERATION))
            raise UsageError(
                f"generation_kwargs: {name}={settings[name]!r} is not "
                f"supported{nearest(name, _GENERATION)}; use {known}"
            )
    options = {"until": tuple(until), "max_new_tokens": count}
    if settings.pop("do_sample"):
        # The default temperature of sampling is 1.
        return options | {"temperature": 1.0} | settings
    return options


def _progress(title):
    """A progress bar for batches, on a terminal."""
    if not sys.stderr.isatty():
        return iter
    return functools.partial(track, description=f"efx: {title}", console=Console(stderr=True))


@functools.cache
def model_class():
    """The class of runs as models of lm-eval, with the arguments of `_Model`. An instance is an
    argument of `lm_eval.simple_evaluate(model=...)`."""
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError:
        raise UsageError(
            "lm-eval is not installed: pip install -e '.[eval]' (or pip install lm-eval)"
        ) from None
    return type("EfxLM", (_Model, TemplateLM), {"__doc__": _Model.__doc__})


# ---- the command ---------------------------------------------------------------------------------


def evaluate(workdir, tasks, *, num_fewshot=None, limit=None, log_samples=False, **options):
    """Evaluate a run in lm-eval's tasks; print the results and write them to the run directory.

    Args:
      tasks: names or patterns of lm-eval's tasks, or paths of YAML files.
      num_fewshot: examples before each question; None: the task's default.
      limit: documents of each task; None: all.
      log_samples: also write every document and answer.
      options: arguments of `model_class`.
    Returns: lm-eval's results, with an entry "efx" (`Costs.per_answer`).
    """
    make = model_class()
    from lm_eval import simple_evaluate, utils
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    # Indexing all tasks of lm-eval takes a while.
    manager = TaskManager(include_defaults=not all(map(_is_file, tasks)))
    tasks = _tasks(tasks, manager)
    model = make(workdir, **options)
    try:
        with _without_forks():
            results = simple_evaluate(
                model=model,
                tasks=tasks,
                task_manager=manager,
                num_fewshot=num_fewshot,
                limit=limit,
                log_samples=log_samples,
                batch_size=options.get("batch_size"),
                bootstrap_iters=_RESAMPLES,
            )
    except OSError as error:  # from libraries that read or download data
        raise UsageError(f"--tasks: their data cannot be read ({error})") from error
    results["efx"] = model.costs.per_answer()
    text = json.dumps(results, indent=1, default=utils.handle_non_serializable)
    time = datetime.datetime.now().isoformat().replace(":", "-")
    path = io.folder(workdir) / "lm_eval" / f"results_{time}.json"
    with io.report_write_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    io.write_atomic(path, text + "\n")
    with _without_forks():
        print(utils.make_table(results))
        if "groups" in results:
            print(utils.make_table(results, "groups"))
    print(cost_table(results["efx"]))
    print(f"step {model.step}: {path}")
    if other := model.get_model_info().get("other_model"):
        print(other)
    return results


@contextlib.contextmanager
def _without_forks():
    """Keep lm-eval, and the library of its tables, from forking processes: with JAX's threads a
    forked process may hang."""
    name, count = "DISABLE_MULTIPROC", multiprocessing.cpu_count
    before = os.environ.get(name)
    os.environ[name], multiprocessing.cpu_count = "1", lambda: 1
    try:
        yield
    finally:
        multiprocessing.cpu_count = count
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def cost_table(per_answer):
    """Markdown table of `Costs.per_answer`."""
    rows = [
        (
            task,
            f"{row['answers']:,}",
            f"{row['tokens_per_answer']:,.1f}",
            tables.number(row["flops_per_answer"], "FLOPs"),
        )
        for task, row in per_answer.items()
    ]
    return tables.markdown(("Tasks", "answers", "tokens an answer", "FLOPs an answer"), rows)


def _is_file(task):
    return task.endswith((".yaml", ".yml"))


def _tasks(names, manager):
    """Names and files of tasks for lm-eval. Raises UsageError for unknown ones."""
    found = []
    if not names:
        raise UsageError("--tasks is empty: set names of lm-eval's tasks, or YAML files")
    for name in names:
        if _is_file(name):
            path = pathlib.Path(name).expanduser()
            if not path.is_file():
                raise UsageError(f"--tasks={name}: there is no such file")
            found.append(str(path.resolve()))
            continue
        matches = manager.match_tasks([name])
        if not matches:
            known = nearest(name, manager.all_tasks)
            raise UsageError(f"--tasks={name}: not a task, group or tag of lm-eval{known}")
        found += matches
    return list(dict.fromkeys(found))


def main(argv=None):
    parser = cli.Parser("efx.interop.lm_eval", __doc__)
    parser.add_argument("--workdir", required=True, help="run directory")
    parser.add_argument(
        "--tasks", required=True, help="of lm-eval, or YAML files, separated by commas"
    )
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples before a question")
    parser.add_argument("--limit", type=int, metavar="N", help="documents of each task")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows at a time")
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="tokens of a row (default: the context)"
    )
    parser.add_argument("--step", type=int, help="checkpoint (default: the newest)")
    parser.add_argument("--log-samples", action="store_true", help="also write every answer")
    parser.set_defaults(extra=[])
    return parser.run(run, argv)


def run(arguments):
    for flag in ("num_fewshot", "limit"):
        value, least = getattr(arguments, flag), 1 if flag == "limit" else 0
        if value is not None and value < least:
            raise UsageError(f"--{flag.replace('_', '-')}={value}: must be at least {least}")
    for setting in arguments.extra:
        if not setting.startswith("--config."):
            raise UsageError(
                f"{setting}: only settings may follow --, as in --config.train.dtype=bfloat16"
            )
    argv = ["efx", "--mode=evaluate", f"--workdir={arguments.workdir}", *arguments.extra]
    evaluate(
        arguments.workdir,
        list(filter(None, arguments.tasks.split(","))),
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        log_samples=arguments.log_samples,
        batch_size=arguments.batch_size,
        max_length=arguments.max_length,
        step=arguments.step,
        config=flags.parse(argv).config if arguments.extra else None,
    )


if __name__ == "__main__":
    sys.exit(main())
