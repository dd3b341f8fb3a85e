"""The model of a config, with the models of its member runs and of its teacher."""

import dataclasses

from efx import io, models, run_dir
from efx.config import schema
from efx.data.tokenizers import load_tokenizer
from efx.errors import UsageError
from efx.parallel import sharding
from efx.train import named_runs


@dataclasses.dataclass(frozen=True)
class Setup:
    """A checked `Config` and its model (of the last stage of training)."""

    config: object
    tokenizer: object
    model: object
    mesh: object
    rules: tuple  # logical to mesh axes


def mesh_and_rules(config, devices=None):
    """(mesh, rules) of a `Config`. devices: of the mesh, possibly absent ones; None: JAX's own."""
    return sharding.make_mesh(config.mesh, devices), sharding.check_rules(config.rules)


def build_model(config, vocab_size, mesh, rules, *, run_config=None, name="", members=()):
    """The model of a run, checked for the rows and in the dtype of `config`.

    Args:
      run_config: the `Config` of the run, if it is another one.
      name: the setting that names that run, and its value.
      members: the models of `config.model.member_runs`.
    """
    blocks = run_config or config
    model = models.build(
        blocks.model,
        vocab_size=vocab_size,
        context=blocks.data.seq_len,
        dtype=config.train.dtype,
        adapter=blocks.adapter,
        members=members,
        vocab_ways=sharding.shard_count("vocab", mesh, rules),
    )
    if model.context < config.data.seq_len:
        raise UsageError(
            f"{name or f'config.model.context={model.context}'}: a context of {model.context} "
            f"tokens; must be at least config.data.seq_len={config.data.seq_len}"
        )
    return model


def build_with_members(config, tokenizer, mesh, rules):
    """`build_model` of a config whose model may be composed of other runs."""
    members, vocab_size = [], tokenizer.vocab_size
    for key, run in config.model.member_runs:
        name = f"config.model.{key}={run}"
        run_config = named_runs.config_of_single_model(run, f"config.model.{key}")
        if _tokenizer_of(run).fingerprint != tokenizer.fingerprint:
            first_key, first = config.model.member_runs[0]
            raise UsageError(
                f"{name}: its tokenizer differs from that of config.model.{first_key}={first}; all "
                "members need the same tokenizer"
            )
        # Its vocabulary is padded for the devices of this run.
        options = dict(run_config=_with_padding(run_config, 0), name=name)
        members.append(build_model(config, vocab_size, mesh, rules, **options))
    return build_model(config, vocab_size, mesh, rules, members=members)


def teacher_setup(config, tokenizer=None, *, vocab_size=0, devices=None):
    """The `Setup` of the teacher on the devices of `config`; None if `losses.distill` is 0.

    Args:
      tokenizer: that of the run; None: any with `vocab_size` tokens.
      devices: see `mesh_and_rules`.
    """
    run, name = config.train.teacher, f"config.train.teacher={config.train.teacher}"
    if not config.losses.distils:
        return None
    if not run:
        raise UsageError(
            f"config.losses.distill={config.losses.distill!r}: config.train.teacher is empty; "
            "set it to the run directory of the teacher, or set config.losses.distill=0"
        )
    if not run_dir.RunDir(run, "config.train.teacher").has_result:
        raise UsageError(f"{name}: there is no run with a checkpoint in this directory")
    theirs = _tokenizer_of(run)
    fits = theirs.vocab_size == vocab_size
    if tokenizer is not None:
        fits = theirs.fingerprint == tokenizer.fingerprint
    if not fits:
        raise UsageError(
            f"{name}: its tokenizer differs from that of this run; a teacher needs the same "
            "tokenizer"
        )
    run_config = on_devices_of(config, run, "config.train.teacher")
    mesh, rules = mesh_and_rules(config, devices)
    options = dict(run_config=run_config, name=name)
    model = build_model(config, theirs.vocab_size, mesh, rules, **options)
    return Setup(run_config, theirs, model, mesh, rules)


def on_devices_of(config, run, key):
    """The `Config` of the run in a directory, computed on the devices and in the dtype of `config`.

    The teacher's own teacher is ignored.

    Args:
      key: the flag or setting that names the run, for messages.
    """
    theirs = named_runs.config_of_single_model(run, key)
    changes = {"mesh": config.mesh, "rules": config.rules, "train.dtype": config.train.dtype}
    changes |= {"losses.distill": 0.0}
    # Its logits are as wide as those of `config`; bridges are padded as their members.
    return _with_padding(
        schema.replaced(theirs, changes), getattr(config.model, "vocab_multiple", 0)
    )


def _with_padding(config, multiple):
    """A `Config` with this `model.vocab_multiple`, if its family has one."""
    if not hasattr(config.model, "vocab_multiple"):
        return config
    return schema.replaced(config, {"model.vocab_multiple": multiple})


def _tokenizer_of(run):
    return load_tokenizer(io.folder(run) / run_dir.TOKENIZER_FILE)
