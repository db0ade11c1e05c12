"""The scorer against a brute-force search over a tiny vocabulary."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.beam_search import BeamScorer, num_candidates
from engine.sequence import BeamSearch


def logprobs(prefix: tuple[int, ...], vocab: int) -> list[tuple[int, float]]:
    """Of every token after a prefix, best first: a fixed function of the prefix."""
    rng = random.Random(repr(prefix))
    weights = [rng.random() + 0.01 for _ in range(vocab)]
    total = sum(weights)
    return sorted(
        ((token, math.log(weight / total)) for token, weight in enumerate(weights)),
        key=lambda one: -one[1],
    )


def search(scorer: BeamScorer, width: int, vocab: int) -> None:
    beams: list[tuple[int, ...]] = [()] * width
    while True:
        found = [logprobs(beam, vocab)[: 4 * width] for beam in beams]
        choices = scorer.advance(beams, found)
        if not choices:
            return
        beams = [(*beams[parent], token) for parent, token in choices]


@given(length=st.integers(1, 4), ends=st.sets(st.integers(0, 4), max_size=2))
def test_a_beam_as_wide_as_the_tree_finds_the_best_of_all(length: int, ends: set[int]) -> None:
    """Without a length penalty: with one, ending early is a heuristic, as it is elsewhere."""
    vocab = 5
    width = vocab**length
    scorer = BeamScorer(BeamSearch(width=width, length_penalty=0.0), frozenset(ends), length)
    search(scorer, width, vocab)

    complete: list[tuple[float, tuple[int, ...]]] = []

    def grow(prefix: tuple[int, ...], total: float) -> None:
        for token, logprob in logprobs(prefix, vocab):
            ids, score = (*prefix, token), total + logprob
            if token in ends or len(ids) == length:
                complete.append((score, ids))
            else:
                grow(ids, score)

    grow((), 0.0)
    best = max(complete)
    assert scorer.finished[0].score == pytest.approx(best[0])
    assert scorer.finished[0].token_ids == best[1]
    assert all(one.is_stopped == (one.token_ids[-1] in ends) for one in scorer.finished)


def test_enough_candidates_remain_whatever_ends() -> None:
    assert num_candidates(BeamSearch(width=4), frozenset()) == 8
    assert num_candidates(BeamSearch(width=4), frozenset({1})) == 8
    assert num_candidates(BeamSearch(width=4), frozenset({1, 2, 3})) == 16


def test_the_search_ends_when_nothing_running_can_win() -> None:
    scorer = BeamScorer(BeamSearch(width=1, length_penalty=0.0), frozenset({9}), 100)
    assert scorer.advance([()], [[(9, -1.0), (1, -1.5)]]) == []  # -1.5 can only fall further
    assert [one.token_ids for one in scorer.finished] == [(9,)]

    scorer = BeamScorer(BeamSearch(width=1, length_penalty=2.0), frozenset({9}), 100)
    assert scorer.advance([()], [[(1, -1.0), (9, -1.5)]]) == [(0, 1)]
    assert scorer.finished == []  # only the best `width` candidates may complete
