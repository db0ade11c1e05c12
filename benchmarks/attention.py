"""Three exact ways of attending to paged KV on CPU, for steps of decodes of mixed lengths.

    OMP_WAIT_POLICY=passive python benchmarks/attention.py [threads]

Prints milliseconds per step (30 layers, 9 heads over 3 KV heads of 64, float32), least of several.

    sequence  each sequence's blocks gathered and attended to alone: what the engine does
    padded    all sequences gathered as one rectangle, the shorter masked
    grouped   rectangles of similar lengths: a new one where the next length is 30 % greater
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels import Span, attention_for

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 30, 9, 3, 64, 16, 4096
REAL_LAYERS = 4  # cycled: enough that no layer stays in the processor's cache
Way = Callable[[Tensor, Tensor], Tensor]


def by_sequence(spans: Sequence[Span], cache: Tensor) -> Way:
    attention = attention_for(cache.device)
    batch = attention.prepare(spans, cache)
    new_kv = torch.randn(len(spans), 2, KV_HEADS, HEAD_DIM)
    return lambda query, layer: attention.attend(query, new_kv, layer, batch)


def padded(spans: Sequence[Span], cache: Tensor) -> Way:
    return _rectangle(spans, cache.new_empty(_scratch_size(spans)))


def grouped(spans: Sequence[Span], cache: Tensor) -> Way:
    order = sorted(range(len(spans)), key=lambda i: spans[i].start)
    groups = [[order[0]]]
    for i in order[1:]:
        if spans[i].start > 1.3 * spans[groups[-1][0]].start:
            groups.append([])
        groups[-1].append(i)
    scratch = cache.new_empty(max(_scratch_size([spans[i] for i in g]) for g in groups))
    ways = [
        (torch.tensor(group), _rectangle([spans[i] for i in group], scratch)) for group in groups
    ]
    inverse = torch.tensor([*chain.from_iterable(groups)]).argsort()

    def attend(query: Tensor, layer: Tensor) -> Tensor:
        return torch.cat([way(query[rows], layer) for rows, way in ways])[inverse]

    return attend


def _scratch_size(spans: Sequence[Span]) -> int:
    longest = max(len(span.block_table) for span in spans)
    return len(spans) * longest * BLOCK_SIZE * 2 * KV_HEADS * HEAD_DIM


def _rectangle(spans: Sequence[Span], scratch: Tensor) -> Way:
    longest = max(len(span.block_table) for span in spans)
    tables = torch.zeros(len(spans), longest, dtype=torch.int64)
    mask = torch.full((len(spans), 1, 1, longest * BLOCK_SIZE), float("-inf"))
    for i, span in enumerate(spans):
        tables[i, : len(span.block_table)] = torch.tensor(span.block_table)
        mask[i, ..., : span.start + 1] = 0
    rows = tables.flatten()
    gathered = scratch[: _scratch_size(spans)].view(len(rows), -1)
    shape = (len(spans), longest * BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM)
    keys, values = gathered.view(shape).permute(2, 0, 3, 1, 4)

    def attend(query: Tensor, layer: Tensor) -> Tensor:
        torch.index_select(layer.flatten(1), 0, rows, out=gathered)
        packed = query.reshape(len(spans), KV_HEADS, -1, HEAD_DIM)
        return F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask).flatten(1)

    return attend


def milliseconds(way: Way, query: Tensor, layers: Sequence[Tensor]) -> float:
    """Least time over repetitions of one step's attention."""
    least = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        for i in range(LAYERS):
            way(query, layers[i % len(layers)])
        least = min(least, time.perf_counter() - began)
    return least * 1e3


def main() -> None:
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    rng = random.Random(0)
    shape = (NUM_BLOCKS, BLOCK_SIZE, 2, KV_HEADS, HEAD_DIM)
    layers = [torch.randn(shape) for _ in range(REAL_LAYERS)]
    ways = {"sequence": by_sequence, "padded": padded, "grouped": grouped}
    print(f"{torch.get_num_threads()} threads".ljust(22), *(name.rjust(9) for name in ways))
    for num_seqs in (1, 4, 16, 32):
        for low, high in ((50, 50), (200, 215), (50, 1000), (1000, 1000)):
            ids = iter(rng.sample(range(NUM_BLOCKS), NUM_BLOCKS))
            starts = [rng.randint(low, high) - 1 for _ in range(num_seqs)]
            spans = [Span(s, 1, [next(ids) for _ in range(s // BLOCK_SIZE + 1)]) for s in starts]
            query = torch.randn(num_seqs, HEADS, HEAD_DIM)
            times = [milliseconds(way(spans, layers[0]), query, layers) for way in ways.values()]
            print(f"{num_seqs:2} x {low}..{high}".ljust(22), *(f"{t:9.1f}" for t in times))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
