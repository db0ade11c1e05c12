"""Weights, tokenizer, transformer and sampler: from a StepPlan to token ids."""
