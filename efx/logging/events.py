"""TensorBoard event files, written in the calling thread.

tensorboardX's SummaryWriter writes in a thread of its own: when the disk is full that thread dies
with a traceback, and the run hangs once its queue is full. Its EventsWriter, which is what that
thread calls, is called here, so that a write that fails is an OSError where it happens.
"""

import os
import sys
import time

_FLUSH_SECONDS = 10  # minimum time between two flushes, which wait for the disk


class Events:
    """One event file of one launch, in `folder` (made if absent).

    purge_from: TensorBoard hides the events of earlier files of the folder from this step on (None:
    hides nothing), which a resumed run needs.
    """

    def __init__(self, folder, purge_from):
        self._tensorboardx = _tensorboardx()
        folder.mkdir(parents=True, exist_ok=True)
        # The name has the time in seconds, and two launches may begin in the same second.
        self._file = self._tensorboardx.event_file_writer.EventsWriter(
            os.fspath(folder / "events"), f".{time.time_ns()}"
        )
        self._flushed = time.monotonic()
        if purge_from is not None:
            proto = self._tensorboardx.proto.event_pb2
            log = proto.SessionLog(status=proto.SessionLog.START)
            self._add(step=purge_from, session_log=log)

    def scalars(self, step, values):
        """Adds {name: number} at `step`."""
        message = self._tensorboardx.proto.summary_pb2.Summary
        for name, value in values.items():
            # Not tensorboardX's helper, which prints a complaint about each NaN.
            value = message.Value(tag=name, simple_value=value)
            self._add(step=step, summary=message(value=[value]))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def text(self, step, name, markdown):
        """Adds a text at `step` and flushes."""
        self._add(step=step, summary=self._tensorboardx.summary.text(name, markdown))
        self._file.flush()

    def close(self):
        """Flushes and closes the file."""
        self._file.close()

    def _add(self, **fields):
        event = self._tensorboardx.proto.event_pb2.Event(wall_time=time.time(), **fields)
        self._file.write_event(event)


def _tensorboardx():
    """The package. It imports torch if that is installed, which takes seconds and is not needed
    here, so torch is hidden meanwhile."""
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None
    try:
        import tensorboardX.event_file_writer
        import tensorboardX.summary
    finally:
        if hide:
            del sys.modules["torch"]
    return tensorboardX
