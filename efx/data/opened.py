"""The texts that a `config.data` block names: opened, split, made tokens.

There are one or two: `source`, and `eval_source` if the held-out split is a text of its own. Each
holds documents (`sources`) or tokens (`shards`).
"""

import logging

from efx.data import corpus, growing, held_out, shards, sources, tokenizers
from efx.data.corpus import SPLITS
from efx.data.disk_cache import cache_root, content_key, remember
from efx.data.stream import TokenSplit
from efx.data.subset import Subset
from efx.errors import UsageError

log = logging.getLogger(__name__)


class OpenedTexts:
    """The texts of a `config.data` block and what is held out of them.

    Args:
      config_data: the block.
      splits: which of "train" and "eval" are needed; a text that neither needs is not opened.
      run_origin, same_text: see `pipeline.load`.

    Attributes:
      source, eval_source: opened texts; None where there is none, or it is not needed.
      origin: what a run records about them, JSON-able: "source" and "eval_source", hashes of their
        content or None; "held_out", which part of the source is held out (see `held_out.decide` and
        `TokenShards.decide`), None if it is the eval_source instead; "of", the hash of the content
        that this was decided by.
      subset: the Subset that the training split is limited to, or None.

    With config.data.shuffle="buffer" nothing but `training_pieces` reads the whole of the source:
    what is held out, and a tokenizer that is made of it, is decided by its head.

    Raises UsageError for what cannot be opened, and for a text that has changed.
    """

    def __init__(self, config_data, splits=SPLITS, run_origin=None, same_text=True):
        self._config, self._root = config_data, cache_root(config_data.cache_dir)
        self._splits, self.grows = splits, config_data.shuffle == "buffer"
        self.source = self.eval_source = self.subset = None
        if config_data.eval_source and splits:
            self.eval_source = self._open("eval_source")
        if "train" in splits or ("eval" in splits and not self.eval_source):
            self.source = self._open("source")
        self.origin = {name: text and text.identity() for name, text in self._texts()}
        self.origin |= {"of": None, "held_out": None}
        if run_origin and same_text:
            self._refuse_changes(run_origin)
        if not self.source:
            return
        if self.origin["source"] == self.origin["eval_source"]:
            raise UsageError(
                f"{self.eval_source.name} has the same text as {self.source.name}: no text "
                "remains for training; use another eval_source"
            )
        if is_tokens(self.source) and is_tokens(self.eval_source):
            self._refuse_shards_of_both()
        if not self.eval_source or config_data.withhold:
            self.origin |= self._held_out(run_origin, same_text)
        self.subset = Subset.load(config_data.subset) if config_data.subset else None

    def _texts(self):
        return (("source", self.source), ("eval_source", self.eval_source))

    def _open(self, key):
        c, setting = self._config, f"config.data.{key}"
        kind, argument = sources.parse(getattr(c, key), setting)
        if kind != "tokens":
            return sources.open_source(c, self._root, key)
        limit = c.max_bytes if key == "source" else 0
        return shards.TokenShards(f"{setting}={getattr(c, key)!r}", argument, limit, self._root)

    def _refuse_shards_of_both(self):
        # Documents of both texts are left out of training; shards are not documents.
        if name := self.eval_source.trained_on_in(self.source):
            raise UsageError(
                f"{self.eval_source.name}: {name} is also a training shard of "
                f"{self.source.name}; select other training shards with a pattern"
            )

    def _refuse_changes(self, run_origin):
        for key, text in self._texts():
            if text is None or self.origin[key] in (
                run_origin[key],
                key == "source" and run_origin["of"],
            ):
                continue
            if key == "source" and self._config.on_change == "keep_split":
                continue
            way_out = "restore the old text, or use another --workdir"
            if key == "source":
                way_out += (
                    ", or resume with --config.data.on_change=keep_split to keep the held-out "
                    "text and train on everything else"
                )
            raise UsageError(
                f"{text.name} has changed since the run started (content "
                f"{str(run_origin[key])[:8]} then, {self.origin[key][:8]} now): {way_out}"
            )

    def _held_out(self, run_origin, same_text):
        """The entries "of" and "held_out": those of the run, or new ones for a new text."""
        c, identity = self._config, self.origin["source"]
        if run_origin and run_origin["held_out"]:
            if same_text or identity in (run_origin["source"], run_origin["of"]):
                return {"of": run_origin["of"], "held_out": run_origin["held_out"]}
        if is_tokens(self.source):
            decision = self.source.decide(c.split, c.eval_fraction)
        else:
            key = content_key("split", identity, c.split, c.eval_fraction, *self._of_head())
            decision = remember(self._root, key, self._decide)
        return {"of": identity, "held_out": decision}

    def _decide(self):
        source = held_out.Head(self.source) if self.grows else self.source
        decision = held_out.decide(source, self._config.split, self._config.eval_fraction)
        self._check_unchanged("source")
        return decision

    def pieces(self):
        """Yields ("train" or "eval", name, bytes) for every document or piece of one, in order."""
        if self.source:
            yield from self._of_source()
        if self.eval_source and not is_tokens(self.eval_source):
            yield from self._of_eval_source()

    def _of_eval_source(self):
        return self._while_unchanged("eval_source", held_out.all_pieces(self.eval_source, "eval"))

    def training_pieces(self):
        """Yields (name, bytes) for every document or piece of one that is for training."""
        return ((name, data) for split, name, data in self._of_source() if split == "train")

    def _of_source(self, head=False):
        decision, source = self.origin["held_out"], self.source
        source = held_out.Head(source) if head else source
        if decision:
            pieces = held_out.pieces(source, decision)
        else:
            pieces = held_out.all_pieces(source, "train")
        if self.grows:
            pieces = held_out.held_out_in_head(pieces)
        if self.eval_source:  # what is held out of the source is neither trained on nor scored
            pieces = (piece for piece in pieces if piece[0] == "train")
            if not is_tokens(self.eval_source):
                pieces = held_out.without_documents_of(self.eval_source, pieces, self.source.name)
        pieces = self.subset.pick(pieces) if self.subset else pieces
        return self._while_unchanged("source", pieces)

    def _while_unchanged(self, key, pieces):
        """`pieces`, then a UsageError if the text has changed since it was hashed."""
        yield from pieces
        self._check_unchanged(key)

    def _of_head(self):
        """What is part of the key of all that is made of the head of the source alone."""
        return ("head", held_out.HEAD_BYTES) if self.grows else ()

    def _check_unchanged(self, key):
        text = getattr(self, key)
        if text.identity() != self.origin[key]:
            raise UsageError(
                f"{text.name} changed while it was read; rerun the command when "
                "it no longer changes"
            )

    def key(self, split=""):
        """Hash of all that `pieces` depends on; with split="eval" of the held-out text alone."""
        names = ("eval_source",) if split == "eval" else ("source", "eval_source", "held_out")
        chosen = self.subset.key if self.subset and split != "eval" else ""
        return content_key(*(self.origin[name] for name in names), chosen)

    def tokenizer(self, path=None):
        """The tokenizer in the file `path`, or else the one that the config names."""
        of_tokens = [text for _, text in self._texts() if is_tokens(text)]
        of_shards = [_shard_tokenizer(text, self._config.tokenizer, path) for text in of_tokens]
        if of_shards:
            return of_shards[0]
        if path is not None:
            return tokenizers.load_tokenizer(path)
        name, key, pieces = (self.source or self.eval_source).name, self.key(), self.pieces
        if self.grows and self.source:
            key, pieces = content_key(key, *self._of_head()), self._of_head_of_source
        return corpus.make_tokenizer(self._config.tokenizer, name, key, pieces, self._root)

    def streams(self, tokenizer):
        """{"train" or "eval": stream.TokenSplit} of the texts that were opened."""
        token_splits = {}
        if is_tokens(self.source):
            token_splits = self.source.splits(self.origin["held_out"])
        elif self.source and self.grows:
            token_splits = self._growing(tokenizer)
        elif self.source:
            splits = ("train",) if self.eval_source else SPLITS
            token_splits = corpus.load_corpus(
                self.source.name, self.key(), self._of_source, tokenizer, self._root, splits
            )
        if is_tokens(self.eval_source):
            token_splits["eval"] = self.eval_source.all_shards()
        elif self.eval_source:
            name, key, pieces = self.eval_source.name, self.key("eval"), self._of_eval_source
            token_splits |= corpus.load_corpus(name, key, pieces, tokenizer, self._root, ("eval",))
        return token_splits

    def _growing(self, tokenizer):
        name, key, token_splits = self.source.name, self.key(), {}
        if not self.eval_source and "eval" in self._splits:
            of_head = content_key(key, *self._of_head())
            token_splits = corpus.load_corpus(
                name, of_head, self._held_out_of_head, tokenizer, self._root, ("eval",)
            )
        if "train" in self._splits:
            tokens = growing.GrowingTokens(
                name, key, tokenizer, self._root, self._config, self.origin
            )
            token_splits["train"] = TokenSplit(name, tokens)
        return token_splits

    def _of_head_of_source(self):
        return self._of_source(head=True)

    def _held_out_of_head(self):
        return (piece for piece in self._of_head_of_source() if piece[0] == "eval")


