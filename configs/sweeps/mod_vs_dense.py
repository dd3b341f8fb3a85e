"""The default Mixture-of-Depths run against its dense twin at equal training FLOPs.

python -m efx.studies.sweep --sweep configs/sweeps/mod_vs_dense.py --workdir runs/mod_vs_dense
"""


def get_sweep():
    return dict(
        config="mod",
        seeds=(0, 1, 2),
        equal="flops",
        runs={
            "MoD, 12.5% every second block": {},
            # The same with tokens picked at random: shows the gain of learned routing.
            "stochastic, 12.5% every second block": {
                "model.depth_routing.train_selection": "stochastic",
            },
            "dense twin": {"model.depth_routing.kind": "none"},
            # A forward pass costs about as much as that of the first run: the fair comparison.
            "dense, half as deep": {"model.depth_routing.kind": "none", "model.depth": 4},
        },
        columns={
            "loss under training's selection": "eval/loss_topk|eval/loss_stochastic",
            "decision accuracy": "eval/router/accuracy",
            "fraction routed": "eval/router/routed_fraction",
        },
    )
