"""Speed of making batches, and whether it slows a training step down.

    python -m benchmarks.data [--seq-len=1024] [--batch-size=32] [--seconds=1]

First table: opening each kind of data, new and from the cache. Second: batches from a memory-mapped
file of 100 million random tokens and from the standard library, for each order. Third: peak memory
of preparing texts of --text MB, and one of 8 MB without spaces; at most 400 MB. Fourth: tokenising,
by the `tokenizers` library alone and as it is done here, in turns (the best of three is shown).
Fifth: a jitted step of the size given by --step-width, fed the same batch over and over and fed
from the pipeline, in turns; the two should take the same time (the best of --rounds is shown).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import efx.data
from benchmarks.common import command
from efx.config.run import DataConfig
from efx.data.bpe import train_bpe
from efx.data.sources import open_source
from efx.data.tokenise import prepare
from efx.data.tokenizers import ByteTokenizer

TOKENS = 100_000_000


def config_for(source, cache, arguments, **changes):
    shape = dict(seq_len=arguments.seq_len, batch_size=arguments.batch_size, eval_fraction=0.05)
    return DataConfig(source=source, cache_dir=cache, **shape | changes)


def write_token_file(folder):
    rng = np.random.default_rng(0)
    documents = (rng.integers(0, 256, 1_000_000, dtype=np.uint16) for _ in range(TOKENS // 10**6))
    efx.data.write_token_shards(folder, ByteTokenizer(), documents)


def opening(cache, arguments):
    print(f"{'opening the standard library':<44}{'new, s':>10}{'cached, s':>10}")
    for tokenizer in ("bytes", "chars", "bpe:1024"):
        config = config_for("stdlib", cache, arguments, tokenizer=tokenizer, split="documents")
        seconds = []
        for _ in range(2):
            begin = time.perf_counter()
            efx.data.load(config, seed=0)
            seconds.append(time.perf_counter() - begin)
        print(f"  {tokenizer:<42}{seconds[0]:>10.2f}{seconds[1]:>10.3f}")


def rate(iterator, seconds):
    """Batches a second."""
    for _ in range(3):
        next(iterator)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        next(iterator)
        count += 1
    return count / (time.perf_counter() - begin)


def making(kinds, arguments):
    shape = f"{arguments.batch_size} x {arguments.seq_len}"
    print(f"\n{'batches of ' + shape:<44}{'batches/s':>10}{'Mtokens/s':>10}{'ms':>8}")
    for name, config in kinds:
        iterator = efx.data.load(config, seed=0).train_iterator()
        batches_per_second = rate(iterator, arguments.seconds)
        tokens = batches_per_second * arguments.batch_size * arguments.seq_len / 1e6
        milliseconds = 1e3 / batches_per_second
        print(f"  {name:<42}{batches_per_second:>10.0f}{tokens:>10.1f}{milliseconds:>8.2f}")


def tokenising(cache, arguments):
    config = config_for("stdlib", cache, arguments, max_bytes=1 << 24)
    source = open_source("stdlib", "", config, Path(cache), config.max_bytes)
    documents = list(source.documents())
    texts = [document.text for document in documents]
    megabytes = sum(len(document.data) for document in documents) / 1e6
    tokenizer = train_bpe(texts, 8192)
    folders = iter(range(100))

    def to_shards():
        prepare(source, tokenizer, Path(cache) / f"tokenising{next(folders)}")

    ways = {
        "the library's encode_batch": lambda: tokenizer._inner.encode_batch(texts),
        "encode_documents": lambda: sum(len(i) for _, i in tokenizer.encode_documents(documents)),
        "to token shards": to_shards,
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(3):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - begin)
    heading = f"tokenising {megabytes:.0f} MB of the standard library, {os.cpu_count()} cores"
    print(f"\n{heading:<64}{'MB/s':>8}{'of the library':>16}")
    library = best["the library's encode_batch"]
    for name, seconds in best.items():
        print(f"  {name:<62}{megabytes / seconds:>8.1f}{library / seconds:>16.2f}")


PEAK = """
import sys
import efx.data
from efx.config.run import DataConfig
source, tokenizer, cache = sys.argv[1:]
efx.data.load(DataConfig(source="stdlib", max_bytes=10**5, cache_dir=cache), seed=0)
def peak():  # of this process; ru_maxrss counts its parent, too
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024
begin = peak()
data = efx.data.load(DataConfig(source=source, tokenizer=tokenizer, cache_dir=cache), seed=0)
print(peak() - begin)
"""


def memory(cache, arguments):
    """Peak memory over that of a process that has read a small text."""
    rng, size = np.random.default_rng(0), arguments.text << 20
    code = "".join(d.text for d in open_source("stdlib", "", DataConfig(), Path(cache)).documents())
    code = (code * (size // len(code) + 1))[:size]
    lines = (json.dumps({"text": code[i : i + 4000]}) for i in range(0, size, 4000))
    texts = {
        "text:{}": ("code.txt", code),
        "jsonl:{}": ("code.jsonl", "\n".join(lines)),
        "text:{}, without spaces": ("word.txt", rng.bytes(1 << 22).hex()),
    }
    print(f"\n{'peak memory over a small text':<44}{'MB of text':>12}{'MB':>8}")
    for form, (name, text) in texts.items():
        path = Path(cache) / name
        path.write_text(text)
        for tokenizer in ("bytes", "bpe:1024"):
            source = form.partition(",")[0].format(path)
            command = [sys.executable, "-c", PEAK, source, tokenizer, cache]
            peak = float(subprocess.run(command, capture_output=True, check=True).stdout)
            label = f"{form.format(name)}, {tokenizer}"
            print(f"  {label:<42}{len(text) / 1e6:>12.0f}{peak:>8.0f}")
        path.unlink()


def stepping(kinds, arguments):
    import jax

    width = arguments.step_width
    embedding = jax.numpy.ones((256, width)) / width
    kernel = jax.numpy.ones((width, width)) / width

    @jax.jit
    def step(kernel, batch):
        def loss(kernel):
            x_BTD = jax.numpy.take(embedding, batch["inputs"], axis=0).reshape(-1, width)
            return ((x_BTD @ kernel) ** 2).mean() + batch["weights"].mean()

        return kernel - 1e-3 * jax.grad(loss)(kernel)

    def run(next_batch, count, kernel):
        begin = time.perf_counter()
        for _ in range(count):
            kernel = step(kernel, next_batch())
        jax.block_until_ready(kernel)
        return (time.perf_counter() - begin) / count

    print(f"\n{'a jitted step on ' + jax.devices()[0].device_kind:<44}{'alone, ms':>10}"
          f"{'fed, ms':>10}{'ratio':>8}")  # fmt: skip
    for name, config in kinds:
        iterator = efx.data.load(config, seed=0).train_iterator()
        batch = next(iterator)
        run(lambda batch=batch: batch, 3, kernel)
        pairs = [
            (run(lambda batch=batch: batch, 4, kernel), run(iterator.__next__, 4, kernel))
            for _ in range(arguments.rounds)
        ]
        # The minimum, because other work on the machine only adds time.
        alone, fed = (1e3 * min(times) for times in zip(*pairs, strict=True))
        print(f"  {name:<42}{alone:>10.2f}{fed:>10.2f}{fed / alone:>8.3f}")


@command
def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each rate")
    parser.add_argument("--step-width", type=int, default=256)
    parser.add_argument("--text", type=int, default=100, help="MB of the text for memory")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        cache, shards = f"{folder}/cache", f"{folder}/shards"
        opening(cache, arguments)
        write_token_file(shards)
        library = dict(split="documents")
        kinds = []
        for name, source, changes in (
            ("100 M tokens", f"tokens:{shards}", {}),
            ("standard library, bytes", "stdlib", library),
            ("standard library, bpe:1024", "stdlib", library | dict(tokenizer="bpe:1024")),
        ):
            for order in (dict(shuffle="windows"), dict(shuffle="random"), dict(packing=True)):
                label = f"{name}, {'packing' if 'packing' in order else order['shuffle']}"
                kinds.append((label, config_for(source, cache, arguments, **changes, **order)))
        making(kinds, arguments)
        memory(cache, arguments)
        tokenising(cache, arguments)
        stepping(kinds[:3], arguments)


if __name__ == "__main__":
    sys.exit(main())
