"""The texts of a `config.data` block: opened, prepared, split into training and held-out text."""

import itertools
import logging

import numpy as np

from efx.config.run import DataConfig
from efx.config.schema import make
from efx.data import held_out, sources, tokenise, tokenizers
from efx.data.batches import Data
from efx.data.disk_cache import cache_root, content_key, remember
from efx.data.shards import TokenShards, joined
from efx.errors import UsageError

log = logging.getLogger(__name__)

SPLITS = ("train", "eval")


def load(
    config_data,
    *,
    seed,
    tokenizer_path=None,
    splits=SPLITS,
    text_record=None,
    is_recorded_text=True,
):
    """Open the data that `config_data` describes; prepare it if it is not in the cache.

    Args:
      config_data: the `data` block of a config.
      seed: with the step, determines every batch; `config.seed` as a rule.
      tokenizer_path: tokenizer.json of a run, used in place of `config_data.tokenizer`.
      splits: which of "train" and "eval" to load. With a `tokenizer_path`, a text that they do not
        need is not opened.
      text_record: `Data.text_record` of a run; None for a new run. Text that it held out is held
        out again; a text that has changed is refused, but see config.data.on_change.
      is_recorded_text: whether `config_data` names the text of that run. If not, its text is split
        anew, unless its content is the run's.
    """
    c = make(DataConfig, config_data)
    # Before the text, which takes minutes to read.
    if tokenizer_path:
        named = tokenizers.load_tokenizer(tokenizer_path)
    else:
        named = tokenizers.pretrained_tokenizer(c.tokenizer)
    texts = Texts(c, splits if tokenizer_path else SPLITS, text_record, is_recorded_text)
    tokenizer = texts.tokenizer(named, tokenizer_path)
    token_splits = {}
    for split, tokens in texts.token_splits(tokenizer).items():
        kind = split.partition("/")[0]
        if kind not in splits:
            continue
        token_splits[split] = tokens
        if kind == "eval" and tokens.loss and not c.lossy_tokenizer:
            raise UsageError(
                f"{tokens.name}: config.data.tokenizer={c.tokenizer!r} loses text: {tokens.loss}; "
                "use another tokenizer, or set config.data.lossy_tokenizer=True (then no bits per "
                "byte are logged)"
            )
        # A text that is held out as a whole may be shorter than a row.
        is_whole = kind == "eval" and (c.eval_source or split != "eval")
        needed = 2 if is_whole else c.seq_len + 1
        if len(tokens.stream) < needed:
            side = "training" if kind == "train" else "held-out"
            raise UsageError(
                f"config.data.seq_len={c.seq_len}: the {side} split of {tokens.name} has "
                f"{len(tokens.stream)} tokens and needs {needed}; lower config.data.seq_len, or "
                "use a longer text, or another config.data.eval_source"
            )
    subset = texts.subset and texts.subset.key
    key = content_key(texts.record, subset, tokenizer.fingerprint)
    data = Data(c, seed, tokenizer, token_splits, key)
    data.text_record, data.subset = texts.record, subset
    data.is_cut = "train" in splits and any(part.shards.is_cut for part in texts.parts.values())
    return data


