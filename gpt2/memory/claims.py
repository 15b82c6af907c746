"""Whose a block is: parameters, buffers, gradients and optimizer state claim theirs by address.

The claims are made through PyTorch's global hooks, on a real GPU and on a simulated one alike: at the start of a
root module's forward, and around an optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from gpt2.memory.trace import Category, Event


class Claim(NamedTuple):
    """After `position` allocations and frees the block at `address` belonged to `name`."""

    position: int
    address: int
    category: str
    name: str


class Claims:
    """Collects claims. `address` gives a tensor's storage address on the card (0: not there), `position` the number of
    allocations and frees so far."""

    def __init__(self, address: Callable[[torch.Tensor], int], position: Callable[[], int]):
        self._address, self._position = address, position
        self.made: list[Claim] = []
        self._names: dict[int, str] = {}

    def _claim(self, tensor, category: Category, name: str, position: int) -> None:
        if not isinstance(tensor, torch.Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return  # torch.func's wrappers have no storage
        if address := self._address(tensor):
            self.made.append(Claim(position, address, category.value, name))

    def module(self, module: torch.nn.Module) -> None:
        """Parameters and buffers of a root module."""
        position = self._position()
        for name, parameter in module.named_parameters():
            self._names[id(parameter)] = name
            self._claim(parameter, Category.PARAMETERS, name, position)
        for name, buffer in module.named_buffers():
            self._claim(buffer, Category.INPUTS, name, position)

    def gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """What has arrived in `.grad`, and the parameters an optimizer holds."""
        position = self._position()
        for parameter in _parameters(optimizer):
            name = self._names.get(id(parameter), "")
            self._claim(parameter, Category.PARAMETERS, name, position)
            if parameter.grad is not None:
                self._claim(parameter.grad, Category.GRADIENTS, name, position)

    def state(self, optimizer: torch.optim.Optimizer) -> None:
        """Moments and step counters."""
        position = self._position()
        for parameter in _parameters(optimizer):
            for key, value in optimizer.state.get(parameter, {}).items():
                self._claim(value, Category.OPTIMIZER, f"{self._names.get(id(parameter), '')}:{key}", position)


def _parameters(optimizer):
    return (p for group in optimizer.param_groups for p in group["params"])


def settle(events: list[Event], claims: list[Claim]) -> list[Event]:
    """The events with the claims written into category and module of the allocations they are about."""
    settled = list(events)
    live: dict[int, int] = {}
    position, waiting = 0, 0
    for i, event in enumerate([*events, None]):
        while waiting < len(claims) and (event is None or claims[waiting].position <= position):
            claim = claims[waiting]
            waiting += 1
            j = live.get(claim.address)
            if j is not None and not settled[j].category:
                settled[j] = settled[j]._replace(category=claim.category, module=claim.name or settled[j].module)
        if event is None:
            break
        if event.action == "alloc":
            live[event.address] = i
        elif event.action in ("free", "free_requested"):
            live.pop(event.address, None)
        position += event.action in ("alloc", "free", "free_requested")
    return settled
