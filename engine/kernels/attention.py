"""Attention over paged KV in plain torch.

Each sequence's blocks are gathered into a scratch buffer, and its queries attend to exactly its
own context there. Of the ways that benchmarks/attention.py measures, it is the fastest for mixed
lengths (what is gathered stays in the core's own cache, nothing is padded), and a sequence's
numbers are bitwise the same in any batch. Milliseconds per step of decodes, 30 layers of 9 heads
over 3 KV heads of 64, float32, two cores of an AMD EPYC:

                    by sequence   one rectangle   rectangles of similar lengths
     4 x 50..1000          13.5            25.6            17.4
    16 x 50                11.2            10.3            11.9
    16 x 200..215          31.0            29.6            31.4
    16 x 50..1000          83.1           198.3           116.1
    32 x 200..215          66.1            64.9            65.8
    32 x 50..1000         137.1           373.4           164.8
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# Pairs of query and key up to which one thread is faster than waking another for each operation.
_SHORT = 2048


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, start + num_tokens) of one sequence, to be computed in this step."""

    start: int
    num_tokens: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Part:
    """One sequence's share of a batch."""

    rows: slice  # of the flat batch
    blocks: Tensor  # ids of the blocks that hold the context it sees
    gathered: Tensor  # where they are gathered, one block a row
    keys: Tensor  # [1, kv_heads, context, head_dim], a view of `gathered`
    values: Tensor
    mask: Tensor | None  # [num_tokens, context], added to the scores
    is_causal: bool  # the context is the queries' own tokens and nothing before them


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where one step's tokens lie; the same for all layers that see as much of the context."""

    slots: Tensor  # block_id * block_size + offset of each token
    short: tuple[_Part, ...]  # so little work each that a second thread would not pay
    long: tuple[_Part, ...]
    # What it was made of, for `within`.
    spans: tuple[Span, ...]
    tables: tuple[Tensor, ...]  # of each span, the ids of the blocks that hold its context
    scratch: Tensor


class Attention:
    """Paged attention with a scratch buffer that is reused: not for two threads at once.

    A fresh buffer per call would cost more in page faults than the gathering itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scratch = torch.empty(0, device=device)

    def prepare(self, spans: Sequence[Span], cache: Tensor) -> AttentionBatch:
        """Index tensors for a step; `cache` is any layer's [blocks, block_size, 2, heads, dim]."""
        block_size = cache.shape[1]
        slots: list[int] = []
        block_ids: list[int] = []
        counts: list[int] = []
        for span in spans:
            end = span.start + span.num_tokens
            counts.append(-(-end // block_size))
            block_ids += span.block_table[: counts[-1]]
            slots += (
                span.block_table[position // block_size] * block_size + position % block_size
                for position in range(span.start, end)
            )
        index = torch.tensor(slots + block_ids, dtype=torch.int64).to(self._device)
        tables = torch.split(index[len(slots) :], counts)
        scratch = self._scratch_for(max(counts), cache)
        return _batch(index[: len(slots)], tuple(spans), tables, scratch, None)

    def within(self, batch: AttentionBatch, window: int) -> AttentionBatch:
        """The same step for layers whose queries see only `window` tokens, their own the last."""
        if all(span.start + span.num_tokens <= window for span in batch.spans):
            return batch
        return _batch(batch.slots, batch.spans, batch.tables, batch.scratch, window)

    def attend(self, query: Tensor, new_kv: Tensor, cache: Tensor, batch: AttentionBatch) -> Tensor:
        """Store the step's keys and values, then attend.

        query   [num_tokens, num_heads, head_dim]
        new_kv  [num_tokens, 2, num_kv_heads, head_dim]
        cache   [num_blocks, block_size, 2, num_kv_heads, head_dim], of one layer

        Returns [num_tokens, num_heads * head_dim].
        """
        cache.flatten(0, 1).index_copy_(0, batch.slots, new_kv)
        blocks = cache.flatten(1)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        with _threads(1):
            for part in batch.short:
                out[part.rows] = _attend(query[part.rows], blocks, part)
        for part in batch.long:
            out[part.rows] = _attend(query[part.rows], blocks, part)
        return out.flatten(1)

    def _scratch_for(self, num_blocks: int, cache: Tensor) -> Tensor:
        if len(self._scratch) < num_blocks or self._scratch.dtype != cache.dtype:
            self._scratch = cache.new_empty((num_blocks, *cache.shape[1:]))
        return self._scratch


def _batch(
    slots: Tensor,
    spans: tuple[Span, ...],
    tables: tuple[Tensor, ...],
    scratch: Tensor,
    window: int | None,
) -> AttentionBatch:
    short: list[_Part] = []
    long: list[_Part] = []
    row = 0
    for span, table in zip(spans, tables, strict=True):
        # The first query's window opens first.
        first = 0 if window is None else max(0, span.start + 1 - window)
        part = _part(span, row, table, scratch, first, window)
        pairs = span.num_tokens * (span.start + span.num_tokens - first)
        (short if pairs <= _SHORT else long).append(part)
        row += span.num_tokens
    return AttentionBatch(slots, tuple(short), tuple(long), spans, tables, scratch)


def _part(
    span: Span, row: int, table: Tensor, scratch: Tensor, first: int, window: int | None
) -> _Part:
    """The share of a sequence whose queries see positions [first, their own], or a window of it."""
    block_size = scratch.shape[1]
    skipped = first // block_size
    blocks = table[skipped:]
    gathered = scratch[: len(blocks)]
    end = span.start + span.num_tokens
    # Exactly the context: what a block holds beyond it may be stale, even NaN.
    context = gathered.flatten(0, 1)[first - skipped * block_size : end - skipped * block_size]
    keys, values = context.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
    is_masked = span.num_tokens > 1 and (span.start > 0 or (window is not None and end > window))
    return _Part(
        rows=slice(row, row + span.num_tokens),
        blocks=blocks,
        gathered=gathered.flatten(1),
        keys=keys,
        values=values,
        mask=_mask(span, first, window, scratch) if is_masked else None,
        is_causal=span.num_tokens > 1 and not is_masked,
    )


def _mask(span: Span, first: int, window: int | None, like: Tensor) -> Tensor:
    """[num_tokens, keys from position `first`]: 0 where a query sees a key, else -inf."""
    shape = (span.num_tokens, span.start + span.num_tokens - first)
    hidden = torch.ones(shape, dtype=torch.bool, device=like.device).triu_(span.start - first + 1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril_(span.start - first - window)
    mask = torch.zeros(shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(hidden, float("-inf"))


def _attend(query: Tensor, cache: Tensor, part: _Part) -> Tensor:
    torch.index_select(cache, 0, part.blocks, out=part.gathered)
    if len(query) == 1:
        # No mask among the queries of one token: those that share a KV head go as its rows.
        grouped = query.view(1, part.keys.shape[1], -1, query.shape[-1])
        out = F.scaled_dot_product_attention(grouped, part.keys, part.values)
        return out.view(query.shape)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        part.keys,
        part.values,
        attn_mask=part.mask,
        is_causal=part.is_causal,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Run CPU operations of this thread on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
