"""Deciding which tokens are computed: plans, causal decisions, routing by depth, experts."""
