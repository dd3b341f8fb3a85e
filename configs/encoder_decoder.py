"""Parallel encoder-decoder: a causal encoder stream beside the decoder stream that predicts.

    python -m efx.main --config configs/encoder_decoder.py --workdir runs/encoder_decoder

Layer l holds an encoder block and a decoder block, which reads the encoder stream through causal
cross-attention. By default (`cross_source="previous_layer"`) it reads the input of the layer, so
that the two blocks do not depend on each other. A loss moves the encoder's output towards the
running mean of the embeddings.

efx/models/encoder_decoder.py has the settings of `config.model`. The main ones:
    depth, encoder_depth    decoder and encoder blocks
    cross_source            the encoder state that a decoder block reads: "previous_layer",
                            "same_layer", or "final" (the serial encoder-decoder)
    order                   of a decoder block: "self_first", "cross_first" or "cross_only"
    positions               "learned" or "rope"
    embedding_loss          "mse", "cosine", "log_cosine" or "none", with the weight
                            `config.losses.embedding`

Variants:
    smoke       half a minute on a CPU
    masks       learned dropout at every site of both streams, with the published penalties on
                entropy and L1 norm of the masks
    published   the published recipe, for an accelerator: 15.8M parameters with a BPE of 50,257
                tokens, context 200. The published numbers are those of the serial form: add
                --config.model.cross_source=final
    seed        published,masks

The default takes some minutes on 2 CPU cores.
"""

from efx.configs import common

PUBLISHED = {
    "data.tokenizer": "bpe:50257",
    "data.seq_len": 200,
    "data.batch_size": 800,
    "train.accumulation": 16,
    "train.loss_chunk": 50,
    "model.width": 150,
    "model.depth": 13,
    "model.cross_source": "same_layer",
    "model.attention.num_heads": 5,
    "model.cross_heads": 10,
    "model.use_bias": False,
    "model.output_positions": "subtract",
    "model.embedding_loss": "mse",
    "model.embedding_loss_gains": True,
    "losses.embedding": 1.0,
    "steps": 9_000,
    "optim.learning_rate": 9e-4,
    "optim.schedule.kind": "constant",
    "optim.schedule.warmup_steps": 300,
    "optim.b1": 0.9,
    "optim.b2": 0.95,
    "optim.weight_decay": 0.1,
}
MASKS = {
    "model.dropout.kind": "elementwise",
    "model.dropout.sites": ("embedding", "attention_probs", "attention_output", "mlp_output"),
    "losses.dropout_entropy": 1.0,
    "losses.dropout_l1": 1.0,
}
VARIANTS = {
    "smoke": {
        **common.SMOKE,
        "data.tokenizer": "bytes",
        "train.accumulation": 1,
        "train.loss_chunk": 0,
        "model.cross_heads": 0,
    },
    "masks": MASKS,
    "published": PUBLISHED,
    "seed": {**PUBLISHED, **MASKS},
}


def get_config(arg=""):
    config = common.base("encoder_decoder")
    size = {"model.width": 128, "model.depth": 4, "model.attention.num_heads": 4}
    common.apply(config, {**common.RECIPE, **size})
    return common.variant(config, arg, **VARIANTS)
