"""Beam search over one prompt: which continuations of which beams go on, and when it is over.

Pure arithmetic over candidates; blocks and tokens are moved by whoever asks. The rules are those
of transformers' `generate` (num_beams, length_penalty, early_stopping), so that its output is an
oracle: a hypothesis scores the sum of its logprobs over length ** length_penalty, and the search
ends when `width` hypotheses are complete and no running beam can beat the worst of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.sequence import BeamSearch

Candidates = Sequence[tuple[int, float]]
"""(token id, logprob) of one beam's likeliest next tokens."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete continuation, its last token included."""

    score: float
    token_ids: tuple[int, ...]
    is_stopped: bool  # by an end token, not by its length


class BeamScorer:
    """Scores of the running beams and the best complete hypotheses so far."""

    def __init__(self, search: BeamSearch, end_token_ids: frozenset[int], max_tokens: int) -> None:
        self.finished: list[Hypothesis] = []  # best first
        self._search = search
        self._ends = end_token_ids
        self._max_tokens = max_tokens
        # All beams begin alike: only the first one's continuations count.
        self._scores = [0.0] + [-math.inf] * (search.width - 1)

    def advance(
        self, outputs: Sequence[Sequence[int]], candidates: Sequence[Candidates]
    ) -> list[tuple[int, int]]:
        """The next beams as (parent, token), best first; none when the search is over.

        outputs  what each beam has generated so far
        """
        width, length = self._search.width, len(outputs[0]) + 1
        best = sorted(
            (
                (score + logprob, parent, token)
                for parent, (score, found) in enumerate(zip(self._scores, candidates, strict=True))
                if score > -math.inf
                for token, logprob in found
            ),
            key=lambda candidate: -candidate[0],
        )[: num_candidates(self._search, self._ends)]
        is_last = length >= self._max_tokens
        for total, parent, token in best[:width]:
            if is_last or token in self._ends:
                score = total / length**self._search.length_penalty
                ids = (*outputs[parent], token)
                self.finished.append(Hypothesis(score, ids, is_stopped=token in self._ends))
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[width:]
        going = [found for found in best if found[2] not in self._ends][:width]
        if is_last or not going or self._is_over(going[0][0], length):
            return []
        # With fewer tokens than beams, the rest follow the first one and count for nothing.
        going += [(-math.inf, *going[0][1:])] * (width - len(going))
        self._scores = [total for total, _, _ in going]
        return [(parent, token) for _, parent, token in going]

    def _is_over(self, best_running: float, length: int) -> bool:
        if len(self.finished) < self._search.width:
            return False
        if self._search.early_stopping:
            return True
        best_possible: float = best_running / length**self._search.length_penalty
        return best_possible <= self.finished[-1].score


def num_candidates(search: BeamSearch, end_token_ids: frozenset[int]) -> int:
    """How many likeliest tokens of each beam a search looks at: even if every end token is among
    them, enough remain to go on."""
    return max(2, 1 + len(end_token_ids)) * search.width
