"""The texts that a `config.data` block names: opened, split, made tokens.

There are two of them: `source`, and `eval_source` if the held-out split is a text of its own. Each
holds documents (`sources`) or tokens (`shards`).
"""

from efx.data import corpus, shards, sources, split, tokenizers
from efx.data.cache import cache_root, content_key, remember
from efx.data.corpus import PARTS
from efx.data.subset import Subset
from efx.errors import UsageError


class Opened:
    """The texts of a `config.data` block and what is held out of them.

    Args:
      config_data: the block.
      parts: which of "train" and "eval" are wanted: a text that they do not need is not opened.
      before, same_text: see `pipeline.load`.

    Attributes:
      source, eval_source: opened texts; None where there is none, or it is not needed.
      origin: what a run writes down of them, JSON-able: "source" and "eval_source", hashes of their
        content or None; "held_out", which part of the source is held out (see `split.decide` and
        `TokenShards.decide`), None where the eval_source takes its place; "of", the hash of the
        content that this was decided by.
      subset: the Subset that the training split is limited to, or None.

    Raises UsageError for what cannot be opened, and a text that is not what it was before.
    """

    def __init__(self, config_data, parts=PARTS, before=None, same_text=True):
        self._config, self._root = config_data, cache_root(config_data.cache_dir)
        self.source = self.eval_source = self.subset = None
        if config_data.eval_source and parts:
            self.eval_source = self._open("eval_source")
        if "train" in parts or ("eval" in parts and not self.eval_source):
            self.source = self._open("source")
        self.origin = {name: one and one.identity() for name, one in self._both()}
        self.origin |= {"of": None, "held_out": None}
        if before and same_text:
            self._refuse_changes(before)
        if not self.source:
            return
        if self.origin["source"] == self.origin["eval_source"]:
            raise UsageError(
                f"{self.eval_source.name} has the same text as {self.source.name}: nothing is left"
                " to train on"
            )
        if not self.eval_source or config_data.withhold:
            self.origin |= self._held_out(before, same_text)
        self.subset = Subset.load(config_data.subset) if config_data.subset else None

    def _both(self):
        return (("source", self.source), ("eval_source", self.eval_source))

    def _open(self, key):
        c, setting = self._config, f"config.data.{key}"
        kind, argument = sources.parse(getattr(c, key), setting)
        if kind != "tokens":
            return sources.open_source(c, self._root, key)
        limit = c.max_bytes if key == "source" else 0
        return shards.TokenShards(f"{setting}={getattr(c, key)!r}", argument, limit, self._root)

    def _refuse_changes(self, before):
        for key, one in self._both():
            if one is None or self.origin[key] in (before[key], key == "source" and before["of"]):
                continue
            if key == "source" and self._config.on_change == "keep_split":
                continue
            way_out = "put the old text back, or use another --workdir"
            if key == "source":
                way_out += (
                    ", or go on with --config.data.on_change=keep_split: then what was held out"
                    " is held out still, and all the rest is for training"
                )
            raise UsageError(
                f"{one.name} is not the text that this run began with (content"
                f" {str(before[key])[:8]} then, {self.origin[key][:8]} now): {way_out}"
            )

    def _held_out(self, before, same_text):
        """The entries "of" and "held_out": those of before, or for a new text new ones."""
        c, identity = self._config, self.origin["source"]
        if before and before["held_out"]:
            if same_text or identity in (before["source"], before["of"]):
                return {"of": before["of"], "held_out": before["held_out"]}
        if is_tokens(self.source):
            decision = self.source.decide(c.split, c.eval_fraction)
        else:
            key = content_key("split", identity, c.split, c.eval_fraction)
            decision = remember(self._root, key, self._decide)
        return {"of": identity, "held_out": decision}

    def _decide(self):
        decision = split.decide(self.source, self._config.split, self._config.eval_fraction)
        self._check_at_rest("source")
        return decision

    def pieces(self):
        """Yields ("train" or "eval", name, bytes) for every document or piece of one, in order."""
        if self.source:
            yield from self._of_source()
        if self.eval_source and not is_tokens(self.eval_source):
            yield from self._of_eval_source()

    def _of_eval_source(self):
        return self._at_rest("eval_source", split.whole(self.eval_source, "eval"))

    def _of_source(self):
        decision = self.origin["held_out"]
        if decision:
            found = split.pieces(self.source, decision)
        else:
            found = split.whole(self.source, "train")
        if self.eval_source:  # what is held out besides is neither trained on nor scored
            found = (piece for piece in found if piece[0] == "train")
            if not is_tokens(self.eval_source):
                found = split.without(found, self.source.name, self.eval_source)
        found = self.subset.pick(found) if self.subset else found
        return self._at_rest("source", found)

    def _at_rest(self, key, pieces):
        """`pieces`; UsageError after the last if they are no longer those that were hashed."""
        yield from pieces
        self._check_at_rest(key)

    def _check_at_rest(self, key):
        one = getattr(self, key)
        if one.identity() != self.origin[key]:
            raise UsageError(f"{one.name} changed while it was read; start again when it rests")

    def key(self, part=""):
        """Hash of all that `pieces` depends on; of what is held out alone with part="eval"."""
        names = ("eval_source",) if part == "eval" else ("source", "eval_source", "held_out")
        chosen = self.subset.key if self.subset and part != "eval" else ""
        return content_key(*(self.origin[name] for name in names), chosen)

    def tokenizer(self, path=None):
        """The tokenizer in the file `path`, or else the one that the config names."""
        of_tokens = [one for _, one in self._both() if is_tokens(one)]
        found = [_shard_tokenizer(one, self._config.tokenizer, path) for one in of_tokens]
        if found:
            return found[0]
        if path is not None:
            return tokenizers.load_tokenizer(path)
        name = (self.source or self.eval_source).name
        return corpus.make_tokenizer(
            self._config.tokenizer, name, self.key(), self.pieces, self._root
        )

    def streams(self, tokenizer):
        """{"train" or "eval": stream.Part} of the texts that were opened."""
        found = {}
        if is_tokens(self.source):
            found = self.source.parts(self.origin["held_out"])
        elif self.source:
            parts = ("train",) if self.eval_source else PARTS
            found = corpus.load_corpus(
                self.source.name, self.key(), self._of_source, tokenizer, self._root, parts
            )
        if is_tokens(self.eval_source):
            found["eval"] = self.eval_source.whole()
        elif self.eval_source:
            name, key, pieces = self.eval_source.name, self.key("eval"), self._of_eval_source
            found |= corpus.load_corpus(name, key, pieces, tokenizer, self._root, ("eval",))
        return found


