"""Blocks that every config starts from. Every setting of efx is written here, with its meaning.

A config file calls `base()`, changes what its experiment changes and returns the result; any key
can then be set from the command line, e.g. `--config.model.depth=12`. A placeholder (None) stands
for "decided by the preset".
"""

import itertools

from ml_collections import ConfigDict, config_dict

from efx import settings
from efx.errors import UsageError, nearest
from efx.sharding import DEFAULT_RULES


def base():
    """The whole config, for a dense Llama-style decoder on Python's standard library."""
    return ConfigDict(
        dict(
            seed=0,
            # One of the two: optimiser steps, or total training FLOPs (then the number of steps
            # follows from the model's ledger and the batch).
            steps=1000,
            train_flops=0.0,
            data=data(),
            init=init(),
            model=decoder(),
            adapter=adapter(),
            losses=losses(),
            train=train(),
            optim=optim(),
            # Devices along each axis of the mesh; one may be -1, "all that are left".
            mesh=dict(data=-1, fsdp=1, tensor=1, expert=1, sequence=1),
            # (logical axis, mesh axis or axes or None): see efx/sharding.py.
            rules=DEFAULT_RULES,
            checkpoint=checkpoint(),
            log=log(),
            evaluate=evaluate(),
            sample=sample(),
            cluster=cluster(),
            ensemble=ensemble(),
        )
    )


def losses():
    """Weight of every extra loss, by the name under which a layer sows it. A number, or a schedule:
    dict(schedule="linear"|"cosine"|"exponential", ...), see efx/losses.py."""
    weights = dict(
        z_loss=0.0,
        router_bce=0.01,
        predictor_bce=0.01,
        load_balance=0.01,
        router_z=0.001,
        expert_bce=0.01,
        embedding=1.0,
        # Of the next latent. The published weight rises over the first fifth of the training:
        # dict(schedule="linear", c_start=0.0, c_end=0.003, steps=...).
        latent_prediction=0.003,
        inclusion_bce=0.1,
        # Learned dropout, of its masks m: mean entropy -m log2 m, that of 1 - m, m, m^2 / 2.
        dropout_entropy=0.0,
        dropout_alternate_entropy=0.0,
        dropout_l1=0.0,
        dropout_squared_l1=0.0,
    )
    # Without a type, so that a config may put a schedule in a number's place.
    return {
        name: config_dict.FieldReference(weight, field_type=object)
        for name, weight in weights.items()
    }


def data():
    return dict(
        # "stdlib": the source code of the running Python's standard library; "text:PATH" (file,
        # folder or glob); "tokens:DIR" (token shards); "arrayrecord:GLOB"; "hf:NAME"; "pydoc",
        # Python's language reference; "mix:stdlib,text:PATH", the documents of several of these.
        source="stdlib",
        # "bytes", "chars", "bpe:8192" (trained on the training split, saved in the run), or the
        # path of a tokenizer.json.
        tokenizer="bytes",
        seq_len=256,
        batch_size=16,  # sequences in a step, over all devices and hosts
        # Held out is a source of its own, all of it, whatever max_bytes is: official test files, or
        # with --mode=evaluate any other text. Nothing is then held out of `source`, and its
        # documents that are in eval_source are not trained on. "": the two settings that follow.
        eval_source="",
        eval_fraction=0.1,  # held out of the source
        split="tail",  # "tail": the end of the stream; "documents": whole documents, by hash
        withhold=False,  # with eval_source: keep what these two would hold out from training, too
        # If the source has other content than when the run began: "error"; "keep_split": what was
        # held out then is held out still, and all the rest is for training.
        on_change="error",
        shuffle="windows",  # "windows": every window once an epoch; "random": random starts
        packing=False,  # rows of whole documents: segment ids, restarted positions
        # Field of a JSON or msgpack record, or of a data set, that holds the text; "": raw records.
        text_key="text",
        max_bytes=0,  # read at most so much of the source (of each part of a mixture); 0: all
        document_bytes=0,  # cut documents into pieces of at most so many bytes; 0: whole
        clusters="",  # folder of a clustering (--mode=cluster), with split="documents"
        cluster=-1,  # train on the documents of this cluster alone; -1: on all
        cache_dir="",  # tokenised data; "": $EFX_CACHE or ~/.cache/efx
    )


