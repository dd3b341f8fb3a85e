"""What benchmarks/fuzz.py tries: each part makes cases of one kind, and knows what may come of one.

A part prepares what its cases have in common in a folder of its own, draws cases by hypothesis, and
checks one: it returns for what works, and raises a UsageError of one line for what does not. Any
other end is a finding, and so is a run directory that a refused case has written into.
"""

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import shutil
import struct

import jax
import numpy as np
from flax import linen as nn
from hypothesis import strategies as st

from benchmarks import hostile_settings
from benchmarks.crash import state_of
from efx import models
from efx.config import flags, schema
from efx.config.load import config_of_run, to_config
from efx.config.names import setting_names
from efx.config.run import Config, default_config
from efx.configs import common
from efx.data import load, write_token_shards
from efx.data.bpe import END_OF_TEXT, train_bpe
from efx.data.tokenizers import ByteTokenizer, CharTokenizer, load_tokenizer
from efx.errors import UsageError
from efx.interop import hf, import_run
from efx.interop.architectures import params_from_hf
from efx.logging import read_metrics
from efx.sampling import TextSampler
from efx.train import setup, trainer

TEXT = "The quick brown fox jumps over the lazy dog.\n" * 60
TINY = {
    "steps": 4,
    "data.seq_len": 8,
    "data.batch_size": 2,
    "mesh.data": 1,
    "model.depth": 2,
    "model.width": 8,
    "model.attention.num_heads": 2,
    "optim.schedule.warmup_steps": 1,
    "checkpoint.every": 2,
    "checkpoint.asynchronous": False,
    "evaluate.every": 0,
    "evaluate.batch_size": 2,
    "evaluate.max_batches": 1,
    "sample.every": 2,
    "sample.max_new_tokens": 2,
    "log.every": 1,
    "log.tensorboard": False,
}


class Wrong(Exception):
    """What should not have been; the message says it."""


@contextlib.contextmanager
def one_device():
    """Runs take one of the devices, of which the tests have eight."""
    devices, count, listed = jax.devices()[:1], jax.device_count, jax.devices
    jax.devices, jax.device_count = lambda: devices, lambda: 1
    try:
        yield
    finally:
        jax.devices, jax.device_count = listed, count


# ---- how files become hostile ----------------------------------------------------------------

NUMBERS = (-1, 0, 1, 2**31, 2**32 - 1, 2**63, 10**30, -0.5, 1e308, math.nan, math.inf, -math.inf)
WORDS = ("", "a", "\ud800", "\0", "../..", "..", "/etc/passwd", "/dev/zero", "a" * 3000, "ü\n")
VALUES = (*NUMBERS, *WORDS, None, True, [], {}, [[]], {"": None}, ["a", 1], "DEEP")
_DEEP = "[" * 100_000  # in the place of "DEEP"


def changed_json():
    """Changes of a JSON value: [(which of its nodes, what becomes of it)]."""
    kinds = st.one_of(
        st.tuples(st.just("nudge"), st.integers(-2, 2)),
        st.tuples(st.just("put"), st.sampled_from(VALUES)),
        st.tuples(st.just("put"), st.integers() | st.floats() | st.text(max_size=8)),
        st.tuples(st.sampled_from(("remove", "add", "swap")), st.sampled_from(VALUES)),
    )
    return st.lists(st.tuples(st.integers(0, 10**6), kinds), max_size=3)


def apply_json(value, changes):
    """The text of a JSON value after `changes`."""
    value = json.loads(json.dumps(value))
    for number, (kind, new) in changes:
        places = list(_places(value))
        new = copy.deepcopy(new)
        if not places:
            value = new
            continue
        owner, key = places[number % len(places)]
        if kind == "put":
            owner[key] = new
        elif kind == "nudge":
            owner[key] = _nudged(owner[key], new)
        elif kind == "remove":
            del owner[key]
        elif isinstance(owner, dict):
            owner["added" if kind == "add" else key] = new if kind == "add" else list(owner)
        else:
            owner.append(new if kind == "add" else owner[key])
    return json.dumps(value).replace('"DEEP"', _DEEP)


