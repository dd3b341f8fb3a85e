"""Checks of an export with the transformers on the path: python load_exports.py FOLDER

The folder has an export with `tokens.npy` [B, T] and efx's `logits.npy` of these.
"""

import copy
import pathlib
import sys

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

GREEDY = dict(max_new_tokens=6, do_sample=False)


def load(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)
    return model.eval()


def tokens_and_logits(folder):
    return torch.tensor(np.load(folder / "tokens.npy")), np.load(folder / "logits.npy")


def assert_refused(name, function, *args, **options):
    try:
        function(*args, **options)
    except ValueError as error:
        assert name in str(error), error
    else:
        raise AssertionError(f"{name} was accepted")


@torch.no_grad()
def check_logits(folder):
    """Equal to efx's; independent of padding, of the chunks of a row and of copies of the cache."""
    model, (tokens_BT, expected_BTV) = load(folder), tokens_and_logits(folder)
    np.testing.assert_allclose(model(tokens_BT).logits, expected_BTV, atol=1e-4)
    # Row i begins with 2 i padding tokens.
    (rows, length), pads = tokens_BT.shape, [2 * i for i in range(len(tokens_BT))]
    ids_BT, mask_BT = torch.zeros(2, rows, length + pads[-1], dtype=torch.long)
    for i, pad in enumerate(pads):
        ids_BT[i, pad : pad + length], mask_BT[i, pad : pad + length] = tokens_BT[i], 1
    cache, chunks = None, []
    for start, end in ((0, 2), (2, 12), (12, 13), (13, length + pads[-1])):
        options = dict(attention_mask=mask_BT[:, :end], use_cache=True)
        out = model(ids_BT[:, start:end], past_key_values=copy.deepcopy(cache), **options)
        again = model(ids_BT[:, start:end], past_key_values=cache, **options)
        assert torch.equal(out.logits, again.logits)
        cache = out.past_key_values
        chunks.append(out.logits)
    chunked_BTV = torch.cat(chunks, dim=1)
    for i, pad in enumerate(pads):
        row_TV = chunked_BTV[i, pad : pad + length]
        np.testing.assert_allclose(row_TV, expected_BTV[i], atol=1e-4)


@torch.no_grad()
def check_generation(folder):
    """The same with a cache, without, in chunks of a padded prompt, and from a copied prefix."""
    model, (tokens_BT, _) = load(folder), tokens_and_logits(folder)
    prompts_BT = tokens_BT[:2, :16]
    for beams in (1, 2):
        options = dict(num_beams=beams, **GREEDY)
        whole = model.generate(prompts_BT, **options)
        assert whole.tolist() == model.generate(prompts_BT, use_cache=False, **options).tolist()
    whole = model.generate(prompts_BT[:1], **GREEDY)[0]
    padded_BT = torch.cat([prompts_BT.new_zeros(1, 5), prompts_BT[:1]], dim=1)
    options = dict(attention_mask=(torch.arange(21) >= 5).long()[None], **GREEDY)
    # transformers 4 counts padding in the positions of chunks, so the model refuses them.
    chunks = dict(prefill_chunk_size=5)
    for more in ({}, chunks if transformers.__version__ >= "5" else {}):
        padded = model.generate(padded_BT, **more, **options)[0]
        assert padded[5:].tolist() == whole.tolist()
    first = model(prompts_BT[:1, :3], use_cache=True).past_key_values
    caches = []

    def record(_, args, options):
        caches.append(options.get("cache", options.get("past_key_values")))

    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    model.generate(prompts_BT[:1], **GREEDY)
    hook.remove()
    assert {*map(type, caches)} == {type(first)}  # from the first call
    empty = dict(past_key_values=type(first)(), **chunks)
    for options in (chunks, empty, dict(past_key_values=copy.deepcopy(first))):
        assert model.generate(prompts_BT[:1], **options, **GREEDY)[0].tolist() == whole.tolist()