def init():
    return dict(
        # Run folder whose newest parameters (and tokenizer) the run starts from; "": from scratch.
        run="",
        missing="",  # regex (whole path) of parameters that it may lack: these are initialised
        unexpected="",  # regex of those that it may have in excess: these are left out
        rename=(),  # ((regex, replacement), ...): path here -> path there, first match
    )


def decoder():
    return dict(
        family="decoder",
        preset="llama",  # "gpt2" or "llama": decides every field below that is None
        context=0,  # longest sequence; 0: data.seq_len
        width=128,
        depth=4,
        num_heads=4,
        num_kv_heads=0,  # 0: as num_heads
        head_dim=0,  # 0: width / num_heads
        norm=config_dict.placeholder(str),  # "layernorm", "rmsnorm"
        norm_eps=config_dict.placeholder(float),
        use_bias=config_dict.placeholder(bool),
        positions=config_dict.placeholder(str),  # "learned", "rope", "none"
        rope_theta=10000.0,
        tied=config_dict.placeholder(bool),  # the output layer is the token embedding
        qk_norm="none",  # "head", "width"
        attention_scale="sqrt",  # 1/sqrt(head_dim); "mup": 1/head_dim
        window=0,  # positions a query looks back, its own included; 0: all
        attention_softcap=0.0,
        logit_softcap=0.0,
        attention_chunk=0,  # queries in a chunk of the attention kernel; 0: chosen by length
        # "gpt2": all weights N(0, init_std^2); "spike_no_more": N(0, 2 / (5 width)).
        initialisation="gpt2",
        init_std=0.02,  # residual outputs: / sqrt(2 depth)
        mup=mup(),
        # The vocabulary is padded to a multiple of this; 0: of the devices that the mesh splits it
        # over. Padding gets no probability, and a checkpoint can be read with any.
        vocab_multiple=0,
        scan_layers=False,  # one compiled layer for all: compiles faster, runs a little slower
        remat="none",  # "full", "dots": recompute activations in the backward pass
        mlp=mlp(),
        depth_routing=depth_routing(),
        dropout=dropout(),
        soft_experts=soft_experts(),
        dense_former=dense_former(),
    )


def encoder_decoder():
    """`config.model` of this family: `config.model = ConfigDict(common.encoder_decoder())`."""
    return dict(
        family="encoder_decoder",
        context=0,  # longest sequence; 0: data.seq_len
        width=128,
        depth=4,  # decoder blocks
        # Encoder blocks; 0: as many as decoder blocks, with cross_source="previous_layer" one less
        # (what the last would give is read by nothing).
        encoder_depth=0,
        num_heads=4,  # of self-attention, in both streams
        cross_heads=0,  # of cross-attention, each width / cross_heads wide; 0: as num_heads
        order="self_first",  # "cross_first"; "cross_only": a decoder without self-attention
        # The encoder state that a decoder block reads: "same_layer", this layer's output;
        # "previous_layer", what enters the layer, so that both streams of a layer run at once;
        # "final", the serial encoder-decoder. For unequal depths see efx/models/encoder_decoder.py.
        cross_source="previous_layer",
        # "final" only: d_0 = Linear(the encoder's output); "embedding": Linear(e_0), as elsewhere.
        serial_start="encoder",
        decoder_input_norm=False,  # d_0 is linear in the norm of that state, not in the state
        decoder_input_positions=False,  # d_0 + the position embedding of the next position
        # LN(d_L) minus the position embedding of the next position: "subtract", "subtract_norm" (a
        # norm after it), "none".
        output_positions="subtract",
        embedding_loss="mse",  # "cosine", "log_cosine", "none"; its weight: losses.embedding
        # Norms of that loss with gain and bias: the published form, which 0 gains minimise.
        embedding_loss_gains=False,
        norm="layernorm",  # "rmsnorm"
        norm_eps=1e-5,
        use_bias=False,
        qk_norm="none",  # "head", "width"
        attention_scale="sqrt",  # 1/sqrt(head_dim); "mup": 1/head_dim
        window=0,  # positions a query looks back, its own included; 0: all
        attention_softcap=0.0,
        logit_softcap=0.0,
        attention_chunk=0,  # queries in a chunk of the attention kernel; 0: chosen by length
        init_std=0.02,  # residual outputs: / sqrt(sublayers of the stream)
        # The vocabulary is padded to a multiple of this; 0: of the devices that the mesh splits it
        # over. Padding gets no probability, and a checkpoint can be read with any.
        vocab_multiple=0,
        scan_layers=False,  # one compiled layer for all; not with cross_source="final"
        remat="none",  # "full", "dots": recompute activations in the backward pass
        mlp=mlp(),  # of both streams; activation: "gelu" if not given
        dropout=dropout(),
    )