def _nudged(value, by):
    """A value of the same type that is close to this one."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + by
    if isinstance(value, list):
        return value[by:] + value[:by]
    return value + "a" * by if isinstance(value, str) else dict(reversed(value.items()))


def _places(value):
    """Yields (owner, key or index) of every node below a value."""
    if not isinstance(value, dict | list):
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(items):
        yield value, key
        yield from _places(child)


def changed_bytes():
    """Changes of a file: [(what is done, where, with which bytes)]."""
    kinds = st.sampled_from(("flip", "cut", "remove", "insert", "empty", "tail", "fill"))
    where = st.integers(0, 10**6)
    return st.lists(st.tuples(kinds, where, st.binary(max_size=6)), min_size=1, max_size=2)


def apply_bytes(data, changes):
    data = bytearray(data)
    for kind, where, new in changes:
        at = where % max(1, len(data))
        if kind == "flip" and data:
            data[at] ^= 1 + where % 255
        elif kind == "cut":
            del data[at:]
        elif kind == "remove":
            del data[at : at + 1 + where % 9]
        elif kind == "insert":
            data[at:at] = new
        elif kind == "empty":
            data.clear()
        elif kind == "tail":
            data += new * 40
        else:
            data[at : at + 8] = (b"\xff" if where % 2 else b"\0") * 8
    return bytes(data)


def changed_file(names):
    """(name of a file, its changes): as JSON, where it is that, or as bytes."""
    changes = st.one_of(
        st.tuples(st.just("bytes"), changed_bytes()),
        st.tuples(st.just("json"), changed_json()),
        st.tuples(st.just("text"), st.sampled_from((b"null", b"[]", b"{}", b"1", b"\n", b"{"))),
        st.tuples(st.just("gone"), st.none()),
        st.tuples(st.just("folder"), st.none()),
    )  # fmt: skip
    return st.tuples(st.sampled_from(names), changes)


def apply_file(folder, change):
    name, (kind, changes) = change
    path = folder / name
    data = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "text":
        path.write_bytes(changes)
    elif kind == "bytes":
        path.write_bytes(apply_bytes(data, changes))
    elif kind == "json":
        contents = json.loads(data) if name.endswith(".json") else data.decode("latin-1").split()
        path.write_text(apply_json(contents, changes), errors="surrogatepass")


def snapshot(folder):
    """{name: hash} of the files of a folder, but for the lock."""
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


# ---- parts -----------------------------------------------------------------------------------


class Settings:
    """Some settings of a family with values of every kind; its step is traced."""

    examples = 10

    def __init__(self, folder):
        self.folder, self.traced, self.exits = folder, set(), contextlib.ExitStack()
        hostile_settings.write_folder(folder)
        self.exits.enter_context(hostile_settings.remembered())
        self.exits.enter_context(contextlib.chdir(folder))
        self.configs, self.hints = {}, {}
        for name, (family, changes, _) in hostile_settings.CASES.items():
            self.configs[name] = hostile_settings.configured(family, changes, folder)
            self.hints[name] = hostile_settings.walked(name, self.configs[name])

    def cases(self):
        def values(case):
            keys = st.lists(st.sampled_from(sorted(self.hints[case])), min_size=1, max_size=3)
            return keys.flatmap(
                lambda keys: st.tuples(
                    st.just(case),
                    st.fixed_dictionaries({key: self._value(case, key) for key in keys}),
                )
            )

        return st.sampled_from(sorted(self.hints)).flatmap(values)

    def _value(self, case, key):
        known = hostile_settings.hostile(self.hints[case][key])
        # Of large models each is traced for minutes.
        free = st.integers(-9, 9) | st.floats(-2, 2) | st.text(max_size=4) | st.booleans()
        return st.sampled_from(known) | free if known else free

    def check(self, case):
        name, changes = case
        changed = schema.replaced(self.configs[name], changes)
        workdir = self.folder / "run"
        launch = trainer.Trainer(changed, workdir, (), 0.0, None)
        if workdir.exists():
            raise Wrong(f"{workdir} was made")
        hostile_settings.trace_step(launch, self.traced)

    def close(self):
        self.exits.close()


class CommandLine:
    """Arguments of every kind."""

    examples = 100

    def __init__(self, folder):
        self.folder = folder
        keys = [f"--{name}" for name in setting_names(default_config())]
        flags = ["--config", "--workdir", "--mode", "--from", "--prompt", "--step", "--cpu_devices"]
        self.flags = [*flags, "--topology", "--json", "--distributed", "--help=", "--", "-", *keys]

    def cases(self):
        words = st.sampled_from(("mod", "mod:smoke,dense", "configs/mod.py", ",", ":", "(", "{}"))
        value = st.text(max_size=9) | words | st.integers().map(str) | st.floats().map(str)
        argument = st.one_of(
            st.tuples(st.sampled_from(self.flags), value).map("=".join),
            st.sampled_from(self.flags),
            value,
        )
        return st.lists(argument, max_size=3)

    def check(self, case):
        before = snapshot(self.folder)
        given = ["efx", "--config=mod", f"--workdir={self.folder / 'run'}", *case]
        values = flags.parse(given)
        if values is not None:
            to_config(values.config)
        if snapshot(self.folder) != before:
            raise Wrong("a file was written")

    def close(self):
        pass


class RunFiles:
    """A file of a finished run is changed; the run goes on, is evaluated, or is refused."""

    examples = 8

    def __init__(self, folder):
        (folder / "text.txt").write_text(TEXT)
        self.run, self.copy = folder / "run", folder / "copy"
        changes = {
            "data.source": f"text:{folder / 'text.txt'}",
            "data.cache_dir": str(folder / "c"),
        }
        with one_device():
            trainer.train_and_evaluate(common.apply(common.base(), {**TINY, **changes}), self.run)
        self.state, self.rows = state_of(self.run), read_metrics(self.run)
        names = [str(path.relative_to(self.run)) for path in self.run.rglob("*") if path.is_file()]
        self.names = sorted(name for name in names if name != ".lock")

    def cases(self):
        # A change of config.json or of a checkpoint's bookkeeping finds more than one of arrays.
        top = [name for name in self.names if "/" not in name]
        manifests = [name for name in self.names if name.endswith("efx_manifest.json")]
        names = st.sampled_from((top, manifests, self.names))
        return st.tuples(names.flatmap(changed_file), st.booleans())

    def check(self, case):
        change, evaluates = case
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.run, self.copy)
        apply_file(self.copy, change)
        before = snapshot(self.copy)
        try:
            config = config_of_run(self.copy)
            config.steps = TINY["steps"]  # an edit that is meant may ask for years of training
            with one_device():
                if evaluates:
                    setup.finished(config, self.copy, splits=("eval",))
                    read_metrics(self.copy)
                else:
                    trainer.train_and_evaluate(config, self.copy)
        except UsageError:
            if changed := dict(snapshot(self.copy).items() ^ before.items()):
                names = sorted(changed)
                raise Wrong(f"refused, and changed: {names}") from None
            raise
        if evaluates or change[1][0] in ("gone", "folder"):
            return
        if state_of(self.copy) != self.state:
            raise Wrong("taken without a word, and the checkpoint has another state")
        if len(read_metrics(self.copy)) != len(self.rows):
            raise Wrong("taken without a word, and rows of the metrics are missing")

    def close(self):
        pass


def _batches(config_data):
    """The first batch of a text, for training and for evaluation."""
    data = load(config_data, seed=0)
    first = next(data.train_iterator(rows=range(config_data.batch_size)))
    return data, first


class Text:
    """A text of any bytes, with each kind of tokenizer, as one file or as a folder of them."""

    examples = 40

    def __init__(self, folder):
        self.folder = folder

    def cases(self):
        piece = st.one_of(
            st.binary(max_size=200),
            st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
            st.sampled_from(
                [bytes(range(256)), b"\r\n" * 9, b"\xef\xbb\xbfa b", b"\0", b"a" * 999]
            ),
        )
        pieces = st.lists(piece, min_size=1, max_size=5)
        kinds = st.sampled_from(("bytes", "chars", "bpe:257", "bpe:300"))
        return st.tuples(pieces, kinds, st.booleans(), st.sampled_from(("tail", "documents")))

    def check(self, case):
        pieces, tokenizer, is_folder, split = case
        path = self.folder / "text"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        for number, piece in enumerate(pieces if is_folder else [b"".join(pieces)]):
            (path / f"{number}.txt").write_bytes(piece)
        c = Config().data
        c = dataclasses.replace(
            c, source=f"text:{path}", tokenizer=tokenizer, seq_len=2, batch_size=2, split=split,
            cache_dir=str(self.folder / "cache"), eval_fraction=0.3,
        )  # fmt: skip
        try:
            data, _ = _batches(c)
        finally:
            shutil.rmtree(self.folder / "cache", ignore_errors=True)
        text = b"".join(pieces)
        if (decoded := data.tokenizer.decode_bytes(data.tokenizer.encode(text))) != text:
            raise Wrong(f"{text!r} is decoded as {decoded!r}")

    def close(self):
        pass


def tokenizers():
    """{name: contents of a tokenizer.json}: ours, and one of each model of the library."""
    import tokenizers as library

    models_of = library.models
    words = {word: i for i, word in enumerate(["[UNK]", "the", "fox", "##x", "a", "</s>"])}
    made = {
        "bytes": ByteTokenizer().to_json(),
        "chars": CharTokenizer("abcdefghijklmnopqrstuvwxyz .\n").to_json(),
        "bpe": train_bpe([TEXT], 270).to_json(),
    }
    for name, model in (
        ("words", models_of.WordLevel(words, unk_token="[UNK]")),
        ("pieces", models_of.WordPiece(words, unk_token="[UNK]")),
        ("unigram", models_of.Unigram([("<unk>", 0.0), ("a", -1.0), ("fox", -2.0)], 0)),
    ):
        inner = library.Tokenizer(model)
        inner.pre_tokenizer = library.pre_tokenizers.Whitespace()
        inner.add_special_tokens([END_OF_TEXT])
        end = END_OF_TEXT, inner.token_to_id(END_OF_TEXT)
        inner.post_processor = library.processors.TemplateProcessing(
            single=f"{END_OF_TEXT} $A", special_tokens=[end]
        )
        made[name] = inner.to_str()
    return {name: json.loads(text) for name, text in made.items()}


class Tokenizers:
    """A tokenizer.json of any contents, and texts for it."""

    examples = 60

    def __init__(self, folder):
        self.path, self.made = folder / "tokenizer.json", tokenizers()

    def cases(self):
        change = st.tuples(st.just("json"), changed_json()) | st.tuples(
            st.just("bytes"), changed_bytes()
        )
        text = st.text(max_size=30) | st.binary(max_size=30) | st.just("the fox a")
        return st.tuples(st.sampled_from(sorted(self.made)), change, text)

    def check(self, case):
        name, (kind, changes), text = case
        contents = self.made[name]
        if kind == "json":
            self.path.write_text(apply_json(contents, changes), errors="surrogatepass")
        else:
            self.path.write_bytes(apply_bytes(json.dumps(contents).encode(), changes))
        tokenizer = load_tokenizer(self.path)
        ids = tokenizer.encode(text)
        if len(ids) and not 0 <= min(ids) <= max(ids) < tokenizer.vocab_size:
            raise Wrong(f"ids {min(ids)} to {max(ids)} of a vocabulary of {tokenizer.vocab_size}")
        list(tokenizer.encode_documents([("a", b"the fox"), ("b", b"")]))
        tokenizer.decode(ids), tokenizer.decode_bytes(ids), tokenizer.byte_lengths()
        decoder = tokenizer.stream_decoder()
        "".join([*map(decoder.feed, ids), decoder.finish()]).encode()
        tokenizer.to_json(), tokenizer.fingerprint

    def close(self):
        pass


class Prompts:
    """Prompts and stop texts of every kind, with each kind of tokenizer."""

    examples = 40

    def __init__(self, folder):
        self.setups = []
        config = to_config(common.apply(common.base(), TINY))
        for name, contents in tokenizers().items():
            path = folder / f"{name}.json"
            path.write_text(json.dumps(contents))
            tokenizer = load_tokenizer(path)
            model = models.build(
                config.model, vocab_size=tokenizer.vocab_size, context=8, dtype="float32"
            )
            variables = jax.jit(lambda m=model: nn.unbox(models.init(m, jax.random.key(0))))()
            self.setups.append((tokenizer, model, variables))
        self.sample = config.sample

    def cases(self):
        anything = st.text(max_size=12) | st.sampled_from(("", "\ud800", "\0", "a" * 99, "the fox"))
        which = st.integers(0, len(self.setups) - 1)
        return st.tuples(which, anything, anything, st.sampled_from((0.0, 1.0)))

    def check(self, case):
        which, prompt, stop, temperature = case
        tokenizer, model, variables = self.setups[which]
        changes = {"prompt": prompt, "stop": stop, "temperature": temperature, "max_new_tokens": 2}
        sample = schema.replaced(self.sample, changes)
        sampler = TextSampler(model, tokenizer, sample)
        for text in sampler.texts(variables, [prompt], seeds=[0]):
            (prompt + text).encode()

    def close(self):
        pass


class Shards:
    """A folder of tokens whose files are changed."""

    examples = 40

    def __init__(self, folder):
        self.folder, self.copy = folder / "shards", folder / "copy"
        texts = [TEXT[i : i + 90] for i in range(0, 900, 90)]
        write_token_shards(
            self.folder, ByteTokenizer(), texts, heldout=[TEXT[:200]], shard_tokens=300
        )
        self.names = sorted(path.name for path in self.folder.iterdir())
        self.cache = str(folder / "cache")

    def cases(self):
        return changed_file(self.names) | changed_file(["meta.json"])

    def check(self, case):
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.folder, self.copy)
        apply_file(self.copy, case)
        c = Config().data
        _batches(
            dataclasses.replace(
                c, source=f"tokens:{self.copy}", tokenizer="bytes", seq_len=8, batch_size=2,
                cache_dir=self.cache,
            )
        )  # fmt: skip

    def close(self):
        pass


class Records:
    """ArrayRecord files: their bytes, and what is in their records."""

    examples = 30

    def __init__(self, folder):
        self.folder, self.path = folder, folder / "a.array_record"
        self.write([f"document {i} ".encode() * 20 for i in range(20)])
        self.sound = self.path.read_bytes()

    def write(self, records):
        from array_record.python.array_record_module import ArrayRecordWriter

        writer = ArrayRecordWriter(str(self.path), "group_size:4")
        for record in records:
            writer.write(record)
        writer.close()

    def cases(self):
        plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=30)
        record = st.one_of(
            st.binary(max_size=90),
            (plain | st.floats() | st.lists(plain)).map(lambda v: json.dumps({"text": v}).encode()),
            st.sampled_from(
                [_DEEP.encode(), b'{"text": 100000000000}', b'{"text": ' + b"9" * 9999]
            ),
        )
        good = json.dumps({"text": "a document of some length"}).encode()
        records = st.lists(record | st.just(good), min_size=1, max_size=6)
        return st.tuples(st.just("bytes"), changed_bytes()) | st.tuples(st.just("records"), records)

    def check(self, case):
        kind, contents = case
        if kind == "bytes":
            self.path.write_bytes(apply_bytes(self.sound, contents))
        else:
            self.write(contents)
        c = dataclasses.replace(
            Config().data, source=f"arrayrecord:{self.path}", tokenizer="bytes",
            seq_len=4, batch_size=2, cache_dir=str(self.folder / "cache"),
            text_key="text" if kind == "records" else "",
        )  # fmt: skip
        try:
            _batches(c)
        finally:
            shutil.rmtree(self.folder / "cache", ignore_errors=True)

    def close(self):
        pass


class Caches:
    """What is stored of a text: damaged, it is made again, and the batches are the same."""

    examples = 15

    def __init__(self, folder):
        self.folder, self.copy = folder / "cache", folder / "copy"
        path = folder / "text.txt"
        path.write_text(TEXT)
        self.config = dataclasses.replace(
            Config().data, source=f"text:{path}", tokenizer="bpe:260", seq_len=8,
            batch_size=2, cache_dir=str(self.folder),
        )  # fmt: skip
        self.first = _batches(self.config)[1]
        names = [p for p in self.folder.rglob("*") if p.is_file() and p.suffix != ".lock"]
        self.names = sorted(str(path.relative_to(self.folder)) for path in names)

    def cases(self):
        return changed_file(self.names)

    def check(self, case):
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.folder, self.copy)
        apply_file(self.copy, case)
        _, first = _batches(dataclasses.replace(self.config, cache_dir=str(self.copy)))
        for name, array in self.first.items():
            if not np.array_equal(array, first[name]):
                raise Wrong(f"{name} of the first batch are others")

    def close(self):
        pass


class Pretrained:
    """A Hugging Face folder whose config, weights, index or tokenizer are changed."""

    examples = 25

    def __init__(self, folder):
        self.folder, self.copy = folder / "model", folder / "copy"
        tokenizer = train_bpe([TEXT], 260)
        changes = {**TINY, "model.vocab_multiple": 1}
        config = to_config(common.apply(common.base(), changes))
        config = schema.replaced(config, {"model.depth_routing.kind": "none"})
        model = models.build(
            config.model, vocab_size=tokenizer.vocab_size, context=8, dtype="float32"
        )
        params = jax.jit(lambda: models.init(model, jax.random.key(0)))()["params"]
        hf.save_hf(self.folder, nn.unbox(params), model)
        tokenizer.save(self.folder / "tokenizer.json")
        self.names = ("config.json", "model.safetensors", "tokenizer.json")
        self.index = json.dumps({"weight_map": {"a": "model.safetensors"}})
        blob = (self.folder / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", blob[:8])[0]
        self.header, self.arrays = json.loads(blob[8 : 8 + length]), blob[8 + length :]

    def cases(self):
        header = st.tuples(changed_json(), st.sampled_from((None, 0, 2**63, 10**8, -1)))
        return st.one_of(
            st.tuples(st.just("file"), changed_file(self.names)),
            st.tuples(st.just("file"), changed_file(["config.json"])),
            st.tuples(st.just("header"), header),
            st.tuples(st.just("index"), changed_json()),
        )

    def check(self, case):
        kind, change = case
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.folder, self.copy)
        if kind == "file":
            apply_file(self.copy, change)
        elif kind == "header":
            header = apply_json(self.header, change[0]).encode("utf-8", "surrogatepass")
            length = len(header) if change[1] is None else change[1] % 2**64
            data = struct.pack("<Q", length) + header + self.arrays
            (self.copy / "model.safetensors").write_bytes(data)
        else:
            names = {name: "model.safetensors" for name in self.header if name != "__metadata__"}
            text = apply_json({"weight_map": names}, change)
            (self.copy / "model.safetensors.index.json").write_text(text, errors="surrogatepass")
        config = import_run.config_for(self.copy)
        read = import_run.read_config(self.copy)
        rows = read["vocab_size"]
        tokenizer = load_tokenizer(self.copy / "tokenizer.json")
        e = setup.without_text(config, tokenizer.vocab_size, jax.devices()[:1])
        params_from_hf(import_run.Tensors(self.copy), e.model, read["model_type"], rows)

    def close(self):
        pass


PARTS = {
    "settings": Settings,
    "command_line": CommandLine,
    "run_files": RunFiles,
    "text": Text,
    "tokenizers": Tokenizers,
    "prompts": Prompts,
    "shards": Shards,
    "records": Records,
    "caches": Caches,
    "pretrained": Pretrained,
}
