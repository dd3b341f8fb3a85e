"""Bridges between finished models (CALM): settings, model."""
