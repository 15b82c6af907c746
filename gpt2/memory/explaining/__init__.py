"""An out-of-memory message, understood: parts of `gpt2.memory.explain`."""
