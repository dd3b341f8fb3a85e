"""Hostile input of all kinds: each case works, or is one line of a UsageError.

    python -m benchmarks.fuzz --seconds=600 --seed=0

Settings, arguments, files of a run, texts, tokenizers, prompts, token shards, ArrayRecords, caches
and pretrained models (benchmarks/fuzz_parts.py), drawn by hypothesis, which also reduces what it
finds. Anything else than these two ends is printed with the command that makes it again: a
traceback from the depths, a process that died, hangs or takes too much memory, a file that was
written by what was refused. Exit status 1 if there is any.

The cases run in a process beside this one, which is watched (with --once: in this one).
"""

import argparse
import collections
import contextlib
import dataclasses
import io
import json
import pathlib
import select
import subprocess
import sys
import tempfile
import time
import traceback

from benchmarks.common import command, table
from efx.errors import UsageError, extra

PARTS = (
    "settings", "command_line", "run_files", "text", "tokenizers", "prompts", "shards", "records",
    "caches", "pretrained",
)  # fmt: skip
_HANGS = 120  # seconds for one case, or for what a part's cases have in common
_MEMORY = 6 << 30  # bytes that the process of the cases may take


@dataclasses.dataclass
class Found:
    """What is wrong. key: the same for what is likely to have the same cause."""

    part: str
    seed: int
    key: str
    text: str


@dataclasses.dataclass
class Counts:
    """Of one part: cases that worked, and that were refused in one line."""

    worked: int = 0
    refused: int = 0


class Fuzzer:
    """The parts, prepared when they are first needed, in a folder that is theirs."""

    def __init__(self, scratch, said=lambda **what: None):
        self.scratch, self.said = pathlib.Path(scratch), said
        self.counts, self._parts = collections.defaultdict(Counts), {}

    def batch(self, name, seed):
        """The cases of one part that follow from a seed: a `Found` or None."""
        import hypothesis

        self.said(part=name, seed=seed)
        part, failing = self._part(name), []

        def one(case):
            self.said(part=name, seed=seed)
            try:
                with _silence():
                    self._one(name, part, case)
            except Exception:
                failing[:] = [case]  # in the end the simplest one
                raise

        test = hypothesis.given(part.cases())(one)
        test = hypothesis.seed(seed)(test)
        phases = (hypothesis.Phase.generate, hypothesis.Phase.shrink)
        test = hypothesis.settings(
            max_examples=part.examples, database=None, deadline=None, phases=phases,
            report_multiple_bugs=False, verbosity=hypothesis.Verbosity.quiet, print_blob=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        )(test)  # fmt: skip
        try:
            test()
        except KeyboardInterrupt:
            raise
        except Exception as error:
            return Found(name, seed, _key(error), _described(error, failing))
        return None

    def _part(self, name):
        if name not in self._parts:
            from benchmarks import fuzz_parts

            folder = self.scratch / name
            folder.mkdir()
            with _silence():
                self._parts[name] = fuzz_parts.PARTS[name](folder)
        return self._parts[name]

    def _one(self, name, part, case):
        try:
            part.check(case)
            self.counts[name].worked += 1
        except UsageError as error:
            if len(str(error).splitlines()) != 1:  # never more: empty
                raise ValueError("a UsageError that says nothing") from error
            self.counts[name].refused += 1
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:  # what a library in Rust panics with
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    def close(self):
        for part in self._parts.values():
            part.close()


@contextlib.contextmanager
def _silence():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _key(error):
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/efx/" in frame.filename] or frames[-1:]
    return f"{type(error).__name__} {own[-1].filename}:{own[-1].lineno}"


def _described(error, failing):
    lines = traceback.format_exception(error)
    return f"case: {repr(failing)[:1500]}\n{''.join(lines)[-2500:]}"


# ---- the process of the cases ----------------------------------------------------------------


def work(parts, seed, seconds):
    """Runs batches until the time is over, and says on standard output what it does."""
    import os

    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def said(**what):
        out.write(json.dumps(what) + "\n")

    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="efx_fuzz_") as scratch:
        fuzzer = Fuzzer(scratch, said)
        try:
            while time.monotonic() < end:
                for name in parts:
                    found = fuzzer.batch(name, seed)
                    said(found=found and dataclasses.asdict(found), counts=_plain(fuzzer.counts))
                    if time.monotonic() >= end:
                        break
                seed += 1
        finally:
            fuzzer.close()


