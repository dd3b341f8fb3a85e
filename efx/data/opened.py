"""The texts that a `config.data` block names: opened, split, and tokenised.

There are one or two: `source`, and `eval_source` if the held-out split is a text of its own. Each
has documents (`sources.Source`) or tokens (`shards.TokenShards`).
"""

import collections
import dataclasses
import logging

from efx.data import corpus, growing, held_out, shards, sources, tokenizers
from efx.data.corpus import SPLITS
from efx.data.disk_cache import cache_root, content_key, remember
from efx.data.stream import TokenSplit
from efx.data.subset import Subset
from efx.errors import UsageError

log = logging.getLogger(__name__)


class OpenedTexts:
    """The texts of a `config.data` block and their held-out part.

    All files are hashed. With config.data.shuffle="buffer" only `training_pieces` reads the text
    of the whole source: the held-out documents, and a tokenizer that is trained on the source,
    depend on its head alone.

    Args:
      config_data: the block.
      splits: which of "train" and "eval" are needed; a text that neither needs is not opened.
      recorded_origin, is_recorded_text: see `pipeline.load`.

    Attributes:
      source, eval_source: opened texts; None where there is none, or it is not needed.
      origin: a run's record of them, JSON-able: "source" and "eval_source", hashes of their
        content or None; "held_out", which part of the source is held out (see `held_out.decide` and
        `TokenShards.decide`), None if it is the eval_source instead; "of", the hash of the content
        for which this was decided.
      subset: the Subset that the training split is limited to, or None.

    Raises:
      UsageError: a text cannot be opened, or has changed.
    """

    def __init__(self, config_data, splits=SPLITS, recorded_origin=None, is_recorded_text=True):
        c = config_data
        self._config, self._root, self._splits = c, cache_root(c.cache_dir), splits
        self.grows = c.shuffle == "buffer"
        self.source = self.eval_source = self.subset = None
        if c.eval_source and splits:
            self.eval_source = self._open(c, "eval_source")
        if "train" in splits or ("eval" in splits and not self.eval_source):
            self.source = self._open(c, "source")
        texts = {"source": self.source, "eval_source": self.eval_source}
        self._texts = {key: text for key, text in texts.items() if text}
        self.origin = {key: text and text.identity() for key, text in texts.items()}
        self.origin |= {"of": None, "held_out": None}
        if recorded_origin and is_recorded_text:
            self._refuse_changes(recorded_origin)
        if not self.source:
            return
        self._refuse_training_on_held_out()
        if not self.eval_source:
            self.origin |= self._decision(recorded_origin, is_recorded_text)
        self.subset = Subset.load(c.subset) if c.subset else None

    def _open(self, c, key):
        spec, setting = getattr(c, key), f"config.data.{key}"
        kind, argument = sources.parse(spec, setting)
        if kind != "tokens":
            return sources.open_source(c, self._root, key)
        limit = c.max_bytes if key == "source" else 0
        return shards.TokenShards(f"{setting}={spec!r}", argument, limit, self._root)

    def is_source_cut(self):
        """Whether config.data.max_bytes leaves out a part of the source; False if that is unknown
        because the source `grows`."""
        limit = self._config.max_bytes

        def compute():
            # The longest character has 4 bytes, and so has the longest id.
            c = dataclasses.replace(self._config, max_bytes=limit + 4, document_bytes=0)
            longer = self._open(c, "source")
            if is_tokens(longer):
                return len(longer.all_tokens().stream) > len(self.source.all_tokens().stream)
            sizes = collections.Counter()
            for document in longer.documents():
                sizes[document.component] += len(document.data)
            return max(sizes.values()) > limit

        key = content_key("cut", self.origin["source"])
        return limit > 0 and not self.grows and remember(self._root, key, compute)

    def _refuse_changes(self, recorded):
        """UsageError if a text is not the one that the run recorded."""
        for key, text in self._texts.items():
            is_known = self.origin[key] == recorded[key]
            remedy = "restore the old text, or use another --workdir"
            if key == "source":
                is_known |= self.origin[key] == recorded["of"]
                is_known |= self._config.on_change == "keep_split"
                remedy += (
                    ", or resume with --config.data.on_change=keep_split to keep the held-out "
                    "text and train on everything else"
                )
            if not is_known:
                raise UsageError(
                    f"{text.name} has changed since the run started (content "
                    f"{str(recorded[key])[:8]} then, {self.origin[key][:8]} now): {remedy}"
                )

    def _refuse_training_on_held_out(self):
        """UsageError if a held-out shard is trained on, too, or text is compared with tokens.

        Held-out documents are dropped from training; shards are compared as whole files.
        """
        heldout = self.eval_source or self.source
        if is_tokens(heldout) != is_tokens(self.source):
            raise UsageError(
                f"{heldout.name} cannot be compared with {self.source.name}, since only one of "
                "them is tokens, so held-out text could be trained on; use text or token shards "
                "for both, or score it after training with --mode=evaluate"
            )
        if is_tokens(heldout):
            if name := heldout.find_training_shard_of(self.source):
                raise UsageError(
                    f"{heldout.name}: the held-out shard {name} is also a training shard of "
                    f"{self.source.name}; select other shards with a pattern"
                )

    def _decision(self, recorded, is_recorded_text):
        """The entries "of" and "held_out": those of the run, or new ones for a new text."""
        c, identity = self._config, self.origin["source"]
        if recorded and recorded["held_out"]:
            if is_recorded_text or identity in (recorded["source"], recorded["of"]):
                return {"of": recorded["of"], "held_out": recorded["held_out"]}
        elif recorded and identity == recorded["source"]:
            raise UsageError(
                "config.data.eval_source='': the run trained on all of config.data.source; use "
                "its eval_source"
            )
        if is_tokens(self.source):
            return {"of": identity, "held_out": self.source.decide(c.split, c.eval_fraction)}

        def decide():
            source = held_out.head_of(self.source) if self.grows else self.source
            decision = held_out.decide(source, c.split, c.eval_fraction)
            self._check_unchanged("source")
            return decision

        key = content_key(
            "split", held_out.VERSION, identity, c.split, c.eval_fraction, *self._head_key()
        )
        return {"of": identity, "held_out": remember(self._root, key, decide)}

    def _head_key(self):
        """Part of the keys of everything that is made of the head of the source alone."""
        return ("head", held_out.HEAD_BYTES) if self.grows else ()

    def pieces(self):
        """Yield ("train" or "eval", name, bytes) for every document or piece of one, in order."""
        if self.source:
            yield from self._source_pieces()
        if self.eval_source and not is_tokens(self.eval_source):
            yield from self._eval_source_pieces()

    def training_pieces(self):
        """Yield (name, bytes) for every document or piece of one that is for training."""
        return ((name, data) for split, name, data in self._source_pieces() if split == "train")

    def _source_pieces(self):
        return self._split_pieces(self.source)

    def _head_pieces(self):
        return self._split_pieces(held_out.head_of(self.source))

    def _split_pieces(self, source):
        """Yield the pieces of the source, or of its head; then check that the text is unchanged."""
        if self.eval_source and not is_tokens(self.eval_source):
            source = held_out.drop_documents_of(self.eval_source, source)
        pieces = held_out.pieces(source, self.origin["held_out"])
        if self.grows:
            pieces = held_out.drop_held_out_behind_head(pieces)
        yield from self.subset.select(pieces) if self.subset else pieces
        self._check_unchanged("source")

    def _eval_source_pieces(self):
        for document in self.eval_source.documents():
            yield "eval", document.name, document.data
        self._check_unchanged("eval_source")

    def _check_unchanged(self, key):
        text = self._texts[key]
        if text.identity() != self.origin[key]:
            raise UsageError(
                f"{text.name} changed while it was read; rerun the command when "
                "it no longer changes"
            )

    def key(self):
        """Hash of everything that `pieces` depends on."""
        names = ("source", "eval_source", "held_out")
        return content_key(
            *(self.origin[name] for name in names), self.subset.key if self.subset else ""
        )

    def tokenizer(self, path=None):
        """The tokenizer in the file `path`, or else the one that the config names."""
        texts = [text for text in self._texts.values() if is_tokens(text)]
        if texts:
            spec = self._config.tokenizer
            tokenizer_of_text = {text.name: _shard_tokenizer(text, spec, path) for text in texts}
            first, *others = tokenizer_of_text.values()
            if any(other.fingerprint != first.fingerprint for other in others):
                raise UsageError(
                    f"{self.eval_source.name} has another tokenizer than {self.source.name}; make "
                    "both with the same one"
                )
            return first
        if path is not None:
            return tokenizers.load_tokenizer(path)
        name, key, pieces = (self.source or self.eval_source).name, self.key(), self.pieces
        if self.grows and self.source:
            key, pieces = content_key(key, *self._head_key()), self._head_pieces
        return corpus.make_tokenizer(self._config.tokenizer, name, key, pieces, self._root)

    def token_splits(self, tokenizer):
        """{"train" or "eval": TokenSplit} of the texts that were opened."""
        token_splits = {}
        if is_tokens(self.source):
            token_splits = self.source.token_splits(self.origin["held_out"])
        elif self.source and self.grows:
            token_splits = self._growing_splits(tokenizer)
        elif self.source:
            token_splits = corpus.load_corpus(
                self.source.name, self.key(), self._source_pieces, tokenizer, self._root,
                ("train",) if self.eval_source else SPLITS,
            )  # fmt: skip
        if is_tokens(self.eval_source):
            token_splits["eval"] = self.eval_source.all_tokens()
        elif self.eval_source:
            token_splits |= corpus.load_corpus(
                self.eval_source.name, self.origin["eval_source"], self._eval_source_pieces,
                tokenizer, self._root, ("eval",),
            )  # fmt: skip
        return token_splits

    def _growing_splits(self, tokenizer):
        name, token_splits = self.source.name, {}
        if not self.eval_source and "eval" in self._splits:
            key = content_key(self.key(), *self._head_key())
            token_splits = corpus.load_corpus(
                name, key, self._head_pieces, tokenizer, self._root, ("eval",)
            )
        if "train" in self._splits:
            tokens = growing.GrowingTokens(
                name, self.key(), tokenizer, self._root, self._config, self.origin
            )
            token_splits["train"] = TokenSplit(name, tokens)
        return token_splits


