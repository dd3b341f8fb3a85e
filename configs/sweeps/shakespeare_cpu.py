"""nanoGPT's CPU recipe on tinyshakespeare: both presets, at equal training FLOPs.

    python -m efx.studies.sweep --sweep configs/sweeps/shakespeare_cpu.py \
        --workdir runs/shakespeare_cpu -- --config.data.source=text:input.txt
"""


def get_sweep():
    return dict(
        config="shakespeare_char:cpu",
        seeds=(0, 1, 2),
        equal="flops",
        runs={
            "gpt2": {},
            "llama": {"model.preset": "llama"},
        },
        columns={},
    )