class Text:
    """A text of a config.

    Attributes:
      name: the setting and its value, for messages.
      identity: hash of the text.
      source: `sources.Source`; None for tokens. shards: `TokenShards`, once it is prepared.
    """

    def __init__(self, c, root, setting, spec, max_bytes=0):
        self.name, self.source, self.shards = f"{setting}={spec!r}", None, None
        self._source_rows = None
        kind, argument = sources.parse(spec, setting)
        if kind == "tokens":
            self.shards = TokenShards(self.name, argument, root)
            self.shards.count_in_ids()
            if max_bytes:
                log.warning(
                    "%s: config.data.max_bytes=%d does not limit tokens; set it to 0",
                    self.name, max_bytes,
                )  # fmt: skip
        else:
            self.source = sources.open_source(spec, setting, c, root, max_bytes)
        self.identity = (self.source or self.shards).identity

    @property
    def rows(self):
        """ROW[n]; without tokens before the text is prepared."""
        if self.shards:
            return self.shards.rows
        if self._source_rows is None:
            self._source_rows = tokenise.rows_of(self.source)
        return self._source_rows

    def is_evaluation(self):
        """bool[n]: whether a row is in a shard for evaluation."""
        return self.shards.is_evaluation() if self.shards else np.zeros(len(self.rows), bool)

    def content(self, row):
        """The bytes of a row before the text is prepared; of tokens its ids."""
        if self.shards:
            return self.shards.ids(row)
        return next(itertools.islice(self.source.documents(), row, None)).data

    def cut_at(self, offsets):
        """Let documents end at some bytes of the text, too; of tokens at some ids."""
        if self.shards:
            self.shards.cut_at(offsets)
        elif offsets:
            self.source, self._source_rows = self.source.cut_at(offsets), None

    def prepare(self, tokenizer, root, shard=(1, 1)):
        """Tokenise the text, unless it is done; False if other machines have parts left."""
        if self.shards is None:
            folder = tokenise.prepare(self.source, tokenizer, root, shard)
            self.shards = folder and TokenShards(self.name, folder, root)
        return self.shards is not None