@torch.no_grad()
def check_outputs(folder):
    """Hidden states are the embeddings and the output of each block, the last after the norm;
    `return_dict=False` returns a tuple; outputs that do not exist are refused."""
    model, (tokens_BT, expected_BTV) = load(folder), tokens_and_logits(folder)
    assert model(tokens_BT).hidden_states is None
    states = model(tokens_BT, output_hidden_states=True).hidden_states
    assert len(states) == 1 + len(model.model.layers)
    assert torch.equal(states[0], model.model.embed_tokens(tokens_BT))
    last = []
    hook = model.model.layers[-2].register_forward_hook(lambda _, inputs, out: last.append(out))
    model(tokens_BT)
    hook.remove()
    assert torch.equal(states[-2], last[0]) and not torch.equal(states[-2], states[-1])
    logits_BTV = model.lm_head(states[-1]) * model.config.logit_scale
    np.testing.assert_allclose(logits_BTV, expected_BTV, atol=1e-4)
    options = dict(output_hidden_states=True, return_dict_in_generate=True, **GREEDY)
    generated = model.generate(tokens_BT[:1], **options)
    assert len(generated.hidden_states[0]) == len(states)
    logits_BTV, *_ = model(tokens_BT, return_dict=False)
    np.testing.assert_allclose(logits_BTV, expected_BTV, atol=1e-4)
    assert_refused("output_attentions", model, tokens_BT, output_attentions=True)


@torch.no_grad()
def check_packed_rows(folder):
    """Documents of a row, at position_ids that restart, are independent."""
    model, (tokens_BT, _) = load(folder), tokens_and_logits(folder)
    documents = tokens_BT[:1].split([5, 11, 16], dim=1)
    position_ids = torch.cat([torch.arange(ids.shape[1]) for ids in documents])[None]
    packed = model(tokens_BT[:1], position_ids=position_ids)
    assert packed.past_key_values is None
    alone = torch.cat([model(ids).logits for ids in documents], dim=1)
    np.testing.assert_allclose(packed.logits, alone, atol=1e-4)
    options = dict(position_ids=position_ids, use_cache=True)
    assert_refused("position_ids", model, tokens_BT[:1], **options)


def check_training(folder):
    """Trainer: accumulated batches and checkpointed gradients train as one batch does; bfloat16
    autocast runs; a loss is divided by the number of labels in all accumulated batches."""
    tokens_BT, _ = tokens_and_logits(folder)
    rows = [{"input_ids": row, "labels": row.clone()} for row in tokens_BT[:8]]
    for i, row in enumerate(rows):
        row["labels"][3 * i + 2 :] = -100
    before = load(folder).state_dict()

    def train(**options):
        settings = dict(max_steps=2, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant")
        quiet = dict(
            per_device_eval_batch_size=4,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=True,
        )
        arguments = TrainingArguments(
            folder / "trainer", logging_steps=1, **settings | quiet | options
        )
        model = load(folder)
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        assert 0 < trainer.predict(rows).metrics["test_loss"] < 100
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, model.state_dict()

    whole = dict(per_device_train_batch_size=4)
    halves = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    losses, after = train(**whole)
    assert any(not torch.equal(after[name], before[name]) for name in after if "router" in name)
    for options in (halves, dict(gradient_checkpointing=True, **whole)):
        other_losses, other = train(**options)
        np.testing.assert_allclose(other_losses, losses, rtol=1e-3)
        for name, weight in after.items():
            np.testing.assert_allclose(other[name], weight, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(train(bf16=True, **halves)[0], losses, rtol=0.05)
    model = load(folder).train()
    model.gradient_checkpointing_enable()
    assert model(tokens_BT, use_cache=True).past_key_values is None


def check_idle_blocks(folder):
    """All parameters have gradients where routed blocks select no token, as
    DistributedDataParallel requires."""
    model, (tokens_BT, _) = load(folder).train(), tokens_and_logits(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer, "threshold"):
                layer.threshold.fill_(1e6)
            for decision in ("router", "predictor"):
                for weight in getattr(layer, decision, torch.nn.Identity()).parameters():
                    weight.zero_()
    model(tokens_BT, labels=tokens_BT).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
    idle = model.model.layers[-1].self_attn.q_proj.weight
    assert not idle.grad.any() and model.lm_head.weight.grad.any()


CHECKS = (
    check_logits,
    check_generation,
    check_outputs,
    check_packed_rows,
    check_training,
    check_idle_blocks,
)
if __name__ == "__main__":
    for check in CHECKS:
        check(pathlib.Path(sys.argv[1]))
