"""Text is prepared once: resumed, divided between machines, in bounded memory."""

import errno
import json
import logging
import subprocess
import sys

import numpy as np
import pytest
from data_helpers import (
    cache_entries,
    make_config,
    open_data,
    refuse_data,
    same,
    text_of,
    token_ids,
    write_folder,
    write_letters,
)
from test_bytes import sentence_pieces

from efx import io
from efx.config.run import DataConfig
from efx.config.schema import make
from efx.data import load_tokenizer, prepare, sources, tokenise
from efx.data.shards import TokenShards
from efx.data.texts import Texts
from efx.data.tokenizers import ByteTokenizer

TEXTS = [f"document {i}: " + " ".join(f"w{i}x{j}" for j in range(i % 17)) for i in range(120)]


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Config of twelve files of ten rows each, tokenised in parts of two files and small shards."""
    monkeypatch.setattr(tokenise, "_SHARD_TOKENS", 200)
    monkeypatch.setattr(sources, "_PART_BYTES", 1000)
    for i in range(12):
        lines = (json.dumps({"text": text}) + "\n" for text in TEXTS[10 * i : 10 * i + 10])
        (tmp_path / f"{i:02d}.jsonl").write_text("".join(lines))
    return make_config(f"jsonl:{tmp_path}/*.jsonl", tmp_path, text_key="text", split="documents")


def files_of(tmp_path):
    (entry,) = [path for path in cache_entries(tmp_path) if path.parent.name == "prepared"]
    return {path.name: (path.read_bytes(), path.stat().st_ino) for path in entry.iterdir()}


def test_all_documents_are_in_the_shards_in_order_whatever_the_split(rows, tmp_path):
    open_data(rows)
    shards = files_of(tmp_path)
    assert sum(name.endswith(".bin") for name in shards) > 20
    (entry,) = cache_entries(tmp_path)
    text = TokenShards("text", str(entry), tmp_path)
    assert ByteTokenizer().decode(text.stream.windows([0], len(text.stream))[0]) == "".join(TEXTS)
    assert text.rows["bytes"].tolist() == [len(text) for text in TEXTS]
    for eval_fraction in (0.1, 0.5):
        rows.eval_fraction = eval_fraction
        data = open_data(rows)
        found = [
            data.tokenizer.decode(data.tokens(split, *span))
            for split in ("train", "eval")
            for span in data.documents(split)
        ]
        assert sorted(found) == sorted(TEXTS)
    assert files_of(tmp_path) == shards  # prepared once


def test_a_stopped_preparation_resumes_after_its_last_shard(rows, tmp_path, monkeypatch):
    whole = open_data(make_config(rows.source, tmp_path / "other", text_key="text"))
    encode, encoded = ByteTokenizer.encode, []

    def encode_some(self, text):
        encoded.append(text)
        if len(encoded) == 70:
            raise KeyboardInterrupt
        return encode(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode", encode_some)
    rows.split = "tail"
    with pytest.raises(KeyboardInterrupt):
        open_data(rows)
    before = files_of(tmp_path)
    assert "meta.json" not in before
    data = open_data(rows)
    # All but the documents of the shard that was not finished are encoded once.
    assert len(TEXTS) < len(encoded) < len(TEXTS) + 20
    for split in ("train", "eval"):
        assert token_ids(data, split) == token_ids(whole, split)
    kept = {name: file for name, file in before.items() if name.endswith((".bin", ".rows"))}
    assert kept and kept.items() <= files_of(tmp_path).items()


def test_machines_prepare_parts_and_a_later_call_joins_them(rows, tmp_path, capsys):
    other = dict(text_key="text", split="documents")
    whole = open_data(make_config(rows.source, tmp_path / "other", **other))
    cache = f"--config.data.cache_dir={rows.cache_dir}"
    command = ["prepare", "--config=mod", f"--config.data.source={rows.source}", cache]
    command.append("--config.data.split=documents")

    def run(*more):
        status = prepare.main([*command, *more])
        return status, capsys.readouterr().err

    for number in (1, 3):
        assert run(f"--shard={number}/3") == (
            0, f"efx: config.data.source={rows.source!r}: shard {number}/3 is done; others are "
            "missing\n",
        )  # fmt: skip
    before = files_of(tmp_path)
    status, output = run()
    assert status == 0 and "tokens in" in output
    assert {name: before[name] for name in before if name.endswith(".bin")}.items() <= (
        files_of(tmp_path).items()
    )
    data = open_data(rows)
    for split in ("train", "eval"):
        assert token_ids(data, split) == token_ids(whole, split)
    for wrong in ("4/3", "0/3", "a", "1"):
        status, output = run(f"--shard={wrong}")
        assert status == 2 and output.count("\n") == 1 and wrong in output


def test_a_full_disk_is_reported(rows, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(io, "replacing", full)
    refuse_data(rows, f"config.data.cache_dir={rows.cache_dir!r}", "No space left", "free space")


DAMAGE = {
    "*01.bin": lambda p: p.unlink(),
    "*02.bin": lambda p: p.write_bytes(b""),
    "*03.bin": lambda p: p.write_bytes(bytes([p.read_bytes()[0] ^ 1]) + p.read_bytes()[1:]),
    "*02.rows": lambda p: p.write_bytes(p.read_bytes()[:-1]),
    "tokenizer.json": lambda p: p.unlink(),
    "meta.json": lambda p: p.write_bytes(b""),
}


def test_a_damaged_or_missing_shard_is_made_again_and_the_others_are_kept(rows, tmp_path, caplog):
    batch = next(open_data(rows).train_iterator())
    (entry,) = cache_entries(tmp_path)
    for pattern, damage in DAMAGE.items():
        before, damaged = files_of(tmp_path), sorted(entry.glob(pattern))[-1]
        damage(damaged)
        caplog.clear()
        same(next(open_data(rows).train_iterator()), batch)
        after = files_of(tmp_path)
        assert cache_entries(tmp_path) == [entry] and "damaged" in caplog.text
        shards = [name for name in before if name.endswith((".bin", ".rows"))]
        assert {name: after[name][0] for name in shards} == {
            name: before[name][0] for name in shards
        }
        others = [name for name in shards if name[:5] != damaged.name[:5]]
        assert others and all(after[name] == before[name] for name in others)
    caplog.clear()
    open_data(rows)
    assert "damaged" not in caplog.text


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_long_document_is_encoded_in_pieces_and_stays_one(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 100)
    long = "".join(f"line {i} é\n" for i in range(300))
    for name, text in (("a", "short"), ("b", long), ("c", "end")):
        (tmp_path / f"{name}.txt").write_text(text, "utf-8")
    config = make_config(f"text:{tmp_path}/*.txt", tmp_path, tokenizer=tokenizer, packing=True)
    for fraction in (0.5, 0.01):
        config.eval_fraction = fraction
        config.seq_len = 1
        data, whole = open_data(config), "short" + long + "end"
        cut = int((1 - fraction) * len(whole))
        assert text_of(data, "train") == whole[:cut] and text_of(data, "eval") == whole[cut:]
        assert len(data.documents("train")) == 2 and len(data.documents("eval")) == 2
    config.split, config.eval_fraction = "documents", 0.25
    data = open_data(config)
    spans = [(split, *span) for split in ("train", "eval") for span in data.documents(split)]
    texts = [data.tokenizer.decode(data.tokens(*span)) for span in spans]
    assert sorted(texts) == ["end", long, "short"]


def test_a_trained_tokenizer_sees_a_sample_from_all_over_the_text(tmp_path, monkeypatch):
    lines = [json.dumps({"text": f"{chr(97 + i // 40) * 8} {i}"}) + "\n" for i in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    monkeypatch.setattr(tokenise, "_SAMPLE_BYTES", 1000)
    config = make_config(f"jsonl:{tmp_path}/a.jsonl", tmp_path, tokenizer="bpe:300")
    config.text_key, seen = "text", []
    sample = tokenise.sample

    def watched(*arguments):
        for document in sample(*arguments):
            seen.append(document.data)
            yield document

    monkeypatch.setattr(tokenise, "sample", watched)
    data = open_data(config)
    assert 800 < len(b"".join(seen)) < 1400
    assert {text[:1] for text in seen} == {
        bytes([97 + i]) for i in range(8)
    }  # the tail is held out
    assert text_of(data, "train").startswith("aaaaaaaa 0")


def test_progress_has_a_rate_and_the_time_left(rows, monkeypatch, caplog):
    monkeypatch.setattr(tokenise, "_LOG_SECONDS", 0)
    with caplog.at_level(logging.INFO, logger="efx"):
        open_data(rows)
    assert "MB/s" in caplog.text and " s left" in caplog.text


PEAK = """
import sys
import efx.data
from efx.config.run import DataConfig
efx.data.load(DataConfig(source="stdlib", max_bytes=10**5, cache_dir=sys.argv[2]), seed=0)
def peak():  # of this process; ru_maxrss counts its parent, too
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024
before = peak()
efx.data.load(DataConfig(source=sys.argv[1], tokenizer=sys.argv[3], cache_dir=sys.argv[2]), seed=0)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:512"])
def test_memory_is_bounded_for_a_text_of_one_word(tokenizer, root, tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "a.txt").write_bytes(rng.choice(np.arange(97, 123, dtype=np.uint8), 1 << 23))
    arguments = [f"text:{tmp_path}/a.txt", str(tmp_path / "cache"), tokenizer]
    command = [sys.executable, "-c", PEAK, *arguments]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 400


