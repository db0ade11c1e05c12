"""Choosing tokens: the published hash, the distribution, the filters, and independence of mates."""

import math
import random
from itertools import pairwise

import pytest
import torch

from engine.model.sampler import Draw, sample, uniform
from engine.sequence import SamplingParams

CPU = torch.device("cpu")
WORD = 0xFFFFFFFF


def mix(x: int) -> int:
    """MurmurHash3's 32-bit finalizer, on Python's integers."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & WORD
    x ^= x >> 13
    x = x * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def expected_u(seed: int, position: int, token_id: int) -> float:
    state = mix(mix(mix(seed & WORD ^ 0x9E3779B9) ^ seed >> 32 & WORD) ^ position)
    return (mix(state ^ mix(token_id ^ 0x9E3779B9)) + 0.5) / 2**32


def draws(num_draws: int, **params: float) -> list[Draw]:
    """One draw at each of the first positions of one sequence."""
    made = SamplingParams(max_tokens=1, seed=42, **params)  # type: ignore[arg-type]
    return [Draw(made, position) for position in range(num_draws)]


def chi_square(tokens: list[int], probabilities: list[float]) -> float:
    counts = [tokens.count(i) for i in range(len(probabilities))]
    return sum(
        (count - len(tokens) * p) ** 2 / (len(tokens) * p)
        for count, p in zip(counts, probabilities, strict=True)
    )


def test_the_finalizer_is_the_published_one() -> None:
    # fmix32 of MurmurHash3 (smhasher): 0 is fixed, 1 goes to 0x514E28B7.
    assert (mix(0), mix(1)) == (0, 0x514E28B7)


def test_uniform_is_the_documented_hash_of_seed_position_and_token() -> None:
    rng = random.Random(1)
    seeds = [0, 1, WORD, 1 << 32, (1 << 64) - 1, rng.getrandbits(64)]
    positions = [0, 1, 8191, 7, 123456, 99]

    u = uniform(seeds, positions, 1003, CPU)

    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token_id in (0, 1, 17, 500, 1001, 1002):
            assert u[row, token_id].item() == expected_u(seed, position, token_id)


def test_uniform_never_reaches_its_ends() -> None:
    # A hash of all ones gave u = 1 and infinite noise elsewhere: the greatest u must stay below.
    assert (WORD + 0.5) / 2**32 < 1
    assert 0.5 / 2**32 > 0
    assert math.isfinite(-math.log(-math.log((WORD + 0.5) / 2**32)))
    u = uniform(range(2000), range(2000), 1000, CPU)
    assert 0 < u.min().item() < 1e-5
    assert 1 - 1e-5 < u.max().item() < 1


def test_drawn_tokens_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    tokens = sample(logits.repeat(20_000, 1), draws(20_000, temperature=0.7)).tolist()

    # 4 degrees of freedom: exceeded by chance once in 100,000 (and the seed is fixed).
    assert chi_square(tokens, (logits / 0.7).softmax(-1).tolist()) < 28.5


def test_consecutive_positions_are_independent() -> None:
    tokens = sample(torch.zeros(20_000, 4), draws(20_000)).tolist()
    pairs = [4 * a + b for a, b in pairwise(tokens)]

    assert chi_square(pairs, [1 / 16] * 16) < 48  # 15 degrees of freedom


def test_neighbouring_seeds_are_independent() -> None:
    same = [Draw(SamplingParams(max_tokens=1, seed=seed), 5) for seed in range(20_000)]
    tokens = sample(torch.zeros(20_000, 8), same).tolist()

    assert chi_square(tokens, [1 / 8] * 8) < 33


def test_a_token_never_depends_on_its_batch_mates() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 5000, generator=generator) * 4
    mates = [
        Draw(SamplingParams(max_tokens=1, seed=i, temperature=t, top_k=k, top_p=p), 10 * i)
        for i, (t, k, p) in enumerate(
            [(0, 0, 1.0), (1, 0, 1.0), (1, 5, 1.0), (1, 0, 0.5), (2, 50, 0.9), (9, 0, 0.999)] * 2
        )
    ]
    alone = [sample(logits[i : i + 1], [mates[i]]).item() for i in range(12)]
    order = [7, 3, 11, 0, 5, 1]

    assert sample(logits, mates).tolist() == alone
    assert sample(logits[order], [mates[i] for i in order]).tolist() == [alone[i] for i in order]
    assert alone[:6] != alone[6:]


def test_wide_shortlists_and_nuclei_stay_among_their_own_rows() -> None:
    """Each row takes another way to the tokens that it keeps, and keeps as many as alone."""
    flat = torch.linspace(0.0, 1.0, 3000).flip(0)
    ways: list[tuple[dict[str, float], int]] = [
        ({"top_k": 2000}, 2000),
        ({"top_k": 3}, 3),
        ({"top_k": 10_000}, 3000),
        ({"top_p": 0.9}, int((flat.softmax(-1).cumsum(-1) < 0.9).sum()) + 1),
        ({"top_p": 1e-6}, 1),
        ({"top_k": 1500, "top_p": 0.9}, int((flat[:1500].softmax(-1).cumsum(-1) < 0.9).sum()) + 1),
    ]
    positions = range(600)
    mates = [
        Draw(SamplingParams(max_tokens=1, temperature=1e3, **params), position)  # type: ignore[arg-type]
        for position in positions
        for params, _ in ways
    ]
    scores = (flat * 1e3).repeat(len(mates), 1)

    chosen = sample(scores, mates)
    for i in range(0, len(mates), 101):  # over all the tiles in which noise is made
        assert chosen[i] == sample(scores[i : i + 1], [mates[i]])
    tokens = chosen.view(len(positions), len(ways))
    for column, (_, num_kept) in zip(tokens.unbind(1), ways, strict=True):
        assert int(column.max()) < num_kept
        assert int(column.max()) > 0.98 * num_kept - 3


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.9999], [5.0, 1.0, 2.0]])

    assert sample(logits, draws(2, temperature=temperature)).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, {2}),
        ({"top_k": 3}, {1, 2, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 1e-9}, {2}),
        ({"top_p": 0.39}, {2}),
        ({"top_p": 0.41}, {2, 1}),
        ({"top_p": 0.71}, {1, 2, 4}),
        # Renormalized over the two that top_k keeps: 4/7 of the mass is the first's.
        ({"top_k": 2, "top_p": 0.55}, {2}),
        ({"top_k": 2, "top_p": 0.6}, {1, 2}),
        ({"min_p": 0.51}, {1, 2}),
        ({"min_p": 0.49}, {1, 2, 4}),
        ({"min_p": 1.0}, {2}),
        # Renormalized over the three that min_p keeps: 4/9 and 3/9 of the mass are the first two's.
        ({"min_p": 0.49, "top_p": 0.75}, {1, 2}),
        ({"min_p": 0.51, "top_k": 3}, {1, 2}),
    ],
)
def test_filters_keep_exactly_the_likeliest(params: dict[str, float], kept: set[int]) -> None:
    probabilities = torch.tensor([0.05, 0.3, 0.4, 0.03, 0.2, 0.02])

    tokens = sample(probabilities.log().repeat(4000, 1), draws(4000, **params)).tolist()

    assert set(tokens) == kept


def test_a_nucleus_wider_than_the_shortlist_is_exact() -> None:
    logits = torch.zeros(3000, 1500)

    tokens = sample(logits, draws(3000, top_p=0.9999)).tolist()

    # Equal logits tie, and ties stay: the nucleus is everything.
    assert len(set(tokens)) > 1024


def test_mixed_greedy_and_drawn_rows_keep_their_places() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.0, 9.0], [0.0, 9.0, 0.0]])
    cold = SamplingParams(max_tokens=1, temperature=0)
    warm = SamplingParams(max_tokens=1, temperature=1.0, top_k=1)

    assert sample(logits, [Draw(warm, 0), Draw(cold, 0), Draw(warm, 0)]).tolist() == [0, 2, 1]
