"""Studies: launch sets of runs and turn run folders into tables and pictures. No model code."""