class Texts:
    """The texts of a `config.data` block and their held-out part.

    Args:
      c: DataConfig.
      splits: which of "train" and "eval" are needed; a text that neither needs is not opened.
      text_record, is_recorded_text: see `load`.

    Attributes:
      parts: {name: Text} to train on, and to split unless config.data.eval_source is set. Without
        a mixture the only name is "".
      sets: {name: Text} held out as a whole; the name of config.data.eval_source is "".
      record: JSON-able; {"train": {part: {"content": hash of the text, "held_out": which part of it
        is held out, see `held_out`, or None, "split_made_for": the content for which that was
        decided}}, "eval": {set: content}}.
      subset: the Subset that the training split is limited to, or None.
    """

    def __init__(self, c, splits=SPLITS, text_record=None, is_recorded_text=True):
        self._c, self._root = c, cache_root(c.cache_dir)
        self.parts, self.sets, self._copies = {}, {}, {}
        if splits:
            self.sets = {
                name: Text(c, self._root, setting, spec)
                for name, (setting, spec) in c.held_out_texts().items()
            }
        if "train" in splits or ("eval" in splits and not c.eval_source):
            self.parts = {
                name: Text(c, self._root, setting, spec, c.max_bytes)
                for name, (setting, spec) in c.training_texts().items()
            }
        recorded = text_record or {"train": {}, "eval": {}}
        if is_recorded_text:
            self._refuse_changes(recorded)
        self._refuse_incomparable()
        self.record = {
            "train": {},
            "eval": {name: text.identity for name, text in self.sets.items()},
        }
        for name, part in self.parts.items():
            decision = self._recorded_decision(part, recorded["train"].get(name), is_recorded_text)
            self.record["train"][name] = {"content": part.identity} | decision
            self._cut(name)
        self.subset = held_out.Subset.load(c.subset) if self.parts and c.subset else None

    def all(self):
        """List of the texts that were opened."""
        return [*self.parts.values(), *self.sets.values()]

    def _refuse_changes(self, recorded):
        """UsageError if a text is not the one that the run recorded."""
        for kind, texts in (("train", self.parts), ("eval", self.sets)):
            for name, text in texts.items():
                if name not in recorded[kind]:
                    continue  # another set, for --mode=evaluate
                known, remedy = [recorded[kind][name]], ""
                if kind == "train":
                    known = [known[0]["content"], known[0]["split_made_for"]]
                    remedy = (
                        ", or resume with --config.data.on_change=keep_split to keep the held-out "
                        "text and train on everything else"
                    )
                is_kept = kind == "train" and self._c.on_change == "keep_split"
                if text.identity not in known and not is_kept:
                    raise UsageError(
                        f"{text.name} has changed since the run started (content "
                        f"{known[0][:8]} then, {text.identity[:8]} now): restore the old text, or "
                        f"use another --workdir{remedy}"
                    )

    def _refuse_incomparable(self):
        """UsageError if held-out text could be trained on unnoticed: text is not found in ids."""
        for part, text in itertools.product(self.parts.values(), self.all()):
            if self._c.eval_source and text in self.parts.values():
                continue
            if _has_text(part) != _has_text(text):
                raise UsageError(
                    f"{text.name} cannot be compared with {part.name}, since only one of them is "
                    "tokens, so held-out text could be trained on; use text or token shards for "
                    "both, or score it after training with --mode=evaluate"
                )

    # ---- held-out text ---------------------------------------------------------------------------

    def _recorded_decision(self, part, recorded, is_recorded_text):
        """{"held_out", "split_made_for"} of a part as in its entry of the record of a run, if there
        is one; "held_out" is None if it is undecided."""
        undecided = {"held_out": None, "split_made_for": None}
        if self._c.eval_source:
            return undecided
        if recorded and recorded["held_out"]:
            known = (recorded["content"], recorded["split_made_for"])
            if is_recorded_text or part.identity in known:
                return {key: recorded[key] for key in undecided}
        elif recorded and part.identity == recorded["content"]:
            raise UsageError(
                "config.data.eval_source='': the run trained on all of its text; use its "
                "eval_source"
            )
        return undecided | {"split_made_for": part.identity}

    def _cut(self, name):
        """Cut the documents of a part where held-out text begins and ends; decide on its tail."""
        c, part, record = self._c, self.parts[name], self.record["train"][name]
        sets = [text.source for text in self.sets.values() if text.source]
        copies = []
        if part.source and sets:
            copies = self._remember(
                ["copies", part.identity, [source.identity for source in sets]],
                lambda: held_out.find_copies(part.source, sets, c.max_bytes),
            )
        if not (record["held_out"] or c.eval_source):
            if part.shards and part.is_evaluation().any():
                record["held_out"] = held_out.choose_shards(part.rows, part.is_evaluation())
            elif c.split == "tail":
                arguments = part.content, c.eval_fraction
                record["held_out"] = self._remember(
                    ["tail", held_out.VERSION, part.identity, c.eval_fraction],
                    lambda: held_out.choose_tail(part.name, part.rows, *arguments),
                )
        start, stop = (record["held_out"] or {}).get("tail", (0, 0))
        edges = {edge for edge in itertools.chain(*copies) if not start < edge < stop}
        part.cut_at(edges | ({start, stop} if stop else set()))
        self._copies[name] = copies

    def _remember(self, key, compute):
        return remember(self._root, content_key(*key), compute)

    def _sides(self):
        """{part: (rows to train on, held-out rows)}, two bool[n]."""
        heldout, documents, digests = {}, {}, {}
        for name, part in self.parts.items():
            record, is_evaluation = self.record["train"][name], part.is_evaluation()
            if not (record["held_out"] or self._c.eval_source):
                record["held_out"] = held_out.choose_documents(
                    part.name, part.rows, self._c.eval_fraction
                )
            decision = record["held_out"]
            heldout[name] = held_out.held_out_rows(part.name, part.rows, decision, is_evaluation)
            documents[name] = held_out.Documents(part.rows, decision)
            digests[name] = documents[name].digests[documents[name].row[heldout[name]]]
        sets = [held_out.Documents(text.rows).digests for text in self.sets.values()]
        sides = {}
        for name, part in self.parts.items():
            found, others = documents[name], [digests[each] for each in digests if each != name]
            is_copy = np.isin(found.digests, np.concatenate([np.empty(0, "V16"), *sets, *others]))
            # The first half of the document in which the tail begins is trained on.
            is_copy |= np.isin(found.digests, digests[name]) & ~found.is_half
            is_copy = is_copy[found.row]
            for start, stop in self._copies[name]:
                is_copy |= held_out.is_between(part.rows, start, stop)
            is_copy &= ~heldout[name]
            if is_copy.any():
                log.info(
                    "%s: %d documents, or pieces of them, are held out and not trained on%s",
                    part.name, is_copy.sum(), "".join(f"; {t.name}" for t in self.sets.values()),
                )  # fmt: skip
            is_trained = ~(heldout[name] | is_copy)
            if self.subset:
                is_trained = self.subset.select(part.rows, is_trained)
            sides[name] = is_trained, heldout[name]
        return sides

    # ---- tokens ----------------------------------------------------------------------------------

    def tokenizer(self, tokenizer, path=None):
        """The tokenizer of the file `path`, or the one that the config names, once it is checked.

        Args:
          tokenizer: None: it is that of token shards, or has to be trained on the text.
        """
        texts, spec = self.all(), self._c.tokenizer
        name = str(path) if path else f"config.data.tokenizer={spec!r}"
        tokens = [text.shards for text in texts if text.source is None]
        if tokens and tokenizer is None:
            name, tokenizer = _tokenizer_of_shards(tokens[0], name, tokenizers.parse(spec)[0])
        for shards in tokens:
            if shards.tokenizer and shards.tokenizer.fingerprint != tokenizer.fingerprint:
                raise UsageError(
                    f"{name} is not the tokenizer of {shards.name}; use "
                    f"config.data.tokenizer={shards.tokenizer_path}"
                )
            shards.check_ids(tokenizer, name)
        if tokenizer:
            return tokenizer

        def training_text():
            for name, (is_trained, _) in self._sides().items():
                part = self.parts[name]
                yield from tokenise.sample(part.source, part.rows, is_trained)

        key = self.record, self._c.split, self._c.eval_fraction, self.subset and self.subset.key
        text_sources = [text.source for text in texts]
        return tokenise.train_tokenizer(spec, text_sources, training_text, key, self._root)

    def prepare(self, tokenizer, shard=(1, 1)):
        """Tokenise all texts; return those of which other machines have parts left."""
        return [text for text in self.all() if not text.prepare(tokenizer, self._root, shard)]

    def token_splits(self, tokenizer):
        """{split: TokenSplit}, see `batches.Data`."""
        self.prepare(tokenizer)
        splits, heldout = {}, {}
        for name, (is_trained, is_held_out) in self._sides().items():
            shards = self.parts[name].shards
            suffix = f"/{name}" if name else ""
            splits[f"train{suffix}"] = shards.select(is_trained)
            if not self._c.eval_source:
                heldout[f"eval{suffix}"] = shards.select(is_held_out)
        if len(heldout) > 1:
            splits |= heldout
        if heldout:
            splits["eval"] = joined(list(heldout.values()), tokenizer.eot)
        for name, text in self.sets.items():
            everything = text.shards.select(np.ones(len(text.rows), bool))
            splits[f"eval/{name}" if name else "eval"] = everything
        return splits

    def documents(self):
        """{split: list of the bytes of its documents}."""
        tokenizer = tokenizers.ByteTokenizer()
        return {
            split: [
                tokenizer.decode_bytes(tokens.stream.windows([start], stop - start)[0])
                for start, stop in tokens.documents(tokenizer.eot)
            ]
            for split, tokens in self.token_splits(tokenizer).items()
        }


def _has_text(text):
    return text.source is not None or text.shards.has_text


def _tokenizer_of_shards(shards, name, kind):
    """(file, tokenizer) of token shards in place of one that would be trained."""
    tokenizer, path = shards.tokenizer, shards.tokenizer_path
    if not tokenizer or tokenizer.kind != kind:
        raise UsageError(
            f"{name} cannot be trained on {shards.name}, a source of tokens without text; "
            "use the path of the tokenizer.json of these tokens"
        )
    log.info("instead of %s, using %s (%d ids)", name, path, tokenizer.vocab_size)
    return str(path), tokenizer


def content_of(record, key):
    """The hash of a text in a `Data.text_record`, or None; key: "source" or "eval_source"."""
    if key == "source":
        return record["train"].get("", {}).get("content")
    return record["eval"].get("")
