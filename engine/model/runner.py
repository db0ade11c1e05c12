"""Executing plans on a model: StepPlan -> tensors -> logits -> token ids."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

import torch
from torch import Tensor

from engine.config import CacheConfig
from engine.kernels import Span, attention_for
from engine.model.kv_cache import KVCache, blocks_within
from engine.model.loader import LoadedModel
from engine.model.logprobs import is_finite, select, tagged_logprobs, untagged
from engine.model.sampler import NONE_ALLOWED, Sampler
from engine.plan import StepOutput, StepPlan
from engine.sequence import Sequence as EngineSequence

_HEAD_ROWS = 64  # of a prompt's logits that are in memory at a time
_NOT_FINITE = "the model's logits are not finite"
_NONE_ALLOWED = (
    "no token is allowed here: logit_bias, bad_words, min_tokens and the grammar bar them all"
)


class ModelRunner:
    """A model with its KV cache. One thread at a time; keeps no state but caches.

    `prefill` is the runner whose blocks this one's plans receive, if they do.
    """

    def __init__(
        self, model: LoadedModel, cache: CacheConfig, *, prefill: "ModelRunner | None" = None
    ) -> None:
        self._model = model
        self.cache: KVCache = KVCache(
            model.config,
            cache,
            device=model.device,
            dtype=model.dtype,
            prefill=prefill.cache if prefill is not None else None,
        )
        self._attention = attention_for(model.device)
        self._sampler = Sampler(model.config.vocab_size, model.eos_token_ids, model.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Run one step. A sequence whose logits are not finite gets an error, the others tokens."""
        output = StepOutput({}, swap_seconds=self.cache.move(plan.copies))
        if plan.chunks:
            hidden = self._forward(plan)
            self._score_prompts(plan, hidden, output)
            self._draw(plan, hidden, output)
        return output

    def _forward(self, plan: StepPlan) -> Tensor:
        """Hidden states after all tokens of the step, the plan's chunks side by side."""
        token_ids: list[int] = []
        positions: list[int] = []
        for chunk in plan.chunks:
            end = chunk.start + chunk.num_tokens
            token_ids += chunk.seq.token_ids[chunk.start : end]
            positions += range(chunk.start, end)
        tokens, places = torch.tensor([token_ids, positions]).to(self._model.device)
        spans = [Span(c.start, c.num_tokens, c.seq.block_table) for c in plan.chunks]
        batch = self._attention.prepare(spans, self.cache.layers[0])
        return self._model.network.forward(tokens, places, self.cache, self._attention, batch)

    def _draw(self, plan: StepPlan, hidden: Tensor, output: StepOutput) -> None:
        """The next token of each sequence that draws; one row of logits may serve several."""
        drawing = [(c, end) for c, end in zip(plan.chunks, _ends(plan), strict=True) if c.draws]
        if not drawing:
            return
        seqs = [seq for chunk, _ in drawing for seq in chunk.draws]
        logits = self._model.network.logits(_rows(hidden, [end - 1 for _, end in drawing]))
        if len(seqs) > len(drawing):
            shared = [row for row, (chunk, _) in enumerate(drawing) for _ in chunk.draws]
            logits = _rows(logits, shared)
        # A sum is finite only if every term is: one pass, and no mask of the logits' size.
        finite = logits.sum(-1).isfinite()
        asked = [row for row, seq in enumerate(seqs) if seq.params.logprobs is not None]
        tagged = tagged_logprobs(_rows(logits, asked)) if asked else None
        chosen = self._sampler.next_tokens(logits, seqs)
        _report(seqs, chosen, finite, output)
        if tagged is not None:
            num_top = [seqs[row].params.logprobs or 0 for row in asked]
            found = select(tagged, chosen[asked].clamp_(min=0), max(num_top))
            for row, entry in zip(asked, untagged(found, num_top), strict=True):
                if seqs[row].id in output.token_ids:
                    output.logprobs[seqs[row].id] = entry

    def _score_prompts(self, plan: StepPlan, hidden: Tensor, output: StepOutput) -> None:
        """Logprobs of the prompt tokens that follow those of the chunks, where they are wanted."""
        chunks: list[tuple[EngineSequence, int]] = []  # with how many tokens
        rows: list[int] = []
        token_ids: list[int] = []
        num_top: list[int] = []
        for chunk, end in zip(plan.chunks, _ends(plan), strict=True):
            seq, start = chunk.seq, chunk.start
            num_tokens = min(chunk.num_tokens, seq.num_prompt_tokens - 1 - start)
            if not seq.scores_prompt or num_tokens <= 0:
                continue
            chunks.append((seq, num_tokens))
            first = end - chunk.num_tokens
            rows += range(first, first + num_tokens)
            token_ids += seq.token_ids[start + 1 : start + 1 + num_tokens]
            num_top += [seq.params.prompt_logprobs or 0] * num_tokens
        if not chunks:
            return
        index, targets = torch.tensor([rows, token_ids], device=hidden.device)
        slices = [
            select(tagged_logprobs(self._model.network.logits(hidden[part])), tokens, max(num_top))
            for part, tokens in zip(index.split(_HEAD_ROWS), targets.split(_HEAD_ROWS), strict=True)
        ]
        found = iter(untagged(torch.cat(slices), num_top))
        for seq, num_tokens in chunks:
            entries = tuple(islice(found, num_tokens))
            if all(map(is_finite, entries)):
                output.prompt_logprobs[seq.id] = entries
            else:
                output.errors[seq.id] = _NOT_FINITE


def _ends(plan: StepPlan) -> Iterator[int]:
    """Where each chunk ends in the flat batch."""
    return accumulate(chunk.num_tokens for chunk in plan.chunks)


def _rows(values: Tensor, rows: list[int]) -> Tensor:
    return values.index_select(0, torch.tensor(rows, device=values.device))


def _report(
    seqs: Sequence[EngineSequence], chosen: Tensor, finite: Tensor, output: StepOutput
) -> None:
    """Enter what was chosen for each sequence, or why nothing was."""
    for seq, token_id, is_good in zip(
        seqs, *torch.stack([chosen, finite.long()]).tolist(), strict=True
    ):
        if not is_good or seq.id in output.errors:
            output.errors[seq.id] = _NOT_FINITE
        elif token_id == NONE_ALLOWED:
            output.refusals[seq.id] = _NONE_ALLOWED
        else:
            output.token_ids[seq.id] = token_id


def blocks_for_memory(model: LoadedModel, cache_bytes: int, block_size: int = 16) -> int:
    """Blocks that fit in `cache_bytes`. Raises ConfigError when not even one does."""
    return blocks_within(model.config, model.dtype, cache_bytes, block_size)
