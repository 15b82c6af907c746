"""Somebody's training loop: a small BERT of transformers. It knows nothing of this study."""

import torch
from transformers import BertConfig, BertForMaskedLM

config = BertConfig(hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536)
model = BertForMaskedLM(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for _ in range(3):
    tokens = torch.randint(0, config.vocab_size, (16, 256), device="cuda")
    out = model(input_ids=tokens, labels=tokens)
    loss = out.loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
