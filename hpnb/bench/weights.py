"""Weights drawn on a rank's own device: the same for all candidates, and no whole model on the host."""

from __future__ import annotations

from typing import Any

import torch

import hpnb


def draw_weights(model: Any) -> None:
    """Fill a model of transformers that is on meta, in place: normal, 0.02 wide, and norms around 1."""
    model.to_empty(device=hpnb.device()).tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        table = hpnb.models.roles(model)
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.02)
            if table[name].kind == "norm" and not table[name].bias:
                parameter.add_(1.0)
