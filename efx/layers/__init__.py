"""Layers: what models are made of. No layer knows a config file, a mesh axis or a model family."""
