"""`--mode=compile`: what is read off a compiled program, the report, and what cannot be asked.

The programs are written by hand in XLA's format, as it prints them for TPUs and GPUs, or compiled
here for fake CPU devices. One small model is compiled for a TPU where libtpu is installed.
"""

# ruff: noqa: E501 -- programs have the lines that XLA gives them

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from efx import main
from efx.ahead_of_time import compile as compile_lib
from efx.ahead_of_time import hlo, topology
from efx.ahead_of_time.report import Compiled, Estimate, Memory, Report
from efx.config import load_config
from efx.data.tokenizers import ByteTokenizer
from efx.errors import UsageError
from efx.flops import causal_pairs
from efx.run_settings import check

# A scan of 5 in a scan of 3 as on a TPU, where trip counts stand in the conditions alone.
LOOPS = """\
HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%compared (p.0: s32[], p.1: s32[]) -> pred[] {
  %p.0 = s32[] parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %gt = pred[] compare(%p.1, %p.0), direction=GT
}

%inner_condition (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]{0}) parameter(0)
  %five = s32[] constant(5)
  %i = s32[] get-tuple-element(%c), index=0
  ROOT %lt = pred[] fusion(%i, %five), kind=kLoop, calls=%compared
}

%inner_body (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %b = (s32[], f32[8]{0:T(128)S(1)}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %y.1 = f32[8]{0:T(128)} get-tuple-element(%b), index=1
  %reduced = f32[8]{0:T(128)} all-reduce(%y.1), channel_id=1, to_apply=%add, metadata={op_name="jit(step)/mlp"}
  %fast = f32[8]{0:T(128)} negate(%reduced), backend_config={"window_config":{"estimated_cycles":"7"}}
  ROOT %t = (s32[], f32[8]{0}) tuple(%j, %fast)
}

%outer_condition (d: (s32[], f32[8])) -> pred[] {
  %bound = s32[] constant(4)
  %d = (s32[], f32[8]{0}) parameter(0)
  %k = s32[] get-tuple-element(%d), index=0
  ROOT %lt.1 = pred[] compare(%k, %bound), direction=LT
}

%outer_body (e: (s32[], f32[8])) -> (s32[], f32[8]) {
  %e = (s32[], f32[8]{0}) parameter(0)
  %zero = s32[] constant(0)
  %y.2 = f32[8]{0} get-tuple-element(%e), index=1
  %start = (s32[], f32[8]{0}) tuple(%zero, %y.2)
  ROOT %inner = (s32[], f32[8]{0}) while(%start), condition=%inner_condition, body=%inner_body
}

ENTRY %main (a: f32[8], /*index=1*/n: s32[]) -> (s32[], f32[8]) {
  %a = f32[8]{0} parameter(0)
  %n = s32[] parameter(1)
  %one = s32[] constant(1)
  %begin = s32[] copy(%one), backend_config={"window_config":{"estimated_cycles":"100"}}
  %sorted = f32[8]{0} sort(%a), dimensions={0}, to_apply=%add
  %init = (s32[], f32[8]{0}) tuple(%begin, %sorted)
  ROOT %outer = (s32[], f32[8]{0}) while(%init), condition=%outer_condition, body=%outer_body
}
"""

PAIR = "  %pair = (s32[], f32[8]{0}) parameter(2)"


def program(body, *computations):
    """A `Program` of an entry with these lines."""
    blocks = [*computations, "ENTRY %main () -> f32[] {\n" + body + "\n}"]
    return hlo.Program("HloModule jit_step\n\n" + "\n\n".join(blocks) + "\n")


ONE_HOST, TWO_HOSTS = [0] * 8, [0] * 4 + [1] * 4


def test_what_is_in_a_loop_runs_as_often_as_the_loop():
    """The bound less the start, times that of the loop around it."""
    step = hlo.Program(LOOPS)
    assert step.unknown_loops == 0
    assert hlo.collectives(step, ONE_HOST) == [
        hlo.Collective("all-reduce", "f32[8]", "jit(step)/mlp", 1, 8, 15, 480)
    ]
    cycles, missing = hlo.estimated_cycles(step)
    assert missing == {"sort": 1}
    slowest = [(o.kind, o.shapes, o.runs, o.time) for o in hlo.operations(cycles)]
    assert slowest == [("negate", "f32[8]", 15, 15 * 7), ("copy", "s32[]", 1, 100)]


@pytest.mark.parametrize(
    "known, unknown",
    [
        ("tuple(%begin, %sorted)", "tuple(%n, %sorted)"),
        ("while(%init)", "while(%pair)"),
        ("compare(%k, %bound), direction=LT", "compare(%k, %bound), direction=NE"),
    ],
)
def test_a_loop_of_unknown_length_counts_once_and_is_told(known, unknown):
    text = LOOPS.replace("%n = s32[] parameter(1)", "%n = s32[] parameter(1)\n" + PAIR)
    step = hlo.Program(text.replace(known, unknown))
    assert step.unknown_loops == 1
    assert hlo.collectives(step, ONE_HOST)[0].runs == 5


