"""Adapters on finished models, one or several composed (PHATGOOSE): settings, layers, model."""
