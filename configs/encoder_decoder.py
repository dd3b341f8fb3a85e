"""Parallel encoder-decoder: a causal encoder stream beside the decoder stream that predicts.

    python -m efx.main --config configs/encoder_decoder.py --workdir runs/encoder_decoder

Layer l holds an encoder block and a decoder block. The decoder block reads the encoder stream
through causal cross-attention. With the default cross_source="previous_layer" the two blocks of a
layer do not depend on each other. A loss ties the encoder's output to the running mean of the
embeddings.

Settings in `config.model` (defaults in efx/models/encoder_decoder.py):
    depth, encoder_depth    decoder blocks; encoder blocks, 0: as many as are of use
    cross_heads             heads of cross-attention
    positions               "learned", or "rope" in self-attention and cross-attention
    order                   "self_first", "cross_first", "cross_only"
    cross_source            "previous_layer", "same_layer", "final" (the serial encoder-decoder)
    serial_start            with "final": the decoder starts from the "encoder" output or from the
                            "embedding", as with the other sources
    decoder_input_norm, decoder_input_positions   a norm before the decoder's first linear layer;
                            the embedding of the next position added after it
    output_positions        "subtract" the embedding of the next position from the output, then
                            also a norm ("subtract_norm"), or "none"; with positions="rope": "none"
    embedding_loss          "mse", "cosine", "log_cosine", "none"; weight: `config.losses.embedding`
    embedding_loss_gains    norms of that loss with gains: the published form, which collapses
    depth_routing           Mixture-of-Depths in both streams; `blocks` and capacities number
                            the encoder's blocks before the decoder's
    mlp.moe                 experts in every n-th block of each stream
    mup, initialisation     transfer of learning rates between widths; initial weights
    dropout                 as in every family

Variants, combined with commas:
    configs/encoder_decoder.py:smoke       about half a minute on a CPU
    configs/encoder_decoder.py:same_layer  a decoder block reads the output of its layer's encoder
    configs/encoder_decoder.py:serial      all encoder blocks come first, and the decoder starts
                            from their output
    configs/encoder_decoder.py:masks       learned dropout at every site of both streams, with the
                            published penalties: the entropy of the masks and their L1 norm
    configs/encoder_decoder.py:published   the published recipe: 13 layers, 150 wide, context 200,
                            15.8M parameters with its BPE of 50,257 tokens, batches of 800; for an
                            accelerator. The published numbers are of published,serial
    configs/encoder_decoder.py:seed        the published model with its masks and both penalties,
                            for an accelerator; masks,smoke is the same model at a small size

Hardware: 2 CPU cores.
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
# loss = cross-entropy + entropy of the masks + their L1 norm, both means with weight 1.
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
    "same_layer": {"model.cross_source": "same_layer"},
    "serial": {"model.cross_source": "final"},
    "masks": MASKS,
    "published": PUBLISHED,
    "seed": {**PUBLISHED, **MASKS},
}


def get_config(arg=""):
    config = common.base("encoder_decoder")
    common.apply(
        config,
        {
            **common.RECIPE,
            "model.width": 128,
            "model.depth": 4,
            "model.attention.num_heads": 4,
        },
    )
    return common.variant(config, arg, recipes=("published", "seed"), **VARIANTS)
