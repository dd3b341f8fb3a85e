"""The files of a launch: check the run directory first, open it after all other checks."""

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


class RunFiles:
    """The run directory of a launch. The constructor checks the config and writes nothing.

    Args:
      config: `Config`. lock: the `run_dir.Lock` of the directory.
    Attributes:
      workdir: its path. is_new: whether there is no checkpoint to resume.
      writer, mirror, record: see `open`.
    """

    def __init__(self, config, workdir, command_line, lock):
        self.workdir, self._config, self._lock = io.folder(workdir), config, lock
        self._command_line = list(command_line)
        self.is_new = self._check_directory().is_new
        if config.log.wandb:
            multihost.run_on_primary(workdir, lambda: check_wandb(config.log.wandb))

    def _check_directory(self):
        return run_dir.open_run(
            self.workdir,
            schema.as_dict(self._config),
            command_line=self._command_line,
            may_differ=MAY_DIFFER,
            completed=with_new_defaults,
        )

    def check_text(self, data):
        """UsageError if the text or its subset differs from the run's. Paths may change."""
        if self.is_new:
            return
        record, c = run_dir.run_record(self.workdir), self._config.data
        text = run_dir.recorded_text(self.workdir)
        for key in ("source", "eval_source"):
            path_changed = getattr(c, key) != run_dir.recorded_setting(self.workdir, f"data.{key}")
            if path_changed and text and content_of(data.text_record, key) != content_of(text, key):
                raise UsageError(
                    f"config.data.{key}={getattr(c, key)}: --workdir={self.workdir} was trained on "
                    "different text; use the same text, or another --workdir"
                )
        if record.get("subset") != data.subset:
            raise UsageError(
                f"config.data.subset={c.subset!r}: selects different documents from the run in "
                f"--workdir={self.workdir}; use the run's subset, or another --workdir"
            )

    def open(self, stack, step, data, origin, teacher_origin):
        """Take the lock, check the directory again, record this launch, and open the metrics.

        Sets `mirror`, the `io.Mirror` of the directory; `writer`, its `MetricsWriter`; and
        `record`, for checkpoints.

        Args:
          stack: ExitStack that closes the files. step: of the resume.
          origin, teacher_origin: of the initial parameters and of the teacher, or None.
        """
        self._lock.take()
        opened = self._check_directory()
        if opened.is_new != self.is_new:
            raise UsageError(
                f"--workdir={self.workdir}: another launch trained there while this one started; "
                "rerun the command"
            )
        c = self._config.log

        def open_metrics():
            names = RESUMED_FILES if is_primary() else ()
            self.mirror = stack.enter_context(io.Mirror(self.workdir, names))
            writer = MetricsWriter(
                self.mirror.path,
                tensorboard=c.tensorboard,
                wandb=self._wandb_arguments(),
                resume_step=None if self.is_new else step,
            )
            self.writer = stack.enter_context(writer)

        if jax.process_index() != 0:
            open_metrics()  # only process 0 writes
        multihost.run_on_primary(self.workdir, open_metrics)
        saved = run_dir.saved_tokenizer(self.workdir)
        tokenizer = saved.read_text(encoding="utf-8") if saved else data.tokenizer.to_json()
        entries = {
            "text": data.text_record,
            "tokenizer": run_dir.checksum(tokenizer),
            "subset": data.subset,
            "origin": origin,
            "teacher": teacher_origin,
        }
        contents = {run_dir.TOKENIZER_FILE: tokenizer}
        if not c.wandb:
            contents[WANDB_ID_FILE] = None
        self.record = opened.commit(contents, **{k: v for k, v in entries.items() if v})
        self.writer.truncate_after(-1 if self.is_new else step)

    def _wandb_arguments(self):
        """Arguments of `wandb.init`; None without Weights & Biases."""
        c = self._config.log
        if not c.wandb:
            return None
        return {
            "project": c.wandb,
            "name": run_dir.run_name(self.workdir, self._command_line),
            "config": schema.as_dict(self._config),
        }
