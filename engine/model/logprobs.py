"""Log-probabilities under the model itself: of the tokens that came, and of the likeliest.

A logprob and its token travel as one float64: the 29 bits that it has below a float32's hold the
token id. Logprobs are negative, so that of two equal ones the lower id is the greater number; a
token's place among the likeliest then never depends on how many are asked for.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.events import TokenLogprobs

_ID_MASK = (1 << 28) - 1  # one bit less than there are: converting back rounds to what was there


def tagged_logprobs(logits: Tensor) -> Tensor:
    """log_softmax of float32 logits [rows, vocab_size], each tagged with its token id."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    bits = logits.log_softmax(-1).double().view(torch.int64)
    return bits.bitwise_or_(ids).view(torch.float64)


def select(tagged: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """[rows, 1 + num_top]: each row's own token, then its likeliest ones, best first."""
    own = tagged.gather(1, token_ids.unsqueeze(1))
    return torch.cat([own, tagged.topk(min(num_top, tagged.shape[1]), dim=-1).values], dim=1)


def untagged(selected: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """What `select` found, with so many of the likeliest for each row."""
    found = selected.cpu()
    token_ids = (found.view(torch.int64) & _ID_MASK).tolist()
    logprobs = found.float().tolist()
    return [
        TokenLogprobs(ids[0], values[0], tuple(zip(ids[1 : n + 1], values[1 : n + 1], strict=True)))
        for ids, values, n in zip(token_ids, logprobs, num_top, strict=True)
    ]


def is_finite(found: TokenLogprobs) -> bool:
    return math.isfinite(found.logprob) and all(math.isfinite(value) for _, value in found.top)
