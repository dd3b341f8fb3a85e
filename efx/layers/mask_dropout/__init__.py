"""Learned dropout: modules, the functions that they are made of, MLPs that skip closed tokens."""
