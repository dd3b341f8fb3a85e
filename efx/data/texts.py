"""The texts of a `config.data` block: opened, prepared, split into training and held-out text."""

import functools
import itertools
import logging

import numpy as np

from efx.config.run import DataConfig
from efx.config.schema import make
from efx.data import held_out, sources, tokenise, tokenizers
from efx.data.batches import SPLIT_NAMES, Data, check_length
from efx.data.disk_cache import cache_root, content_key, remember
from efx.data.shards import CUT, NO_TEXT, TokenShards, joined
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

    Returns:
      Data.

    Raises:
      UsageError: one line that names the key, value or file at fault.
    """
    c = make(DataConfig, config_data)
    texts = Texts(c, splits if tokenizer_path else SPLITS, text_record, is_recorded_text)
    tokenizer = texts.tokenizer(tokenizer_path)
    token_splits = {
        split: tokens
        for split, tokens in texts.token_splits(tokenizer).items()
        if split.partition("/")[0] in splits
    }
    for split, tokens in token_splits.items():
        kind = split.partition("/")[0]
        if kind == "eval" and tokens.loss and not c.lossy_tokenizer:
            raise UsageError(
                f"{tokens.name}: config.data.tokenizer={c.tokenizer!r} loses text: {tokens.loss}; "
                "use another tokenizer, or set config.data.lossy_tokenizer=True (then no bits per "
                "byte are logged)"
            )
        if not len(tokens.stream):
            raise UsageError(
                f"{tokens.name}: the {SPLIT_NAMES[kind]} has no tokens; use more text, or another "
                "config.data.eval_source"
            )
        # A text that is held out as a whole may be shorter than a row.
        is_whole = kind == "eval" and (c.eval_source or split != "eval")
        check_length(1 if is_whole else c.seq_len, kind, tokens.name, len(tokens.stream))
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
        kind, argument = sources.parse(spec, setting)
        if kind == "tokens":
            self.shards = TokenShards(self.name, argument, root, max_bytes)
        else:
            self.source = sources.open_source(spec, setting, c, root, max_bytes)
        self.identity = (self.source or self.shards).identity()

    @property
    def has_text(self):
        return self.source is not None or self.shards.has_text

    @functools.cached_property
    def _source_rows(self):
        return tokenise.rows_of(self.source)

    def rows(self):
        """ROW[n]; without tokens before the text is prepared."""
        return self.shards.rows if self.shards else self._source_rows

    def is_evaluation(self):
        """bool[n]: whether a row is in a shard for evaluation."""
        return self.shards.is_evaluation if self.shards else np.zeros(len(self.rows()), bool)

    def content(self, row, begin, end):
        """Bytes of a row, see `held_out`."""
        if self.shards:
            return self.shards.content(row, begin, end)
        return next(itertools.islice(self.source.documents(), row, None)).data[begin:end]

    def prepare(self, tokenizer, root, shard=(1, 1)):
        """Tokenise the text, unless it is done; False if other machines have parts left.

        Args:
          shard: see `tokenise.prepare`.
        """
        if self.shards is None:
            folder = tokenise.prepare(self.source, tokenizer, root, shard)
            if folder is None:
                return False
            self.shards = TokenShards(self.name, folder, root)
        self.shards.tokenizer = tokenizer
        return True


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

    Raises:
      UsageError: a text cannot be opened, or has changed.
    """

    def __init__(self, c, splits=SPLITS, text_record=None, is_recorded_text=True):
        self._c, self._root, self._recorded = c, cache_root(c.cache_dir), text_record
        self._is_recorded_text = is_recorded_text
        self.parts, self.sets = {}, {}
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
        self.record = {
            "train": {name: {"content": part.identity} for name, part in self.parts.items()},
            "eval": {name: text.identity for name, text in self.sets.items()},
        }
        if text_record and is_recorded_text:
            self._refuse_changes()
        self._refuse_incomparable()
        for name, part in self.record["train"].items():
            part |= self._recorded_split(name)
        self.subset = held_out.Subset.load(c.subset) if self.parts and c.subset else None

    def all(self):
        """List of the texts that were opened."""
        return [*self.parts.values(), *self.sets.values()]

    def _refuse_changes(self):
        """UsageError if a text is not the one that the run recorded."""
        for kind, texts in (("train", self.parts), ("eval", self.sets)):
            for name, text in texts.items():
                recorded = self._recorded[kind].get(name)
                if recorded is None:
                    continue  # another set, for --mode=evaluate
                remedy = "restore the old text, or use another --workdir"
                known = [recorded]
                if kind == "train":
                    known = [recorded["content"], recorded["split_made_for"]]
                    if self._c.on_change == "keep_split":
                        continue
                    remedy += (
                        ", or resume with --config.data.on_change=keep_split to keep the held-out "
                        "text and train on everything else"
                    )
                if text.identity not in known:
                    raise UsageError(
                        f"{text.name} has changed since the run started (content "
                        f"{known[0][:8]} then, {text.identity[:8]} now): {remedy}"
                    )

    def _refuse_incomparable(self):
        """UsageError if held-out text could be trained on unnoticed: text is not found in ids."""
        held_out_texts = list(self.sets.values())
        if not self._c.eval_source:
            held_out_texts += self.parts.values()
        for part, text in itertools.product(self.parts.values(), held_out_texts):
            if part.has_text != text.has_text:
                raise UsageError(
                    f"{text.name} cannot be compared with {part.name}, since only one of them is "
                    "tokens, so held-out text could be trained on; use text or token shards for "
                    "both, or score it after training with --mode=evaluate"
                )

    def _recorded_split(self, name):
        """The entries "held_out" and "split_made_for" of a part; none for one to split."""
        content, recorded = self.record["train"][name]["content"], None
        if self._c.eval_source:
            return {"held_out": None, "split_made_for": None}
        if self._recorded:
            recorded = self._recorded["train"].get(name)
        if recorded and recorded["held_out"]:
            known = (recorded["content"], recorded["split_made_for"])
            if self._is_recorded_text or content in known:
                return {key: recorded[key] for key in ("held_out", "split_made_for")}
        elif recorded and content == recorded["content"]:
            raise UsageError(
                "config.data.eval_source='': the run trained on all of its text; use its "
                "eval_source"
            )
        return {}

    # ---- what is trained on ----------------------------------------------------------------------

    def _sides(self, name, withheld=(), copies=()):
        """The `held_out.Sides` of a part; its held-out text is chosen if that is not done yet."""
        c, part, record = self._c, self.parts[name], self.record["train"][name]
        arguments = part.name, part.rows(), part.content, part.is_evaluation()
        if "held_out" not in record:
            record["split_made_for"] = part.identity
            record["held_out"] = held_out.choose_held_out(*arguments, c.split, c.eval_fraction)
        return held_out.split(*arguments, record["held_out"], withheld, copies)

    def _training_sides(self):
        """{part: `held_out.Sides`}; the training sides are without all that is held out."""
        sets = [held_out.Documents(text.rows()).digests for text in self.sets.values()]
        of_parts, found = {}, {}  # digests of the documents that are held out in each part
        for name, part in self.parts.items():
            of_parts[name] = held_out.held_out_digests(part.rows(), self._sides(name))
        for name, part in self.parts.items():
            others = [digests for other, digests in of_parts.items() if other != name]
            withheld = np.concatenate([*sets, *others, self._cut_held_out_documents(part)])
            sides = self._sides(name, withheld, self._copies(part))
            if sides.dropped:
                log.info(
                    "%s: %d documents or parts of documents are held out and not trained on%s",
                    part.name, sides.dropped, "".join(f"; {t.name}" for t in self.sets.values()),
                )  # fmt: skip
            if self.subset:
                self.subset.select(part.rows(), part.content, sides)
            found[name] = sides
        return found

    def _copies(self, part):
        """Where sets of a single document occur in documents of a part: list of (first and
        last-plus-one byte)."""
        texts = [held_out.single_document(t.source) for t in self.sets.values() if t.source]
        texts = list(filter(None, texts))
        if not texts or not part.source:
            return ()
        digests = [sources.document_digest(text).hex() for text in texts]
        return remember(
            self._root,
            content_key("copies", part.identity, digests),
            lambda: held_out.find_copies(part.source.documents(), texts),
        )

    def _cut_held_out_documents(self, part):
        """V16 array: digests of documents that begin as one of a set and that max_bytes cut."""
        rows, documents, found = part.rows(), held_out.Documents(part.rows()), np.empty(0, "V16")
        for row in np.flatnonzero(rows["flags"] & (CUT | NO_TEXT) == CUT):
            document = documents.row[row]
            first = int(np.flatnonzero(documents.row == document)[0])
            text = b"" if first < row else part.content(row, 0, int(rows["bytes"][row]))
            for other in self.sets.values():
                is_beginning = rows["digest"][first] in other.rows()["digest"]
                if text:
                    longer = np.flatnonzero(other.rows()["bytes"] > len(text)).tolist()
                    is_beginning = any(other.content(r, 0, len(text)) == text for r in longer)
                if is_beginning:
                    found = np.append(found, documents.digests[document])
        return found

    # ---- tokens ----------------------------------------------------------------------------------

    def tokenizer(self, path=None):
        """The tokenizer in the file `path`, or else the one that the config names."""
        texts, spec = self.all(), self._c.tokenizer
        if tokens := [text for text in texts if text.source is None]:
            first, *others = (_tokenizer_of_shards(text.shards, spec, path) for text in tokens)
            for text, other in zip(tokens[1:], others, strict=True):
                if other.fingerprint != first.fingerprint:
                    raise UsageError(
                        f"{text.name} has another tokenizer than {tokens[0].name}; make both with "
                        "the same one"
                    )
            return first
        if path is not None:
            return tokenizers.load_tokenizer(path)

        def training_text():
            for name, sides in self._training_sides().items():
                yield from tokenise.sample(self.parts[name].source, self.parts[name].rows(), sides)

        key = self.record, self._c.split, self._c.eval_fraction, self.subset and self.subset.key
        text_sources = [text.source for text in texts]
        return tokenise.make_tokenizer(spec, text_sources, training_text, key, self._root)

    def prepare(self, tokenizer, shard=(1, 1)):
        """Tokenise all texts; return those of which other machines have parts left."""
        return [text for text in self.all() if not text.prepare(tokenizer, self._root, shard)]

    def token_splits(self, tokenizer):
        """{split: TokenSplit}, see `batches.Data`."""
        self.prepare(tokenizer)
        splits, heldout = {}, {}
        for name, sides in self._training_sides().items():
            shards = self.parts[name].shards
            suffix = f"/{name}" if name else ""
            splits[f"train{suffix}"] = shards.select(sides.train, sides.train_parts)
            if self.record["train"][name]["held_out"]:
                heldout[f"eval{suffix}"] = shards.select(sides.heldout, sides.heldout_parts)
        if len(heldout) > 1:
            splits |= heldout
        if heldout:
            splits["eval"] = joined(list(heldout.values()), tokenizer.eot)
        for name, text in self.sets.items():
            everything = text.shards.select(np.ones(len(text.rows()), bool))
            splits[f"eval/{name}" if name else "eval"] = everything
        return splits


