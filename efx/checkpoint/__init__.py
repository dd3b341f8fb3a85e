"""Checkpoints of a run: whole states (Checkpointer) and parameters alone (restore_params)."""

from efx.checkpoint.files import CheckpointError
from efx.checkpoint.manager import Checkpointer, Restored
from efx.checkpoint.params import ParamsDiff, fingerprint, restore_params
from efx.checkpoint.start import start_from

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "ParamsDiff",
    "Restored",
    "fingerprint",
    "restore_params",
    "start_from",
]
