"""Executing plans on a model: StepPlan -> tensors -> logits -> token ids."""

import torch
from torch import Tensor

from engine.config import CacheConfig
from engine.kernels import Span, attention_for
from engine.model.kv_cache import KVCache, blocks_within
from engine.model.loader import LoadedModel
from engine.model.sampler import Draw, sample
from engine.plan import StepOutput, StepPlan

NOT_FINITE = -1  # where a token id would be


class ModelRunner:
    """A model with its KV cache. One thread at a time; keeps no state but the cache."""

    def __init__(self, model: LoadedModel, cache: CacheConfig) -> None:
        self._model = model
        self.cache = KVCache(model.config, cache, device=model.device, dtype=model.dtype)
        self._attention = attention_for(model.device, model.config.sliding_window)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step. A sequence whose logits are not finite gets an error, the others tokens."""
        if not plan.chunks:
            return StepOutput({})
        logits = self._forward(plan)
        sampling = [seq for chunk in plan.chunks for seq in chunk.draws]
        if not sampling:
            return StepOutput({})
        chosen = sample(logits, [Draw(seq.params, seq.num_tokens) for seq in sampling])
        # A sum is finite only if every term is: one pass, and no mask of the logits' size.
        chosen.masked_fill_(~logits.sum(-1).isfinite(), NOT_FINITE)
        token_ids: dict[str, int] = {}
        errors: dict[str, str] = {}
        for seq, token_id in zip(sampling, chosen.tolist(), strict=True):
            if token_id == NOT_FINITE:
                errors[seq.id] = "the model's logits are not finite"
            else:
                token_ids[seq.id] = token_id
        return StepOutput(token_ids, errors)

    def _forward(self, plan: StepPlan) -> Tensor:
        """Logits of each chunk that draws, in the plan's order."""
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for chunk in plan.chunks:
            end = chunk.start + chunk.num_tokens
            token_ids += chunk.seq.token_ids[chunk.start : end]
            positions += range(chunk.start, end)
            rows += [len(token_ids) - 1] * len(chunk.draws)
        index = torch.tensor(token_ids + positions + rows, dtype=torch.int64)
        tokens, places, last = torch.split(
            index.to(self._model.device), [len(token_ids), len(positions), len(rows)]
        )
        spans = [Span(c.start, c.num_tokens, c.seq.block_table) for c in plan.chunks]
        batch = self._attention.prepare(spans, self.cache.layers[0])
        network = self._model.network
        hidden = network.forward(tokens, places, self.cache, self._attention, batch)
        return network.logits(hidden[last])


def blocks_for_memory(model: LoadedModel, cache_bytes: int, block_size: int = 16) -> int:
    """Blocks that fit in `cache_bytes`. Raises ConfigError when not even one does."""
    return blocks_within(model.config, model.dtype, cache_bytes, block_size)