def _tokenizer_of_shards(shards, spec, path):
    """The tokenizer of token shards: it has to be the one that made them.

    Args:
      path: tokenizer.json of a run, or None.
    """
    stored, stored_path = shards.tokenizer, shards.folder / "tokenizer.json"
    if path is not None:
        name, tokenizer = str(path), tokenizers.load_tokenizer(path)
    else:
        name, tokenizer = f"config.data.tokenizer={spec!r}", tokenizers.pretrained_tokenizer(spec)
        if tokenizer is None and stored and stored.kind == tokenizers.parse(spec)[0]:
            tokenizer = stored
            log.info("instead of %s, using %s (%d ids)", name, stored_path, stored.vocab_size)
    if tokenizer is None:
        raise UsageError(
            f"{name} cannot be trained on {shards.name}, a source of tokens without text; "
            "use the path of the tokenizer.json of these tokens"
        )
    if stored and stored.fingerprint != tokenizer.fingerprint:
        raise UsageError(
            f"{name} is not the tokenizer of {shards.name}; use config.data.tokenizer={stored_path}"
        )
    shards.check_ids(tokenizer, name)
    return tokenizer


def content_of(record, key):
    """The hash of a text in a `Data.text_record`, or None; key: "source" or "eval_source"."""
    if key == "source":
        return record["train"].get("", {}).get("content")
    return record["eval"].get("")
