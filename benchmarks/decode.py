"""Decoding speed: tokens/s of greedy sampling, a dense stack and its Mixture-of-Depths twin.

    python -m benchmarks.decode [--quick] [--width=512] [--depth=8] [--context=1024] [--rounds=3]

Both models are sampled in turns in one process, with efx's sampler. The cost of a routed stack
depends on how many tokens it routes, so the routers are set to route the fraction --capacity of
random text; the fraction of the sampled text that they route is printed too. Weights are random,
apart from large embeddings, without which greedy text would repeat one token. Times are wall-clock
and, in brackets, CPU time of the process, which depends less on other work on the machine. Prefill
is the time of reading the prompts.

If the extra `interop` is installed, Hugging Face transformers' Llama of the same size takes turns
too (`--no-transformers` leaves it out): greedy `generate` with its cache, without prefill.
"""

import argparse
import importlib.util
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks.common import command
from efx import models
from efx.configs import common
from efx.errors import UsageError
from efx.routing.calibrate import calibrate
from efx.sampling import STREAM, Sampler


def build(kind, arguments):
    """(model, variables) of kind "none" or "mod"; the latter routes `capacity` of random text."""
    config = common.base()
    changes = {
        "preset": "llama",
        "width": arguments.width,
        "depth": arguments.depth,
        "attention.num_heads": arguments.heads,
        "depth_routing.kind": kind,
        "depth_routing.capacity": arguments.capacity,
    }
    common.apply(config, {f"model.{name}": value for name, value in changes.items()})
    model = models.build(
        config.model, vocab_size=arguments.vocab, context=arguments.context, dtype=arguments.dtype
    )
    variables = nn.unbox(jax.jit(lambda key: models.init(model, key))(jax.random.key(0)))
    params, state = variables.pop("params"), variables
    params["embed"]["embedding"] *= 30
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(0, arguments.vocab, (4, min(arguments.context, 256)))
    batches = [{"inputs": jnp.asarray(tokens_BT, jnp.int32)}]
    return model, {"params": params, **calibrate(model, params, state, batches)}


