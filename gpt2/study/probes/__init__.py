"""Kernels one by one on a real GPU: the evidence behind the rules of gpt2/memory/kernels."""
