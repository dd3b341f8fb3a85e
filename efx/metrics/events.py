"""TensorBoard event files, written in the calling thread.

tensorboardX's SummaryWriter writes in a thread of its own: when the disk is full that thread dies
with a traceback, and the run hangs once its queue is full. So its record format and messages are
used here without it, and a write that fails is an OSError where it happens.
"""

import os
import socket
import sys
import time

_FLUSH_SECONDS = 10  # least time between two flushes, which wait for the disk


class Events:
    """One event file of one launch, in `folder` (made if absent).

    purge_from: TensorBoard hides what earlier files of the folder hold from this step on (None:
    nothing), as a run that resumes wants.
    """

    def __init__(self, folder, purge_from):
        tensorboardx = _tensorboardx()
        self._text_summary = tensorboardx.summary.text
        self._proto = tensorboardx.proto.event_pb2
        self._message = tensorboardx.proto.summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names: by time.
        nanoseconds = time.time_ns()
        name = f"events.out.tfevents.{nanoseconds // 10**9}.{socket.gethostname()}.{nanoseconds}"
        self._file = tensorboardx.RecordWriter(os.fspath(folder / name))
        self._flushed = time.monotonic()
        self._add(file_version="brain.Event:2")
        if purge_from is not None:
            log = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._add(step=purge_from, session_log=log)

    def scalars(self, step, values):
        """Adds {name: number} at `step`."""
        for name, value in values.items():
            # Not tensorboardX's own helper: that one complains on the terminal about each NaN.
            value = self._message.Value(tag=name, simple_value=value)
            self._add(step=step, summary=self._message(value=[value]))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def text(self, step, name, markdown):
        """Adds a text at `step` and flushes."""
        self._add(step=step, summary=self._text_summary(name, markdown))
        self._file.flush()

    def close(self):
        """Flushes and closes the file."""
        self._file.close()

    def _add(self, **fields):
        event = self._proto.Event(wall_time=time.time(), **fields)
        self._file.write(event.SerializeToString())


def _tensorboardx():
    """The package. It imports torch where there is one, which takes seconds, for nothing that is
    used here: so torch is hidden meanwhile."""
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None
    try:
        import tensorboardX
        import tensorboardX.proto.event_pb2
        import tensorboardX.proto.summary_pb2
        import tensorboardX.summary
    finally:
        if hide:
            del sys.modules["torch"]
    return tensorboardX