def measure(sampler, variables, arguments):
    """(tokens/s, tokens per second of CPU time, stats) of one run."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, arguments.vocab, (sampler.batch_size, arguments.prompt)).tolist()
    seeds = range(sampler.batch_size)
    cpu, last_time = 0.0, None
    for _ in sampler.tokens(variables, prompts, max_new_tokens=arguments.tokens, seeds=seeds):
        # The first piece includes the prefill, which is not counted.
        cpu += time.process_time() - last_time if last_time else 0.0
        last_time = time.process_time()
    stats = sampler.stats
    decoded = stats["new_tokens"] - STREAM * sampler.batch_size
    return stats["tokens_per_second"], decoded / max(cpu, 1e-9), stats


def has_transformers():
    """Whether transformers and PyTorch are installed."""
    return all(importlib.util.find_spec(name) for name in ("transformers", "torch"))


class Transformers:
    """Hugging Face's Llama of the same shapes, greedy.

    Args:
      model: the dense one. device: of PyTorch, "cpu" or "cuda".
      cache: "static", which PyTorch compiles for on a GPU, or None for the default.
    """

    def __init__(self, model, arguments, device="cpu", cache=None):
        import torch
        import transformers

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        block = model.specs()[0].block
        config = transformers.LlamaConfig(
            vocab_size=arguments.vocab,
            hidden_size=arguments.width,
            intermediate_size=block.hidden,
            num_hidden_layers=arguments.depth,
            num_attention_heads=arguments.heads,
            num_key_value_heads=block.attention.num_kv_heads,
            max_position_embeddings=arguments.context,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.torch, self.device, self.cache = torch, device, cache
        self.model = transformers.LlamaForCausalLM(config).eval()
        self.model = self.model.to(device, getattr(torch, arguments.dtype))

    def measure(self, batch, arguments):
        rng = np.random.default_rng(1)
        prompts = rng.integers(0, arguments.vocab, (batch, arguments.prompt))
        ids = self.torch.as_tensor(prompts, device=self.device)

        def generate(count):
            wall, cpu = time.perf_counter(), time.process_time()
            with self.torch.inference_mode():
                text = self.model.generate(
                    ids,
                    attention_mask=self.torch.ones_like(ids),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                    cache_implementation=self.cache,
                )
                text.cpu()  # waits for a GPU
            return time.perf_counter() - wall, time.process_time() - cpu

        one_token, all_tokens = generate(1), generate(arguments.tokens)
        new_tokens = batch * (arguments.tokens - 1)
        wall, cpu = np.subtract(all_tokens, one_token)
        return new_tokens / wall, new_tokens / cpu


def best_of_rounds(built, others, batch, arguments):
    """{name: (tokens/s, tokens per second of CPU time, stats)}: the best of so many rounds, in
    which all take turns.

    Args:
      built: {name: (model, variables)}. others: {name: `Transformers`}, whose stats are {}.
    """
    best = {}
    samplers = {
        name: Sampler(model, batch_size=batch, temperature=0.0)
        for name, (model, _) in built.items()
    }
    for _ in range(arguments.rounds):
        for name, (_, variables) in built.items():
            wall, cpu, stats = measure(samplers[name], variables, arguments)
            best_so_far = best.get(name, (0.0, 0.0, stats))
            best_prefill = best_so_far[2].get("prefill_seconds", stats["prefill_seconds"])
            stats["prefill_seconds"] = min(stats["prefill_seconds"], best_prefill)
            best[name] = max(wall, best_so_far[0]), max(cpu, best_so_far[1]), stats
        for name, other in others.items():
            best_so_far = best.get(name, (0.0, 0.0, {}))
            wall, cpu = other.measure(batch, arguments)
            best[name] = max(wall, best_so_far[0]), max(cpu, best_so_far[1]), {}
    return best


@command
def main(argv=None):
    arguments = parse(argv)
    built = {"dense": build("none", arguments), "mod": build("mod", arguments)}
    others = {}
    if not arguments.no_transformers and has_transformers():
        others["transformers"] = Transformers(built["dense"][0], arguments)
    print(
        f"width {arguments.width}, depth {arguments.depth}, context {arguments.context}, "
        f"vocabulary {arguments.vocab}, {arguments.dtype}, {jax.devices()[0].device_kind}; best of "
        f"{arguments.rounds} rounds of {arguments.tokens} tokens a row"
    )
    head = f"{'batch':>5} {'':12} {'tokens/s':>9} {'(CPU)':>9} {'routed':>7} {'cache MB':>9}"
    print(f"{head} {'prefill ms':>10}")
    for batch in arguments.batches:
        best = best_of_rounds(built, others, batch, arguments)
        for name, (wall, cpu, stats) in best.items():
            routed = f"{stats['routed_fraction']:.1%}" if "routed_fraction" in stats else ""
            row = f"{batch:>5} {name:12} {wall:>9.1f} {f'({cpu:.1f})':>9} {routed:>7}"
            if stats:
                row += (
                    f" {stats['cache_bytes'] / 1e6:>9.1f} {1e3 * stats['prefill_seconds']:>10.1f}"
                )
            print(row)
        pairs = ("mod", "dense"), ("dense", "transformers"), ("mod", "transformers")
        for name, baseline in pairs:
            if baseline in best:
                ratios = [best[name][i] / best[baseline][i] for i in (0, 1)]
                text = f"{ratios[0]:>9.2f} {f'({ratios[1]:.2f})':>9}"
                print(f"{batch:>5} {f'{name} / {baseline}':20} {text}", flush=True)


def parse(argv):
    """The flags as `arguments`, which all functions here take."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (
        ("width", 512), ("depth", 8), ("heads", 8), ("context", 1024), ("vocab", 8192),
        ("prompt", 64), ("tokens", 256), ("rounds", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--capacity", type=float, default=0.125)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--quick", action="store_true", help="48 tokens, two rounds")
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    parsed = parser.parse_args(argv)
    if parsed.quick:
        parsed.tokens, parsed.rounds = 48, 2
    if parsed.tokens <= STREAM:
        raise UsageError(
            f"--tokens={parsed.tokens}: the first {STREAM} are not timed, as they come with the"
            " prompt; give it more"
        )
    return parsed


if __name__ == "__main__":
    sys.exit(main())
