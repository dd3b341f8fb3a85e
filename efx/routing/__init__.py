"""Routing of tokens: scores, selections, gates, causal decisions, Mixture-of-Depths, recursion."""
