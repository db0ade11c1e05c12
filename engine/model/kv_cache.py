"""The paged KV cache: keys and values of every token, in blocks, per layer.

Layout, per layer: [slot, 2, kv_head, head_dim], slot = block_id * block_size + offset.
Token-major, because then the keys and values that a step computes, one row of the fused qkv
projection per token, are stored by one index_copy, the context of a sequence is gathered by one
index_select, and both halves are read as views. Heads-major blocks would need a transposing copy
on either side on CPU. One slot more than the pool has is always zero: what pads a batch points
there, so that nothing stale, not even a NaN, can reach another sequence.
"""

import torch

from engine.config import CacheConfig
from engine.errors import ConfigError
from engine.model.config import ModelConfig


class KVCache:
    """Storage for `config.num_blocks` blocks; `layers[i]` is [num_slots + 1, 2, kv_heads, dim]."""

    def __init__(
        self, model: ModelConfig, config: CacheConfig, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.block_size = config.block_size
        self.null_slot = config.num_tokens
        shape = (config.num_tokens + 1, 2, model.num_kv_heads, model.head_dim)
        # Zeros of this size are pages that the system maps when they are first written.
        self.layers = tuple(
            torch.zeros(shape, device=device, dtype=dtype) for _ in range(model.num_layers)
        )


def token_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of KV that one token takes over all layers."""
    return 2 * model.num_layers * model.kv_size * dtype.itemsize


def blocks_within(model: ModelConfig, dtype: torch.dtype, cache_bytes: int, block_size: int) -> int:
    """Blocks that fit in this many bytes. Raises ConfigError when not even one does."""
    per_token = token_bytes(model, dtype)
    num_blocks = (cache_bytes - per_token) // (per_token * block_size)
    if num_blocks < 1:
        raise ConfigError(
            f"{cache_bytes} bytes of KV cache hold no block of {block_size} tokens "
            f"({per_token * (block_size + 1)} bytes are needed for one): give it more memory"
        )
    return int(num_blocks)