def _plain(counts):
    return {name: dataclasses.asdict(count) for name, count in counts.items()}


def watch(parts, seed, seconds):
    """Runs `work` in a process and starts it again with the next seed where it dies or is stuck:
    (findings, counts)."""
    all_found, all_counts = [], collections.defaultdict(Counts)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with tempfile.TemporaryFile() as errors:
            arguments = [f"--work={','.join(parts)}", f"--seed={seed}", f"--seconds={left}"]
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.fuzz", *arguments],
                stdout=subprocess.PIPE, stderr=errors, bufsize=0,
            )  # fmt: skip
            try:
                now, counts, problem = _follow(process, all_found)
            finally:
                process.kill()
                process.wait()
            for name, count in counts.items():
                all_counts[name].worked += count["worked"]
                all_counts[name].refused += count["refused"]
            if problem:
                errors.seek(0)
                tail = errors.read()[-2000:].decode(errors="replace")
                key = f"{problem} {now['part']}"
                all_found.append(Found(now["part"], now["seed"], key, f"{problem}\n{tail}"))
                seed = now["seed"] + 1
            else:
                break
    return all_found, all_counts


def _follow(process, all_found):
    """(last case, counts, what is wrong with the process) once it has ended or is stuck."""
    now, counts, rest, heard = {"part": "?", "seed": 0}, {}, b"", time.monotonic()
    while True:
        ready, _, _ = select.select([process.stdout], [], [], 1.0)
        if ready:
            new = process.stdout.read(1 << 16)
            if not new:
                status = process.wait()
                return now, counts, status and f"the process ended with status {status}"
            heard = time.monotonic()
            *lines, rest = (rest + new).split(b"\n")
            for line in lines:
                what = json.loads(line)
                if "part" in what:
                    now = what
                else:
                    counts = what["counts"]
                    if what["found"]:
                        all_found.append(Found(**what["found"]))
        elif time.monotonic() - heard > _HANGS:
            return now, counts, f"nothing for {_HANGS} seconds"
        if _memory(process.pid) > _MEMORY:
            return now, counts, f"more than {_MEMORY >> 30} GiB of memory"


def _memory(pid):
    try:
        pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):  # ended, or not on Linux
        return 0
    return pages * 4096


@command
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch of each part")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, joined by commas")
    parser.add_argument("--once", action="store_true", help="one batch of each, in this process")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        import hypothesis  # noqa: F401
    except ImportError as error:
        raise UsageError(f"benchmarks.fuzz needs {extra('dev')}") from error
    if options.work:
        work(options.work.split(","), options.seed, options.seconds)
        return 0
    parts = options.parts.split(",")
    if unknown := [name for name in parts if name not in PARTS]:
        raise UsageError(f"--parts={options.parts}: {unknown[0]!r} is none of {', '.join(PARTS)}")
    began = time.monotonic()
    if options.once:
        with tempfile.TemporaryDirectory(prefix="efx_fuzz_") as scratch:
            fuzzer = Fuzzer(scratch)
            found = [fuzzer.batch(name, options.seed) for name in parts]
            fuzzer.close()
        found, counts = [one for one in found if one], fuzzer.counts
    else:
        found, counts = watch(parts, options.seed, options.seconds)
    distinct = {one.key: one for one in reversed(found)}
    findings = collections.Counter(one.part for one in distinct.values())
    rows = [
        (name, c.worked + c.refused, c.worked, c.refused, findings[name])
        for name, c in counts.items()
    ]  # fmt: skip
    print(table(("part", "cases", "worked", "one line", "findings"), *rows))
    seconds = time.monotonic() - began
    total = sum(c.worked + c.refused for c in counts.values())
    print(f"{total} cases in {seconds:.0f} seconds, seed {options.seed}")
    for one in distinct.values():
        print(f"\nFOUND in {one.part}: {one.key}")
        print(f"again: python -m benchmarks.fuzz --parts={one.part} --seed={one.seed} --once")
        print(one.text)
    return int(bool(distinct))


if __name__ == "__main__":
    sys.exit(main())
