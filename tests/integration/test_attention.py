"""Attention over paged KV: every way of batching equals the definition."""

import random
from itertools import count

import pytest
import torch

from engine.kernels import Linear, Span, attention_for
from engine.kernels.reference import attend

CPU = torch.device("cpu")
NUM_BLOCKS = 64


def spans_of(chunks: list[tuple[int, int]], block_size: int, seed: int = 0) -> list[Span]:
    """Sequences (start, num_tokens) with block tables in random order and no block in two."""
    blocks = list(range(NUM_BLOCKS))
    random.Random(seed).shuffle(blocks)
    spans = []
    for start, num_tokens in chunks:
        table = [blocks.pop() for _ in range(-(-(start + num_tokens) // block_size))]
        # A table may run ahead of what is computed.
        spans.append(Span(start, num_tokens, [*table, blocks.pop()]))
    return spans


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 1)],
        [(36, 1)],
        [(0, 20)],
        [(5, 12)],
        [(7, 1), (8, 1), (31, 1), (0, 1)],
        [(40, 1), (3, 1), (0, 9), (8, 8), (13, 2)],
    ],
    ids=str,
)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("block_size", [4, 8])
@pytest.mark.parametrize("window", [None, 1, 5, 8, 30])
def test_attention_equals_its_definition(
    chunks: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    window: int | None,
) -> None:
    head_dim = 8
    num_tokens = sum(n for _, n in chunks)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(num_tokens, num_heads, head_dim, generator=generator)
    new_kv = torch.randn(num_tokens, 2, num_kv_heads, head_dim, generator=generator)
    cache = torch.randn(NUM_BLOCKS, block_size, 2, num_kv_heads, head_dim, generator=generator)
    spans = spans_of(chunks, block_size)
    expected_cache = cache.clone()
    row = count()
    for span in spans:
        for position in range(span.start, span.start + span.num_tokens):
            block = span.block_table[position // block_size]
            expected_cache[block, position % block_size] = new_kv[next(row)]
    parts = query.split([span.num_tokens for span in spans])
    expected = torch.cat(
        [
            attend(
                part, expected_cache.flatten(0, 1), list(s.block_table), block_size, s.start, window
            )
            for part, s in zip(parts, spans, strict=True)
        ]
    )

    attention = attention_for(CPU)
    batch = attention.prepare(spans, cache)
    if window is not None:
        batch = attention.within(batch, window)
    got = attention.attend(query, new_kv, cache, batch)

    torch.testing.assert_close(got, expected.flatten(1), atol=1e-5, rtol=1e-5)
    assert torch.equal(cache, expected_cache)


def test_a_sliding_layer_reads_no_block_before_its_window() -> None:
    spans = spans_of([(50, 1), (40, 20)], 8)
    cache = torch.full((NUM_BLOCKS, 8, 2, 1, 8), float("nan"))
    for span, first in ((spans[0], 44), (spans[1], 34)):  # seven tokens up to the first query's
        for position in range(first // 8 * 8, span.start):
            cache[span.block_table[position // 8], position % 8] = 1.0
    attention = attention_for(CPU)
    batch = attention.prepare(spans, cache)
    query, new_kv = torch.ones(21, 2, 8), torch.ones(21, 2, 1, 8)

    assert torch.equal(
        attention.attend(query, new_kv, cache, attention.within(batch, 7)), torch.ones(21, 16)
    )
    assert attention.attend(query, new_kv, cache, batch).isnan().all()


def test_a_decode_is_bitwise_the_same_alone_and_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    cache = torch.randn(NUM_BLOCKS, 16, 2, 3, 64, generator=generator)
    spans = spans_of([(100, 1), (31, 1), (250, 1), (16, 1)], 16)
    query = torch.randn(4, 9, 64, generator=generator)
    new_kv = torch.randn(4, 2, 3, 64, generator=generator)
    attention = attention_for(CPU)

    together = attention.attend(query, new_kv, cache, attention.prepare(spans, cache))
    alone = [
        attention.attend(
            query[i : i + 1], new_kv[i : i + 1], cache, attention.prepare([span], cache)
        )
        for i, span in enumerate(spans)
    ]

    assert torch.equal(together, torch.cat(alone))


def test_stale_blocks_beyond_the_context_are_never_read() -> None:
    spans = spans_of([(2, 1), (0, 3)], 8)
    cache = torch.full((NUM_BLOCKS, 8, 2, 1, 8), float("nan"))
    for position in range(2):
        cache[spans[0].block_table[0], position] = 1.0
    attention = attention_for(CPU)

    out = attention.attend(
        torch.ones(4, 2, 8), torch.ones(4, 2, 1, 8), cache, attention.prepare(spans, cache)
    )

    assert torch.equal(out, torch.ones(4, 16))


@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_the_matrix_product(num_rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(96, 1536, generator=generator).to(dtype)
    x = torch.randn(num_rows, 1536, generator=generator).to(dtype)

    out = Linear(weight)(x)

    assert out.shape == (num_rows, 96)
    assert out.dtype == dtype
    exact = x.double() @ weight.double().T
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert (out.double() - exact).norm() / exact.norm() < tolerance