def is_tokens(source):
    """Whether a text is tokenised already."""
    return isinstance(source, shards.TokenShards)


def _shard_tokenizer(source, spec, tokenizer_path):
    """The tokenizer of token shards, which has to be the one that made them."""
    stored_path = source.tokenizer_path()
    stored = None if stored_path is None else tokenizers.load_tokenizer(stored_path)
    if tokenizer_path is not None:
        name, tokenizer = str(tokenizer_path), tokenizers.load_tokenizer(tokenizer_path)
    else:
        name = f"config.data.tokenizer={spec!r}"
        tokenizer = tokenizers.ready(spec)
        if tokenizer is None and stored is not None:
            tokenizer = _stored_for(source, spec, stored)
        if tokenizer is None:
            raise UsageError(
                f"{name} cannot be trained on {source.name}, a source of tokens without text; "
                "use the path of the tokenizer.json of these tokens"
            )
    if stored is not None and stored.fingerprint != tokenizer.fingerprint:
        raise UsageError(
            f"{name} is not the tokenizer of {source.name}; use config.data.tokenizer={stored_path}"
        )
    source.check_ids(tokenizer, name)
    return tokenizer


def _stored_for(source, spec, stored):
    """The tokenizer `stored` with token shards if `spec` would make one of its kind, else None."""
    kind, size = tokenizers.parse(spec)
    if stored.kind != kind:
        return None
    # A text with few pairs worth merging comes to fewer ids than were asked for, never to more.
    if size is not None and stored.vocab_size > size:
        raise UsageError(
            f"config.data.tokenizer={spec!r}: the tokenizer of {source.name} has "
            f"{stored.vocab_size} ids; use config.data.tokenizer={source.tokenizer_path()}"
        )
    log.info(
        "instead of config.data.tokenizer=%r, using %s (%d ids), the tokenizer of %s",
        spec,
        source.tokenizer_path(),
        stored.vocab_size,
        source.name,
    )
    return stored
