"""Plausible mistakes: each ends the command with one line that names the setting, flag or file at
fault and the remedy, before anything is compiled or written."""

import contextlib
import gzip
import os
import re
import sys

import devices
import jax
import numpy as np
import pytest
from run_files import TINY

import efx.data
from efx import main, run_dir
from efx.data.tokenizers import CharTokenizer

SMALL = {**TINY, "data.source": "text:text.txt", "data.eval_fraction": 0.1, "model.depth": 2}
DENSE = "model.depth_routing.kind=none data.tokenizer=chars "
RECURSION = "model.depth_routing.kind=recursion model.depth=4 "
MOE = "model.mlp.kind=moe model.mlp.moe."
# The mistake, the settings and flags that make it, and what the line contains: the setting, flag or
# file at fault and the remedy, if any.
# Of a small new run on text.txt:
NEW_RUNS = [
    # Names and types.
    ("key misspelt", "modle.depth=3", "config.modle", "'model'"),
    ("key misspelt in a block", "optim.schedule.warmup=3", "schedule.warmup", "'config.optim"),
    ("key in the wrong block", "batch_size=4", "config.batch_size", "'config.data.batch_size'"),
    ("key of PyTorch", "optim.lr=3e-4", "config.optim.lr", "'config.optim.learning_rate'"),
    ("key of transformers", "model.d_model=64", "model.d_model", "'config.model.width'"),
    ("flag of PyTorch", "--lr=3e-4", "--lr", "'--config.optim.learning_rate'"),
    ("block for a setting", "optim=lion", "config.optim", "name"),
    ("setting for a block", "model.depth.x=3", "config.model.depth", "is a value"),
    ("word for a number", "model.depth=deep", "config.model.depth=deep", "whole number"),
    ("float for an integer", "steps=1e3", "config.steps=1e3", "whole number"),
    ("no value", "--config.steps", "--config.steps", "value"),
    ("percent", "model.depth_routing.capacity=12.5%", "capacity='12.5%'", "float"),
    ("choice in capitals", "model.depth_routing.kind=MoD", "kind='MoD'", "'mod'"),
    ("choice misspelt", "optim.schedule.kind=cosin", "schedule.kind='cosin'", "'cosine'"),
    ("unknown family", "model.family=rnn", "model.family='rnn'", "decoder"),
    ("family of another config", "model.family=latent", "config.model.family='latent'", "file"),
    # Numbers.
    ("regex", "optim.frozen=(", "config.optim.frozen='('", "regular expression"),
    ("no length given", "steps=0", "config.steps=0", "config.train_flops", "exactly one"),
    ("two lengths given", "train_flops=1e9", "config.steps=2", "config.train_flops", "exactly one"),
    ("too few FLOPs", "steps=0 train_flops=1", "config.train_flops=1", "step"),
    ("profile after the end", "log.profile_at=2", "config.log.profile_at=2", "earlier"),
    # Batch and devices.
    ("accumulation", "train.accumulation=3", "data.batch_size=8", "multiple", "accumulation=3"),
    ("batch and devices", "data.batch_size=12", "data.batch_size=12", "multiple of 8"),
    ("evaluation and devices", "evaluate.batch_size=3", "evaluate.batch_size=3", "8 devices"),
    ("mesh too large", "mesh.data=16", "config.mesh", "16 devices", "8"),
    ("mesh that does not divide", "mesh.tensor=3", "config.mesh", "multiple of 3", "8"),
    ("length and devices", "data.seq_len=36 mesh.data=1 mesh.sequence=8", "seq_len=36", "8"),
    ("width and devices", "model.width=20 model.attention.head_dim=8 mesh.data=1 mesh.fsdp=8",
     "20 is not a multiple", "config.mesh"),
    ("two open axes", "mesh.data=-1 mesh.fsdp=-1", "config.mesh", "at most one"),
    # Optimiser.
    ("warm-up after the decay", "optim.schedule.warmup_steps=2 optim.schedule.decay_steps=1",
     "config.optim.schedule.warmup_steps=2", "decay_steps=1"),
    ("warm-up and decay", "optim.schedule.kind=wsd optim.schedule.warmup_fraction=0.9",
     "config.optim.schedule", "config.steps=2"),
    ("decay without a match", "optim.decay=.*/kernal", "config.optim.decay='.*/kernal'", "kernel"),
    ("all is frozen", "optim.frozen=.*", "config.optim.frozen='.*'", "nothing"),
    ("multiplier without factor", "optim.lr_multipliers=(('.*',),)", "multipliers[0]", "pair"),
    ("rate without a match", "optim.lr_multipliers=(('x',2.0),)", "[0]='x'", "embed"),
    ("muP and muon", "optim.name=muon model.mup.base_width=16", "optim.name='muon'", "adamw"),
    ("metric misspelt", "checkpoint.best_metric=eval/los", "best_metric='eval/los'", "'eval/loss'"),
    ("metric to maximise", "checkpoint.best_metric=eval/accuracy", "best_metric=", "minimise"),
    # Model.
    ("heads", "model.attention.num_heads=3", "attention.num_heads=3", "width=16"),
    ("key heads", "model.attention.num_kv_heads=3", "num_kv_heads=3", "num_heads=2"),
    ("odd heads", "model.attention.head_dim=3", "attention.head_dim=3", "even"),
    ("kernel of a TPU", "model.attention.kernel=splash", "kernel='splash'", "cpu", "'auto'"),
    ("context below the length", "model.context=8", "config.model.context=8", "seq_len=16"),
    ("odd pattern", "model.scan_layers=True model.depth=3", "scan_layers=True", "even"),
    ("very deep", "model.depth=1001", "config.model.depth=1001", "config.model.scan_layers=True"),
    ("no block is routed", "model.depth_routing.every=3", "depth_routing.every=3", "smaller"),
    ("block after the last", "model.depth_routing.blocks=(1,4)", "blocks=(1, 4)", "0 and 1"),
    ("too many capacities", "model.depth_routing.capacity=(0.5,0.2)", "capacity=(0.5, 0.2)", "one"),
    ("stage at the end", "model.depth_routing.capacity_stages=((1.0,0.5),)", "stages=", "0 and 1"),
    ("stages without routing", "model.depth_routing.kind=none"
     " model.depth_routing.capacity_stages=((0.5,1.0),)", "capacity_stages=", "kind='mod'"),
    ("loss of a control", "model.depth_routing.score=position"
     " model.depth_routing.causal_decision=aux_loss", "depth_routing.score='position'",
     "'threshold'"),
    ("score that does not exist", "model.depth_routing.score=rooter", "'rooter'", "'router'"),
    ("recursion of 2 blocks", "model.depth_routing.kind=recursion", "model.depth=2", "at least 3"),
    ("recursion that grows", RECURSION + "model.depth_routing.capacity=(0.3,0.5)",
     "config.model.depth_routing.capacity=(0.3, 0.5)", "none larger"),
    ("recursion of a block", RECURSION + "model.depth_routing.blocks=(1,)", "blocks=(1,)", "()"),
    ("recursion in stages", RECURSION + "model.depth_routing.capacity=(0.9,0.5)"
     " model.depth_routing.capacity_stages=((0.5,1.0),)", "depth_routing.capacity_stages="),
    ("scanned recursion", RECURSION + "model.scan_layers=True", "scan_layers=True", "recursion"),
    ("more experts than there are", MOE + "top_k=9", "model.mlp.moe.top_k=9", "8"),
    ("no block has experts", MOE + "every=3", "config.model.mlp.moe.every=3", "smaller"),
    ("no-ops that choose", MOE + "router=expert_choice model.mlp.moe.num_noop=1", "moe.num_noop=1"),
    ("experts that choose some", MOE + "router=expert_choice model.mlp.moe.computed_fraction=0.5",
     "config.model.mlp.moe.computed_fraction=0.5"),
    ("no block has soft experts", "model.soft_experts.num=2 model.soft_experts.every=3",
     "config.model.soft_experts.every=3", "smaller"),
    ("two kinds of experts", "model.soft_experts.num=2 model.mlp.kind=moe", "every=1", "change"),
    ("masks without a site", "model.dropout.kind=elementwise model.dropout.sites=()",
     "config.model.dropout.sites=()", "mlp_output"),
    ("masks of probabilities", "model.dropout.kind=attention", "dropout.sites=", "elementwise"),
    ("mask heads", "model.dropout.kind=attention model.dropout.sites=('mlp_output',)"
     " model.attention.num_heads=5 model.attention.head_dim=8", "attention.num_heads=5"),
    ("dense connections under scan", "model.dense_former.on=True model.scan_layers=True",
     "config.model.scan_layers=True", "config.model.dense_former.on=True"),
    ("adapter without a base", "adapter.kind=lora", "adapter.kind='lora'", "config.init.run"),
    ("gate without an adapter", "adapter.gate=True", "config.adapter.gate=True", "adapter.kind"),
    # Text.
    ("path without a kind", "data.source=text.txt", "source='text.txt'", "'text:text.txt'"),
    ("kind misspelt", "data.source=txt:text.txt", "source='txt:text.txt'", "'text'"),
    ("text missing", "data.source=text:no.txt", "source='text:no.txt'", "no such file"),
    ("no text matches", "data.source=text:no/*.txt", "source='text:no/*.txt'", "no file"),
    ("empty folder", "data.source=text:nothing", "source='text:nothing'", "no file"),
    ("empty text", "data.source=text:empty.txt", "text:empty.txt", "empty"),
    ("binary text", "data.source=text:binary.txt", "binary.txt", "binary", "glob"),
    ("compressed text", "data.source=text:text.txt.gz", "text.txt.gz", "decompress"),
    ("encoding", "data.source=text:latin.txt data.tokenizer=chars", "latin.txt", "=bytes"),
    ("text for records", "data.source=jsonl:text.txt", "text.txt line 1", "not JSON"),
    ("key of a record", "data.source=jsonl:rows.jsonl", "text_key='text'", "content"),
    ("text too short", "data.source=text:short.txt", "seq_len=16", "'text:short.txt'", "longer"),
    ("rows too long", "data.seq_len=5000", "config.data.seq_len=5000", "training", "lower"),
    ("held-out rows too long", "data.seq_len=300", "config.data.seq_len=300", "held-out", "lower"),
    ("nothing held out", "data.eval_fraction=0", "config.data.eval_fraction=0.0", "(0, 1)"),
    ("everything held out", "data.eval_fraction=1", "config.data.eval_fraction=1.0", "(0, 1)"),
    ("held out and trained on", "data.eval_source=text:text.txt", "training split", "eval_source"),
    ("documents of one", "data.split=documents", "data.split='documents'", "data.split=tail"),
    ("packing of one document", "data.packing=True", "config.data.packing=True", "one document"),
    ("packing of windows", "data.packing=True data.shuffle=random", "packing=True", "'windows'"),
    ("packing with memory tokens", "--config=latent data.packing=True model.memory_global=2",
     "config.model.memory_global=2", "packing=False"),
    ("tail of a mixture", "data.source=mix:stdlib,pydoc", "split='tail'", "split=documents"),
    ("tail of a subset", "data.subset=no", "config.data.split='tail'", "split=documents"),
    ("subset missing", "data.subset=no data.split=documents data.document_bytes=64",
     "config.data.subset='no'", "--mode=cluster"),
    ("tiny documents", "data.document_bytes=8", "config.data.document_bytes=8", "16"),
    ("no shards", "data.source=tokens:nothing", "source='tokens:nothing'", "write_token_shards"),
    ("documents in shards", "data.source=tokens:shards data.tokenizer=chars data.split=documents",
     "config.data.split='documents'", "data.split=tail"),
    ("pieces of shards", "data.source=tokens:shards data.document_bytes=64", "document_bytes"),
    ("vocabulary too small", "data.source=tokens:wide", "train.bin", "2999", "tokenizer.json"),
    ("tokenizer of the shards", "data.source=tokens:shards", "='bytes'", "=shards/token"),
    ("tokenizer misspelt", "data.tokenizer=byte", "data.tokenizer='byte'", "'bytes'"),
    ("tokenizer without size", "data.tokenizer=bpe", "data.tokenizer='bpe'", "bpe:8192"),
    ("tokenizer too small", "data.tokenizer=bpe:100", "data.tokenizer='bpe:100'", "257"),
    ("tokenizer missing", "data.tokenizer=no.json", "data.tokenizer='no.json'", "no such file"),
    ("tokenizer before text", "data.tokenizer=no.json data.source=text:binary.txt", "no.json"),
    ("text for a tokenizer", "data.tokenizer=text.txt", "text.txt", "not a tokenizer"),
    ("other JSON for a tokenizer", "data.tokenizer=other.json", "other.json", "not a tokenizer"),
    ("cache in a file", "data.cache_dir=text.txt", "data.cache_dir='text.txt'", "writable"),
    ("cache in a store", "data.cache_dir=gs://b/c", "config.data.cache_dir=gs://b/c", "local disk"),
    # Other runs.
    ("initial run missing", "init.run=no", "config.init.run='no'", "no such"),
    ("initial run is another folder", "init.run=shards", "config.init.run='shards'", "config.json"),
    ("initial tokenizer", "init.run=run", "tokenizer='bytes'", "init.run=run", "=chars"),
    ("missing parameters of no run", "init.missing=.*", "init.missing='.*'", "config.init.run"),
    ("no teacher", "losses.distill=1.0", "losses.distill=1.0", "config.train.teacher"),
    ("teacher missing", "losses.distill=1.0 train.teacher=no", "train.teacher=no", "no run"),
    ("teacher's tokenizer", "losses.distill=1.0 train.teacher=run", "teacher=run", "same"),
    ("long prompt", f"sample.every=1 sample.prompt={'a' * 17}", "sample.prompt", "16", "shorten"),
    ("prompt's characters", "sample.every=1 sample.prompt=Z data.tokenizer=chars", "prompt", "'Z'"),
    # Directories.
    ("directory is a file", "--workdir=text.txt", "text.txt", "another"),
    ("directory below a file", "--workdir=text.txt/run", "text.txt", "another"),
    ("directory of another program", "--workdir=model", "model", "another"),
    ("stale directory", "--workdir=stray", "--workdir=stray", "metrics.jsonl", "another"),
    ("home not expanded", "--workdir=~/run", "--workdir=~/run", "use /"),
    ("store without checkpoints", "--workdir=s3://b/run", "--workdir=s3://b/run", "gs://"),
]  # fmt: skip
# Whole commands; `run` is a finished run:
COMMANDS = [
    ("no directory", "--config=mod", "--workdir", "e.g."),
    ("no config", "--workdir=new", "--config", "e.g."),
    ("config misspelt", "--config=mood --workdir=new", "--config=mood", "'mod'"),
    ("config not far", "--config=mod.py --workdir=new", "--config=mod.py", "'mod'"),
    ("no Python", "--config=text.txt --workdir=new", "--config=text.txt", ".py"),
    ("no config in the file", "--config=mine.py --workdir=new", "mine.py", "get_config"),
    ("config that is a variant", "--config=smoke --workdir=new", "=smoke", "'mod:smoke'"),
    ("variant misspelt", "--config=mod:smok --workdir=new", "mod:smok", "'smoke'"),
    ("variants that conflict", "--config=shakespeare_char:gpu,cpu --workdir=new", "'cpu'", "'gpu'"),
    ("mode misspelt", "--config=mod --workdir=new --mode=trian", "--mode=trian", "'train'"),
    ("flag misspelt", "--config=mod --wrkdir=new", "--wrkdir", "'--workdir'"),
    ("setting for a flag", "--config=mod --workdir=new --steps=5", "--steps", "'--config.steps'"),
    ("stray word", "--config=mod --workdir=new resume", "'resume'", "--config.<key>=<value>"),
    ("config as a word", "mod:smoke --workdir=new", "'mod:smoke'", "'--config=mod:smoke'"),
    ("mode misspelt as a word", "smaple run", "'smaple'", "'sample'"),
    ("two runs", "run run", "'run'", "efx.studies.report"),
    ("dashes alone", "--config=mod --workdir=new -- --config.steps=3", "'--'", "only flags"),
    ("flag twice", "--config=mod --workdir=new --workdir=run", "--workdir=run", "new"),
    ("flag of another mode", "--config=mod --workdir=new --prompt=x", "--prompt", "--mode=sample"),
    ("processes", "--config=mod --workdir=new --num_processes=2", "--num_processes", "all three"),
    ("address", "--config=mod --workdir=new --coordinator_address=a --num_processes=1"
     " --process_id=0", "--coordinator_address=a", "port"),
    ("process after the last", "--config=mod --workdir=new --coordinator_address=a:1"
     " --num_processes=2 --process_id=2", "--process_id=2", "[0, 1]"),
    ("topology missing", "--config=mod --mode=compile", "--topology", "e.g."),
    ("topology misspelt", "--config=mod --mode=compile --topology=v5x:2x2", "v5x", "v5e"),
    ("topology without sizes", "--config=mod --mode=compile --topology=h100", "=h100", ":1x1x8"),
    ("tail for clusters", "--config=mod --workdir=new --mode=cluster", "'tail'", "=documents"),
    ("sample from nothing", "--mode=sample --workdir=no", "--workdir=no", "no such"),
    ("sample from a word", "sample no", "--workdir=no", "no such"),
    ("sample from another folder", "--mode=sample --workdir=nothing", "nothing", "config.json"),
    ("step missing", "--mode=sample --workdir=run --step=77", "77", "newest are 2"),
    ("step is a word", "--mode=evaluate --workdir=run --step=last", "--step=last", "whole number"),
    ("prompt", "--mode=sample --workdir=run --prompt=Zürich", "prompt", "'Z'"),
    ("prompt empty", "sample run --prompt=", "--prompt", "e.g."),
    ("prompt too long", f"--mode=sample --workdir=run --prompt={'the' * 9}", "prompt", "shorten"),
    ("tokenizer", "--mode=sample --workdir=run data.tokenizer=bytes", "'bytes'", "tokenizer=chars"),
    ("width", "--mode=evaluate --workdir=run model.width=32", "checkpoint 2", "embed", "config"),
    ("split", "--mode=evaluate --workdir=run data.eval_fraction=0.3", "fraction", "eval_source"),
    ("resume another model", "--workdir=run model.width=32", "model.width: 16", "32", "another"),
    ("resume another tokenizer", "--workdir=run data.tokenizer=bytes", "'bytes'", "another"),
    ("resume another text", "--workdir=run data.source=text:other.txt", "other.txt", "another"),
    ("resume another family", "--workdir=run --config=latent:smoke", "--workdir=run", "another"),
    ("resume another program", "--workdir=model", "model/config.json", "config.model"),
    ("convert nothing", "--mode=convert --workdir=new --to=mod", "--from", "dense"),
    ("convert to another", "--mode=convert --workdir=new --from=run --to=mode", "=mode", "'mod'"),
    ("convert another folder", "--mode=convert --workdir=new --from=shards --to=mod", "=shards"),
    ("convert into a run", "--mode=convert --workdir=run --from=run --to=mod", "=run", "new"),
    ("export to nothing", "--mode=export --workdir=run", "--to", "new"),
    ("export into a folder", "--mode=export --workdir=run --to=shards", "shards", "new"),
    ("import from the hub", "--mode=import --workdir=new --from=gpt2", "--from=gpt2", "download"),
    ("import another folder", "--mode=import --workdir=new --from=shards", "shards", "Hugging"),
]  # fmt: skip
# The module that is not installed, and the extra that brings it.
EXTRAS = [
    ("wandb", "log.wandb=project", "config.log.wandb='project'", "`wandb`"),
    ("datasets", "data.source=hf:some/thing", "config.data.source='hf:some/thing'", "`hf`"),
    ("pyarrow", "data.source=parquet:text.txt", "config.data.source=", "`data`"),
    ("gcsfs", "--workdir=gs://b/run", "--workdir=gs://b/run", "`gcs`"),
    ("sklearn", "--mode=cluster data.split=documents data.document_bytes=64", "`studies`"),
]
# Mistakes that show when the parameters are initialised.
LATE = [
    ("unwritable directory", "--workdir=/proc/efx", "/proc/efx", "another"),
    ("initial width", f"{DENSE} init.run=run model.width=32", "checkpoint 2", "widths"),
    ("initial router", "init.run=run data.tokenizer=chars", "checkpoint 2", "config.init.missing"),
]  # fmt: skip


