"""The benchmarks' command lines; what they measure is in docs/results.md."""

import importlib

import pytest


@pytest.mark.quick
@pytest.mark.parametrize("name, flags, words", [
    ("mod_step", "--steps=0", "--steps=0: must be at least 1"),
    ("mod_step", "--threads=0", "--threads=0: must be at least 1"),
    ("mod_step", "--loss-chunk=-1", "--loss-chunk=-1: must be at least 0"),
    ("dense_step", "--warmup=-1", "--warmup=-1: must be at least 0"),
    ("latent_cost", "--latents=4,0", "--latents=0: must be at least 1"),
    ("closed_masks", "--shares 0.5 1.5", "--shares=1.5: of the tokens, at most 1"),
    ("soft_experts", "--pairs=4:2,4", "--pairs=4:2,4: expected channels:shrink"),
    ("soft_experts", "--pairs=4:0", "--pairs=4:0: expected channels:shrink"),
    ("soft_experts", "--hidden-multiple=0", "--hidden-multiple=0.0: must be more than 0"),
    ("decode", "--tokens=16", "--tokens=16: the first 16 are not timed"),
    ("decode", "--rounds=0", "--rounds=0: must be at least 1"),
    ("checkpoint_stall", "--saves=0", "--saves=0: must be at least 1"),
    ("data_loading", "--seconds=0", "--seconds=0.0: must be more than 0"),
])  # fmt: skip
def test_a_number_that_cannot_be_is_one_line(name, flags, words, capsys):
    benchmark = importlib.import_module(f"benchmarks.{name}")
    assert benchmark.main([*flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("efx: error: ") and err.count("\n") == 1
    assert words in err
