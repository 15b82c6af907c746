"""Asks for more and more; `catch` goes on after the failure."""

import sys

import torch


def grow():
    kept = []
    for size in range(1, 100):
        kept.append(torch.empty(size * 2**28, device="cuda"))


try:
    grow()
except torch.OutOfMemoryError as error:
    if "catch" not in sys.argv:
        raise
    print("caught:", str(error).split(". GPU")[0])
torch.cuda.empty_cache()
print("then", torch.empty(1024, device="cuda").shape)
