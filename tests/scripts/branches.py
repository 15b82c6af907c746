"""Decides by a value."""

import torch

loss = torch.randn(4, device="cuda").sum()
if loss.item() > 3:
    print("unreachable")
