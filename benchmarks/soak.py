"""Memory, threads and open files of a run that saves, evaluates and samples all the time.

    python -m benchmarks.soak [--config=configs/mod.py] [--seconds=3600] [--every=5]

Prints ten looks at the process, each the least of its tenth of the time, and the growth of memory
in the second half by least squares. Exit status 1 if memory grows by more than --most MB in 1,000
steps by two standard errors, or threads or open files grow.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import time

import pandas as pd
import psutil
from scipy.stats import linregress

from benchmarks import common
from efx.logging import read_metrics


def watch(process, workdir, seconds):
    """Return a row for each second: memory in MB, threads, files, the last logged step."""
    rows, end = [], time.monotonic() + seconds
    watched = psutil.Process(process.pid)
    while time.monotonic() < end and process.poll() is None:
        with watched.oneshot():
            row = {"memory": watched.memory_info().rss / 1e6, "threads": watched.num_threads()}
            row |= {"files": watched.num_fds()}
        metrics = read_metrics(workdir) if (workdir / "metrics.jsonl").exists() else []
        rows.append(row | {"step": max((line["step"] for line in metrics), default=0)})
        time.sleep(1)
    return pd.DataFrame(rows)


@common.command
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/mod.py")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--most", type=float, default=5.0, help="MB in 1,000 steps")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder) / "run"
        command = [sys.executable, "-m", "efx.main", f"--config={args.config}"]
        command += [f"--workdir={workdir}", "--config.log.every=1", "--config.steps=10000000"]
        command += [
            f"--config.{k}.every={args.every}" for k in ("evaluate", "sample", "checkpoint")
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            rows = watch(process, workdir, args.seconds)
        finally:
            process.kill()
            process.wait()
    tenths = rows.groupby(rows.index * 10 // len(rows)).min()
    print(tenths.to_string(float_format="{:.0f}".format))
    half = rows[len(rows) // 2 :]
    fit = linregress(half.step, half.memory)
    print(f"memory grows by {1e3 * fit.slope:.2f} ± {1e3 * fit.stderr:.2f} MB in 1,000 steps")
    grows = 1e3 * (fit.slope - 2 * fit.stderr) > args.most
    grows |= bool((tenths.iloc[-1] > tenths.iloc[5] + 4)[["threads", "files"]].any())
    return int(grows)


if __name__ == "__main__":
    sys.exit(main())
