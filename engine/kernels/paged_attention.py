"""Attention over paged KV in plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, start + num_tokens) of one sequence, to be computed in this step."""

    start: int
    num_tokens: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    slots: Tensor
    spans: tuple[tuple[int, int, Tensor, Tensor | None], ...]


class Attention:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def prepare(self, spans: Sequence[Span], block_size: int, null_slot: int) -> AttentionBatch:
        slots: list[Tensor] = []
        out = []
        row = 0
        for span in spans:
            end = span.start + span.num_tokens
            context = torch.tensor(
                [
                    span.block_table[p // block_size] * block_size + p % block_size
                    for p in range(end)
                ],
                device=self._device,
            )
            slots.append(context[span.start :])
            mask = None
            if span.num_tokens > 1:
                mask = torch.ones(span.num_tokens, end, dtype=torch.bool, device=self._device).tril(
                    span.start
                )
            out.append((row, row + span.num_tokens, context, mask))
            row += span.num_tokens
        return AttentionBatch(torch.cat(slots), tuple(out))

    def attend(self, query: Tensor, new_kv: Tensor, cache: Tensor, batch: AttentionBatch) -> Tensor:
        cache.index_copy_(0, batch.slots, new_kv)
        outs = []
        for begin, end, context, mask in batch.spans:
            kv = cache.index_select(0, context)
            keys, values = kv.transpose(0, 2).unbind(1)
            out = F.scaled_dot_product_attention(
                query[begin:end].transpose(0, 1)[None],
                keys[None],
                values[None],
                attn_mask=mask,
                enable_gqa=True,
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs).flatten(1)
