"""GPT-2, one instrumented training step, and the instrument that accounts for every byte of it."""
