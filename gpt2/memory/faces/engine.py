"""The autograd engine: which thread a node of a graph was made in decides when a second backward pass runs it.

engine.cpp: of the nodes that are ready, the one with the highest sequence number goes first. The numbers are counted by
thread (ATen/SequenceNumber.h), and on a card the backward pass runs in a thread of its own: a graph that it makes, as
`create_graph=True` asks, is numbered low, and everything the program's own thread made before goes ahead of it. Here
there is one thread; its numbers are put right afterwards.
"""

from __future__ import annotations

import torch

from gpt2.memory.faces.face import Faces

_next_number = torch._C._autograd._get_sequence_nr


class EngineFaces(Faces):
    """`torch.autograd`'s door to the engine."""

    def _engine(self) -> None:
        real, tracker, made = torch.autograd._engine_run_backward, self.card.tracker, 0

        def run(outputs, gradients, retain_graph, create_graph, *rest, **kwargs):
            nonlocal made
            begin = _next_number()
            found = real(outputs, gradients, retain_graph, create_graph, *rest, **kwargs)
            end = _next_number()
            if create_graph and any(isinstance(t, torch.Tensor) and tracker.knows(t) for t in outputs):
                results = found or [leaf.grad for leaf in _leaves(outputs)]
                _renumber([t.grad_fn for t in results if t is not None], begin, end, made)
            made += end - begin
            return found

        self.set(torch.autograd, "_engine_run_backward", run)


def _walk(roots, enters) -> list:
    """The nodes below these that `enters` lets in, each once."""
    seen, waiting = {}, [node for node in roots if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen and enters(node):
            seen[node] = None
            waiting += [following for following, _ in node.next_functions if following is not None]
    return list(seen)


def _leaves(outputs) -> list:
    """The tensors whose gradients a backward pass of `outputs` adds to."""
    nodes = _walk([t.grad_fn for t in outputs if isinstance(t, torch.Tensor)], lambda node: True)
    return [node.variable for node in nodes if hasattr(node, "variable")]


def _renumber(roots, begin: int, end: int, first: int) -> None:
    """Nodes with a number from `begin` up to `end` were made by the backward pass: they count from `first`."""
    made = _walk(roots, lambda node: hasattr(node, "_set_sequence_nr") and begin <= node._sequence_nr() < end)
    for node in made:
        node._set_sequence_nr(node._sequence_nr() - begin + first)
