"""Choosing the next token of each sequence: greedy, or by the Gumbel-max of a counter RNG.

The noise of a token is a pure function of (seed, position, vocabulary id), so a sequence draws
the same token whatever its batch mates, its chunks and its preemptions are:

    state = mix(mix(mix(seed_low ^ C) ^ seed_high) ^ position)      C = 0x9E3779B9, all 32 bits
    h     = mix(state ^ mix(id ^ C))
    u     = (h + 0.5) / 2**32                                       strictly within (0, 1)
    next  = argmax over ids of  logit / temperature - log(-log(u))

`mix` is the 32-bit finalizer of MurmurHash3. Integers are int32 tensors, whose products wrap
alike on CPU and CUDA; u and its logarithms are float64, where u never rounds to 0 or 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sequence import SamplingParams

MIN_TEMPERATURE = 1e-5  # below, sampling is greedy

_C = 0x9E3779B9 - (1 << 32)  # as int32; keeps seed 0 and id 0 off the one fixed point of `mix`
_WORD = 0xFFFFFFFF
_SIGN = -(1 << 31)
# Candidates that a nucleus usually needs; a wider one costs a full sort.
_SHORTLIST = 1024


@dataclass(frozen=True, slots=True)
class Draw:
    """How one sequence's next token, the one at `position`, is to be chosen."""

    params: SamplingParams
    position: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Token ids [num_draws] from logits [num_draws, vocab_size] in float32."""
    rows = [i for i, draw in enumerate(draws) if draw.params.temperature >= MIN_TEMPERATURE]
    if not rows:
        return logits.argmax(-1)
    if len(rows) == len(draws):
        return _draw(logits, draws)
    tokens = logits.argmax(-1)
    index = torch.tensor(rows, device=logits.device)
    return tokens.index_copy_(0, index, _draw(logits[index], [draws[i] for i in rows]))


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    device, vocab_size = logits.device, logits.shape[1]

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

    scores = logits / column([draw.params.temperature for draw in draws], torch.float32)
    top_k = [draw.params.top_k for draw in draws]
    if any(top_k):
        scores = _keep_top_k(scores, column(top_k, torch.int64), min(max(top_k), vocab_size))
    top_p = [draw.params.top_p for draw in draws]
    if min(top_p) < 1:
        scores = _keep_top_p(scores, column(top_p, torch.float32))
    seeds = [draw.params.seed for draw in draws]
    u = uniform(seeds, [draw.position for draw in draws], vocab_size, device)
    return u.log_().neg_().log_().neg_().add_(scores).argmax(-1)


def _keep_top_k(scores: Tensor, top_k: Tensor, greatest_k: int) -> Tensor:
    """Scores with all but the k greatest of each row at -inf; ties with the last of them stay.

    top_k  [rows, 1], of which 0 keeps all; greatest_k is the greatest of them
    """
    best = scores.topk(greatest_k, dim=-1).values
    least = best.gather(1, (top_k - 1).clamp_(0, greatest_k - 1))
    return scores.masked_fill((scores < least) & (top_k > 0), float("-inf"))


def _keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Scores with all at -inf but the likeliest, until their probabilities sum to top_p."""
    probabilities = scores.softmax(-1)
    best = probabilities.topk(min(_SHORTLIST, scores.shape[1]), dim=-1).values
    if bool(((best.sum(-1, keepdim=True) < top_p) & (top_p < 1)).any()):
        best = probabilities.sort(dim=-1, descending=True).values
    # A token stays if those before it have not reached top_p: the likeliest always does.
    num_kept = (best.cumsum(-1) - best < top_p).sum(-1, keepdim=True).clamp_(min=1)
    least = best.gather(1, num_kept - 1)
    return scores.masked_fill((probabilities < least) & (top_p < 1), float("-inf"))


def uniform(
    seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device
) -> Tensor:
    """The RNG's u, [len(seeds), vocab_size] in float64: a row for each (seed, position)."""
    low, high, position = torch.tensor(
        [[s & _WORD for s in seeds], [s >> 32 & _WORD for s in seeds], [*positions]], device=device
    ).to(torch.int32)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
    state = _mix(_mix(_mix(low ^ _C) ^ high) ^ position)
    signed = _mix(state.unsqueeze(1) ^ _mix(ids ^ _C))
    # Flipping the sign bit shifts the signed range up to where the unsigned one begins.
    return signed.bitwise_xor_(_SIGN).double().add_(2.0**31 + 0.5).mul_(2.0**-32)


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finalizer on int32, in place. Shifts are made logical by masks."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= -0x7A143595  # 0x85EBCA6B
    x ^= (x >> 13).bitwise_and_(0x7FFFF)
    x *= -0x3D4D51CB  # 0xC2B2AE35
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x
