"""What to do after an out-of-memory error: most useful first, and nothing that cannot help.

Left out on purpose: `empty_cache()`, because the allocator has given back all it could before it raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpt2.memory.caching.out_of_memory import format_size
from gpt2.memory.explaining.candidates import LIKELY_BATCH, Candidate
from gpt2.memory.explaining.oom_message import OomMessage

_SMALL_SEGMENTS = (2 * 2**20, 20 * 2**20)


def advise(read: OomMessage, cause: str, found: Sequence[Candidate], *, batch: int | None,
           allocator_conf: str = "") -> list[str]:
    """Sentences, most useful first. `batch` in sequences where known: with 1, a smaller batch is no advice."""
    steps = list(_for_cause(read, cause, allocator_conf))
    if cause == "outside this allocator" and read.requested_bytes is not None:
        return steps  # a smaller step does not help where there was room
    likely = [c for c in found if c.batch <= LIKELY_BATCH]
    too_big_for_the_card = (read.requested_bytes or 0) > (read.total_bytes or 2**60 - 1)
    if too_big_for_the_card and not likely:
        return ["Look at the shapes in the traceback's last line: a broadcast, a reshape or an index made a tensor "
                "that this card cannot hold. No setting will help."]
    steps += _smaller(read, likely, batch)
    return steps + list(_expandable_too(read, cause, allocator_conf))


def _gaps_would_do(read: OomMessage, allocator_conf: str) -> bool:
    short = (read.requested_bytes or 0) - read.room_bytes
    return 0 < short <= (read.unallocated_bytes or 0) and "expandable_segments:True" not in allocator_conf


def _for_cause(read: OomMessage, cause: str, allocator_conf: str) -> Iterator[str]:
    if cause == "limit":
        yield (f"Raise the limit of {format_size(read.allowed_bytes)}: torch.cuda.set_per_process_memory_fraction, or "
               "per_process_memory_fraction in the allocator's configuration.")
        if _gaps_would_do(read, allocator_conf):
            yield ("Or keep the limit and set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: "
                   f"{format_size(read.unallocated_bytes)} lie in gaps and {format_size(read.room_bytes)} are left "
                   "below the limit, together enough for this request.")
    elif cause == "another process":
        named = ", ".join(str(pid) for pid, _ in read.processes)
        yield (f"Find the other processes on the card with nvidia-smi{f' ({named})' if named else ''}: a notebook "
               "kernel left running is the usual one. End it, or choose another card with CUDA_VISIBLE_DEVICES.")
    elif cause == "fragmentation":
        yield from _defragment(read, allocator_conf)
    elif cause == "outside this allocator" and read.requested_bytes is None:
        yield ("Leave room for it: torch.cuda.set_per_process_memory_fraction(0.9) keeps PyTorch's cache from taking "
               "the last bytes, and torch.cuda.empty_cache() before the call gives idle cache back.")
        if read.source == "cuBLAS":
            yield ("Run once on the CPU or with CUDA_LAUNCH_BLOCKING=1: an index out of range on the GPU also ends in "
                   "this message.")
    elif cause == "outside this allocator":
        yield ("Look outside this allocator: nvidia-smi while it runs (another process may hold the memory only at "
               "that moment), the container's or MIG slice's share, and any limit set on this process.")
        if read.private_bytes:
            yield "A memory pool or CUDA graph is in use: a request inside it cannot take memory from outside it."


def _defragment(read: OomMessage, allocator_conf: str) -> Iterator[str]:
    if "expandable_segments:True" not in allocator_conf:
        yield ("Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts: segments then grow, and the "
               f"{format_size(read.unallocated_bytes or 0)} in gaps can be used.")
    if "max_split_size_mb" in allocator_conf and "expandable_segments:True" in allocator_conf:
        yield "Drop max_split_size_mb: with expandable segments it makes reserved memory grow."
    yield "If lengths vary, run the longest batch first or pad to a few lengths: the cache then fits what follows."


def _smaller(read: OomMessage, found: Sequence[Candidate], batch: int | None) -> Iterator[str]:
    """Ways to need less, the one aimed at the likeliest tensor first."""
    likely = found[0].kind if found and (read.requested_bytes or 0) not in _SMALL_SEGMENTS else ""
    if likely == "loss":
        yield ("Compute the loss in chunks of tokens (or with a fused linear and cross-entropy): the vocabulary-sized "
               "tensors, three or four at the peak, shrink to one chunk.")
        yield "Drop the name `logits` before backward (return the loss only): one tensor of that size less."
    if likely == "scores":
        yield ("Use F.scaled_dot_product_attention: no T x T matrix is kept at all, neither this one nor those of the "
               "other blocks.")
    if likely == "parameter":
        yield ("If this is in optimizer.step(): AdamW(fused=True) needs no temporaries of the size of the weights, "
               "where the default (foreach) takes one more copy of them.")
    if likely != "parameter":
        yield "Checkpoint the blocks (torch.utils.checkpoint): what they keep for backward goes, for one more forward."
        yield ("Train under bf16 autocast, with fused attention (scaled_dot_product_attention): most of what is kept "
               "halves. Attention written out keeps its scores and probabilities in two precisions and gains little.")
    if batch != 1:
        yield (f"Lower the batch{f' of {batch}' if batch else ' if it is above 1'} and accumulate gradients over more "
               "micro-batches: everything per token shrinks with it, weights and optimizer state do not.")
    yield "Shorten the sequences: everything per token shrinks, attention written out with the square of the length."
    if likely in ("", "parameter"):
        yield ("If it fails in the first optimizer.step(), the moments (8 bytes per parameter) are what is missing: "
               "an 8-bit or sharded optimizer, or a smaller model.")


def _expandable_too(read: OomMessage, cause: str, allocator_conf: str) -> Iterator[str]:
    """Where gaps are small but would just have held the request."""
    if cause == "size" and _gaps_would_do(read, allocator_conf):
        yield ("expandable_segments:True may let this one request through "
               f"({format_size(read.unallocated_bytes)} lie in gaps), the next one hardly.")
