"""Settings that are refused, and how a refusal is checked.

A refusal is a `UsageError` of one line that names what is at fault: the setting with its value, the
file or the flag. Its other words are free.
"""

import pytest

from efx.errors import UsageError
from efx.parallel.sharding import DEFAULT_RULES


def refused(call, *names):
    """`call()` raises a `UsageError` of one line in which each of `names` occurs."""
    with pytest.raises(UsageError) as error:
        call()
    line = str(error.value)
    assert "\n" not in line and all(name in line for name in names), line


# Changes of a small run (test_cli.SETTINGS) and the names that the message must have.
# tests/config/test_refusals.py starts each of them by the command line.

GENERAL = [
    # Keys.
    ({"modle.depth": 3}, "--config.modle"),
    ({"optim.schedule.warmup": 3}, "--config.optim.schedule.warmup"),
    ({"model": 3}, "--config.model"),
    # Types.
    ({"model.depth": "deep"}, "--config.model.depth=deep"),
    ({"steps": "1e3"}, "--config.steps=1e3"),
    ({"data.packing": "yes"}, "--config.data.packing=yes"),
    ({"losses.router_bce": "'much'"}, "config.losses.router_bce='much'"),
    ({"losses.z_loss": "nan"}, "config.losses.z_loss"),
    ({"rules": "(('mlp', 5),)"}, "config.rules[0]"),
    ({"rules": repr((*DEFAULT_RULES, ("mpl", None)))}, "'mpl'"),
    ({"sample.prompt": "\udcff"}, "config.sample.prompt"),
    # Ranges, and settings that contradict each other.
    ({"seed": 2**32}, "config.seed=4294967296"),
    ({"log.every": 0}, "config.log.every=0"),
    ({"log.profile_at": 2}, "config.log.profile_at=2"),
    ({"steps": 0, "train_flops": "inf"}, "config.train_flops=inf"),
    ({"steps": 0, "train_flops": 1e38}, "config.train_flops"),
    ({"optim.learning_rate": 1e39}, "config.optim.learning_rate"),
    (
        {"optim.schedule.decay_steps": 1, "optim.schedule.warmup_steps": 2},
        "config.optim.schedule.decay_steps=1",
    ),
    ({"checkpoint.best_metric": "eval/los"}, "config.checkpoint.best_metric"),
    ({"checkpoint.best_metric": "eval/accuracy"}, "config.checkpoint.best_metric"),
    ({"checkpoint.keep_best": 1, "checkpoint.best_metric": "x"}, "config.checkpoint.best_metric"),
    ({"data.batch_size": 9}, "config.data.batch_size=9"),
    ({"data.packing": True}, "config.data.packing"),
    ({"data.seq_len": 100_000}, "config.data.seq_len=100000"),
    ({"adapter.kind": "lora"}, "config.adapter.kind='lora'"),
    ({"init.missing": ".*"}, "config.init.missing='.*'"),
    # Models.
    ({"model.attention.num_heads": 3}, "config.model.attention.num_heads=3"),
    ({"model.attention.rope_theta": 0.0}, "config.model.attention.rope_theta=0.0"),
    ({"model.depth": 1001}, "config.model.depth=1001"),
    ({"model.depth_routing.capacity": 1.5}, "config.model.depth_routing.capacity=1.5"),
    ({"model.depth_routing.every": 3}, "config.model.depth_routing.every=3"),
    ({"model.mlp.kind": "moe", "model.mlp.moe.every": 3}, "config.model.mlp.moe.every=3"),
    ({"model.dropout.kind": "elementwise", "model.dropout.sites": "()"}, "model.dropout.sites"),
    # Memory.
    ({"model.width": 10**7}, "config.model.width=10000000"),
    ({"model.context": 10**9, "model.positions": "learned"}, "embedding"),
    ({"data.batch_size": 8 * 10**8}, "config.data.batch_size=800000000"),
    ({"evaluate.batch_size": 8 * 10**8}, "config.evaluate.batch_size=800000000"),
    ({"sample.every": 1, "model.context": 10**9}, "config.model.context=1000000000"),
    # Files.
    ({"data.source": "text:nowhere.txt"}, "nowhere.txt"),
    ({"data.tokenizer": "/none"}, "config.data.tokenizer='/none'"),
    ({"data.tokenizer": "/dev/null"}, "config.data.tokenizer='/dev/null'"),
    ({"init.run": "/none"}, "config.init.run='/none'"),
    ({"losses.distill": 1.0, "train.teacher": "/none"}, "config.train.teacher"),
]

