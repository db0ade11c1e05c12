"""What is added to single tokens' logits: a request's biases, and -inf where a token is barred."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.sequence import Sequence as EngineSequence


def add_biases(
    logits: Tensor, seqs: Sequence[EngineSequence], eos_token_ids: frozenset[int]
) -> None:
    """Apply logit_bias, bad_words and min_tokens, in place.

    logits  [len(seqs), vocab_size]; a token outside the vocabulary is ignored
    """
    rows: list[int] = []
    token_ids: list[int] = []
    biases: list[float] = []
    for row, seq in enumerate(seqs):
        changes = dict(seq.params.logit_bias)
        changes.update((token_id, float("-inf")) for token_id in _barred(seq, eos_token_ids))
        known = {i: bias for i, bias in changes.items() if 0 <= i < logits.shape[1]}
        rows += [row] * len(known)
        token_ids += known.keys()
        biases += known.values()
    if rows:
        index = torch.tensor([rows, token_ids], device=logits.device)
        # No pair comes twice, so that nothing depends on the order of additions.
        logits[index[0], index[1]] += torch.tensor(biases, device=logits.device)


def _barred(seq: EngineSequence, eos_token_ids: frozenset[int]) -> Iterable[int]:
    params = seq.params
    if seq.num_output_tokens < params.min_tokens:
        # Also with ignore_eos, as in vLLM: the sequence is to have that many tokens of text.
        yield from eos_token_ids
        yield from params.stop_token_ids
    for word in params.bad_words:
        begun = len(word) - 1
        if begun == 0 or tuple(seq.token_ids[-begun:]) == word[:-1]:
            yield word[-1]
