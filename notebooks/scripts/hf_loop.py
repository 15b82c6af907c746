"""A transformers training loop that knows nothing of this study; its memory history is dumped.

    python hf_loop.py            # both variants, each in a fresh process, files to $OUT

Writes hf.pickle/hf.json (history begins before the model is built) and hf-late.pickle/hf-late.json (after it).
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

OUT = Path(os.environ.get("OUT", "."))
STEPS, BATCH, LENGTH = 4, 8, 256


def train(late: bool) -> None:
    import torch
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel

    def record() -> None:
        torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=40_000)

    torch.manual_seed(0)
    if not late:
        record()
    config = GPT2Config(n_layer=6, n_embd=384, n_head=6, n_positions=512, vocab_size=16_384)
    model = GPT2LMHeadModel(config).cuda()
    model.train()
    if late:
        record()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(0, config.vocab_size, (BATCH, LENGTH)).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.4f}")
    torch.cuda.synchronize()
    name = "hf-late" if late else "hf"
    torch.cuda.memory._dump_snapshot(str(OUT / f"{name}.pickle"))
    facts = {
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
        "memory_allocated": torch.cuda.memory_allocated(),
        "memory_reserved": torch.cuda.memory_reserved(),
        "stats": {k: v for k, v in torch.cuda.memory_stats().items() if k.split(".")[0] in (
            "allocated_bytes", "reserved_bytes", "requested_bytes", "allocation", "segment")},
        "parameters": {str(p.data_ptr()): n for n, p in model.named_parameters()},
        "buffers": {str(b.data_ptr()): n for n, b in model.named_buffers()},
        "parameter_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "moments_bytes": sum(v.nbytes for s in optimizer.state.values() for v in s.values() if v.is_cuda),
        "losses": losses, "steps": STEPS, "batch": BATCH, "length": LENGTH, "config": {
            "n_layer": 6, "n_embd": 384, "n_head": 6, "n_positions": 512, "vocab_size": 16_384},
        "late": late, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "transformers": transformers.__version__, "date": time.strftime("%Y-%m-%d"),
    }
    (OUT / f"{name}.json").write_text(json.dumps(facts, indent=1))
    size = (OUT / f"{name}.pickle").stat().st_size
    print(f"{name}: {size:,} B of pickle, max_memory_allocated {facts['max_memory_allocated']:,}, "
          f"reserved {facts['max_memory_reserved']:,}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1] == "late")
    else:
        for variant in ("early", "late"):
            subprocess.run([sys.executable, __file__, variant], check=True)
