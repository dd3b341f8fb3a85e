"""The grouped-latent transformer: settings, levels, loss of latents, model, ledger."""
