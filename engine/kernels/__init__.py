"""What runs on the device: attention over paged KV and linear layers.

The one place where a kernel can be replaced: models ask `attention_for(device)` and construct
`Linear`, and know nothing of what stands behind them.
"""

import torch

from engine.kernels.attention import Attention, AttentionBatch, Span
from engine.kernels.linear import Linear

__all__ = ["Attention", "AttentionBatch", "Linear", "Span", "attention_for"]


def attention_for(device: torch.device) -> Attention:
    """The attention that runs on this device: plain torch, everywhere so far."""
    return Attention(device)
