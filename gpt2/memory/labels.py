"""Who is asking: phase, step, module and stack at the moment of an allocation.

Phases can be announced (`watch`) or are inferred: inside a module's forward, inside the autograd engine, inside an
optimizer's step. In backward the module is the one whose forward made the autograd node, found by its sequence number.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from gpt2.memory.claims import Claims
from gpt2.memory.trace import Frame

_next_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
_in_backward = torch._C._current_graph_task_id
_TORCH = Path(torch.__file__).parent
# ... what PyTorch wraps around a dispatch mode, that a card's stacks do not show
_NOT_OF_THE_PROGRAM = tuple(
    map(str, (Path(__file__).parent, _TORCH / "_dynamo" / "eval_frame.py", _TORCH / "_compile.py"))
)


class Labels:
    """The labels of now. Hooks are installed by `install` and removed by `remove`."""

    def __init__(self, claims: Claims, *, stacks: bool = False, forward_begins: Callable[[], None] = lambda: None):
        self.claims, self.forward_begins = claims, forward_begins
        self.announced = ""  # phase set by watch, "" while nobody has
        self.step = 0
        self.path: list[str] = []  # modules whose forward is running, innermost last
        self.optimizing = False
        self.around = None  # makes a profiler range of a name; a real GPU's recorder wants one per module
        self._ranges: list = []
        self.watched = False  # somebody announces phases and steps
        self.begun = False  # a forward or an optimizer's step has been seen
        self.steps_of: Counter = Counter()  # steps done, by optimizer
        self.with_stacks = stacks
        self.stacks: list[tuple[Frame, ...]] = []
        self._stack_index: dict[tuple, int] = {}
        self._names: WeakKeyDictionary = WeakKeyDictionary()
        self._module_of_node: dict[int, str] = {}
        self._handles: list = []

    def install(self) -> None:
        """Start following modules and optimizers, all of them, through PyTorch's global hooks."""
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._enter),
            torch_module.register_module_forward_hook(self._leave, always_call=True),
            torch_optimizer.register_optimizer_step_pre_hook(self._step_begins),
            torch_optimizer.register_optimizer_step_post_hook(self._step_ends),
        ]

    def remove(self) -> None:
        """Take the hooks away again."""
        for handle in self._handles:
            handle.remove()

    def current_step(self) -> int:
        """The announced step; where nobody announces, one more than the busiest optimizer has done, 0 before the first
        forward."""
        if self.watched or not self.begun:
            return self.step
        return 1 + max(self.steps_of.values(), default=0)

    def phase(self) -> str:
        """The announced phase, or the inferred one; a forward inside the engine is a recomputation."""
        if self.path and (self.announced == "backward" or not self.announced and _in_backward() != -1):
            return "recompute"
        if self.announced:
            return self.announced
        if _in_backward() != -1:
            return "backward"
        if self.optimizing:
            return "optimizer"
        return "forward" if self.path else ""

    def module(self) -> str:
        """Path of the module at work; in backward that of the node's forward."""
        if self.path:
            return self.path[-1]
        if _in_backward() != -1 and (node := _current_node()) is not None:
            return self._module_of_node.get(node._sequence_nr(), "")
        return ""

    def note_node(self) -> None:
        """An operator runs in a module's forward: the node that autograd has just made for it belongs there."""
        self._module_of_node.setdefault(_next_sequence_number() - 1, self.path[-1])

    def stack(self) -> int:
        """Index of the Python stack of now, innermost first, the instrument's own frames left out; -1 if not wanted."""
        if not self.with_stacks:
            return -1
        frame, key = sys._getframe(1), []
        while frame is not None:
            if not frame.f_code.co_filename.startswith(_NOT_OF_THE_PROGRAM):
                key.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        key = tuple(key)
        index = self._stack_index.get(key)
        if index is None:
            index = self._stack_index[key] = len(self.stacks)
            self.stacks.append(tuple(Frame(code.co_filename, line, code.co_name) for code, line in key))
        return index

    def _enter(self, module, args) -> None:
        if not self.path:
            self.begun = True
            self.forward_begins()
            self.claims.module(module)
        if module not in self._names:
            for name, child in module.named_modules():
                self._names.setdefault(child, name or type(module).__name__)
        self.path.append(self._names[module])
        if self.around is not None:
            self._ranges.append(self.around(f"module:{self.path[-1]}"))
            self._ranges[-1].__enter__()

    def _leave(self, module, args, output) -> None:
        self.path.pop()
        if self._ranges:
            self._ranges.pop().__exit__(None, None, None)

    def _step_begins(self, optimizer, args, kwargs) -> None:
        self.optimizing = self.begun = True
        self.claims.gradients(optimizer)

    def _step_ends(self, optimizer, args, kwargs) -> None:
        self.optimizing = False
        self.claims.state(optimizer)
        self.steps_of[id(optimizer)] += 1