def latent():
    """`config.model` of this family: `config.model = ConfigDict(common.latent())`."""

    def each(number):  # one number for all levels, or one for each
        return config_dict.FieldReference(number, field_type=object)

    return dict(
        family="latent",
        context=0,  # longest sequence; 0: data.seq_len
        group_size=16,  # P_0, tokens in a group; a sequence is padded to whole groups
        latents=(4,),  # P_1, P_2...: latents that a group has at each level, fewer and fewer
        width=128,  # of the last level and of the latent stack
        depth=4,  # blocks of the latent stack
        num_heads=4,  # of the latent stack
        level_widths=(64,),  # D_0, of tokens, and those of the levels before the last
        level_heads=(),  # of these; (): heads as wide as the latent stack's
        # "perceiver": the last places of a group attend to all of it; "transformer":
        # `compression_blocks` blocks inside the group, of whose output the last places are kept.
        compression="perceiver",
        compression_blocks=1,
        # Blocks of each level, inside groups and across all; one number, or one for each of the
        # levels 1, 2... Decoder level 1 works on tokens: a global block there costs what one of a
        # dense decoder costs.
        encoder_local=each(1),
        encoder_global=each(1),
        decoder_local=each(1),
        decoder_global=each(1),
        block_order="interleaved",  # "sequence": all local blocks, then all global ones
        upsampling="repeat",  # "attention"
        # Upsampling by attention norms what it reads and has an output matrix, as other blocks
        # have; False: neither, the published form.
        upsampling_norm=True,
        # Places for which a group has no latent yet take those of the group before: "tile", all of
        # them again and again; "in_place", each several times.
        repeat="tile",
        skip="sum",  # "lerp": learned shares of what entered the encoder level and of the decoder's
        # Where the skip connection joins: "after" the decoder level's blocks, or "before" them, so
        # that they see the tokens and not only latents.
        skip_joins="after",
        # Learned tables, one a level, which its encoder and its decoder share: "absolute", of the
        # tokens by their place in the document (`context` rows), of latents by their place in the
        # group; "level", of both by the place in the group, so that nothing says which group it
        # is. "rope": none, rotary positions in their stead; "both": "level" and these.
        positions="absolute",
        rope_theta=10000.0,
        memory_local=0,  # learned tokens before each group, for local blocks
        memory_global=0,  # learned tokens before the sequence, for global blocks and the stack
        embedding_noise=0.0,  # uniform noise of this over sqrt(T D) on embeddings, in training
        norm_eps=1e-5,
        use_bias=False,
        tied=True,  # the output layer is the token embedding
        qk_norm="width",  # "head", "none"
        attention_scale="sqrt",  # 1/sqrt(head_dim); "mup": 1/head_dim
        attention_softcap=0.0,
        logit_softcap=0.0,
        attention_chunk=0,  # queries in a chunk of the attention kernel; 0: chosen by length
        init_std=0.02,  # residual outputs: / sqrt(2 blocks)
        initialisation="gpt2",  # "spike_no_more": sqrt(2 / (5 D)) of each level in its place
        mup=mup(),  # logits by D_0, learning rate of a matrix by its fan-in
        # The vocabulary is padded to a multiple of this; 0: of the devices that the mesh splits it
        # over. Padding gets no probability, and a checkpoint can be read with any.
        vocab_multiple=0,
        scan_layers=False,  # one compiled layer for all of the latent stack
        remat="none",  # "full", "dots": recompute activations in the backward pass
        mlp=mlp(),  # kind, hidden: of the latent stack; activation: of all, "gelu" if not given
        depth_routing=depth_routing(),  # of the latent stack
        dropout=dropout(),  # learned: in the latent stack, whose input is taken for the embedding
        soft_experts=soft_experts(),  # of the latent stack
        dense_former=dense_former(),  # of the latent stack
        latent_loss=latent_loss(),
    )


