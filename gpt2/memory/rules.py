"""All rules of what kernels take: importing this registers them with `gpt2.memory.scratch`."""

from gpt2.memory import (  # noqa: F401
    attention_scratch,
    convolution,
    in_place,
    index_scratch,
    indexing,
    loss_scratch,
    norm_scratch,
    reduction_scratch,
    sort_scratch,
    unknown_sizes,
)

in_place.wrap()  # last: its rules stand before the others
