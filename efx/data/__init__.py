"""Data: text sources, tokenizers, and batches that are a function of (seed, step) alone.

    data = load(config.data, seed=config.seed)
    next(data.train_iterator())["inputs"]

is int32[batch_size, seq_len], the first step's tokens.
"""

from efx.data.batches import Data
from efx.data.shards import write_token_shards
from efx.data.texts import SPLITS, load
from efx.data.tokenizers import Tokenizer, load_tokenizer

__all__ = ["SPLITS", "Data", "Tokenizer", "load", "load_tokenizer", "write_token_shards"]
