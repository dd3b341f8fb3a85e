"""Other people's formats: checkpoints in and out."""
