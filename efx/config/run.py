"""Settings of a run, block by block, and `Config`, which holds all of them.

Settings of models are in `efx.layers.config`, `efx.routing.config` and the files of the families.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from efx.config.schema import (
    Bytes,
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Probability,
    Range,
    block,
    check_regex,
    converted,
    defaults,
    names_of,
)
from efx.errors import UsageError, nearest
from efx.models import config_class, config_of
from efx.models.adapters import AdapterConfig
from efx.models.decoder import DecoderConfig
from efx.parallel.sharding import DEFAULT_RULES

Seed = Annotated[int, Range(least=0, below=2**32)]
ProperFraction = Annotated[float, Range(above=0, below=1)]
Devices = Annotated[int, Range(least=-1)]


@block("config.data")
class DataConfig:
    """Text, tokens and batches."""

    # "stdlib": the source code of the running Python's standard library; "text:PATH" (file,
    # folder or glob); "tokens:PATH" (token shards); "arrayrecord:GLOB"; "jsonl:PATH" (also .gz,
    # .zst); "parquet:PATH"; "hf:NAME" or "hf:NAME:CONFIG"; "pydoc", Python's language reference;
    # "mix:stdlib,text:PATH", the documents of several of these, one after another.
    source: str = "stdlib"
    # Several sources in place of `source`, with weights: {"code": ("text:A", 0.7), "wiki":
    # ("text:B", 0.3)}. A weight that changes is ((step, weight), ...), from each step on. ():
    # none.
    mixture: object = ()
    # "bytes", "chars", "bpe:8192" (trained on the training split, saved in the run), "hf:gpt2"
    # (of a model on the Hugging Face hub), or the path of a tokenizer.json.
    tokenizer: str = "bytes"
    # Allow a tokenizer that loses text: drops characters or spaces, changes case, or has a token
    # for unknown words. Then no bits per byte are logged.
    lossy_tokenizer: bool = False
    seq_len: Count = 256  # tokens in a row
    batch_size: Count = 16  # sequences in a step, over all devices and hosts
    # A source that is held out as a whole, independent of max_bytes: official test files, or
    # with --mode=evaluate any other text. Nothing is held out of `source` then, but documents that
    # exactly equal one of eval_source are not trained on. "": use eval_fraction and split.
    eval_source: str = ""
    # Further sources that are held out as a whole, {"wiki": "text:PATH"}; each evaluation logs
    # eval/wiki/loss and eval/wiki/bits_per_byte. (): none.
    eval_sets: object = ()
    eval_fraction: ProperFraction = 0.1  # fraction of the source that is held out
    # "tail": the end of the stream; "documents": whole documents, by hash
    split: Literal["tail", "documents"] = "tail"
    # If the content of the source has changed since the start of the run: "error"; "keep_split":
    # keep the held-out text and train on everything else.
    on_change: Literal["error", "keep_split"] = "error"
    # "windows": every window once an epoch; "random": random starts.
    shuffle: Literal["windows", "random"] = "windows"
    packing: bool = False  # rows of whole documents: segment ids, restarted positions
    # Field of a record or a data set that holds the text; "": records are plain text.
    text_key: str = "text"
    max_bytes: Bytes = 0  # limit of each text that is trained on, not of tokens; 0: none
    document_bytes: Bytes = 0  # cut longer documents into pieces of this size; 0: never
    # File with a list of the training documents, with split="documents" (--mode=cluster writes
    # one for each cluster); "": all.
    subset: str = ""
    cache_dir: str = ""  # tokenised data; "": $EFX_CACHE or ~/.cache/efx

    def check(self):
        object.__setattr__(self, "mixture", _checked_mixture(self.mixture, f"{self.where}.mixture"))
        sets = _checked_names(self.eval_sets, f"{self.where}.eval_sets", "a source")
        object.__setattr__(self, "eval_sets", sets)
        for name in set(sets or ()) & set(self.mixture or ()):
            self.refuse(
                "eval_sets", f"{name!r} is a part of config.data.mixture; rename one of them"
            )
        if 0 < self.document_bytes < 16:
            self.refuse("document_bytes", "must be 0 (whole documents) or at least 16")
        if self.packing and self.shuffle != "windows":
            self.refuse("packing", "needs config.data.shuffle='windows'")
        specs = [spec for _, spec in self.training_texts().values()]
        mixed, tokens = (
            any(spec.startswith(f"{kind}:") for spec in specs) for kind in ("mix", "tokens")
        )
        if (mixed or self.subset) and not self.eval_source and self.split != "documents":
            why = "mix:" if mixed else "config.data.subset"
            self.refuse(
                "split",
                f"{why} needs config.data.split=documents, because the tail of the text is of one "
                "kind",
            )
        for name in ("subset", "document_bytes"):
            if tokens and getattr(self, name):
                self.refuse(name, f"needs text, but {', '.join(specs)} has only tokens")
        if self.subset and self.mixture:
            self.refuse("subset", "needs one source; not with config.data.mixture")

    def training_texts(self):
        """{name of the part: (setting, source)}; without a mixture the only name is ""."""
        if not self.mixture:
            return {"": ("config.data.source", self.source)}
        return {
            name: (f"config.data.mixture.{name}", spec) for name, (spec, _) in self.mixture.items()
        }

    def held_out_texts(self):
        """{name of the set: (setting, source)}; the name of eval_source is ""."""
        texts = {"": ("config.data.eval_source", self.eval_source)} if self.eval_source else {}
        sets = dict(self.eval_sets).items()
        return texts | {name: (f"config.data.eval_sets.{name}", spec) for name, spec in sets}

    def specs(self):
        """{setting: source} of all texts."""
        return dict([*self.training_texts().values(), *self.held_out_texts().values()])


def _checked_names(value, where, content):
    """{name: content} of a mapping or of (); UsageError for anything else, or a bad name."""
    if value == ():
        return ()
    if not hasattr(value, "items") or not value:
        raise UsageError(f"{where}={value!r}: must be a dict of names, each with {content}")
    for name in value:
        if isinstance(value[name], str) != (content == "a source"):
            raise UsageError(f"{where}.{name}={value[name]!r}: must be {content}")
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
            raise UsageError(f"{where}: the name {name!r} must be of letters, digits, _ and -")
    return dict(value.items())


def _checked_mixture(value, where):
    """{name: (source, ((step, weight), ...))}, or ()."""
    parts = _checked_names(value, where, "(source, weight)")
    for name in parts:
        parts[name] = _checked_part(parts[name], f"{where}.{name}")
    schedules = [schedule for _, schedule in dict(parts).values()]
    for step in sorted({step for schedule in schedules for step, _ in schedule}):
        if not any([w for start, w in schedule if start <= step][-1] for schedule in schedules):
            raise UsageError(f"{where}: all weights are 0 from step {step} on; raise one of them")
    return parts


def _checked_part(part, where):
    """(source, ((step, weight), ...)) of a part of a mixture."""
    if len(part) != 2:
        raise UsageError(f"{where}={part!r}: must be (source, weight)")
    weights = part[1] if isinstance(part[1], (tuple, list)) else ((0, part[1]),)
    weights = converted(tuple[tuple[NonNegative, ...], ...], weights, f"{where}: weights")
    steps = [pair[0] for pair in weights if len(pair) == 2 and pair[0] == int(pair[0])]
    if len(steps) < len(weights) or steps[:1] != [0] or steps != sorted(set(steps)):
        raise UsageError(
            f"{where}={part!r}: weights that change must be ((0, weight), (step, weight), ...), "
            "in the order of the steps"
        )
    schedule = tuple((int(step), weight) for step, weight in weights)
    return converted(str, part[0], f"{where}: source"), schedule


@block("config.init")
class InitConfig:
    """Initial parameters from another run."""

    # Run directory with the initial parameters and the tokenizer; "": from scratch.
    run: str = ""
    missing: str = ""  # regex (whole path) of parameters that run may lack; initialised
    unexpected: str = ""  # regex of parameters that only that run has; ignored
    # ((regex, replacement), ...): path here -> path there, first match
    rename: tuple[tuple[str, ...], ...] = ()

    def check(self):
        check_regex(self.missing, f"{self.where}.missing")
        check_regex(self.unexpected, f"{self.where}.unexpected")
        for i, pair in enumerate(self.rename):
            if len(pair) != 2:
                raise UsageError(
                    f"{self.where}.rename[{i}]={pair!r}: must be a pair (regex, replacement)"
                )
            check_regex(pair[0], f"{self.where}.rename[{i}]")


# Keys of a loss weight's schedule, besides "schedule".
COEFFICIENTS = {
    "constant": ("value",),
    "linear": ("c_start", "c_end", "steps"),
    "cosine": ("c_start", "c_end", "steps"),
    "exponential": ("rate", "c_min", "c_max"),
}


def loss_weight(spec, where):
    """A checked weight of `config.losses`: a float or a dict.

    Args:
      spec: a number, or a mapping with `schedule` and exactly its keys in `COEFFICIENTS`.
      where: its name, "config.losses.z_loss".
    """
    if not isinstance(spec, Mapping) and not hasattr(spec, "items"):
        if isinstance(spec, bool) or not isinstance(spec, (int, float)):
            raise UsageError(f"{where}={spec!r}: must be a number, or a dict with a schedule")
        return converted(NonNegative, spec, where)
    spec = dict(spec.items())
    kind = spec.pop("schedule", None)
    if kind not in tuple(COEFFICIENTS):
        raise UsageError(
            f"{where}.schedule={kind!r}: expected one of {', '.join(COEFFICIENTS)}"
            + nearest(kind, COEFFICIENTS)
        )
    keys = COEFFICIENTS[kind]
    for key in spec:
        if key not in keys:
            raise UsageError(
                f"{where}.{key} is not a key of the schedule {kind!r}; its keys are "
                f"{', '.join(keys)}" + nearest(key, keys)
            )
    for key in keys:
        if key not in spec:
            raise UsageError(f"{where}.{key} is missing: the schedule {kind!r} needs it")
    # A negative weight would maximise the loss.
    types = {"steps": Natural}
    weight = {
        key: converted(types.get(key, NonNegative), spec[key], f"{where}.{key}") for key in keys
    }
    if kind == "exponential" and weight["c_min"] > weight["c_max"]:
        raise UsageError(
            f"{where}.c_min={weight['c_min']}: must be at most c_max={weight['c_max']}"
        )
    return {"schedule": kind} | weight


@block("config.losses")
class LossesConfig:
    """Weights of the extra losses, by the names that layers sow.

    A number, or a schedule: dict(schedule="linear"|"cosine"|"exponential", ...), see
    efx/train/losses.py.
    """

    z_loss: object = 0.0  # mean squared log partition function of the output
    distill: object = 0.0  # KL(teacher || model), see config.train.teacher; 0: not computed
    router_bce: object = 0.01  # MoD, aux_loss: router scores against the top-k selection
    predictor_bce: object = 0.01  # MoD: the predictor against the top-k selection
    load_balance: object = 0.01  # MoE: equal numbers of tokens for all experts
    router_z: object = 0.001  # MoE: mean squared log partition function of the router
    expert_bce: object = 0.01  # MoE, expert_choice: logits against the selection
    embedding: object = 1.0  # encoder-decoder: see its embedding_loss
    # Loss of the next latent. The published weight rises over the first fifth of the training:
    # dict(schedule="linear", c_start=0.0, c_end=0.003, steps=...).
    latent_prediction: object = 0.003
    inclusion_bce: object = 0.1  # PHATGOOSE: entrances against their selection
    # Learned dropout with masks m: mean entropy -m log2 m, that of 1 - m, m, m^2 / 2.
    dropout_entropy: object = 0.0
    dropout_alternate_entropy: object = 0.0
    dropout_l1: object = 0.0
    dropout_squared_l1: object = 0.0

    def check(self):
        for name in names_of(type(self)):
            weight = loss_weight(getattr(self, name), f"{self.where}.{name}")
            object.__setattr__(self, name, weight)

    @property
    def distils(self):
        """Whether a teacher is needed; a constant weight of 0 needs none."""
        return self.distill != 0


@block("config.train")
class TrainConfig:
    """How a step is computed."""

    dtype: Literal["float32", "bfloat16"] = "float32"  # of activations. Parameters are float32
    accumulation: Count = 1  # micro-batches of a step; the gradient is that of the whole batch
    # Positions of a sequence with logits in memory at the same time; 0: all
    loss_chunk: Natural = 0
    max_nonfinite: Count = 10  # consecutive (skipped) non-finite steps that stop the run
    # Run directory of the frozen teacher of the loss `distill`.
    teacher: str = ""


@block("config.optim.schedule")
class ScheduleConfig:
    """The learning rate over the steps."""

    # "wsd": constant, then linear decay at the end.
    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: Natural = 100  # at most a tenth of a run that is shorter
    # Fraction of the steps; the longer of the two warm-ups counts.
    warmup_fraction: Annotated[float, Range(least=0, most=1)] = 0.0
    decay_steps: Natural = 0  # step at which the decay ends; 0: the last
    # Final rate as a fraction of learning_rate.
    final_fraction: Annotated[float, Range(least=0, most=1)] = 0.1
    decay_fraction: Fraction = 0.2  # wsd: fraction of the steps that decay


@block("config.optim")
class OptimConfig:
    """How parameters are updated."""

    # Muon updates matrices, AdamW everything else.
    name: Literal["adamw", "lion", "muon", "sgd"] = "adamw"
    learning_rate: NonNegative = 1e-3  # peak of the schedule
    schedule: ScheduleConfig = ScheduleConfig()
    b1: Probability = 0.9  # decay rate of the first moment
    b2: Probability = 0.99  # decay rate of the second moment
    eps: Positive = 1e-8  # with 0 a parameter whose gradient is 0 becomes 0 / 0
    momentum: Probability = 0.95  # muon, sgd
    weight_decay: NonNegative = 0.1  # times the learning rate, on the parameters of `decay`
    decay: str = r".*(kernel|embedding)"  # regex (whole path) of decayed parameters
    frozen: str = ""  # regex of frozen parameters
    lr_multipliers: tuple[object, ...] = ()  # ((regex, factor), ...): first match wins
    # Factor on the learning rate of the routers of depth routing that no pattern matches.
    router_rate: NonNegative = 1.0
    clip_norm: NonNegative = 1.0  # 0: off

    def check(self):
        check_regex(self.decay, f"{self.where}.decay")
        check_regex(self.frozen, f"{self.where}.frozen")
        for i, entry in enumerate(self.lr_multipliers):
            where = f"{self.where}.lr_multipliers[{i}]"
            is_pair = isinstance(entry, (tuple, list)) and len(entry) == 2
            if not is_pair or not isinstance(entry[0], str):
                raise UsageError(f"{where}={entry!r}: must be a pair (regex, factor)")
            pattern, factor = entry
            if (
                isinstance(factor, bool)
                or not isinstance(factor, (int, float))
                or not 0 <= factor < math.inf
            ):
                raise UsageError(f"{where}={entry!r}: must be a pair (regex, finite factor >= 0)")
            converted(NonNegative, factor, where)
            check_regex(pattern, where)


@block("config.mesh")
class MeshConfig:
    """Devices along each axis of the mesh; one axis may be -1, all remaining devices."""

    data: Devices = -1  # rows of the batch
    fsdp: Devices = 1  # rows of the batch, and shards of parameters
    tensor: Devices = 1  # heads and hidden features
    expert: Devices = 1  # experts of an MoE
    sequence: Devices = 1  # tokens of a row


@block("config.checkpoint")
class CheckpointConfig:
    """When the training state is saved, and which checkpoints are kept."""

    every: Natural = 500  # steps; 0: only at the end
    # Also save at the first logged step so many minutes after the last save; 0: by steps alone
    minutes: NonNegative = 0.0
    keep_last: Count = 2  # newest checkpoints that are kept
    keep_best: Natural = 1  # checkpoints with the smallest best_metric that are kept too
    best_metric: str = "eval/loss"  # a metric of the evaluation to minimise
    asynchronous: bool = True  # write while training continues
    # "fall_back": restore the checkpoint before a damaged one, with a warning
    on_damage: Literal["error", "fall_back"] = "error"


@block("config.log")
class LogConfig:
    """Metrics, Weights & Biases, profile."""

    every: Count = 20  # steps
    tensorboard: bool = True  # write event files to the run directory
    wandb: str = ""  # Weights & Biases project; others by its variables, WANDB_TAGS...
    profile_at: Natural = 0  # first profiled step; 0: no profile
    profile_steps: Count = 5  # number of profiled steps


@block("config.evaluate")
class EvaluateConfig:
    """Evaluation on the held-out text."""

    every: Natural = 250  # steps; 0: only at the end
    batch_size: Count = 16  # rows at a time
    max_batches: Natural = 0  # 0: the whole held-out split
    # Batches of training text that set the thresholds of routed blocks in the last checkpoint, and
    # in an export; 0: as trained
    calibrate: Natural = 0
    # Rows of random tokens whose second half repeats the first: does the model copy? 0: none
    repeated_rows: Annotated[int, Range(least=0, most=2**16)] = 0


@block("config.sample")
class SampleConfig:
    """Samples during training and with --mode=sample."""

    every: Natural = 500  # steps; 0: never
    prompt: str = "\n"  # text that the samples continue
    max_new_tokens: Count = 200  # tokens of a sample
    temperature: NonNegative = 0.8  # 0: greedy
    top_k: Natural = 0  # 0: all tokens
    top_p: Fraction = 0.95  # 1: all tokens
    stop: str = ""  # stop after this text
    num_samples: Count = 1  # samples of the prompt
    seed: Seed = 0  # of the samples


@block("config.cluster")
class ClusterConfig:
    """cBTM: clusters of documents, with one expert each.

    With python -m efx.composition.cbtm, `config.steps` (or `config.train_flops`) is the budget of
    the seed model and all experts together.
    """

    count: Count = 4  # number of clusters
    method: Literal["balanced", "random"] = "balanced"  # clusters of one size; "random": control
    seed_fraction: ProperFraction = 0.25  # of the budget, for the seed model on all text


@block("config.ensemble")
class EnsembleConfig:
    """cBTM: how experts are mixed."""

    # An expert's weight: exp(-(distance of context and cluster centre)^2 / tau)
    tau: Positive = 0.1
    top_k: Count = 2  # experts of a token, with renormalised weights
    every: Count = 32  # tokens between two computations of the weights


@block("config")
class Config:
    """All settings of a run."""

    seed: Seed = 0  # of initial parameters, data order and stochastic layers
    # Set one of the two: optimiser steps, or total training FLOPs, from which the number of steps
    # follows.
    steps: Natural = 1000
    train_flops: NonNegative = 0.0  # see steps; 0: use steps
    data: DataConfig = DataConfig()
    init: InitConfig = InitConfig()
    model: object = DecoderConfig()  # the block of a family, see efx/models/__init__.py
    adapter: AdapterConfig = AdapterConfig()
    losses: LossesConfig = LossesConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    mesh: MeshConfig = MeshConfig()
    # (logical axis, mesh axis or axes or None): see efx/parallel/sharding.py.
    rules: tuple[object, ...] = DEFAULT_RULES
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    sample: SampleConfig = SampleConfig()
    cluster: ClusterConfig = ClusterConfig()
    ensemble: EnsembleConfig = EnsembleConfig()

    def check(self):
        object.__setattr__(self, "model", config_of(self.model))


def default_config(family="decoder"):
    """The ConfigDict with all settings of a model family at their defaults."""
    return defaults(dataclasses.replace(Config(), model=config_class(family)()))
