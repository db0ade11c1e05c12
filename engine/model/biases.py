"""What is added to single tokens' logits: a request's biases, and -inf where a token is barred."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.sequence import SamplingParams
from engine.sequence import Sequence as EngineSequence

_MAX_KEPT = 512  # requests


class Biases:
    """logit_bias, bad_words and min_tokens. Keeps each request's biases as tensors, since they may
    be a thousand and are the same at every step."""

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        # By sequence, least recently used first; good for these very parameters.
        self._kept: OrderedDict[str, tuple[SamplingParams, Tensor, Tensor]] = OrderedDict()

    def apply(self, logits: Tensor, seqs: Sequence[EngineSequence]) -> None:
        """Change logits [len(seqs), vocab_size] in place; a token outside the vocabulary is
        ignored."""
        rows = [row for row, seq in enumerate(seqs) if seq.params.logit_bias]
        if rows:
            tensors = [self._tensors(seqs[row]) for row in rows]
            counts = torch.tensor([len(token_ids) for token_ids, _ in tensors])
            row_ids = torch.tensor(rows).repeat_interleave(counts).to(self._device)
            token_ids = torch.cat([token_ids for token_ids, _ in tensors])
            # No pair comes twice, so that nothing depends on the order of additions.
            logits[row_ids, token_ids] += torch.cat([biases for _, biases in tensors])
        barred = [
            (row, token_id)
            for row, seq in enumerate(seqs)
            for token_id in self._barred(seq)
            if 0 <= token_id < self._vocab_size
        ]
        if barred:
            index = torch.tensor(barred, device=self._device)
            logits[index[:, 0], index[:, 1]] = float("-inf")

    def _tensors(self, seq: EngineSequence) -> tuple[Tensor, Tensor]:
        """Token ids and biases."""
        kept = self._kept.pop(seq.id, None)
        if kept is None or kept[0] is not seq.params:
            known = {i: bias for i, bias in seq.params.logit_bias if 0 <= i < self._vocab_size}
            token_ids = torch.tensor(list(known), dtype=torch.int64, device=self._device)
            biases = torch.tensor(list(known.values()), dtype=torch.float32, device=self._device)
            kept = (seq.params, token_ids, biases)
        self._kept[seq.id] = kept
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return kept[1], kept[2]

    def _barred(self, seq: EngineSequence) -> Iterable[int]:
        params = seq.params
        if seq.num_output_tokens < params.min_tokens:
            # Also with ignore_eos, as in vLLM: the sequence is to have that many tokens of text.
            yield from self._eos_token_ids
            yield from params.stop_token_ids
        for word in params.bad_words:
            begun = len(word) - 1
            if begun == 0 or tuple(seq.token_ids[-begun:]) == word[:-1]:
                yield word[-1]
