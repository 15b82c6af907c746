"""A small transformers model, trained as the library's examples do; with `mask`, as its collators feed it."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

config = GPT2Config(vocab_size=1000, n_positions=128, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
schedule = get_linear_schedule_with_warmup(optimizer, 1, 10)
model.train()
for step in range(3):
    batch = {"input_ids": torch.randint(0, 1000, (4, 128))}
    if "mask" in sys.argv:
        batch["attention_mask"] = torch.ones(4, 128, dtype=torch.long)
    batch = {name: value.to(model.device) for name, value in batch.items()}
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    print({"step": step, "loss": loss.item(), "lr": schedule.get_last_lr()[0]})
model.eval()
with torch.no_grad():
    print(model(**batch).logits.shape)
