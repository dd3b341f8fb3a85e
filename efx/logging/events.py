"""TensorBoard event files, written in the calling thread.

The thread of tensorboardX's SummaryWriter dies when the disk is full, and the run then hangs on its
queue. Its EventsWriter is used directly, so that a failed write is an OSError.
"""

import os
import time

_FLUSH_SECONDS = 10  # between two flushes, which wait for the disk


class Events:
    """One event file of one launch.

    Args:
      folder: made if absent.
      purge_from: TensorBoard hides the events of earlier files from this step on; None: none.
    """

    def __init__(self, folder, purge_from):
        from tensorboardX import event_file_writer, proto, summary

        self._proto, self._summary = proto, summary
        folder.mkdir(exist_ok=True)
        # EventsWriter names files by the second, and two launches may start in the same one.
        self._file = event_file_writer.EventsWriter(
            os.fspath(folder / "events"), f".{time.time_ns()}"
        )
        self._flushed = time.monotonic()
        if purge_from is not None:
            log = proto.event_pb2.SessionLog
            self._add(step=purge_from, session_log=log(status=log.START))

    def scalars(self, step, values):
        """Add {name: number}."""
        kind = self._proto.summary_pb2.Summary
        # Not tensorboardX's helper, which prints a warning for each NaN.
        values = [kind.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=kind(value=values))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def text(self, step, name, markdown):
        """Add a text and flush."""
        self._add(step=step, summary=self._summary.text(name, markdown))
        self._file.flush()

    def close(self):
        """Flush and close the file."""
        self._file.close()

    def _add(self, **fields):
        self._file.write_event(self._proto.event_pb2.Event(wall_time=time.time(), **fields))
