"""The command line of the study's small programs: what each is called, what it does, and whether it needs a GPU."""

from __future__ import annotations

import argparse
import sys


def parser(name: str, about: str) -> argparse.ArgumentParser:
    """Of the program `python -m gpt2.study.<name>`, which the first line of its docstring describes."""
    return argparse.ArgumentParser(prog=f"python -m gpt2.study.{name}", description=about.splitlines()[0])


def no_gpu() -> bool:
    """Whether there is no GPU to run kernels on; says so."""
    import torch

    if torch.cuda.is_available():
        return False
    print("error: there is no CUDA GPU here to run kernels on", file=sys.stderr)
    return True