MODELS = [
    ({"cluster.count": 0}, "config.cluster.count=0"),
    ({"cluster.dimensions": 0}, "config.cluster.dimensions=0"),
    ({"cluster.features": 1}, "config.cluster.features=1"),
    ({"cluster.method": "randm"}, "config.cluster.method='randm'"),
    ({"cluster.seed_fraction": 1.0}, "config.cluster.seed_fraction=1.0"),
    ({"ensemble.every": 0}, "config.ensemble.every=0"),
    ({"ensemble.tau": 0.0}, "config.ensemble.tau=0.0"),
    ({"ensemble.top_k": 0}, "config.ensemble.top_k=0"),
    ({"model.attention.num_kv_heads": 3}, "config.model.attention.num_kv_heads=3"),
    ({"model.attention.head_dim": 3}, "config.model.attention.head_dim=3"),
    ({"model.depth_routing.blocks": (1, 4)}, "config.model.depth_routing.blocks=(1, 4)"),
    ({"model.depth_routing.blocks": (1, 0)}, "config.model.depth_routing.blocks=(1, 0)"),
    ({"model.depth_routing.capacity": (0.5, 2)}, "config.model.depth_routing.capacity=(0.5, 2)"),
    ({"model.depth_routing.capacity": (0.5, 0.2)}, "model.depth_routing.capacity=(0.5, 0.2)"),
    ({"model.scan_layers": True, "model.depth": 3}, "config.model.scan_layers=True"),
    ({"train.dtype": "float16"}, "config.train.dtype='float16'"),
    ({"adapter.experts": ("a",)}, "config.adapter.experts"),
    ({"adapter.gate": True}, "config.adapter.gate=True"),
    ({"adapter.kind": "lora", "adapter.sites": "(.*"}, "config.adapter.sites='(.*'"),
    ({"adapter.kind": "lora", "adapter.sites": "head"}, "config.adapter.sites='head'"),
    ({"adapter.kind": "lora", "adapter.experts": ("a", "a")}, "config.adapter.experts"),
]

RECURSION = {"model.depth_routing.kind": "recursion", "model.depth": 4}
OPEN_ROWS = {
    "model.dropout.kind": "attention",
    "model.dropout.sites": ("mlp_output",),
    "model.dropout.attention.input": "embedding_linear",
    "model.dropout.attention.skip_tile": 5,
}