def test_xlas_own_trip_count_is_believed():
    note = ', backend_config={"known_trip_count":{"n":"11"}}'
    text = LOOPS.replace("body=%outer_body", f"body=%outer_body{note}")
    assert hlo.collectives(hlo.Program(text), ONE_HOST)[0].runs == 55


@pytest.mark.parametrize("scanned", [6, 1])
def test_a_program_of_this_jax(scanned):
    """Compiled here for eight devices: a sum over devices in a scan, and a gather before it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))

    def step(w, x):
        w = jax.lax.with_sharding_constraint(w, whole)

        def body(carry, _):
            return jnp.tanh(jnp.sum(x, axis=0) @ w + carry), None

        return jax.lax.scan(body, jnp.sum(x, axis=0), length=scanned)[0]

    w = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=split)
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=split)
    program = hlo.Program(jax.jit(step).lower(w, x).compile().as_text())
    found = hlo.collectives(program, ONE_HOST)
    kinds = {c.kind: c for c in found}
    assert kinds["all-gather"].runs == 1 and kinds["all-gather"].bytes == 4 * 16 * 16
    assert kinds["all-reduce"].runs in (1, scanned)


def test_loops_of_this_jax():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(x):
        def body(x, _):
            return jnp.tanh(jax.lax.psum(x, "data")), None

        return jax.lax.scan(body, x, length=6)[0]

    step = jax.shard_map(
        local, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"),
        check_vma=False,
    )  # fmt: skip
    text = jax.jit(step).lower(jnp.zeros((8, 32))).compile().as_text()
    (found,) = hlo.collectives(hlo.Program(text), ONE_HOST)
    assert (found.kind, found.runs, found.bytes) == ("all-reduce", 6, 6 * 4 * 32)


# As TPUs do it: one gather is in the fusion that starts it, in those that it runs beside, and in
# the one that waits for it.
ASYNC = [
    f"""%part.{i} (p.{i}: bf16[1,64]) -> bf16[4,64] {{
  %p.{i} = bf16[1,64]{{1,0}} parameter(0)
  %gather.{i} = bf16[4,64]{{1,0}} all-gather(%p.{i}), channel_id=3, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
  {last}
}}"""
    for i, last in enumerate(
        [
            'ROOT %c.0 = (bf16[4,64]) custom-call(%gather.0), custom_call_target="AsyncCollectiveStart"',
            "ROOT %b.1 = bf16[4,64]{1,0} negate(%gather.1)",
            'ROOT %c.2 = bf16[4,64] custom-call(%gather.2), custom_call_target="AsyncCollectiveDone"',
        ]
    )
]
SCATTER = """%all-reduce-scatter.1 (q: f32[8,16]) -> f32[2,16] {
  %q = f32[8,16]{1,0} parameter(0)
  %whole = f32[8,16]{1,0} all-reduce(%q), channel_id=4
  %zero = s32[] constant(0)
  ROOT %own = f32[2,16]{1,0} dynamic-slice(%whole, %zero, %zero), dynamic_slice_sizes={2,16}
}"""


def test_each_exchange_counts_once():
    step = program(
        """  %w = bf16[1,64]{1,0} parameter(0)
  %g = f32[8,16]{1,0} parameter(1)
  %async-start = bf16[4,64] fusion(%w), kind=kCustom, calls=%part.0
  %beside = bf16[4,64] fusion(%w), kind=kOutput, calls=%part.1
  %async-done = bf16[4,64] fusion(%w), kind=kCustom, calls=%part.2
  %scattered = f32[2,16] fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
  %sum = f32[8,16]{1,0} all-reduce(%g), channel_id=5
  %ags = (bf16[1,64]{1,0}, bf16[4,64]{1,0}) all-gather-start(%w), channel_id=6, dimensions={0}
  %agd = bf16[4,64]{1,0} all-gather-done(%ags)
  %cps = (bf16[1,64]{1,0}, bf16[1,64]{1,0}, u32[], u32[]) collective-permute-start(%w), channel_id=7
  ROOT %cpd = bf16[1,64]{1,0} collective-permute-done(%cps)""",
        *ASYNC,
        SCATTER,
    )
    found = {}
    for c in hlo.collectives(step, ONE_HOST):
        found.setdefault(c.kind, []).append((c.runs, c.bytes))
    assert found == {
        "all-gather": [(2, 2 * 2 * 4 * 64)],  # the asynchronous one and the one with a start
        "all-reduce": [(1, 4 * 8 * 16)],
        "reduce-scatter": [(1, 4 * 8 * 16)],
        "collective-permute": [(1, 2 * 64)],
    }


@pytest.mark.parametrize("attributes, groups", [
    ("channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", "0123 4567"),
    ("replica_groups=[4,2]<=[8], use_global_device_ids=true", "01 23 45 67"),
    ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", "04 15 26 37"),
    ("replica_groups=[4,2]<=[2,2,2]T(2,1,0)", "04 26 15 37"),
    ("replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, to_apply=%sum", "01234567"),
    ("replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}", "0246 1357"),
    ("replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", "0123 4567"),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'c','a'}, metadata={x}", "0415 2637"),
    ("source_target_pairs={{0,4},{4,0},{1,2}}", "04 40 12"),
    ("replica_groups={}, to_apply=%sum", "01234567"),
    ("replica_groups=mesh['a'=8] {'a':(2)4}, to_apply=%sum", "01234567"),  # all, if not known
])  # fmt: skip
def test_groups_of_devices_as_xla_writes_them(attributes, groups):
    found = ["".join(map(str, group)) for group in hlo._groups(f", {attributes}", 8)]
    assert found == groups.split()


@pytest.mark.parametrize("axes, spread", [
    ("a", (2, 1)), ("b", (1, 2)), ("c", (1, 2)), ("ab", (2, 2)), ("bc", (1, 4)), ("abc", (2, 4)),
])  # fmt: skip
def test_over_how_many_hosts_devices_exchange(axes, spread):
    """Of what this JAX compiles: a gather along axes of a mesh whose first one is that of hosts."""
    mesh = jax.make_mesh((2, 2, 2), tuple("abc"), axis_types=(AxisType.Auto,) * 3)
    split = NamedSharding(mesh, PartitionSpec(tuple(axes)))
    gather = jax.jit(
        lambda x: x + 1, in_shardings=split, out_shardings=NamedSharding(mesh, PartitionSpec())
    )
    program = hlo.Program(gather.lower(jnp.zeros((64, 8))).compile().as_text())
    found = [c for c in hlo.collectives(program, TWO_HOSTS) if c.kind == "all-gather"]
    assert [(c.hosts, c.members) for c in found] == [spread]


def test_seconds_of_an_exchange():
    """By the links of a host where it stays there; else by the networks of all that are members
    there, unless the links take longer."""
    chip = topology.Chip("cuda", GIB, 1.0, link=100.0, network=10.0)

    def seconds(kind, hosts, members):
        return chip.seconds(hlo.Collective(kind, "", "", hosts, members, 1, 1000))

    assert seconds("all-gather", 1, 8) == 10 and seconds("all-reduce", 1, 8) == 20
    assert seconds("all-gather", 4, 1) == 100 and seconds("all-gather", 4, 8) == 1000 / 80
    assert seconds("reduce-scatter", 2, 20) == 10 and seconds("all-reduce", 4, 2) == 100
    assert seconds("collective-permute", 2, 1) == seconds("all-to-all", 2, 8) == 100


def test_hosts_of_a_mesh():
    devices = tuple(jax.devices())
    mesh = jax.sharding.Mesh(np.array(devices[::-1]).reshape(2, 4), ("a", "b"))
    gpus, tpus = (topology.Topology("", None, devices, hosts) for hosts in (4, 0))
    assert gpus.hosts_of(mesh) == [3, 3, 2, 2, 1, 1, 0, 0] and tpus.hosts_of(mesh) == [0] * 8


SPLASH = """  %m = s8[1,4,4]{{2,1,0}} parameter(0)
  %q = bf16[2,3,2048,64]{{3,2,1,0}} parameter(1)
  ROOT %k.{name} = bf16[2,3,2048,64] custom-call(%m, %m, %q, %q, %q), custom_call_target="tpu_custom_call", operand_layout_constraints={{s8[1,4,{width}]{{2,1,0}}, s8[1,4,{width}]{{2,1,0}}, bf16[2,3,2048,64]{{3,2,1,0}}, bf16[2,3,2048,64]{{3,2,1,0}}, bf16[2,3,2048,64]{{3,2,1,0}}}}, frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q\\": 512}}"
}}}}, metadata={{op_name="jit(train_step)/attention/{name}/pallas_call"}}, backend_config={{"custom_call_config":{{"body":"AAAA"}}}}"""
CUDNN = """  %q = bf16[2,512,4,64]{{3,2,1,0}} parameter(0)
  ROOT %a = (bf16[2,4,512,64], f32[2,4,512]) custom-call(%q, %q, %q), custom_call_target="{target}", operand_layout_constraints={{bf16[2,512,4,64]{{3,2,1,0}}, bf16[2,512,4,64]{{3,2,1,0}}}}, backend_config={{"cudnn_fmha_backend_config": {{"intermediate_tensor_shape": {{"element_type": "BF16", "dimensions": ["2", "4", "512", "512"], "tuple_shapes": []}}, "mask_type": "{mask}", "sliding_window_length": {window}}}}}"""


@pytest.mark.parametrize(
    "text, name, flops",
    [
        # 10 of 16 blocks of 512 x 512 lie on or below the diagonal, 7 in a window of two blocks.
        (SPLASH.format(name="splash_mha_fwd_residuals", width=4), "splash_mha_fwd",
         2 * 2 * 2 * 3 * 64 * 10 * 512**2),
        (SPLASH.format(name="splash_mha_dkv_no_residuals", width=2), "splash_mha_dkv",
         4 * 2 * 2 * 3 * 64 * 7 * 512**2),
        (CUDNN.format(target="__cudnn$fmhaSoftmax", mask="CAUSAL", window=0),
         "__cudnn$fmhaSoftmax", 2 * 2 * 2 * 4 * 64 * causal_pairs(512)),
        (CUDNN.format(target="__cudnn$fmhaSoftmaxBackward", mask="NO_MASK", window=0),
         "__cudnn$fmhaSoftmaxBackward", 5 * 2 * 2 * 4 * 64 * 512**2),
        (CUDNN.format(target="__cudnn$fmhaSoftmax", mask="CAUSAL", window=64),
         "__cudnn$fmhaSoftmax", 2 * 2 * 2 * 4 * 64 * causal_pairs(512, 64)),
        (SPLASH.format(name="another", width=4), "another", None),
    ],
)  # fmt: skip
def test_flops_of_kernels(text, name, flops):
    (call,) = hlo.kernels(program(text))
    assert (call.name, call.runs) == (name, 1)
    assert call.flops == flops


def test_the_roofline_counts_products_and_memory():
    """A product is bound by its FLOPs, a sum by its memory; of stacked arrays only the layer that
    is read or written counts, and of what a scatter adds to where it lies, the rows."""
    gemm = """%gemm (l: bf16[128,256], r: bf16[256,64]) -> bf16[128,64] {
  %l = bf16[128,256]{1,0} parameter(0)
  %r = bf16[256,64]{1,0} parameter(1)
  ROOT %d = bf16[128,64]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""
    layer = """%layer (s: f32[10,32], i: s32[]) -> f32[10,32] {
  %s = f32[10,32]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %row = f32[1,32]{1,0} dynamic-slice(%s, %i, %zero.1), dynamic_slice_sizes={1,32}
  ROOT %put = f32[10,32]{1,0} dynamic-update-slice(%s, %row, %i, %zero.1)
}"""
    added = """%added (a: f32[100,8], j: s32[3], u: f32[3,8]) -> f32[100,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %j = s32[3]{0} parameter(1)
  %u = f32[3,8]{1,0} parameter(2)
  ROOT %rows = f32[100,8]{1,0} scatter(%a, %j, %u), to_apply=%sum
}"""
    made = """%made (k: s32[3], v: f32[3,8]) -> f32[100,8] {
  %k = s32[3]{0} parameter(0)
  %v = f32[3,8]{1,0} parameter(1)
  %zero.2 = f32[] constant(0)
  %zeros = f32[100,8]{1,0} broadcast(%zero.2), dimensions={}
  ROOT %rows.1 = f32[100,8]{1,0} scatter(%zeros, %k, %v), to_apply=%sum
}"""
    step = program(
        """  %l.1 = bf16[128,256]{1,0} parameter(0)
  %r.1 = bf16[256,64]{1,0} parameter(1)
  %s.1 = f32[10,32]{1,0} parameter(2)
  %i.1 = s32[] parameter(3)
  %product = bf16[128,64]{1,0} fusion(%l.1, %r.1), kind=kCustom, calls=%gemm
  %stack = f32[10,32]{1,0} fusion(%s.1, %i.1), kind=kLoop, calls=%layer
  %a.1 = f32[100,8]{1,0} parameter(4)
  %j.1 = s32[3]{0} parameter(5)
  %u.1 = f32[3,8]{1,0} parameter(6)
  %in_place = f32[100,8]{1,0} fusion(%a.1, %j.1, %u.1), kind=kInput, calls=%added
  %anew = f32[100,8]{1,0} fusion(%j.1, %u.1), kind=kInput, calls=%made
  ROOT %twice = bf16[128,64]{1,0} add(%product, %product)""",
        gemm,
        layer,
        added,
        made,
    )
    flops, slow = 2 * 128 * 64 * 256, 1e30
    bytes_of_product = 2 * (128 * 256 + 256 * 64 + 128 * 64)
    bytes_of_stack = 4 + 2 * 4 * 32
    bytes_of_sum = 3 * 2 * 128 * 64
    row = 4 * 8
    in_place = 3 * 4 + 3 * row + 2 * 3 * row
    anew = 3 * 4 + 3 * row + 100 * row
    others = bytes_of_stack + bytes_of_sum + in_place + anew

    def seconds(peak, bandwidth):
        return sum(time for _, time in hlo.roofline(step, peak, bandwidth))

    assert seconds(1.0, slow) == flops
    assert seconds(slow, 1.0) == bytes_of_product + others
    both = seconds(flops / bytes_of_product / 10, 1.0)
    assert both == pytest.approx(10 * bytes_of_product + others)


# ---- the report ---------------------------------------------------------------------------------

GIB = 2**30


def report(**changes):
    memory = Memory(chip=16 * GIB, arguments=GIB, temporaries=6 * GIB)
    slow = hlo.Operation("fusion", "bf16[8,8]", "jit(f)/while/body/closed_call/mlp/up", 24, 0.06)
    estimate = Estimate("the compiler's cycles", 0.08, 0.02, 0.05, 0.04, {"sort": 12}, [slow])
    moved = [
        hlo.Collective(
            "all-gather", "bf16[8,8]", "jit(f)/while/body/closed_call/mlp/up", 1, 4, 24, 48_000_000
        ),
        hlo.Collective("all-gather", "bf16[4,8]", "", 2, 2, 24, 2_000_000),
        hlo.Collective("all-reduce", "f32[]", "loss", 1, 4, 1, 4),
    ]
    kernels = [hlo.KernelCall("splash_mha_fwd", 24, 1e9), hlo.KernelCall("splash_mha_fwd", 2, 1e9)]
    fields = dict(
        topology="v5e:2x2", device="TPU v5 lite", devices=4, mesh={"fsdp": 4},
        parameters=1_000_000, tokens=4096, ledger_flops=4e12, executed_flops=5e12, memory=memory,
        estimate=estimate, collectives=moved, kernels=kernels,
    )  # fmt: skip
    return Report(**(fields | changes))


def test_the_report_says_all_of_it():
    text = report().text()
    for words in (
        "v5e:2x2: 4 x TPU v5 lite; mesh fsdp 4",
        "fits: needs 7.00 GiB of 16.00 GiB a chip, 9.00 GiB to spare",
        "4.00 TFLOPs by the ledger, 5.00 TFLOPs executed",
        "kernels: splash_mha_fwd x 26",
        "all-gather x 48, 50 MB a chip",
        "all-reduce x 1, 0 MB a chip",
        "all-gather x 24, 48 MB: bf16[8,8] mlp/up",
        "all-gather x 24, 2 MB among 2 hosts: bf16[4,8]",
        "80.0 ms by the compiler's cycles + 20.0 ms of kernels",
        "75% fusion x 24: bf16[8,8] mlp/up",
        "communication 50.0 ms",
        "40% with communication overlapped, 27% without overlap",
        "not in the estimate: sort x 12",
    ):
        assert words in text, text
    kept = json.loads(json.dumps(report().as_dict()))
    assert kept["memory"]["fits"] and kept["collectives_by_kind"]["all-gather"] == [48, 50_000_000]
    assert kept["estimate"]["step"] == 0.1 and kept["kernel_runs"] == {"splash_mha_fwd": 26}
    slow = report(estimate=dataclasses.replace(report().estimate, communication=0.2))
    assert slow.estimate.step == 0.2 and slow.estimate.mfu == pytest.approx(0.2)
    assert "2 loops of unknown length" in report(unknown_loops=2).text()
    assert "plain XLA, no kernel" in report(kernels=[]).text()
    assert report(advice="cuts 24 into 8").text().splitlines()[1].strip() == "cuts 24 into 8"


def test_what_does_not_fit():
    refused = compile_lib._refused(
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space"
        " hbm. Used 17.90G of 15.75G hbm. Exceeded hbm capacity by 2.15G."
    )
    text = report(memory=refused, estimate=None, collectives=[], kernels=[]).text()
    assert text.endswith("does not fit: needs 17.90 GiB of 15.75 GiB a chip, 2.15 GiB too much")
    other = compile_lib._refused(
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO"
        " temporaries (1.5T) exceeds available HBM (15.75G).",
        beside=GIB,
    )
    assert other.needed == 1537 * GIB and not other.fits
    assert compile_lib._refused("INTERNAL: no luck") is None
    gpu = Memory(chip=80 * GIB, arguments=70 * GIB, fraction=0.75)
    assert (
        gpu.fits
        and "reserves only 75% of a GPU's memory" in gpu.verdict()
        and "0.89" in gpu.verdict()
    )
    assert not Memory(chip=80 * GIB, arguments=81 * GIB).fits


def part(**changes):
    memory = Memory(chip=16 * GIB, arguments=GIB, temporaries=6 * GIB, beside=3 * GIB)
    fields = dict(
        name="evaluation", of="a batch of 8 rows", executed_flops=2e12, memory=memory,
        estimate=report().estimate, collectives=report().collectives, unknown_loops=1,
    )  # fmt: skip
    return Compiled(**(fields | changes))


def test_the_report_of_a_program_beside_the_training_step():
    text = part().text()
    for words in (
        "evaluation, a batch of 8 rows",
        "fits: needs 10.00 GiB of 16.00 GiB a chip, 6.00 GiB to spare",
        "beside it 3.00 GiB of the training; arguments 1.00 GiB, temporaries 6.00 GiB\n",
        "exchanged     all-gather x 48, 50 MB a chip; all-reduce x 1, 0 MB a chip",
        "100.0 ms for 2.00 TFLOPs executed, communication 50.0 ms if not overlapped",
        "not in the estimate: sort x 12",
        "1 loop of unknown length counts as one trip",
    ):
        assert words in text, text
    kept = json.loads(json.dumps(part().as_dict()))
    assert kept["memory"]["needed"] == 10 * GIB and kept["memory"]["fits"]
    assert kept["estimate"]["step"] == 0.1 and "mfu" not in kept["estimate"]
    assert kept["collectives_by_kind"]["all-gather"] == [48, 50_000_000]
    alone = part(collectives=[], estimate=dataclasses.replace(part().estimate, communication=0.0))
    assert "exchanged     nothing" in alone.text() and "hides" not in alone.text()
    too_much = Memory(chip=16 * GIB, refused=17 * GIB, beside=GIB)
    assert part(memory=too_much, estimate=None).text().endswith(
        "does not fit: needs 18.00 GiB of 16.00 GiB a chip, 2.00 GiB too much\n"
        "              beside it 1.00 GiB of the training"
    )  # fmt: skip


def test_steps_of_all_stages_are_compiled(monkeypatch):
    """That of the last stage alone said that a run fits whose first steps compute all tokens."""
    here = topology.Topology("here", topology.CHIPS["v5e"], tuple(jax.devices()[:1]), 0)
    monkeypatch.setattr(topology, "describe", lambda name: here)
    monkeypatch.setattr(compile_lib.flops, "device_peak", lambda *of: 1e12)
    traced = []

    def trace_step(training, model):
        traced.append(model.config.depth_routing.capacity)

    def compiled(run, report, trace, *of, **options):
        if report.name.startswith("training"):
            trace()

    monkeypatch.setattr(compile_lib.build.Training, "trace_step", trace_step)
    monkeypatch.setattr(compile_lib._Run, "_compile", compiled)
    stages = {
        "model.depth_routing.capacity": 0.25,
        "model.depth_routing.capacity_stages": ((0.2, 1.0), (0.5, 0.5)),
        "model.width": 32, "model.attention.num_heads": 2, "data.seq_len": 16, "sample.every": 0,
    }  # fmt: skip
    config = load_config("mod", stages)
    last, first, second, *rest = compile_lib.compile_programs(config, "here", 45)
    assert traced == [0.25, 1.0, 0.5]
    assert first.name == "training step at capacity 1"
    assert second.name == "training step at capacity 0.5"
    assert first.executed_flops > second.executed_flops > last.executed_flops > 0
    assert rest and all(program.name.startswith("evaluation") for program in rest)


def test_all_programs_are_told_and_what_is_not_compiled_is_an_error(monkeypatch, capsys):
    """Each as soon as it is there, as text; and the status is that of bad input."""
    lost = dict(memory=None, estimate=None, collectives=[], error="Refused: no luck")
    programs = [report(), part(**lost), part(name="sampling: prefill")]
    monkeypatch.setattr(compile_lib, "compile_programs", lambda *of: iter(programs))
    config, missed = load_config("mod", {}), "--topology=v5e:2x2: not compiled: evaluation$"
    with pytest.raises(UsageError, match=missed):
        compile_lib.compile_and_report(config, "v5e:2x2", vocab_size=7)
    said = capsys.readouterr().out
    assert said.startswith("v5e:2x2: 4 x TPU") and said.endswith("nothing was run.\n")
    assert "evaluation, a batch of 8 rows\nnot compiled  Refused: no luck\n" in said
    assert said.count("fits: needs") == 2
    with pytest.raises(UsageError, match=missed):
        compile_lib.compile_and_report(config, "v5e:2x2", vocab_size=7, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 4 and found["memory"]["fits"]
    assert [program["error"] for program in found["programs"]] == ["Refused: no luck", ""]
    assert found["programs"][0]["memory"] is None
    monkeypatch.setattr(
        compile_lib, "compile_programs", lambda *of: iter([report(**lost), *programs[2:]])
    )
    with pytest.raises(UsageError, match="not compiled: training step$"):
        compile_lib.compile_and_report(config, "v5e:2x2", vocab_size=7)
    assert "a token\nnot compiled  Refused: no luck\n" in capsys.readouterr().out


# ---- the command line ---------------------------------------------------------------------------


def call(root, monkeypatch, *arguments):
    monkeypatch.chdir(root)
    return main.main(["efx", "--mode=compile", *arguments])


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--config=mod"], "--topology is missing"),
        (["--topology=v5e:2x2"], "--config is missing"),
        (["--config=mod", "--topology=v5e"], "--topology=v5e: expected CHIP:SIZES"),
        (["--config=mod", "--topology=v5e:2x0"], "--topology=v5e:2x0: expected CHIP:SIZES"),
        (["--config=mod", "--topology=h10:1x1x8"], "h10 is not one of v5e, .*did you mean 'h100'"),
        (["--config=mod", "--topology=h100:8"], "--topology=h100:8: expected slices x hosts x GPUs"),
        (["--config=mod", "--topology=v5e:2x2", "--vocab_size=0"], "--vocab_size=0: must be"),
        (["--config=mod", "--topology=v5e:2x2", "--step=3"], "--step goes with --mode=evaluate"),
        (["--config=mod", "--topology=v5e:2x2", "--config.data.tokenizer=chars"],
         "config.data.tokenizer='chars': .*set --vocab_size"),
    ],
)  # fmt: skip
def test_bad_command_lines(root, monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(main, "start_jax", lambda values: None)
    assert call(root, monkeypatch, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("efx: error: ") and re.search(words, line), line


def test_flags_of_compiling_go_with_it_alone(root, monkeypatch, capsys):
    monkeypatch.chdir(root)
    monkeypatch.delattr(main, "start_jax")  # it must not come that far
    assert main.main(["efx", "--config=mod", "--workdir=x", "--topology=v5e:2x2"]) == 2
    assert "--topology goes with --mode=compile, not train" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, module, extra", [("v5e:2x2", "libtpu", "tpu"), ("h100:1x1x8", "jax_plugins", "cuda12")]
)
def test_a_missing_compiler_names_its_extra(name, module, extra, monkeypatch):
    if module == "libtpu":
        monkeypatch.setattr(topology, "find_spec", lambda name: None)
    elif find_spec(module):
        pytest.skip("JAX's plugin for GPUs is installed")
    with pytest.raises(UsageError, match=rf"--topology={name}: .*install the extra `{extra}`"):
        topology.describe(name)


def test_ctrl_c_does_not_wait_for_the_compiler(root):
    """It waited for minutes: the compiler does not return to Python, whose handler has to run."""
    code = """
import hashlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell with & has it ignored
from efx import main
from efx.ahead_of_time import compile

class Lowered:
    def compile(self):
        print("begun", flush=True)
        hashlib.pbkdf2_hmac("sha1", b"", b"", 2**31 - 1)

main.run = lambda argv: compile._compiled(Lowered())
sys.exit(main.command())
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130 and "efx: interrupted" in said


def test_ids_of_tokenizers(root, monkeypatch, tmp_path):
    monkeypatch.chdir(root)
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    for tokenizer, size in (("bytes", 257), ("bpe:4000", 4000), (tmp_path / "tokenizer.json", 257)):
        config = check(load_config("mod", {"data.tokenizer": str(tokenizer)}))
        assert compile_lib._vocab_size(config, None) == size
    monkeypatch.setattr(
        compile_lib.runfolder, "saved_tokenizer", lambda folder: folder / "tokenizer.json"
    )
    config = check(load_config("mod", {"data.tokenizer": "chars"}))
    assert compile_lib._vocab_size(config, tmp_path) == 257


def test_a_small_model_for_a_tpu(root):
    """The whole way, where libtpu is installed: a MoD model split over four chips."""
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (extra tpu)")
    small = {
        "model.width": 128, "model.depth": 4, "model.attention.num_heads": 2, "data.seq_len": 128,
        "data.batch_size": 8, "evaluate.batch_size": 8, "train.dtype": "bfloat16", "mesh.data": 1,
        "mesh.fsdp": -1, "model.scan_layers": True,
    }  # fmt: skip
    given = [f"--config.{key}={value}" for key, value in small.items()]
    command = [sys.executable, "-m", "efx.main", "--config=mod", "--mode=compile", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [*command, "--topology=v5e:2x2", *given],
        cwd=root, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["devices"] == 4 and found["mesh"] == {"fsdp": 4} and found["memory"]["fits"]
    assert found["memory"]["arguments"] > 12 * found["parameters"] / 4
    assert found["kernel_runs"] == {"splash_mha_fwd": 4, "splash_mha_dq": 4, "splash_mha_dkv": 4}
    assert (
        found["advice"] == "" and found["unknown_loops"] == 0 and found["estimate"]["compute"] > 0
    )
    assert found["collectives_by_kind"]["all-reduce"][0] > 0
    programs = {program["name"]: program for program in found["programs"]}
    assert [*programs] == [
        "evaluation with causal routing", "evaluation with topk routing",
        "sampling: copies of the parameters", "sampling: prefill", "sampling: decoding",
    ]  # fmt: skip
    for name, program in programs.items():
        memory = program["memory"]
        assert memory["fits"] and program["error"] == ""
        # All of the optimiser's state is there meanwhile, and of the parameters at least a copy.
        assert memory["beside"] > 8 * found["parameters"] / 4
        assert memory["needed"] > 12 * found["parameters"] / 4
        if program["estimate"]:
            assert program["estimate"]["step"] > 0 and program["collectives_by_kind"], name
    one, all_of = (programs[f"sampling: {name}"] for name in ("decoding", "prefill"))
    assert one["executed_flops"] < all_of["executed_flops"] < found["executed_flops"]
    assert programs["evaluation with causal routing"]["kernel_runs"] == {"splash_mha_fwd": 4}


# Prints, of the programs that sample, the temporary memory of each and the bytes of all keys of a block.
PRODUCTS = """
import json
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from efx import flops
from efx.ahead_of_time import hlo, topology

target, found = topology.describe("v5e:2x2"), {}
device = target.devices[0]
square = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
for precision in ("default", "highest"):
    product = jax.jit(
        lambda x, y: jnp.matmul(x, y, precision=precision),
        in_shardings=SingleDeviceSharding(device),
        out_shardings=SingleDeviceSharding(device),
    )
    program = hlo.Program(product.lower(square, square).compile().as_text())
    seconds = sum(c for _, c in hlo.estimated_cycles(program)[0]) / target.chip.clock
    found[precision] = 2 * 4096**3 / seconds / flops.device_peak("float32", device)
print(json.dumps(found))
"""


def test_products_of_float32_on_a_tpu_are_below_its_peak(root):
    """By default they are made in one pass of bfloat16, as those of the models are."""
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (extra tpu)")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS],
        cwd=root,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 1 / 3 < found["default"] < 1 and found["highest"] < found["default"] / 2, found


SAMPLING = """\
import json
import jax
from efx import models, sample, sharding
from efx.ahead_of_time import topology
from efx.config import load_config
config = load_config("mod", {"model.width": 768, "model.attention.num_heads": 12, "model.depth": 2})
model = models.build(config.model, vocab_size=512, context=8192, dtype="bfloat16")
mesh = sharding.make_mesh(
    dict.fromkeys(sharding.MESH_AXES, 1), topology.describe("v5e:2x2").devices[:1]
)
rules = sharding.unsplit(sharding.DEFAULT_RULES, "batch", "length")
program = sample._Program(model, 8, 8192, 64, True, 0, rules)
variables = models.unboxed_shapes(model)
of_prefill, of_decode = program.shapes_of_prefill(variables), program.shapes_of_decode(variables)
used = {}
for name, shapes in ("prefill_first", of_prefill), ("prefill", of_prefill), ("decode", of_decode):
    whole = sharding.replicated(mesh)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes
    )
    with sharding.use(mesh, rules):
        call = jax.jit(getattr(program, name), donate_argnums=(1, 2), out_shardings=whole)
        used[name] = call.lower(*shapes).compile().memory_analysis().temp_size_in_bytes
