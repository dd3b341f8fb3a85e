"""A `Subject` of a PyTorch module, with its parts by hooks, and of a folder of transformers."""

import contextlib
import dataclasses
import inspect

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from efx.certify.properties import LENGTH, Subject, random_tokens, rows_of
from efx.errors import UsageError, first_line


def _tensor(x):
    return torch.from_numpy(np.asarray(x, np.int64))


def _first(x):
    """The first tensor of the output or of the arguments of a module; None without one."""
    values = (x,) if torch.is_tensor(x) else x if isinstance(x, (tuple, list)) else ()
    return next((value for value in values if torch.is_tensor(value)), None)


def _replaced(output, x):
    """The output of a module with x in place of its first tensor."""
    return x if torch.is_tensor(output) else type(output)((x, *output[1:]))


def count_flops(function):
    """FLOPs of the products that a call executes."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function()
    return counter.get_total_flops()


def of_callable(function, vocab_size, dtype="float32"):
    """The `Subject` of (tokens [B, T] int64) -> logits; with parts if it is a module."""

    def logits(tokens_BT):
        with torch.no_grad():
            return function(_tensor(tokens_BT))

    subject = Subject(logits, vocab_size, dtype=dtype, count_flops=count_flops)
    return with_parts(subject, function) if isinstance(function, nn.Module) else subject


def with_parts(subject, model):
    """The `Subject` with the parts of a module.

    Layers are the entries of lists of modules that map states [B, T, D] to states of this shape;
    their parts are the modules in them that return states and have matrices; and experts.
    """
    names = {module: name for name, module in model.named_modules()}
    shapes, handles = {}, []

    def record(module, args, kwargs, output):
        x, y = _first(args), _first(output)
        x = kwargs.get("hidden_states") if x is None else x
        if x is not None and y is not None and y.ndim == 3:
            shapes[module] = x.shape, y.shape

    handles = [m.register_forward_hook(record, with_kwargs=True) for m in names]
    subject.compute(random_tokens(subject, 0, batch=2))
    for handle in handles:
        handle.remove()
    parts = {}
    for stack in (m for m in names if isinstance(m, nn.ModuleList)):
        for layer in stack:
            state, out = shapes.get(layer, (None, ()))
            if state != out:
                continue
            increments = [
                module
                for module in layer.children()
                if shapes.get(module, ((), ()))[1] == state
                and any(p.ndim > 1 for p in module.parameters())
            ]
            parts[names[layer]] = [names[module] for module in increments]
            parts |= {names[module]: () for module in increments}
            for module in layer.modules():
                if names[module].endswith("experts"):
                    parts |= {f"{names[module]}.{e}": () for e in range(_num_experts(module))}
    modules = {name: module for module, name in names.items()}
    layers = {name for name, inside in parts.items() if inside}

    @contextlib.contextmanager
    def without(off):
        with contextlib.ExitStack() as stack:
            for name in off:
                if name not in modules:  # an expert among matrices [E, ...]
                    stack.enter_context(_zeroed(modules[name.rpartition(".")[0]], name))
                    continue
                hook = _skip if name in layers else _zero
                handle = modules[name].register_forward_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    subject = dataclasses.replace(subject, parts=parts, without=without)
    for name in layers:
        if not _is_plain_residual(subject, modules[name], parts[name]):
            parts[name] = ()
    return subject


def _num_experts(module):
    if isinstance(module, nn.ModuleList):
        return len(module)
    sizes = [p.shape[0] for p in module.parameters(recurse=False) if p.ndim == 3]
    return sizes[0] if sizes else 0


def _zero(module, args, kwargs, output):
    return _replaced(output, torch.zeros_like(_first(output)))


def _skip(module, args, kwargs, output):
    x = _first(args)
    return _replaced(output, kwargs["hidden_states"] if x is None else x)


@contextlib.contextmanager
def _zeroed(module, name):
    """The matrices of an expert are 0."""
    expert = int(name.rpartition(".")[2])
    matrices = [p for p in module.parameters(recurse=False) if len(p) == _num_experts(module)]
    kept = [p.data[expert].clone() for p in matrices]
    for p in matrices:
        p.data[expert] = 0
    try:
        yield
    finally:
        for p, value in zip(matrices, kept, strict=True):
            p.data[expert] = value


def _is_plain_residual(subject, layer, parts):
    """Whether a layer without its parts only scales its tokens: one that norms them after the
    residual is added is never the identity."""
    states = []

    def record(module, args, kwargs, output):
        states.extend((_first(args) if args else kwargs["hidden_states"], _first(output)))

    handle = layer.register_forward_hook(record, with_kwargs=True)
    with subject.without(parts):
        subject.compute(random_tokens(subject, 0, batch=2))
    handle.remove()
    x, y = (state.double() for state in states[:2])
    scale = (x * y).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True).clamp(min=1e-30)
    return bool((y - scale * x).abs().max() < 1e-4 * y.abs().max())


def of_folder(folder, trust_remote_code, text, dtype):
    """The `Subject` of a folder of transformers, of `AutoModelForCausalLM`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options = dict(trust_remote_code=trust_remote_code, local_files_only=True)
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=getattr(torch, dtype), **options
        )
    except Exception as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise UsageError(
                f"{folder} has code of its own: read it, then add --trust-remote-code to run it"
            ) from None
        raise UsageError(f"{folder}: transformers cannot load it: {first_line(error)}") from error
    subject = of_causal_lm(model, dtype)
    if text is not None:
        ids = AutoTokenizer.from_pretrained(folder, **options)(text)["input_ids"]
        subject = dataclasses.replace(subject, text=rows_of(ids, subject))
    return subject


def of_causal_lm(model, dtype="float32"):
    """The `Subject` of a causal language model of transformers."""
    model = model.eval()
    accepted = inspect.signature(model.forward).parameters
    cache_name = next((name for name in ("cache", "past_key_values") if name in accepted), None)
    has_positions = "position_ids" in accepted

    def options(positions_BT):
        return {"position_ids": _tensor(positions_BT)} if has_positions else {}

    @torch.no_grad()
    def logits(tokens_BT, positions_BT=None, segments_BT=None):
        inputs = {}
        if segments_BT is not None and segments_BT.max() > 1:
            # Positions that restart separate documents; the last one is the padding.
            tail_BT = np.cumsum(segments_BT == 0, axis=1) - 1
            inputs = options(np.where(segments_BT == 0, tail_BT, positions_BT))
        elif segments_BT is not None:
            inputs = options(np.maximum(positions_BT, 0))
            inputs["attention_mask"] = _tensor(segments_BT)
        return model(_tensor(tokens_BT), use_cache=False, **inputs).logits

    @torch.no_grad()
    def decode(cache, tokens_BT, positions_BT):
        mask_BS = torch.ones(len(tokens_BT), int(positions_BT.max()) + 1, dtype=torch.long)
        inputs = {cache_name: cache, "attention_mask": mask_BS, **options(positions_BT)}
        out = model(_tensor(tokens_BT), use_cache=True, **inputs)
        return out.logits, getattr(out, cache_name)

    config = model.config.get_text_config()
    layouts = {"padding"} | ({"packing"} if has_positions else set())
    has_cache = cache_name is not None
    subject = Subject(
        logits,
        config.vocab_size,
        layouts=frozenset(layouts),
        context=getattr(config, "max_position_embeddings", LENGTH),
        dtype=dtype,
        init_cache=(lambda batch, size: None) if has_cache else None,
        decode=decode if has_cache else None,
        count_flops=count_flops,
    )
    return with_parts(subject, model)
