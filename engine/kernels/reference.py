"""Attention over paged KV as its definition says, one sequence and one query at a time.

Obvious and slow: the oracle that every other way is tested against.
"""

import torch
from torch import Tensor


def attend(
    query: Tensor,
    cache: Tensor,
    block_table: list[int],
    block_size: int,
    start: int,
    sliding_window: int | None = None,
) -> Tensor:
    """Attention of the tokens at positions start, start + 1, ... of one sequence.

    query  [num_tokens, num_heads, head_dim]
    cache  [num_slots, 2, num_kv_heads, head_dim], keys and values up to the last query's own
    sliding_window  tokens that each query sees, itself the last of them; None: all before it

    Returns [num_tokens, num_heads, head_dim].
    """
    num_tokens, num_heads, head_dim = query.shape
    group = num_heads // cache.shape[2]
    out = torch.empty_like(query)
    for i in range(num_tokens):
        first = 0 if sliding_window is None else max(0, start + i + 1 - sliding_window)
        slots = [
            block_table[position // block_size] * block_size + position % block_size
            for position in range(first, start + i + 1)
        ]
        for head in range(num_heads):
            keys = cache[slots, 0, head // group].double()
            values = cache[slots, 1, head // group].double()
            scores = keys @ query[i, head].double() / head_dim**0.5
            out[i, head] = (torch.softmax(scores, dim=0) @ values).to(out.dtype)
    return out