def bridged():
    """`config.model` of this family, configs/calm.py: finished runs with bridges between them."""
    return dict(
        family="bridged",
        context=0,  # longest sequence; 0: data.seq_len
        anchor="",  # run folder of the model that predicts
        augment=("",),  # run folders of those that it reads, of the same tokenizer
        pairs=2,  # layers of each, evenly spaced, that a bridge connects
        num_heads=4,  # of the bridges' cross-attention
        norm="none",  # of what a bridge reads, from both sides: "rmsnorm", "layernorm"
        init_std=0.02,
    )


# `config.model` of each family.
FAMILIES = {
    "decoder": decoder,
    "encoder_decoder": encoder_decoder,
    "latent": latent,
    "bridged": bridged,
}


def mlp():
    return dict(
        kind="dense",  # "moe": Mixture of Experts
        activation=config_dict.placeholder(str),  # "gelu", "gelu_tanh", "swiglu"
        hidden=0,  # 0: 4 width; swiglu: 8/3 width, rounded up to multiple_of
        multiple_of=32,
        moe=moe(),
    )


def moe():
    return dict(
        every=1,  # blocks every-1, 2*every-1, ... have experts, the others a dense MLP
        num_experts=8,
        expert_hidden=0,  # width of one expert; 0: that of the dense MLP
        router="token_choice",  # "expert_choice": experts pick tokens, which looks ahead
        top_k=2,  # token_choice: experts a token goes to
        renormalise=True,  # token_choice: the weights of these sum to one; False: Switch
        capacity_factor=1.25,  # token_choice: room of an expert over its fair share of tokens
        capacity=0.25,  # expert_choice: share of a sequence that an expert takes
        slack=2.0,  # expert_choice: room of the causal decision, as a multiple of the capacity
        num_shared=0,  # experts that see every token, as one MLP of so many times the width
        num_noop=0,  # token_choice: experts that compute nothing
        # token_choice: share of the choices that experts compute, by which FLOPs are counted; as
        # measured, `eval/moe/computed_fraction`. If not given, as if all were equally liked.
        computed_fraction=config_dict.placeholder(float),
    )


