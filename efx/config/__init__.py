"""Settings: their schema, the blocks of a run, config files and the command line."""
