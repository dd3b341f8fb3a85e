"""Config files, one for each experiment; imported as `efx.configs`."""
