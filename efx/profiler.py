"""A profile of some steps of a run, by JAX's profiler, and the seconds spent compiling."""

import functools
import os
import shutil
import threading

import jax

_COMPILING = (
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
_this_thread = threading.local()


def compile_seconds():
    """Seconds for which this thread has lowered and compiled programs since the first call."""
    _listen()
    return getattr(_this_thread, "seconds", 0.0)


@functools.cache
def _listen():
    jax.monitoring.register_event_duration_secs_listener(_add)


def _add(event, seconds, **_):
    if event in _COMPILING:
        _this_thread.seconds = getattr(_this_thread, "seconds", 0.0) + seconds


class Profile:
    """What devices and threads of this process do from now on, until `end`.

    JAX names its folder by the clock and its files by the host: of two processes on one host the
    one that ends last would replace the profile of the other, and processes whose clocks tell
    another second would seem to be of two profiles. Here the folder has the name of the step, and
    of several processes each has its number in the names of its files. TensorBoard shows these as
    the hosts of one profile.

    Args:
      folder: where profiles of the run are, on a disk; the log directory for TensorBoard.
      step: after which it begins.
    """

    def __init__(self, folder, step):
        self.step = step
        self._folder = folder / "plugins" / "profile" / f"step_{step}"
        self._own = folder / f"process_{jax.process_index()}"
        jax.profiler.start_trace(str(self._own))

    def end(self):
        """Writes it."""
        jax.profiler.stop_trace()
        self._folder.mkdir(parents=True, exist_ok=True)
        process = f"process_{jax.process_index()}_" if jax.process_count() > 1 else ""
        for path in self._own.glob("plugins/profile/*/*"):
            os.replace(path, self._folder / f"{process}{path.name}")
        shutil.rmtree(self._own)
