"""AdamW's state before its first step: memory shows at once what it will be, and no update is changed by it.

The usual way to get the state early, a step with gradients of zero, is a step: it decays the weights and counts, so
that every later bias correction is one step ahead.
"""

from __future__ import annotations

import torch


def allocate_state(optimizer: torch.optim.Adam) -> int:
    """Give every parameter of an Adam or AdamW its state as its first update would find it; returns the new bytes.

    Moments are zero and the count of steps is 0, as in `torch.optim.adam._init_group`: on the parameter's device if the
    update is fused or capturable, on the host otherwise. State that exists is left alone.
    """
    allocated = 0
    for group in optimizer.param_groups:
        on_device = group["fused"] or group["capturable"]
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state or not parameter.requires_grad:
                continue
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
            for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                allocated += state[name].nbytes
            allocated += state["step"].nbytes if on_device else 0
    return allocated
