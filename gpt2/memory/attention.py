"""Stub, filled below."""
from contextlib import contextmanager


@contextmanager
def kernels(card):
    yield
