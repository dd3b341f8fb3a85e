"""cBTM: clusters of a corpus, one expert trained on each, a sparse ensemble of them.

    python -m efx.composition.cbtm --config configs/cbtm.py --workdir runs/cbtm

does all of it: it clusters the documents, trains a seed model on everything and then, from the
seed model, an expert on each cluster, and evaluates. The same by hand, with the experts on any
number of machines that do not communicate:

    python -m efx.main --config configs/cbtm.py --mode=cluster --workdir runs/cbtm
    python -m efx.main --config configs/cbtm.py --workdir runs/cbtm/seed --config.steps=750
    python -m efx.main --config configs/cbtm.py --workdir runs/cbtm/expert_0 --config.steps=562 \
        --config.init.run=runs/cbtm/seed \
        --config.data.subset=runs/cbtm/clusters/cluster_0.json
    python -m efx.main --mode=evaluate --workdir runs/cbtm
    python -m efx.main --mode=sample --workdir runs/cbtm --prompt 'def '

Scaling Expert Language Models with Unsupervised Domain Discovery (Gururangan et al. 2023, arXiv
2303.14177). The corpus is two kinds of real text that come with every Python, unlabelled: the
source of the standard library and the language reference. Other text in place of them or in
addition: `--config.data.source=mix:stdlib,text:input.txt`.

Knobs: `config.cluster` (number of clusters, method, the seed model's fraction of the budget),
`config.ensemble` (tau, top_k, how often the weights are computed), in efx/config/run.py.
`config.steps` is the budget of the seed model and all experts together. Needs the extra `studies`.

Variants: `configs/cbtm.py:smoke`, a minute or two for all of it; `configs/cbtm.py:table`, the size
of `python -m efx.composition.cbtm_table`. Hardware: 2 CPU cores.
"""

from efx.configs import common

VARIANTS = {
    "smoke": {
        **common.SMOKE,
        "steps": 60,
        "data.max_bytes": 200_000,
        "data.document_bytes": 1024,
        "model.width": 32,
        "model.depth": 2,
        "model.attention.num_heads": 2,
        "cluster.count": 2,
        "checkpoint.every": 10,
    },
    "table": {
        "steps": 1200,
        "data.seq_len": 128,
        "model.width": 64,
        "model.depth": 4,
        "evaluate.every": 0,
        "sample.every": 0,
        "checkpoint.every": 0,
        "log.tensorboard": False,
    },
}


def get_config(arg=""):
    config = common.base()
    common.apply(
        config,
        {
            **common.STDLIB,
            "steps": 3000,
            "data.source": "mix:stdlib,pydoc",
            "data.max_bytes": 2_000_000,
            "data.document_bytes": 2048,
            "data.split": "documents",
            "data.packing": True,
            "data.eval_fraction": 0.05,
            "model.depth": 4,
        },
    )
    return common.variant(config, arg, **VARIANTS)