def depth_routing():
    return dict(
        # "mod": Mixture-of-Depths. "recursion": the blocks between the first and the last, applied
        # `recursions` times, each time to tokens that a router picks from those of the time before.
        kind="none",
        recursions=2,
        every=2,  # blocks every-1, 2*every-1, ... are routed
        blocks=(),  # or these, zero-based
        # Share of a sequence that a routed block computes; one value, or one for each routed block.
        # "recursion": one for each pass, or c for 1, c, c^2...
        capacity=config_dict.FieldReference(0.125, field_type=object),
        # ((f, c), ...): until the fraction f of the training steps, capacity c; then `capacity`.
        capacity_stages=(),
        # Of a packed row: training's top-k within each "document", or over the whole "row", where
        # documents compete. Causal decisions and experts count capacity by document always.
        per="document",
        gate="sigmoid",  # "identity" (the paper), "tanh", "one"
        # In training; "threshold"; or a control without a router: "stochastic" (the paper's: random
        # tokens, others in each batch), "random_fixed" (random positions, the same ones always).
        selection="topk",
        causal="aux_loss",  # decision for evaluation and sampling; "predictor", "threshold"
        also_train=(),  # further decisions, trained and evaluated beside it
        predictor_hidden=0,  # 0: width / 2
        threshold_decay=0.99,  # of the running (1 - capacity) quantile of the scores
        threshold_warmup=100,  # steps of top-k before selection="threshold" begins
        bce_reaches_input=True,  # the router's loss also trains what lies below it
        slack=2.0,  # room of the causal decision, as a multiple of the capacity
        kv_for_skipped=False,  # skipped tokens still write keys and values
        light_path=0,  # hidden width of a small MLP for skipped tokens; 0: none
    )


def soft_experts():
    return dict(
        num=0,  # channels of a block, each with its own attention and MLP; 0: none
        every=1,  # blocks every-1, 2*every-1, ... have them
        shared=0,  # MLPs that are added to every channel's
        multiple=1,  # an expert's MLP gives multiple * width / num features, rounded up
        hidden_multiple=4.0,  # its inner width, as a multiple of the model's
        shared_kv=False,  # all channels read the same keys and values
        merge="softmax",  # of the channels, elementwise, weighted by themselves; "mean", "max"
    )


def dense_former():
    return dict(
        on=False,  # blocks read learned averages of all earlier states
        dilation=1,  # of every so manieth of them
        period=1,  # after every so manieth block only
    )


def latent_loss():
    return dict(
        # Loss `latent_prediction`, of W x_t as a prediction of the next latent: "cosine",
        # "siglip" (tell it from the others); "none".
        kind="none",
        target_gradient=False,  # it also moves the latent that is predicted
        candidates="row",  # siglip: the others of the same sequence; "batch": of all sequences
    )


def mup():
    return dict(
        # Width at which the learning rate was found: the rate of hidden matrices, their start,
        # logits and attention scores then follow the width (efx/layers/parametrisation.py). 0: off.
        base_width=0,
    )


def dropout():
    return dict(
        kind="none",  # "standard"; learned, on at inference too: "elementwise", "attention"
        rate=0.1,  # standard: share of the elements that are zeroed
        # Where. kind="attention" has no form for attention_probs.
        sites=("embedding", "attention_probs", "attention_output", "mlp_output"),
        elementwise=dict(  # m = 0.5 cos(a x + b) + 0.5
            detach=True,  # the mask passes no gradient on to x
            a_mean=0.0,  # a and b start from normal distributions
            a_std=0.02,
            b_mean=0.0,
            b_std=0.02,
            sharpen=False,  # apply sigmoid(s (m - 1/2))
            sharpen_scale=60.0,  # s
        ),
        attention=dict(  # m = 0.5 cos(u + b) + 0.5, u a causal self-attention
            # Over what: "hidden", the activations that are masked; "embedding", a linear layer of
            # one attention over the model's input embedding, which all masks share. Cheaper:
            # "embedding_linear", where u is a linear layer of that one attention.
            input="hidden",
            detach=False,  # the masks pass no gradient on to the activations, or the embedding
            num_heads=0,  # 0: as the model
            shift_init=0.0,  # b starts here, in [0, pi]; 0: everything is kept at first
            # "stochastic": 0 or 1 by chance in training, by m >= 0.5 at inference; "none";
            # "sigmoid", of s (m - 1/2); "sigmoid_straight_through"
            rounding="stochastic",
            sigmoid_scale=60.0,  # s
            granularity="feature",  # a mask value for each feature; "token": one for a token
            # At inference MLPs compute only the tokens that are open, so many at a time; 0: all.
            # Not with input="hidden"; needs rounding="stochastic"; pays with granularity="token".
            skip_tile=0,
        ),
    )


