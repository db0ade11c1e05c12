"""The paged KV cache: keys and values of every token, in blocks, per layer.

Layout of a layer: [block, offset, 2, kv_head, head_dim]. Token-major, keys beside values: what a
step computes for a token, one row of the fused qkv projection, is stored by one index_copy; a
sequence's blocks are gathered by one index_select of long contiguous rows; and attention takes
both halves as strided views. Heads-major blocks would need a transposing copy on either side.
"""

import time

import torch
from torch import Tensor

from engine.config import CacheConfig
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.plan import BlockCopies, BlockPairs


class KVCache:
    """`layers[i]` is [num_blocks, block_size, 2, num_kv_heads, head_dim], `host_layers[i]` the
    same of the host pool. `prefill` is the cache from which blocks are received, if there is one.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: CacheConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        prefill: "KVCache | None" = None,
    ) -> None:
        block = (config.block_size, 2, model.num_kv_heads, model.head_dim)
        # Zeros of this size are pages that the system maps when they are first written.
        self.layers = tuple(
            torch.zeros((config.num_blocks, *block), device=device, dtype=dtype)
            for _ in range(model.num_layers)
        )
        # Pinned, so that the copies run at the speed of the link.
        self.host_layers = tuple(
            torch.zeros(
                (config.num_host_blocks, *block), dtype=dtype, pin_memory=device.type == "cuda"
            )
            for _ in range(model.num_layers)
        )
        self._prefill = prefill

    def move(self, copies: BlockCopies) -> float:
        """Make a step's copies; seconds spent between device and host.

        They run before the step's computation, on its stream: what they read is not overwritten
        and what they write is not read before they are done.
        """
        started = time.perf_counter()
        _copy(self.layers, self.host_layers, copies.swapped_out)
        swap_seconds = time.perf_counter() - started
        _copy(self.layers, self.layers, copies.copied)
        started = time.perf_counter()
        _copy(self.host_layers, self.layers, copies.swapped_in)
        swap_seconds += time.perf_counter() - started
        if copies.received:
            assert self._prefill is not None
            _copy(self._prefill.layers, self.layers, copies.received)
        return swap_seconds


def _copy(sources: tuple[Tensor, ...], targets: tuple[Tensor, ...], pairs: BlockPairs) -> None:
    """Copy blocks within every layer; all are read before any is written."""
    if not pairs:
        return
    index = torch.tensor(pairs, dtype=torch.int64)
    from_ids, to_ids = index[:, 0].to(sources[0].device), index[:, 1].to(targets[0].device)
    for source, target in zip(sources, targets, strict=True):
        target.index_copy_(0, to_ids, source.index_select(0, from_ids).to(target.device))


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
