"""The paged KV cache: keys and values of every token, in blocks, per layer.

Layout of a layer: [block, offset, 2, kv_head, head_dim]. Token-major, keys beside values: what a
step computes for a token, one row of the fused qkv projection, is stored by one index_copy; a
sequence's blocks are gathered by one index_select of long contiguous rows; and attention takes
both halves as strided views. Heads-major blocks would need a transposing copy on either side.
"""

import torch

from engine.config import CacheConfig
from engine.errors import ConfigError
from engine.model.config import ModelConfig


class KVCache:
    """`layers[i]` is [num_blocks, block_size, 2, num_kv_heads, head_dim]."""

    def __init__(
        self, model: ModelConfig, config: CacheConfig, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.num_blocks, config.block_size, 2, model.num_kv_heads, model.head_dim)
        # Zeros of this size are pages that the system maps when they are first written.
        self.layers = tuple(
            torch.zeros(shape, device=device, dtype=dtype) for _ in range(model.num_layers)
        )


def kv_bytes_per_token(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes over all layers."""
    return 2 * model.num_layers * model.kv_size * dtype.itemsize


def blocks_within(model: ModelConfig, dtype: torch.dtype, cache_bytes: int, block_size: int) -> int:
    """Blocks that fit in this many bytes. Raises ConfigError when not even one does."""
    block_bytes = block_size * kv_bytes_per_token(model, dtype)
    if cache_bytes < block_bytes:
        raise ConfigError(
            f"{cache_bytes} bytes of KV cache hold no block of {block_size} tokens, which takes "
            f"{block_bytes}: give the cache more memory"
        )
    return cache_bytes // block_bytes