def adapter():
    """Small additions to linear layers of a finished model of any family, configs/phatgoose.py."""
    return dict(
        kind="none",  # "lora": u A B; "mlp": gelu(u A) B
        rank=16,
        scale=1.0,
        # Regex (whole path) of the linear layers that have one.
        sites=r".*/(query|key|value|out|gate|up|down)",
        gate=False,  # one adapter: times sigmoid(v.u), v trained when the adapter is
        # Run folders of experts, adapters of one base model (init.run), to be composed.
        experts=(),
        # Of several experts: "topk" for each token and layer, by their gates; "uniform": the mean
        # of all; "inclusion": an entrance of each expert may leave it out.
        routing="topk",
        top_k=2,
        capacity=0.5,  # inclusion: share of a sequence that an expert takes
        slack=1.5,  # inclusion: room of the causal decision, as a multiple of the capacity
    )


def train():
    return dict(
        dtype="float32",  # of activations; "bfloat16". Parameters are float32
        accumulation=1,  # micro-batches of a step, which is that of the big batch
        loss_chunk=0,  # positions of a sequence whose logits are in memory at once; 0: all
        max_nonfinite=10,  # stop after so many non-finite steps in a row (each is skipped)
    )


def optim():
    return dict(
        name="adamw",  # "lion", "muon", "schedule_free_adamw", "sgd"
        learning_rate=1e-3,
        schedule=dict(
            kind="cosine",  # "linear", "constant", "wsd"
            warmup_steps=100,
            decay_steps=0,  # step at which the decay ends; 0: the last
            final_fraction=0.1,  # of learning_rate, at the end
            decay_fraction=0.2,  # wsd: share of the steps that decay
        ),
        b1=0.9,
        b2=0.99,
        eps=1e-8,
        momentum=0.95,  # muon, sgd
        weight_decay=0.1,
        decay=r".*(kernel|embedding)",  # regex (whole path) of the parameters that are decayed
        frozen="",  # regex of the paths that do not train
        lr_multipliers=(),  # ((regex, factor), ...): first match wins
        clip_norm=1.0,  # 0: off
    )


def checkpoint():
    return dict(
        every=500,  # steps; 0: only at the end
        keep_last=2,
        keep_best=1,
        best_metric="eval/loss",
        asynchronous=True,
        on_damage="error",  # "fall_back": take the checkpoint before a damaged one, with a warning
    )


def log():
    return dict(
        every=20,  # steps
        tensorboard=True,
        wandb="",  # Weights & Biases project
        profile_at=0,  # step at which a profiler window opens; 0: never
        profile_steps=5,
    )


def evaluate():
    return dict(
        every=250,  # steps; 0: only at the end
        batch_size=16,
        max_batches=0,  # 0: the whole held-out split
    )


def sample():
    return dict(
        every=500,  # steps; 0: never
        prompt="\n",
        max_new_tokens=200,
        temperature=0.8,
        top_k=0,
        top_p=0.95,
        stop="",  # stop after this text
        num_samples=1,
        seed=0,
    )


def cluster():
    return dict(
        # Clusters, and experts, one for each. With python -m efx.studies.cbtm, `config.steps` (or
        # `config.train_flops`) is the budget of the seed model and all experts together.
        count=4,
        method="balanced",  # k-means with clusters of one size; "random": the control
        features=50_000,  # words of the tf-idf vectors: the most frequent
        min_documents=2,  # in which a word has to occur
        dimensions=100,  # of the truncated SVD
        iterations=20,  # of k-means, at most
        restarts=3,  # of k-means; the best is taken
        fit_documents=20_000,  # fit on so many of the documents, the others go to the nearest
        seed_fraction=0.25,  # of the budget: the seed model's training on everything
    )