ROUTING = [
    ({"model.attention.kernel": "triton"}, "config.model.attention.kernel='triton'"),
    ({"model.attention.kernel": "splash"}, "config.model.attention.kernel='splash'"),
    ({"model.dropout.kind": "attention"}, "dropout.sites"),
    ({"model.dropout.attention.shift_init": 4.0}, "dropout.attention.shift_init=4.0"),
    ({"model.dropout.attention.sigmoid_scale": -1.0}, "dropout.attention.sigmoid_scale=-1.0"),
    ({"model.dropout.elementwise.b_std": -1.0}, "dropout.elementwise.b_std=-1.0"),
    ({"model.dropout.elementwise.sharpen_scale": 0.0}, "dropout.elementwise.sharpen_scale=0.0"),
    (
        {
            "model.dropout.kind": "attention",
            "model.dropout.sites": ("mlp_output",),
            "model.dropout.attention.num_heads": 5,
        },
        "dropout.attention.num_heads=5",
    ),
    ({"model.mlp.kind": "moe", "model.mlp.moe.num_experts": 0}, "mlp.moe.num_experts=0"),
    ({"model.mlp.kind": "moe", "model.mlp.moe.top_k": 9}, "mlp.moe.top_k=9"),
    ({"model.mlp.kind": "moe", "model.mlp.moe.every": 0}, "mlp.moe.every=0"),
    ({"model.mlp.kind": "moe", "model.mlp.moe.num_noop": -1}, "mlp.moe.num_noop=-1"),
    ({"model.mlp.kind": "moe", "model.mlp.moe.capacity_factor": 0.0}, "moe.capacity_factor=0.0"),
    ({"model.mlp.kind": "moe", "model.mlp.moe.capacity": 1.5}, "mlp.moe.capacity=1.5"),
    ({"model.mlp.kind": "moe", "model.mlp.moe.slack": 0.5}, "mlp.moe.slack=0.5"),
    (
        {
            "model.mlp.kind": "moe",
            "model.mlp.moe.router": "expert_choice",
            "model.mlp.moe.num_noop": 1,
        },
        "mlp.moe.num_noop=1",
    ),
    (
        {"model.mlp.kind": "moe", "model.mlp.moe.computed_fraction": 0.0},
        "mlp.moe.computed_fraction=0.0",
    ),
    (
        {
            "model.mlp.kind": "moe",
            "model.mlp.moe.router": "expert_choice",
            "model.mlp.moe.computed_fraction": 0.5,
        },
        "mlp.moe.computed_fraction=0.5",
    ),
    ({"model.soft_experts.num": -1}, "soft_experts.num=-1"),
    ({"model.soft_experts.num": 2, "model.soft_experts.every": 3}, "soft_experts.every=3"),
    ({"model.soft_experts.num": 2, "model.soft_experts.shared": -1}, "soft_experts.shared=-1"),
    ({"model.soft_experts.num": 2, "model.soft_experts.multiple": 0}, "soft_experts.multiple=0"),
    (
        {"model.soft_experts.num": 2, "model.soft_experts.hidden_multiple": 0.0},
        "soft_experts.hidden_multiple=0.0",
    ),
    ({"model.soft_experts.num": 2, "model.mlp.kind": "moe"}, "soft_experts.every=1"),
    ({"model.dense_former.on": True, "model.scan_layers": True}, "scan_layers=True"),
    ({"model.mup.base_width": -1}, "mup.base_width=-1"),
    ({"model.mup.base_width": 16, "optim.name": "muon"}, "optim.name='muon'"),
    ({"model.mup.base_width": 16, "optim.name": "sgd"}, "optim.name='sgd'"),
    ({**RECURSION, "model.depth": 2}, "config.model.depth=2"),
    ({**RECURSION, "model.depth_routing.recursions": 0}, "depth_routing.recursions=0"),
    ({**RECURSION, "model.depth_routing.capacity": (1.0, 0.5, 0.2)}, "depth_routing.capacity=("),
    ({**RECURSION, "model.depth_routing.capacity": (0.3, 0.5)}, "depth_routing.capacity=("),
    ({**RECURSION, "model.depth_routing.blocks": (1,)}, "config.model.depth_routing.blocks=(1,)"),
    (
        {**RECURSION, "model.depth_routing.train_selection": "stochastic"},
        "config.model.depth_routing.train_selection='stochastic'",
    ),
    (
        {
            **RECURSION,
            "model.depth_routing.capacity": (0.9, 0.5),
            "model.depth_routing.capacity_stages": ((0.5, 1.0),),
        },
        "config.model.depth_routing.capacity_stages=",
    ),
    ({**RECURSION, "model.scan_layers": True}, "config.model.scan_layers=True"),
    ({**OPEN_ROWS, "model.dropout.attention.input": "hidden"}, "attention.skip_tile=5"),
    ({**OPEN_ROWS, "model.dropout.attention.rounding": "sigmoid"}, "attention.skip_tile=5"),
    ({**OPEN_ROWS, "model.dropout.attention.skip_tile": -1}, "attention.skip_tile=-1"),
]

DATA = [
    ({"data.source": "txt:x"}, "config.data.source='txt:x'"),
    ({"data.source": "text:"}, "config.data.source='text:'"),
    ({"data.source": "stdlib:3.11"}, "config.data.source='stdlib:3.11'"),
    ({"data.source": "text:/no/such/file"}, "config.data.source='text:/no/such/file'"),
    ({"data.source": "text:/no/such/*.txt"}, "config.data.source='text:/no/such/*.txt'"),
    ({"data.source": "mix:stdlib", "data.split": "documents"}, "config.data.source='mix:stdlib'"),
    (
        {"data.source": "mix:stdlib,tokens:x", "data.split": "documents"},
        "config.data.source='mix:stdlib,tokens:x'",
    ),
    ({"data.source": "mix:stdlib,pydoc"}, "config.data.split='tail'"),
    ({"data.split": "documents"}, "config.data.split='documents'"),  # of one document
    ({"data.tokenizer": "byte"}, "config.data.tokenizer='byte'"),
    ({"data.tokenizer": "bpe:256"}, "config.data.tokenizer='bpe:256'"),
    ({"data.eval_fraction": 1.0}, "config.data.eval_fraction=1.0"),
    ({"data.packing": True, "data.shuffle": "random"}, "config.data.packing=True"),
    ({"data.withhold": True}, "config.data.withhold=True"),
    ({"data.document_bytes": 8}, "config.data.document_bytes=8"),
    ({"data.document_bytes": 64, "data.source": "tokens:x"}, "config.data.document_bytes=64"),
    ({"data.subset": "x"}, "config.data.split='tail'"),
    ({"data.shuffle": "buffer"}, "config.data.shuffle='buffer'"),
    ({"data.shuffle": "buffer", "data.source": "tokens:x"}, "config.data.source='tokens:x'"),
    ({"data.shuffle": "buffer", "data.tokenizer": "chars"}, "config.data.tokenizer='chars'"),
    ({"data.shuffle": "buffer", "data.subset": "x"}, "config.data.subset='x'"),
    ({"data.cache_dir": "/dev/null/cache"}, "config.data.cache_dir='/dev/null/cache'"),
]