def command(words, small=True):
    """The command line of words, in which a setting is written without --config."""
    is_setting = re.compile(r"[a-z0-9_.]+=")
    given = [f"--config.{w}" if is_setting.match(w) else w for w in words.split()]
    names = {word.partition("=")[0] for word in given}
    rest = {"--config": "mod", "--workdir": "new"}
    rest |= {f"--config.{key}": value for key, value in SMALL.items()}
    rest = [f"{flag}={value}" for flag, value in rest.items() if small and flag not in names]
    return ["efx", *rest, *given]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run of two steps, and with files that are mistaken for others."""
    folder = tmp_path_factory.mktemp("mistakes")
    text = "the quick brown fox jumps over the lazy dog. " * 60
    files = {"text.txt": text, "other.txt": text[::-1], "empty.txt": "", "short.txt": "ab"}
    files |= {"rows.jsonl": '{"content": "a"}\n' * 9, "other.json": '{"a": 1}', "mine.py": "x = 1"}
    files |= {"model/config.json": '{"model_type": "gpt2"}', "stray/metrics.jsonl": ""}
    for name in ("nothing", "model", "stray", "wide"):
        (folder / name).mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    (folder / "binary.txt").write_bytes(b"\0\1\2\3" * 500)
    (folder / "latin.txt").write_bytes("Zürich ".encode("latin-1") * 500)
    (folder / "text.txt.gz").write_bytes(gzip.compress(text.encode()))
    np.arange(3000, dtype=np.uint16).tofile(folder / "wide/train.bin")
    efx.data.write_token_shards(folder / "shards", CharTokenizer("ab"), ["ab" * 990])
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("EFX_CACHE", str(tmp_path_factory.mktemp("cache")))
        with devices.only(1):
            assert main.main(command(f"--workdir=run {DENSE}")) == 0
        yield folder


def files_of(folder):
    """When each file was changed, and the folders; without the locks of runs."""
    paths = [path for path in folder.rglob("*") if path.name != run_dir.LOCK_FILE]
    return {path: path.is_dir() or path.stat().st_mtime_ns for path in paths}


@pytest.fixture
def compiled():
    """The durations of compilations during a test."""
    jax.random.key(0)  # compiled once in a process
    durations = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            durations.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield durations
    jax.monitoring.unregister_event_duration_listener(listen)


def assert_refused(argv, fragments, folder, capsys):
    before = files_of(folder)
    status, captured = main.main(argv), capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("efx: error: ")]
    assert (status, len(lines)) == (2, 1) and "Traceback" not in captured.err, captured.err
    assert all(fragment in lines[0] for fragment in fragments), lines[0]
    assert files_of(folder) == before


ROWS = [(command(row[1]), row) for row in NEW_RUNS]
ROWS += [(command(row[1], small=False), row) for row in COMMANDS]


@pytest.mark.parametrize("argv, row", ROWS, ids=[row[0] for _, row in ROWS])
def test_a_mistake_is_one_line(argv, row, folder, compiled, capsys):
    if "--mode=cluster" in argv:
        pytest.importorskip("pandas", reason="the extra `studies` is not installed")
    assert_refused(argv, row[2:], folder, capsys)
    assert not compiled


@pytest.mark.parametrize("row", EXTRAS, ids=[row[0] for row in EXTRAS])
def test_a_missing_extra_is_named(row, folder, compiled, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("efx.studies", "efx.compos"))]:
        monkeypatch.delitem(sys.modules, name)  # imported by another test
    monkeypatch.setitem(sys.modules, row[0], None)  # as if not installed
    assert_refused(command(row[1]), row[2:], folder, capsys)
    assert not compiled


@pytest.mark.parametrize("row", LATE, ids=[row[0] for row in LATE])
def test_a_late_mistake_is_one_line(row, folder, capsys):
    with devices.only(1):
        assert_refused(command(row[1]), row[2:], folder, capsys)


def test_a_run_in_use_is_refused(folder, compiled, capsys):
    argv = command("--workdir=run steps=3", small=False)
    with run_dir.Lock("run"):
        assert_refused(argv, ("--workdir=run", f"process {os.getpid()}"), folder, capsys)
    assert not compiled
