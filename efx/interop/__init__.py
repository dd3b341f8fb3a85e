"""Reads and writes checkpoints in the formats of other libraries."""