def is_tokens(text):
    """Whether an opened text is tokenised already."""
    return isinstance(text, shards.TokenShards)


def _shard_tokenizer(source, spec, tokenizer_path):
    """The tokenizer of token shards: it has to be the one that made them.

    Args:
      tokenizer_path: tokenizer.json of a run, or None.
    """
    stored, stored_path = None, source.tokenizer_path()
    if stored_path is not None:
        stored = tokenizers.load_tokenizer(stored_path)
    if tokenizer_path is not None:
        name, tokenizer = str(tokenizer_path), tokenizers.load_tokenizer(tokenizer_path)
    else:
        name, tokenizer = f"config.data.tokenizer={spec!r}", tokenizers.pretrained_tokenizer(spec)
        if tokenizer is None and stored and stored.kind == tokenizers.parse(spec)[0]:
            tokenizer = stored
            log.info("instead of %s, using %s (%d ids)", name, stored_path, stored.vocab_size)
    if tokenizer is None:
        raise UsageError(
            f"{name} cannot be trained on {source.name}, a source of tokens without text; "
            "use the path of the tokenizer.json of these tokens"
        )
    if stored and stored.fingerprint != tokenizer.fingerprint:
        raise UsageError(
            f"{name} is not the tokenizer of {source.name}; use config.data.tokenizer={stored_path}"
        )
    source.check_ids(tokenizer, name)
    return tokenizer