largest = max(x.size * x.dtype.itemsize for x in jax.tree.leaves(program.room()[0]))
print(json.dumps([used, largest]))
"""


def test_sampling_on_a_tpu_does_not_move_the_cache(root):
    """No program has room for a copy of a block's keys or values."""
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (extra tpu)")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", SAMPLING], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    used, keys = json.loads(done.stdout.splitlines()[-1])
    assert used.keys() == {"prefill_first", "prefill", "decode"}
    assert max(used.values()) < keys / 2, (used, keys)


# Prints the kinds and shapes of what two layers exchange backwards, whose parts have 128 columns or rows.
GRADIENTS = """\
import json
import jax
import jax.numpy as jnp
from flax import linen as nn
from efx import sharding
from efx.ahead_of_time import hlo, topology
from efx.layers.linear import Linear
class Layers(nn.Module):
    @nn.compact
    def __call__(self, x_BTD):
        x_BTF = Linear(1368, ("embed", "mlp"), 0.1, dtype=jnp.bfloat16)(x_BTD)
        return Linear(512, ("mlp", "embed"), 0.1, dtype=jnp.bfloat16)(jax.nn.gelu(x_BTF))
def loss(params, x_BTD):
    return jnp.sum(jnp.square(Layers().apply(params, x_BTD).astype(jnp.float32)))
target, rules = topology.describe("v5e:4x4"), sharding.DEFAULT_RULES
sizes = dict.fromkeys(sharding.MESH_AXES, 1) | {"data": 4, "fsdp": 4}
mesh = sharding.make_mesh(sizes, target.devices)
with sharding.use(mesh, rules):
    batch = sharding.batch_sharding(mesh, rules)
    x_BTD = jax.ShapeDtypeStruct((32, 512, 512), jnp.bfloat16, sharding=batch)
    boxed = jax.eval_shape(lambda x: Layers().init(jax.random.key(0), x), x_BTD)
    lie = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
    shapes = jax.eval_shape(lambda x: nn.unbox(Layers().init(jax.random.key(0), x)), x_BTD)
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, lie
    )
    compiled = jax.jit(jax.grad(loss), out_shardings=lie).lower(shapes, x_BTD).compile()
found = hlo.collectives(hlo.Program(compiled.as_text()), target.hosts_of(mesh))
print(json.dumps([[c.kind, c.shapes] for c in found]))
"""


def test_gradients_of_layers_are_scattered_on_a_tpu(root):
    """Devices exchange sums of their own parts, of a gradient of which each has 128 rows as of one
    of which each has 128 columns, and everything of no gradient."""
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (extra tpu)")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", GRADIENTS], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(shapes for kind, shapes in found if kind == "reduce-scatter") == [
        "bf16[1368,512]", "bf16[512,1368]",
    ]  # fmt: skip
    summed = [shapes for kind, shapes in found if kind == "all-reduce"]
    assert summed and not any("1368,512" in shapes or "512,1368" in shapes for shapes in summed)


def test_splash_compiles_with_the_libraries_that_are_here(root):
    """What of it a new release of JAX breaks shows here."""
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (extra tpu)")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "benchmarks.compiled_kernels"]
    command += ["--targets", "v5e", "--kernels", "splash", "--masks", "grouped"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "v5e splash: 2 of 4 compiled" in done.stdout  # others it refuses
