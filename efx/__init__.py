"""efx: transformers that decide for themselves how much to compute, in JAX and Flax linen."""

__version__ = "0.1.0"
