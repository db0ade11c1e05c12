"""Choosing the next token of each sequence: greedy, or by the Gumbel-max of a counter RNG.

Masks and biases come first, then penalties, temperature, min_p, top_k and top_p: vLLM's order.

The noise of a token is a pure function of (seed, position, vocabulary id), so a sequence draws
the same token whatever its batch mates, its chunks and its preemptions are:

    state = mix(mix(mix(seed_low ^ C) ^ seed_high) ^ position)      C = 0x9E3779B9, all 32 bits
    h     = mix(state ^ mix(id ^ C))
    u     = (h + 0.5) / 2**32                                       strictly within (0, 1)
    next  = argmax over ids of  logit / temperature - log(-log(u))

`mix` is the 32-bit finalizer of MurmurHash3. Integers are int32 tensors, whose products wrap
alike on CPU and CUDA; u and its logarithms are float64, where u never rounds to 0 or 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.biases import Biases
from engine.model.penalties import Penalties
from engine.model.structured import mask_logits
from engine.sequence import SamplingParams
from engine.sequence import Sequence as EngineSequence

MIN_TEMPERATURE = 1e-5  # below, sampling is greedy
NONE_ALLOWED = -1  # where a token id would be

_C = 0x9E3779B9 - (1 << 32)  # as int32; keeps seed 0 and id 0 off the one fixed point of `mix`
_WORD = 0xFFFFFFFF
_SIGN = -(1 << 31)
_SHORTLIST = 1024  # a top_k of more costs much more
# Tokens that a nucleus is first looked for in, and by how much it is widened where it is not.
_NUCLEUS, _WIDENING = 128, 16
# Numbers of noise at a time. On CPU few enough for their temporaries to stay in the core's cache,
# which makes them twice as fast; elsewhere it bounds memory, 128 MiB for each temporary.
_CPU_TILE, _TILE = 1 << 19, 1 << 24


class Sampler:
    """Next tokens of sequences. Keeps no state but caches of biases and of counts."""

    def __init__(
        self, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device
    ) -> None:
        self._biases = Biases(vocab_size, eos_token_ids, device)
        self._penalties = Penalties(vocab_size, device)

    def next_tokens(self, logits: Tensor, seqs: Sequence[EngineSequence]) -> Tensor:
        """Token ids [len(seqs)], NONE_ALLOWED where every token is barred.

        logits  [len(seqs), vocab_size] in float32, changed in place
        """
        constraints = [
            (i, seq.constraint) for i, seq in enumerate(seqs) if seq.constraint is not None
        ]
        mask_logits(logits, constraints)
        self._biases.apply(logits, seqs)
        self._penalties.apply(logits, seqs)
        chosen = sample(logits, [Draw(seq.params, seq.num_tokens) for seq in seqs])
        # The best of a row is -inf only where all are.
        best = logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
        return chosen.masked_fill_(best == float("-inf"), NONE_ALLOWED)


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
    return tokens.index_copy_(
        0, index, _draw(logits.index_select(0, index), [draws[i] for i in rows])
    )


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    temperatures = [draw.params.temperature for draw in draws]
    scores = logits / _column(temperatures, logits.device)
    _filter(scores, [draw.params.min_p for draw in draws], 0, _keep_min_p)
    # A mate's wide shortlist would cost every row.
    top_k = [draw.params.top_k for draw in draws]
    _filter(scores, [k if k <= _SHORTLIST else 0 for k in top_k], 0, _keep_top_k)
    _filter(scores, [k if k > _SHORTLIST else 0 for k in top_k], 0, _keep_top_k)
    _filter(scores, [draw.params.top_p for draw in draws], 1, _keep_top_p)
    tile = _CPU_TILE if logits.device.type == "cpu" else _TILE
    step = max(1, tile // logits.shape[1])  # rows
    return torch.cat(
        [
            _noisy_argmax(scores[first : first + step], draws[first : first + step])
            for first in range(0, len(draws), step)
        ]
    )


def _noisy_argmax(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    seeds = [draw.params.seed for draw in draws]
    u = uniform(seeds, [draw.position for draw in draws], scores.shape[1], scores.device)
    return u.log_().neg_().log_().neg_().add_(scores).argmax(-1)


def _filter(
    scores: Tensor,
    values: Sequence[float],
    neutral: float,
    least_kept: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Set what is below the least score that is kept to -inf, in rows whose value does anything.

    least_kept  takes scores [rows, vocab_size] and values [rows, 1], returns scores [rows, 1]
    """
    rows = [i for i, value in enumerate(values) if value != neutral]
    if not rows:
        return
    index = torch.tensor(rows, device=scores.device)
    found = scores.index_select(0, index)
    least = least_kept(found, _column([values[i] for i in rows], scores.device))
    scores.index_copy_(0, index, found.masked_fill_(found < least, float("-inf")))


def _keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Probabilities of at least min_p times the greatest; a ratio is a difference of logarithms."""
    return scores.amax(-1, keepdim=True) + min_p.log()


def _keep_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    """The k greatest; ties with the last of them stay."""
    place = top_k.long().clamp_(max=scores.shape[1]) - 1
    best = scores.topk(int(place.max()) + 1, dim=-1).values
    return best.gather(1, place)


def _keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """The likeliest, until their probabilities sum to top_p; ties with the last of them stay."""
    num_tokens = scores.shape[1]
    probabilities = scores.softmax(-1)
    least = torch.empty_like(top_p)
    rows = torch.arange(len(scores), device=scores.device)
    num_listed = min(_NUCLEUS, num_tokens)
    while len(rows):
        best, ids = scores.index_select(0, rows).topk(num_listed, dim=-1)
        listed = probabilities.index_select(0, rows).gather(1, ids)
        sums = listed.cumsum(-1)
        # A token stays if those before it have not reached top_p: the likeliest always does.
        num_kept = (sums - listed < top_p[rows]).sum(-1, keepdim=True).clamp_(min=1)
        least[rows] = best.gather(1, num_kept - 1)
        if num_listed == num_tokens:
            break
        rows = rows[sums[:, -1] < top_p[rows, 0]]
        num_listed = min(_WIDENING * num_listed, num_tokens)
    return least


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)


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
