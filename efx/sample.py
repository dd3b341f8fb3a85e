def sample_text(model, params, tokenizer, config_sample, *, seed): return ["stub"]