def test_text_that_changes_while_it_is_prepared_leaves_nothing(tmp_path, monkeypatch):
    letters = write_letters(tmp_path)
    config = make_config(f"text:{letters}", tmp_path)
    encode = ByteTokenizer.encode

    def encode_and_change(self, text):
        letters.write_text(letters.read_text().upper())
        return encode(self, text)

    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode", encode_and_change)
        refuse_data(config, config.source)
    assert cache_entries(tmp_path) == []
    letters.write_text(letters.read_text().lower())
    assert open_data(config).train_tokens == 300
    decoded = tokenise._decoded

    def decode_and_change(document):
        letters.write_text(letters.read_text().upper())
        return decoded(document)

    config.tokenizer = "chars"
    with monkeypatch.context() as patch:
        patch.setattr(tokenise, "_decoded", decode_and_change)
        refuse_data(config, config.source)
    letters.write_text(letters.read_text().lower())
    assert open_data(config).tokenizer.characters.islower()


def test_shards_of_prepared_text_are_read_by_tokens(tmp_path):
    """They hold all documents, so the tail is held out."""
    config = make_config(f"text:{write_folder(tmp_path)}", tmp_path)
    texts = Texts(make(DataConfig, config))
    texts.prepare(texts.tokenizer(ByteTokenizer()))
    (text,) = texts.all()
    data = open_data(config)
    config.source = f"tokens:{text.shards.folder}"
    tokens = open_data(config)
    for split in ("train", "eval"):
        assert token_ids(tokens, split) == token_ids(data, split)
    assert load_tokenizer(text.shards.folder / "tokenizer.json").kind == "bytes"