def is_tokens(source):
    """Whether a text is made tokens already."""
    return isinstance(source, shards.TokenShards)


def _shard_tokenizer(source, spec, tokenizer_path):
    """The tokenizer of token shards, which has to be the one that they were made with."""
    own_path = source.own_tokenizer()
    own = None if own_path is None else tokenizers.load_tokenizer(own_path)
    if tokenizer_path is not None:
        name, tokenizer = str(tokenizer_path), tokenizers.load_tokenizer(tokenizer_path)
    else:
        name = f"config.data.tokenizer={spec!r}"
        kind, argument = tokenizers.parse(spec)
        if kind == "bytes":
            tokenizer = tokenizers.ByteTokenizer()
        elif kind == "file":
            tokenizer = tokenizers.load_tokenizer(argument)
        elif own is not None and own.kind == kind:
            tokenizer = own
        else:
            raise UsageError(
                f"{name} cannot be made from {source.name}, which holds tokens and no text; name"
                " the tokenizer.json that they were made with"
            )
    if own is not None and own.fingerprint != tokenizer.fingerprint:
        raise UsageError(
            f"{name} is not the tokenizer that {source.name} was made with;"
            f" use config.data.tokenizer={own_path}"
        )
    source.check(tokenizer, name)
    return tokenizer
