"""The parallel encoder-decoder: settings, streams, model."""