def test_a_held_out_document_is_found_across_pieces_of_a_longer_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 100)
    text = "".join(f"line {i}\n" for i in range(100))
    (tmp_path / "all.txt").write_text(text)
    for begin, end in ((150, 420), (190, 270), (0, 130), (700, len(text))):
        (tmp_path / "part.txt").write_text(text[begin:end])
        config = make_config(f"text:{tmp_path}/all.txt", tmp_path)
        config.eval_source = f"text:{tmp_path}/part.txt"
        data = open_data(config)
        assert text_of(data, "train") == text[:begin] + text[end:]
        assert len(data.documents("train")) == (2 if begin and end < len(text) else 1)


def test_a_template_begins_documents_and_not_their_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 50)
    tokenizer = load_tokenizer(sentence_pieces(tmp_path))
    (start,) = tokenizer.start
    for name, text in (("a", "fox"), ("b", "quick brown fox " * 20), ("c", "dog " * 30)):
        (tmp_path / f"{name}.txt").write_text(text)
    config = make_config(f"text:{tmp_path}/*.txt", tmp_path, split="documents", seq_len=1)
    config.tokenizer = str(tmp_path / "made/tokenizer.json")
    data = open_data(config)
    for split in ("train", "eval"):
        for begin, end in data.documents(split):
            assert (data.tokens(split, begin, end) == start).tolist() == [True] + [False] * (
                end - begin - 1
            )
