"""cBTM: clusters of a corpus, one expert trained on each, and a sparse ensemble of the experts.

Scaling Expert Language Models with Unsupervised Domain Discovery (Gururangan et al. 2023, arXiv
2303.14177). This clusters the documents, trains a seed model on all of them and from it an expert
on each cluster, and evaluates:

    python -m efx.composition.cbtm --config configs/cbtm.py --workdir runs/cbtm

The same by hand; the experts may train on different machines:

    python -m efx.main --config configs/cbtm.py --mode=cluster --workdir runs/cbtm
    python -m efx.main --config configs/cbtm.py --workdir runs/cbtm/seed --config.steps=750
    python -m efx.main --config configs/cbtm.py --workdir runs/cbtm/expert_0 --config.steps=562 \
        --config.init.run=runs/cbtm/seed \
        --config.data.subset=runs/cbtm/clusters/cluster_0.json
    python -m efx.main --mode=evaluate --workdir runs/cbtm
    python -m efx.main --mode=sample --workdir runs/cbtm --prompt 'def '

The text is the source of Python's standard library and the language reference, unlabelled; other
text by `--config.data.source=mix:stdlib,text:input.txt`. `config.steps` is the budget of the seed
model and all experts together. efx/config/run.py has `config.cluster` and `config.ensemble`. Needs
the extra `studies` and 2 CPU cores.

Variants:
    smoke       a minute or two on a CPU
    table       the sizes of `python -m efx.composition.cbtm_table`
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
        "evaluate.every": 0,
        "sample.every": 0,
        "checkpoint.every": 0,
        "log.tensorboard": False,
    },
}


def get_config(arg=""):
    config = common.base()
    changes = {
        "steps": 3000,
        "data.source": "mix:stdlib,pydoc",
        "data.max_bytes": 2_000_000,
        "data.document_bytes": 2048,
        "data.split": "documents",
        "data.packing": True,
        "data.eval_fraction": 0.05,
        "model.depth": 4,
    }
    common.apply(config, {**common.STDLIB, **changes})
    return common.variant(config, arg, **VARIANTS)
