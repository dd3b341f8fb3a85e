"""Routing of tokens: selection, causal decisions, Mixture-of-Depths, recursion, controls."""
