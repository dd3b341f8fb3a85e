"""A `Subject` of a PyTorch module, with its parts, and of a folder of transformers."""

import contextlib
import dataclasses
import inspect

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from efx.certify.properties import LENGTH, Subject, random_tokens, rows_of
from efx.errors import UsageError, first_line


def _tensor(x):
    return torch.from_numpy(np.asarray(x, np.int64))


def of_callable(function, vocab_size):
    """The `Subject` of (tokens [B, T] int64) -> logits; with parts if it is a module."""

    def logits(tokens_BT):
        with torch.no_grad():
            return function(_tensor(tokens_BT))

    subject = Subject(logits, vocab_size)
    return with_parts(subject, function) if isinstance(function, nn.Module) else subject


def _states(values):
    """The first states [B, T, D] among arguments or outputs; None without any."""
    tensors = (x for x in values if torch.is_tensor(x) and x.is_floating_point())
    return next((x for x in tensors if x.ndim == 3), None)


def _recorded(subject):
    """{module: (states that it gets, states that it returns)} of a pass over random tokens."""
    recorded = {}

    def record(module, args, kwargs, output):
        outputs = (output,) if torch.is_tensor(output) else tuple(output or ())
        recorded[module] = _states((*args, *kwargs.values())), _states(outputs)

    with register_module_forward_hook(record, with_kwargs=True):
        subject.compute(random_tokens(subject, 0, batch=2))
    return recorded


def _skip(module, args, kwargs, output):
    """Return the states that a layer gets in place of those that it returns."""
    x_BTD = _states((*args, *kwargs.values()))
    return x_BTD if torch.is_tensor(output) else (x_BTD, *output[1:])


@contextlib.contextmanager
def _zeroed(tensors):
    kept = [x.clone() for x in tensors]
    for x in tensors:
        x.zero_()
    try:
        yield
    finally:
        for x, value in zip(tensors, kept, strict=True):
            x.copy_(value)


def _experts(module):
    """The parameters of each expert of a list of modules, or of matrices [E, ...]."""
    if isinstance(module, nn.ModuleList):
        return [[p.data for p in expert.parameters()] for expert in module]
    own = [p.data for p in module.parameters(recurse=False)]
    number = next((len(p) for p in own if p.ndim == 3), 0)
    return [[p[e] for p in own if len(p) == number] for e in range(number)]


def with_parts(subject, model):
    """The `Subject` with the parts of a module.

    Layers are the entries of lists of modules that map states [B, T, D] to states of this shape;
    their parts are the modules in them that return states and have matrices; and experts.
    """
    names = {module: name for name, module in model.named_modules()}
    recorded, parts, layers, parameters = _recorded(subject), {}, {}, {}
    shapes = {m: y.shape for m, (_, y) in recorded.items() if y is not None}
    lists = [module for module in names if isinstance(module, nn.ModuleList)]
    for layer in (layer for stack in lists for layer in stack):
        x_BTD, y_BTD = recorded.get(layer, (None, None))
        if x_BTD is None or y_BTD is None or x_BTD.shape != y_BTD.shape:
            continue
        layers[names[layer]] = layer
        increments = [
            module
            for module in layer.children()
            if shapes.get(module) == x_BTD.shape and any(p.ndim > 1 for p in module.parameters())
        ]
        for module in increments:
            parameters[names[module]] = [p.data for p in module.parameters()]
        for module in layer.modules():
            if names[module].endswith("experts"):
                for e, tensors in enumerate(_experts(module)):
                    parameters[f"{names[module]}.{e}"] = tensors
        parts[names[layer]] = [names[module] for module in increments]

    def without(off, tokens_BT):
        with contextlib.ExitStack() as stack:
            for name in off:
                if name in layers:
                    hook = layers[name].register_forward_hook(_skip, with_kwargs=True)
                    stack.enter_context(hook)
                else:
                    stack.enter_context(_zeroed(parameters[name]))
            return subject.logits(tokens_BT)

    # A layer that norms its tokens after the residual is added is never the identity: without its
    # parts the others only scale their tokens.
    for name, inside in parts.items():
        with _zeroed([x for part in inside for x in parameters[part]]):
            x_BTD, y_BTD = (x.double() for x in _recorded(subject)[layers[name]])
        if torch.cosine_similarity(x_BTD, y_BTD, dim=-1).abs().min() < 1 - 1e-6:
            parts[name] = ()
    parts |= {name: () for name in parameters}
    return dataclasses.replace(subject, parts=parts, without=without)


def of_folder(folder, trust_remote_code=False, text=None):
    """The `Subject` of a folder of transformers, of `AutoModelForCausalLM`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = dict(trust_remote_code=trust_remote_code, local_files_only=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    except Exception as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise UsageError(
                f"{folder} has code of its own: read it, then add --trust-remote-code to run it"
            ) from None
        raise UsageError(f"{folder}: transformers cannot load it: {first_line(error)}") from error
    subject = of_causal_lm(model)
    if text is not None:
        ids = AutoTokenizer.from_pretrained(folder, **options)(text)["input_ids"]
        subject = dataclasses.replace(subject, text=rows_of(ids, subject))
    return subject


def of_causal_lm(model):
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
        if segments_BT is not None:
            inputs = options(np.maximum(positions_BT, 0))
            if segments_BT.max() == 1:  # else positions that restart separate documents
                inputs["attention_mask"] = _tensor(segments_BT)
        return model(_tensor(tokens_BT), use_cache=False, **inputs).logits

    @torch.no_grad()
    def decode(cache, tokens_BT, positions_BT):
        mask_BS = torch.ones(len(tokens_BT), int(positions_BT.max()) + 1, dtype=torch.long)
        inputs = {cache_name: cache, "attention_mask": mask_BS, **options(positions_BT)}
        out = model(_tensor(tokens_BT), use_cache=True, **inputs)
        return out.logits, getattr(out, cache_name)

    config = model.config.get_text_config()
    subject = Subject(
        logits,
        config.vocab_size,
        layouts=frozenset({"padding", "packing"} if has_positions else {"padding"}),
        context=getattr(config, "max_position_embeddings", LENGTH),
        init_cache=lambda batch, size: None,
        decode=decode if cache_name else None,
    )
    return with_parts(subject, model)
