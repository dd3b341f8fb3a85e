"""One launch of a run: check its directory first, write there after all other checks."""

import jax

from efx import io, run_dir
from efx.config import schema
from efx.config.load import with_new_defaults
from efx.data.texts import content_of
from efx.errors import UsageError, is_primary
from efx.logging import MetricsWriter
from efx.logging.writer import RESUMED_FILES, WANDB_ID_FILE, check_wandb
from efx.parallel import multihost

# The settings that a later launch of the same run may change.
MAY_DIFFER = (
    r"steps",
    r"train_flops",
    r"log\..*",
    r"checkpoint\..*",
    r"evaluate\..*",
    r"sample\..*",
    r"mesh\..*",
    r"rules",
    r"data\.(source|eval_source)",  # files may move: their contents are compared
    r"data\.cache_dir",
    r"data\.subset",
    r"data\.on_change",
    r"data\.lossy_tokenizer",
    r"cluster\..*",
    r"ensemble\..*",
    r"train\.max_nonfinite",
    r"train\.teacher",  # a directory may move: its parameters are compared
    r"train\.loss_chunk",
    r"model\.remat",
    r"model\.vocab_multiple",
    r"model\.attention\.(chunk|kernel)",
)


class Launch:
    """A launch in a run directory. The constructor checks the config and writes nothing.

    Args:
      config: `Config`. lock: the `run_dir.Lock` of the directory.
    Attributes:
      run: the `RunDir` as it was before. is_new: whether it has no checkpoint to resume.
      writer, mirror, record: see `open`.
    """

    def __init__(self, config, workdir, command_line, lock):
        self._config, self._lock = config, lock
        self._opened = run_dir.open_run(
            workdir,
            schema.as_dict(config),
            command_line=list(command_line),
            may_differ=MAY_DIFFER,
            add_defaults=with_new_defaults,
        )
        self.run, self.is_new = self._opened.run, self._opened.is_new
        if config.log.wandb:
            multihost.run_on_primary(workdir, lambda: check_wandb(config.log.wandb))

    def check_text(self, data):
        """UsageError if the text or its subset differs from the run's. Paths may change."""
        if self.is_new:
            return
        record, c, text = self.run.record, self._config.data, self.run.text_record
        for key in ("source", "eval_source"):
            path_changed = getattr(c, key) != self.run.setting(f"data.{key}")
            if path_changed and text and content_of(data.text_record, key) != content_of(text, key):
                raise UsageError(
                    f"config.data.{key}={getattr(c, key)}: --workdir={self.run.path} was trained "
                    "on different text; use the same text, or another --workdir"
                )
        if record.get("subset") != data.subset:
            raise UsageError(
                f"config.data.subset={c.subset!r}: selects different documents from the run in "
                f"--workdir={self.run.path}; use the run's subset, or another --workdir"
            )

    def open(self, stack, step, data, origin, teacher_origin):
        """Take the lock, record this launch, and open the metrics.

        Sets `mirror`, the `io.Mirror` of the directory; `writer`, its `MetricsWriter`; and
        `record`, for checkpoints.

        Args:
          stack: ExitStack that closes the files. step: of the resume.
          origin, teacher_origin: of the initial parameters and of the teacher, or None.
        """
        folder = self.run.path
        self._lock.take()
        if self.is_new:
            multihost.run_on_primary(folder, self._check_still_new)

        def open_metrics():
            names = RESUMED_FILES if is_primary() else ()
            self.mirror = stack.enter_context(io.Mirror(folder, names))
            self.writer = stack.enter_context(
                MetricsWriter(
                    self.mirror.path,
                    tensorboard=self._config.log.tensorboard,
                    wandb=self._wandb_arguments(),
                    resume_step=None if self.is_new else step,
                )
            )

        if jax.process_index() != 0:
            open_metrics()  # only process 0 writes
        multihost.run_on_primary(folder, open_metrics)
        saved = self.run.tokenizer_path
        tokenizer = saved.read_text(encoding="utf-8") if saved else data.tokenizer.to_json()
        entries = {
            "text": data.text_record,
            "tokenizer": run_dir.checksum(tokenizer),
            "subset": data.subset,
            "origin": origin,
            "teacher": teacher_origin,
        }
        contents = {run_dir.TOKENIZER_FILE: tokenizer}
        if not self._config.log.wandb:
            contents[WANDB_ID_FILE] = None
        self.record = self._opened.commit(contents, **{k: v for k, v in entries.items() if v})
        self.writer.truncate_after(-1 if self.is_new else step)

    def _check_still_new(self):
        if run_dir.RunDir(self.run.path).has_result:
            raise UsageError(
                f"--workdir={self.run.path}: another launch trained there while this one started; "
                "rerun the command"
            )

    def _wandb_arguments(self):
        """Arguments of `wandb.init`; None without Weights & Biases."""
        if not self._config.log.wandb:
            return None
        config, name = schema.as_dict(self._config), self.run.path.name
        return {"project": self._config.log.wandb, "name": name, "config": config}
