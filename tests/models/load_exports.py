"""Load exports with whatever transformers is on the path: python load_exports.py FOLDER

Each folder in FOLDER is an export with `tokens.npy` [B, T] and efx's `logits.npy` of these.
"""

import copy
import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def check(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokens_BT = torch.tensor(np.load(folder / "tokens.npy"))
    expected = np.load(folder / "logits.npy")
    np.testing.assert_allclose(model(tokens_BT).logits.numpy(), expected, atol=1e-4)
    first = model(tokens_BT[:, :9], use_cache=True)
    cache = copy.deepcopy(first.past_key_values)
    logits = model(tokens_BT[:, 9:], past_key_values=cache).logits.numpy()
    np.testing.assert_allclose(logits, expected[:, 9:], atol=1e-4)

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    inputs = tokenizer("The quick brown", return_tensors="pt")
    options = dict(max_new_tokens=6, do_sample=False)
    whole = model.generate(**inputs, **options)
    assert whole.shape[1] > inputs.input_ids.shape[1]
    assert whole.tolist() == model.generate(**inputs, use_cache=False, **options).tolist()
    empty = type(first.past_key_values)()
    pieces = model.generate(**inputs, past_key_values=empty, prefill_chunk_size=2, **options)
    assert pieces.tolist() == whole.tolist()


if __name__ == "__main__":
    with torch.no_grad():
        for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
            check(folder)