def ensemble():
    return dict(
        tau=0.1,  # an expert's weight: exp(-(distance of context and cluster centre)^2 / tau)
        top_k=2,  # experts in use for a token, their weights renormalised
        every=32,  # tokens after which the weights are computed anew
    )


def apply(config, changes):
    """Set dotted keys: `apply(config, {"model.depth": 2})`; UsageError for one that is none."""
    for key in changes:
        settings.require(config, key)
    config.update_from_flattened_dict(changes)
    return config


def variant(config, arg, recipes=(), **variants):
    """Apply the comma-separated names of `file.py:name,name`, whose order does not matter.

    Those in `recipes`, a size with its data and its training, come first, then the others, and
    "smoke" last, so that it makes anything small. UsageError where two that come together set a key
    to different values, and for an unknown name.

    Args:
      variants: by its name, a dict of dotted keys, or a function that gives one for the config as
        those before have left it.
    """
    names = list(dict.fromkeys(filter(None, arg.split(","))))
    for name in names:
        if name not in variants:
            raise UsageError(
                f"config variant {name!r}: expected one of {', '.join(variants)}"
                + nearest(name, variants)
            )
    smoke = ("smoke",)
    others = [name for name in variants if name not in (*recipes, *smoke)]
    for together in (recipes, others, smoke):
        changes = {name: variants[name] for name in together if name in names}
        changes = {name: d(config) if callable(d) else d for name, d in changes.items()}
        _check_agreement(changes)
        for name in changes:
            try:
                apply(config, changes[name])
            except UsageError as error:
                raise UsageError(f"config variant {name!r}: {error}") from None
    return config


def _check_agreement(variants):
    """UsageError if two of {name: {key: value}} set a key to different values."""
    for (one, first), (other, second) in itertools.combinations(variants.items(), 2):
        for key in first:
            if key in second and first[key] != second[key]:
                raise UsageError(
                    f"config variants {one!r} and {other!r} contradict each other: config.{key} is "
                    f"{first[key]!r} in one and {second[key]!r} in the other; leave one of them out"
                )


# Data, optimiser and evaluation of the small configs, whatever their model: 1000 steps on bytes of
# Python's standard library.
RECIPE = {
    "steps": 1000,
    "data.source": "stdlib",
    "data.tokenizer": "bytes",
    "data.seq_len": 256,
    "data.batch_size": 16,
    "data.eval_fraction": 0.01,
    "optim.learning_rate": 2e-3,
    "optim.schedule.warmup_steps": 50,
    "checkpoint.every": 250,
    "evaluate.every": 250,
    "sample.every": 250,
    "sample.prompt": "def ",
}

# The same with a decoder, 128 wide: some minutes on 2 CPU cores.
STDLIB = {
    **RECIPE,
    "model.preset": "llama",
    "model.width": 128,
    "model.num_heads": 4,
}

SMOKE = {
    "steps": 30,
    "data.seq_len": 64,
    "data.batch_size": 8,
    "data.max_bytes": 400_000,
    "model.width": 64,
    "model.depth": 4,
    "model.num_heads": 4,
    "optim.schedule.warmup_steps": 5,
    "checkpoint.every": 15,
    "log.every": 5,
    "evaluate.every": 15,
    "evaluate.max_batches": 8,
    "sample.every": 30,
    "sample.max_new_tokens": 64,
}

# What the configs for accelerators share, and the smoke run that takes it back.
ACCELERATOR = {
    "data.source": "stdlib",
    "data.eval_fraction": 0.01,
    "model.scan_layers": True,
    "model.remat": "dots",
    "train.dtype": "bfloat16",
    "train.loss_chunk": 256,
    "optim.b2": 0.95,
}

ACCELERATOR_SMOKE = {
    **SMOKE,
    "data.tokenizer": "bytes",
    "model.scan_layers": False,
    "model.remat": "none",
    "train.dtype": "float32",
    "train.accumulation": 1,
    "train.loss_chunk": 0,
}
