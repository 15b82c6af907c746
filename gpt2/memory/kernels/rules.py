"""All rules of what kernels take: importing this registers them with `gpt2.memory.kernels.scratch`."""

from gpt2.memory.kernels import (  # noqa: F401
    attention,
    convolution,
    embedding,
    in_place,
    indexing,
    losses,
    norms,
    reductions,
    sorts,
    unknown_sizes,
)

in_place.wrap()  # last: its rules stand before the others
