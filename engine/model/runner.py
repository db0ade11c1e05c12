"""Executing plans on a model: StepPlan -> tensors -> logits -> token ids."""

import torch

from engine.config import CacheConfig
from engine.kernels import Span, attention_for
from engine.model.kv_cache import KVCache, blocks_within
from engine.model.loader import LoadedModel
from engine.model.sampler import Draw, sample
from engine.plan import StepOutput, StepPlan


class ModelRunner:
    """A model with its KV cache. One thread at a time; keeps no state but the cache."""

    def __init__(self, model: LoadedModel, cache: CacheConfig) -> None:
        self._model = model
        self.cache = KVCache(model.config, cache, device=model.device, dtype=model.dtype)
        self._attention = attention_for(model.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step; next token by sequence id, for each chunk that samples."""
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for chunk in plan.chunks:
            end = chunk.start + chunk.num_tokens
            token_ids += chunk.seq.token_ids[chunk.start : end]
            positions += range(chunk.start, end)
            if chunk.samples:
                rows.append(len(token_ids) - 1)
        if not token_ids:
            return StepOutput({})
        device = self._model.device
        batch = self._attention.prepare(
            [Span(c.start, c.num_tokens, c.seq.block_table) for c in plan.chunks],
            self.cache.block_size,
            self.cache.null_slot,
        )
        logits = self._model.network.forward(
            torch.tensor(token_ids, device=device),
            torch.tensor(positions, device=device),
            torch.tensor(rows, device=device, dtype=torch.int64),
            self.cache,
            self._attention,
            batch,
        )
        sampling = [chunk.seq for chunk in plan.chunks if chunk.samples]
        if not sampling:
            return StepOutput({})
        chosen = sample(logits, [Draw(seq.params, seq.num_tokens) for seq in sampling])
        return StepOutput({s.id: t for s, t in zip(sampling, chosen.tolist(), strict=True)})


def blocks_for_memory(model: LoadedModel, cache_bytes: int, block_size: int = 16) -> int:
    """Blocks that fit in `cache_bytes`. Raises ConfigError when not even one does."""
    return blocks_within(model.config, model.dtype, cache_bytes, block_size)
