"""Training and evaluation of one run."""