RUNS = [
    ({"train_flops": 1e9}, "config.train_flops"),
    ({"steps": 0, "train_flops": 1.0}, "config.train_flops"),
    ({"train.accumulation": 3}, "config.train.accumulation=3"),
    ({"train.loss_chunk": -1}, "config.train.loss_chunk=-1"),
    ({"data.batch_size": 12}, "config.data.batch_size=12"),
    ({"evaluate.batch_size": 3}, "config.evaluate.batch_size=3"),
    ({"evaluate.repeated_rows": 8, "data.seq_len": 3}, "config.evaluate.repeated_rows=8"),
    ({"optim.learning_rate": -1e-3}, "config.optim.learning_rate=-0.001"),
    ({"optim.learning_rate": float("nan")}, "config.optim.learning_rate=nan"),
    ({"optim.b1": 1.0}, "config.optim.b1=1.0"),
    ({"optim.eps": 0.0}, "config.optim.eps=0.0"),
    ({"optim.schedule.final_fraction": 1.5}, "config.optim.schedule.final_fraction=1.5"),
    (
        {"steps": 100, "optim.schedule.warmup_steps": 9, "optim.schedule.decay_steps": 8},
        "config.optim.schedule.warmup_steps=9",
    ),
    (
        {
            "optim.schedule.kind": "wsd",
            "optim.schedule.warmup_fraction": 0.9,
            "optim.schedule.warmup_steps": 0,
        },
        "config.optim.schedule",
    ),
    (
        {"optim.name": "schedule_free_adamw", "model.depth_routing.causal": "aux_loss"},
        "config.optim.schedule.kind='cosine'",
    ),
    ({"optim.name": "schedule_free_adamw"}, "config.optim.name='schedule_free_adamw'"),
    (
        {
            "optim.name": "schedule_free_adamw",
            "model.depth_routing.causal": "aux_loss",
            "optim.b1": 0.0,
            "optim.schedule.kind": "constant",
        },
        "config.optim.b1=0.0",
    ),
    ({"optim.decay": ".*/kernal"}, "config.optim.decay='.*/kernal'"),
    ({"optim.frozen": ".*"}, "config.optim.frozen='.*'"),
    ({"optim.frozen": "("}, "config.optim.frozen='('"),
    ({"optim.lr_multipliers": ((".*/bias",),)}, "config.optim.lr_multipliers[0]"),
    ({"optim.lr_multipliers": ((".*/bias", -1.0),)}, "config.optim.lr_multipliers[0]"),
    ({"optim.lr_multipliers": ((".*/kernel", 1.0), ("x", 2.0))}, "config.optim.lr_multipliers[1]"),
    ({"mesh.data": -1, "mesh.fsdp": -1}, "config.mesh"),
    ({"mesh.data": 0}, "config.mesh"),
    ({"mesh.data": 4}, "config.mesh"),
    ({"mesh.tensor": 3}, "config.mesh"),
    ({"mesh.data": 8, "mesh.dcn_data": 2}, "config.mesh.dcn_data=2"),
    ({"mesh.data": 1, "mesh.sequence": 8, "data.seq_len": 36}, "config.data.seq_len=36"),
    (
        {"mesh.data": 1, "mesh.fsdp": 8, "model.width": 20, "model.attention.head_dim": 8},
        "20 is not a multiple",
    ),
    ({"init.run": "nowhere"}, "config.init.run='nowhere'"),
    ({"model.depth_routing.capacity_stages": ((0.5, 1.5),)}, "capacity_stages"),
    ({"model.depth_routing.capacity_stages": ((0.6, 0.5), (0.3, 0.5))}, "capacity_stages"),
    ({"model.depth_routing.capacity_stages": ((1.0, 0.5),)}, "capacity_stages"),
    ({"model.depth_routing.capacity_stages": ((0.5,),)}, "capacity_stages"),
    ({"sample.every": 1, "sample.prompt": "a" * 17}, "config.sample.prompt"),
    ({"sample.temperature": float("nan")}, "config.sample.temperature=nan"),
    ({"sample.top_p": 0.0}, "config.sample.top_p=0.0"),
    ({"sample.max_new_tokens": 0}, "config.sample.max_new_tokens=0"),
    ({"data.source": "tokens:ftp://b/t"}, "config.data.source='tokens:ftp://b/t'"),
    ({"init.run": "s3://b/run"}, "config.init.run=s3://b/run"),
    ({"data.cache_dir": "gs://b/c"}, "config.data.cache_dir=gs://b/c"),
]

STUDIES = []
