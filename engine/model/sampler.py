"""Choosing next tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.sequence import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """How the token at `position` of one sequence is to be chosen."""

    params: SamplingParams
    position: int


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    return logits.argmax(-1)
