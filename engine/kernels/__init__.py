"""Attention over paged KV: the one place where a kernel can be replaced."""

import torch

from engine.kernels.paged_attention import Attention, AttentionBatch, Span

__all__ = ["Attention", "AttentionBatch", "Span", "attention_for"]


def attention_for(device: torch.device) -> Attention:
    """The attention that this kind of device runs. Plain torch everywhere, so far."""
    return Attention(device)
