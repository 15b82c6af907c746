"""What a history does not say: phase, step and category of each event, inferred from stacks and lifetimes.

A stack tells who asks from Python: an optimizer, `Module._apply` (model.cuda()), a checkpoint recomputing, else
the forward. The autograd thread has no Python stack at all: that is the backward. A lifetime tells what for: made in
the forward and freed in the backward is an activation, made in the optimizer and kept is its state.
Only empty labels are filled in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from gpt2.memory.reading.history import BEFORE
from gpt2.memory.trace import Block, Category, Event, Frame, Trace

_OPTIMIZER_FILES = {f"{name}.py" for name in ("optimizer", "adam", "adamw", "sgd", "adagrad", "rmsprop", "lion")}
_MOVES = {"_apply", "_load_from_state_dict", "load_state_dict"}
_RECOMPUTES = {"unpack_hook", "recompute_fn"}  # of torch.utils.checkpoint, in the backward
_LOSSES = {"cross_entropy", "log_softmax", "nll_loss", "_log_softmax"}
_WORKSPACES = {8_519_680, 33_554_432, 4_194_304 * 8 + 16_384}  # cuBLAS up to Ampere, on Hopper (DESIGN: scratch.py)
_VOCABULARY_BYTES = 2**20  # below it a loss tensor is a scalar or a row of losses
PHASES = ("model", "forward", "backward", "clip", "optimizer", "zero_grad")


def label(trace: Trace, parameters: Mapping[int, str]) -> Trace:
    """The trace with phase, step and category filled in where they were empty (step: 0). `parameters` names addresses.
    """
    phases = _phases(trace)
    steps = _steps(trace.events, phases)
    events = [Event(*e[:5], e.step or step, e.phase or phase, *e[7:])
              for e, phase, step in zip(trace.events, phases, steps, strict=True)]
    trace = Trace(events, trace.marks, trace.stacks, trace.meta)
    for block, category in zip(blocks := trace.blocks(), _categories(trace, blocks, parameters), strict=True):
        module = block.event.module or parameters.get(block.event.address, "") if block.event.phase == BEFORE else ""
        for i in (block.born, block.died):
            if i is not None and not events[i].category:
                events[i] = events[i]._replace(category=category, module=events[i].module or module)
    return trace


def phase_of(stack: tuple[Frame, ...]) -> str:
    """Who is behind a Python stack, innermost frame first."""
    for file, _, name in stack:
        base = file.replace("\\", "/").rsplit("/", 1)[-1]
        if name == "zero_grad":
            return "zero_grad"
        if "/optim/" in file or base in _OPTIMIZER_FILES:
            return "optimizer"
        if base == "clip_grad.py":
            return "clip"
        if base == "module.py" and name in _MOVES:
            return "model"
        if (base in ("_tensor.py", "graph.py", "__init__.py") and name in ("backward", "_engine_run_backward")
                or name in _RECOMPUTES or "autograd::Engine" in name):
            return "backward"
    return "forward" if stack else "backward"


def _phases(trace: Trace) -> list[str]:
    """A phase for each event. A free belongs to the phase in which it happens, not to the one whose stack it shows."""
    by_stack = [phase_of(stack) for stack in trace.stacks]
    if not by_stack:
        return [e.phase for e in trace.events]  # recorded without stacks: an empty one means nothing
    now, phases = "", []
    for event in trace.events:
        if event.phase:
            phases.append(event.phase)
            continue
        if event.action == "alloc":
            now = by_stack[event.stack] if event.stack >= 0 else "backward"
        elif event.action in ("free", "free_requested") and event.stack >= 0 and by_stack[event.stack] == "zero_grad":
            now = "zero_grad"
        phases.append(now)
    return phases


def _steps(events: list[Event], phases: list[str]) -> list[int]:
    """A step ends with its optimizer (with its backward, where no optimizer allocates); the next forward begins one."""
    asked = [p for e, p in zip(events, phases, strict=True) if e.action == "alloc"]
    runs = Counter(b for a, b in zip(["", *asked], asked, strict=False) if a != b)
    last = ("optimizer", "zero_grad") if runs["optimizer"] + runs["zero_grad"] > 1 else ("backward",)
    model = max((i for i, p in enumerate(phases) if p == "model"), default=-1)
    step, over, steps = 0, True, []
    for i, (event, phase) in enumerate(zip(events, phases, strict=True)):
        if i > model and phase == "forward" and event.action == "alloc" and over:
            step, over = step + 1, False
        over = over or phase in last
        steps.append(step)
    return steps


def _categories(trace: Trace, blocks: list[Block], parameters: Mapping[int, str]) -> list[str]:
    """One category for each block."""
    events, stacks = trace.events, trace.stacks
    losses = [any(f.name in _LOSSES for f in s) for s in stacks]
    inside = [any(f.name in ("forward", "_call_impl", "__call__") for f in s) for s in stacks]
    recomputed = [any(f.name in _RECOMPUTES for f in s) for s in stacks]
    sizes = {b.event.requested_bytes for b in blocks
             if b.event.stack >= 0 and losses[b.event.stack] and b.event.requested_bytes >= _VOCABULARY_BYTES}
    buffers = _buffer_stacks(stacks)
    older = _older(blocks, events, parameters)

    def category(n: int, block: Block) -> str:
        event, died = block.event, None if block.died is None else events[block.died]
        kept = died is None or died.step > event.step
        if n in older:
            return older[n]
        if event.requested_bytes in _WORKSPACES and kept:
            return Category.WORKSPACE
        if event.phase == "model":
            return Category.INPUTS if event.stack in buffers else Category.PARAMETERS
        if event.requested_bytes in sizes or event.stack >= 0 and losses[event.stack]:
            return Category.LOSS
        if event.phase == "optimizer":
            return Category.OPTIMIZER if kept else Category.TEMPORARIES
        if event.phase == "backward":
            if event.stack >= 0 and recomputed[event.stack]:
                return Category.ACTIVATIONS
            return Category.GRADIENTS if kept or died.phase != "backward" else Category.TEMPORARIES
        if event.phase != "forward":
            return Category.TEMPORARIES if event.phase and not kept else ""
        if died is not None and died.phase == "forward" and not kept:
            return Category.TEMPORARIES
        return Category.ACTIVATIONS if event.stack >= 0 and inside[event.stack] else Category.INPUTS

    return [str(getattr(c, "value", c)) for c in (category(n, b) for n, b in enumerate(blocks))]


def _buffer_stacks(stacks: list[tuple[Frame, ...]]) -> set[int]:
    """Stacks through Module._apply where it moves buffers: in its source, that is below where it moves parameters."""
    lines = {}
    for i, stack in enumerate(stacks):
        line = next((f.line for f in stack if f.name == "_apply" and f.file.endswith("module.py")), None)
        if line is not None:
            lines[i] = line
    first = min(lines.values(), default=0)
    return {i for i, line in lines.items() if line > first}


def _older(blocks: list[Block], events: list[Event], parameters: Mapping[int, str]) -> dict[int, str]:
    """Blocks older than the recording have no stack. By address where parameters are known; else by size: for each
    gradient of a size there is a parameter of that size, and where three are there, two moments of AdamW."""
    older = {n: b for n, b in enumerate(blocks) if b.event.phase == BEFORE}
    named = {n: Category.PARAMETERS for n, b in older.items() if b.event.address in parameters}
    kept = [n for n, b in older.items() if b.died is None and n not in named]
    gradients = Counter(b.event.requested_bytes for b in blocks if b.event.phase == "backward"
                        and (b.died is None or events[b.died].phase not in ("backward", "")))
    if named:  # parameters are spoken for: what else has their sizes are their moments
        sizes = {older[n].event.requested_bytes for n in named}
        rest = {n: Category.OPTIMIZER if older[n].event.requested_bytes in sizes else Category.INPUTS for n in kept}
    else:
        rest, seen = {}, Counter()
        for n in kept:
            size = older[n].event.requested_bytes
            seen[size] += 1
            first = not gradients or seen[size] <= gradients[size]
            moments = gradients[size] < seen[size] <= 3 * gradients[size]
            rest[n] = Category.PARAMETERS if first else Category.OPTIMIZER if moments else Category.INPUTS
    for n in kept:
        if older[n].event.requested_bytes in _WORKSPACES:
            rest[n] = Category.WORKSPACE
    return named | rest
