"""Parallel encoder-decoder: a causal stream that understands beside one that predicts.

    python -m efx.main --config configs/encoder_decoder.py --workdir runs/encoder_decoder

Layer l holds an encoder block and a decoder block; the latter reads the encoder's stream through
causal cross-attention. With the default cross_source="previous_layer" the two do not depend on each
other, so that the critical path is as long as that of a decoder with so many layers. A loss ties
the running mean of the embeddings to the encoder's output.

Knobs, all in `config.model` (defaults in configs/common.py; `model.depth` counts decoder blocks):
    encoder_depth           encoder blocks; 0: as many as are of use
    cross_heads             heads of cross-attention
    order                   "self_first", "cross_first", "cross_only"
    cross_source            "previous_layer", "same_layer", "final" (the serial encoder-decoder)
    decoder_input_norm, decoder_input_positions   what the decoder's first state is made of
    output_positions        "subtract" the next position's embedding from the output, then a norm
                            ("subtract_norm"), or "none"
    embedding_loss          "mse", "cosine", "log_cosine", "none"; weight `config.losses.embedding`
    embedding_loss_gains    norms of that loss with gains: the published form, which collapses
    dropout                 as in every family

Variants, to be combined with commas:
    configs/encoder_decoder.py:smoke       about half a minute on a CPU
    configs/encoder_decoder.py:same_layer  a decoder block reads the output of its layer's encoder
    configs/encoder_decoder.py:serial      all encoder blocks come first
    configs/encoder_decoder.py:published   the published recipe: 13 layers, 150 wide, context 200,
                            15.8M parameters with its BPE of 50,257 tokens, batches of 800; for an
                            accelerator. The published numbers are of published,serial

Hardware: 2 CPU cores.
"""

from ml_collections import ConfigDict

from configs import common

VARIANTS = {
    "smoke": common.SMOKE,
    "same_layer": {"model.cross_source": "same_layer"},
    "serial": {"model.cross_source": "final"},
    "published": {
        "data.tokenizer": "bpe:50257",
        "data.seq_len": 200,
        "data.batch_size": 800,
        "train.accumulation": 16,
        "train.loss_chunk": 50,
        "model.width": 150,
        "model.depth": 13,
        "model.cross_source": "same_layer",
        "model.num_heads": 5,
        "model.cross_heads": 10,
        "model.use_bias": False,
        "model.output_positions": "subtract",
        "model.embedding_loss": "mse",
        "model.embedding_loss_gains": True,
        "losses.embedding": 1.0,
        "steps": 26_000,
        "optim.learning_rate": 9e-4,
        "optim.schedule.kind": "constant",
        "optim.schedule.warmup_steps": 300,
        "optim.b1": 0.9,
        "optim.b2": 0.95,
        "optim.weight_decay": 0.1,
    },
}


def get_config(arg=""):
    config = common.base()
    config.model = ConfigDict(common.encoder_decoder())
    common.apply(
        config,
        {
            **common.RECIPE,
            "model.width": 128,
            "model.depth": 4,
            "model.num_heads": 4,
        },
    )
    return common.variant(config, arg, **VARIANTS)
