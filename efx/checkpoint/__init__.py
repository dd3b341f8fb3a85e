"""Checkpoints of a run: whole train states (`Checkpointer`), or parameters (`restore_params`)."""

from efx.checkpoint.checkpointer import Checkpointer, Restored
from efx.checkpoint.errors import CheckpointError
from efx.checkpoint.init_from import start_from
from efx.checkpoint.params import ParamsDiff, fingerprint, restore_params

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "ParamsDiff",
    "Restored",
    "fingerprint",
    "restore_params",
    "start_from",
]
