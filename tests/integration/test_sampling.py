"""Masks, biases, penalties and filters: what transformers computes, alone or in any batch."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.model.logprobs import select, tagged_logprobs, untagged
from engine.model.sampler import NONE_ALLOWED, Sampler
from engine.sequence import SamplingParams, TenantShare, child_seed
from engine.sequence import Sequence as EngineSequence

VOCAB = 131  # prime: no row begins where a vector register does
EOS = frozenset({2, 130})
INF = float("inf")
NAMES = count()


def sequence(
    prompt: list[int], output: list[int], params: SamplingParams, name: str | None = None
) -> EngineSequence:
    made = EngineSequence(
        id=name or f"s{next(NAMES)}",
        share=TenantShare(tenant="t"),
        namespace="t",
        token_ids=list(prompt),
        params=params,
        arrived=0.0,
    )
    made.token_ids += output
    return made


def with_params(prompt: list[int], output: list[int], **params: Any) -> EngineSequence:
    return sequence(prompt, output, SamplingParams(max_tokens=1, **params))


def sampler() -> Sampler:
    return Sampler(VOCAB, EOS, torch.device("cpu"))


def random_logits(num_rows: int, seed: int = 0, spread: float = 4.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def changed_logits(seq: EngineSequence, logits: torch.Tensor) -> torch.Tensor:
    """What masks, biases and penalties make of one row."""
    changed = logits.clone().unsqueeze(0)
    sampler().next_tokens(changed, [seq])
    return changed[0]


def processed(
    seq: EngineSequence, logits: torch.Tensor, *processors: LogitsProcessor
) -> torch.Tensor:
    """The same by transformers' processors, in this order."""
    scores = logits.clone().unsqueeze(0)
    for processor in processors:
        scores = processor(torch.tensor([seq.token_ids]), scores)
    return scores[0]


# ----------------------------------------------------------------- the same as transformers


def test_repetition_penalty_counts_prompt_and_output() -> None:
    seq = with_params([5, 6, 7, 5, 5], [9, 6, 120], repetition_penalty=1.7)
    logits = random_logits(1)[0]

    changed = changed_logits(seq, logits)

    assert torch.equal(changed, processed(seq, logits, RepetitionPenaltyLogitsProcessor(1.7)))
    assert (changed != logits).nonzero().flatten().tolist() == [5, 6, 7, 9, 120]
    assert {bool(logits[i] > 0) for i in (5, 6, 7, 9, 120)} == {True, False}


@pytest.mark.parametrize("penalties", [(0.5, 0.0), (0.0, 0.7), (0.5, -0.7)])
def test_frequency_and_presence_count_the_output_alone(penalties: tuple[float, float]) -> None:
    frequency, presence = penalties
    output = [9, 6, 9, 9, 130]
    seq = with_params([5, 6, 7], output, frequency_penalty=frequency, presence_penalty=presence)
    logits = random_logits(1)[0]

    expected = logits.clone()
    for token_id, times in Counter(output).items():
        expected[token_id] -= frequency * times + presence

    changed = changed_logits(seq, logits)

    torch.testing.assert_close(changed, expected, rtol=0, atol=1e-6)
    assert (changed != logits).nonzero().flatten().tolist() == [6, 9, 130]


def test_logit_bias_is_added() -> None:
    bias = {4: -100.0, 77: 3.5, 130: 100.0, 0: -INF}
    seq = with_params([1], [2], logit_bias=tuple(bias.items()))
    logits = random_logits(1)[0]
    oracle = SequenceBiasLogitsProcessor({(token_id,): value for token_id, value in bias.items()})

    changed = changed_logits(seq, logits)

    assert torch.equal(changed, processed(seq, logits, oracle))
    assert int((changed != logits).sum()) == 4


BAD_WORDS = ((11,), (7, 12), (8, 7, 13), (9, 7, 14), (6, 8, 7, 15), (1, 2, 6, 8, 7, 16))


@pytest.mark.parametrize(
    ("prompt", "output", "barred"),
    [
        ([1], [6, 8, 7], [11, 12, 13, 15]),
        ([6, 8], [7], [11, 12, 13, 15]),  # begun in the prompt
        ([6, 8, 7], [], [11, 12, 13, 15]),  # the first token
        ([7], [8], [11]),
        ([7], [], [11, 12]),  # shorter than most of the words
        ([1, 2, 6], [8, 7], [11, 12, 13, 15, 16]),
    ],
)
def test_bad_words_cannot_be_completed(
    prompt: list[int], output: list[int], barred: list[int]
) -> None:
    seq = with_params(prompt, output, bad_words=BAD_WORDS)
    logits = random_logits(1)[0]

    changed = changed_logits(seq, logits)

    assert torch.equal(
        changed, processed(seq, logits, NoBadWordsLogitsProcessor([list(w) for w in BAD_WORDS]))
    )
    assert changed.isneginf().nonzero().flatten().tolist() == barred


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(("num_output", "is_barred"), [(0, True), (2, True), (3, False)])
def test_min_tokens_bars_every_end_until_there_are_as_many(
    num_output: int, is_barred: bool, ignore_eos: bool
) -> None:
    seq = with_params(
        [5, 6, 7, 8],
        [9] * num_output,
        min_tokens=3,
        stop_token_ids=frozenset({40, 41}),
        ignore_eos=ignore_eos,
    )
    logits = random_logits(1)[0]
    oracle = MinNewTokensLengthLogitsProcessor(4, 3, [2, 40, 41, 130])

    changed = changed_logits(seq, logits)

    assert torch.equal(changed, processed(seq, logits, oracle))
    barred = changed.isneginf().nonzero().flatten().tolist()
    assert barred == ([2, 40, 41, 130] if is_barred else [])


def test_tokens_outside_the_vocabulary_hurt_nobody() -> None:
    seq = with_params(
        [1],
        [2],
        logit_bias=((VOCAB, 5.0), (-1, 5.0), (3, 1.0)),
        bad_words=((VOCAB + 7,),),
        stop_token_ids=frozenset({10**6, -5}),
        min_tokens=9,
    )
    logits = random_logits(1)[0]

    changed = changed_logits(seq, logits)

    assert (changed != logits).nonzero().flatten().tolist() == [2, 3, 130]


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"temperature": 2.5, "min_p": 0.3},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.1, "top_k": 6, "top_p": 0.7},
        {"temperature": 0.6, "min_p": 0.02, "top_k": 9, "top_p": 0.95},
        {"temperature": 1.5, "repetition_penalty": 1.5, "top_p": 0.6, "logit_bias": ((3, 2.0),)},
    ],
)
def test_draws_follow_what_transformers_leaves(params: dict[str, Any]) -> None:
    """In vLLM's order: min_p before top_k and top_p, which transformers applies after them."""
    made = SamplingParams(max_tokens=1, seed=11, **params)
    seq = sequence([3, 4, 5], [5], made)
    logits = torch.full((VOCAB,), -60.0)
    logits[:14] = torch.tensor([0.3 * ((5 * i) % 14) for i in range(14)])
    oracles: list[LogitsProcessor] = []
    if made.logit_bias:
        oracles.append(SequenceBiasLogitsProcessor({(i,): value for i, value in made.logit_bias}))
    if made.repetition_penalty != 1:
        oracles.append(RepetitionPenaltyLogitsProcessor(made.repetition_penalty))
    if made.temperature != 1:
        oracles.append(TemperatureLogitsWarper(made.temperature))
    if made.min_p:
        oracles.append(MinPLogitsWarper(made.min_p))
    if made.top_k:
        oracles.append(TopKLogitsWarper(made.top_k))
    if made.top_p < 1:
        oracles.append(TopPLogitsWarper(made.top_p))
    probabilities = processed(seq, logits, *oracles).softmax(-1).double()
    num_draws = 8_000

    seqs = [sequence([3, 4, 5], [5], replace(made, seed=seed)) for seed in range(num_draws)]
    drawn = sampler().next_tokens(logits.repeat(num_draws, 1), seqs)

    kept = probabilities > 1e-9
    expected = probabilities[kept] * num_draws
    counts = drawn.bincount(minlength=VOCAB)
    assert int(counts[~kept].sum()) == 0
    # At most 13 degrees of freedom: exceeded by chance once in 100,000 (and the seeds are fixed).
    assert float(((counts[kept] - expected) ** 2 / expected).sum()) < 50
    assert 0 < int(kept.sum()) < VOCAB


def test_greedy_rows_see_masks_biases_and_penalties() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 7], logits[:, 8] = 5.0, 4.0
    changes: list[dict[str, Any]] = [
        {},
        {"bad_words": ((7,),)},
        {"logit_bias": ((9, 6.0),)},
        {"frequency_penalty": 1.5},
    ]
    seqs = [with_params([1], [7], temperature=0, **change) for change in changes]

    assert sampler().next_tokens(logits, seqs).tolist() == [7, 8, 9, 8]


def test_a_row_without_an_allowed_token_fails_alone() -> None:
    everything = tuple((i, -INF) for i in range(VOCAB))
    nothing: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1},
        {"top_p": 0.5, "top_k": 7, "min_p": 0.1},
        {"top_k": 3, "repetition_penalty": 2.0, "presence_penalty": 1.0},
    ]
    seqs = [with_params([1], [2], logit_bias=everything, **params) for params in nothing]
    mate = with_params([1], [2], logit_bias=everything[1:], top_p=0.5)

    tokens = sampler().next_tokens(random_logits(5), [*seqs, mate]).tolist()

    assert tokens == [NONE_ALLOWED] * 4 + [0]


# --------------------------------------------------------------------- alone or in a batch

TOKENS = st.lists(st.integers(0, 20), max_size=12)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 100, 10**6]),
    top_p=st.sampled_from([1.0, 0.999, 0.7, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
    presence_penalty=st.sampled_from([0.0, 1.1, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    logit_bias=st.sampled_from([(), ((3, 2.5), (4, -100.0)), ((130, 1.0),)]),
    bad_words=st.sampled_from([(), ((5,), (1, 6)), ((7, 7),)]),
    seed=st.sampled_from([0, 1, 2**63 + 5]),
    min_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.sampled_from([frozenset(), frozenset({8})]),
    logprobs=st.sampled_from([None, 0, 1, 20, 1000]),
)


@given(
    rows=st.lists(st.tuples(TOKENS, TOKENS, PARAMS), min_size=2, max_size=9),
    seed=st.integers(0, 1000),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=80, deadline=None)
def test_a_sequence_is_bitwise_independent_of_its_mates(
    rows: list[tuple[list[int], list[int], SamplingParams]], seed: int, order: random.Random
) -> None:
    """Chosen token, changed logits and logprobs; logits are coarse, so that many are equal."""
    logits = random_logits(len(rows), seed).round()
    seqs = [sequence([1, *prompt], output, params) for prompt, output, params in rows]

    def run(picked: list[int], used: Sampler) -> list[tuple[Any, ...]]:
        batch, mates = logits[picked].clone(), [seqs[i] for i in picked]
        tagged = tagged_logprobs(batch)
        chosen = used.next_tokens(batch, mates)
        num_top = [seq.params.logprobs or 0 for seq in mates]
        found = untagged(select(tagged, chosen, max(num_top)), num_top)
        bits = batch.view(torch.int32).tolist()
        return list(zip(chosen.tolist(), found, bits, strict=True))

    alone = [run([i], sampler())[0] for i in range(len(rows))]
    long_lived = sampler()
    everyone = list(range(len(rows)))
    some = [i for i in everyone if order.random() < 0.7] or [0]
    order.shuffle(some)

    assert run(everyone, long_lived) == alone
    assert run(some, long_lived) == [alone[i] for i in some]
    assert run(everyone[::-1], long_lived) == alone[::-1]


def test_children_of_one_request_draw_differently_from_one_row() -> None:
    params = SamplingParams(max_tokens=1, seed=7)
    children = [
        sequence([1, 2], [], replace(params, seed=child_seed(7, index))) for index in range(8)
    ]
    logits = random_logits(1, spread=0.3)

    tokens = sampler().next_tokens(logits.repeat(8, 1), children).tolist()

    assert tokens[0] == int(sampler().next_tokens(logits.clone(), [sequence([1, 2], [], params)]))
    assert len(set(tokens)) == 8


# --------------------------------------------------------------------- the cache of counts

PENALIZED = SamplingParams(
    max_tokens=40,
    seed=3,
    repetition_penalty=1.2,
    frequency_penalty=0.4,
    presence_penalty=0.3,
)


class Recorded(list[int]):
    """A list that remembers how many elements were read at a time."""

    def __init__(self, values: list[int]) -> None:
        super().__init__(values)
        self.read: list[int] = []

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.read.append(len(found) if isinstance(key, slice) else 1)
        return found


def continued(used: Sampler, seqs: list[EngineSequence], step: int) -> None:
    """Draw a token for each, from logits that depend on the sequence's last token alone."""
    table = random_logits(VOCAB, seed=step, spread=2.0)
    tokens = used.next_tokens(table[[seq.token_ids[-1] for seq in seqs]], seqs).tolist()
    for seq, token_id in zip(seqs, tokens, strict=True):
        seq.token_ids.append(token_id)


def recounted(num_steps: int = 30) -> list[int]:
    """The reference: counted anew at each step."""
    seq = sequence([4, 4, 9], [], PENALIZED)
    for step in range(num_steps):
        continued(sampler(), [seq], step)
    return seq.token_ids


def test_counts_are_kept_over_steps() -> None:
    used = sampler()
    seq = sequence([4, 4, 9], [], PENALIZED)
    seq.token_ids = recorded = Recorded(seq.token_ids)
    for step in range(30):
        continued(used, [seq], step)

    assert seq.token_ids == recounted()
    plain = sequence([4, 4, 9], [], SamplingParams(max_tokens=40, seed=3))
    for step in range(30):
        continued(sampler(), [plain], step)
    assert plain.token_ids != seq.token_ids
    # Nothing is read twice, however long the sequence grows.
    assert max(recorded.read[2:]) == 1


def test_a_sequence_that_is_rebuilt_at_each_step_is_counted_again() -> None:
    """As after recomputation: the same id, the same tokens, another list."""
    used = sampler()
    seq = sequence([4, 4, 9], [], PENALIZED)
    for step in range(30):
        continued(used, [seq], step)
        seq.token_ids = list(seq.token_ids)

    assert seq.token_ids == recounted()


def test_a_beam_that_takes_over_another_is_counted_again() -> None:
    used = sampler()
    first, second = (sequence([4, 4, 9], [], PENALIZED, name=name) for name in "ab")
    second.token_ids += [60, 61, 62, 63]
    first.token_ids += [50, 51, 52, 53]
    continued(used, [first, second], 0)

    second.token_ids = [*first.token_ids[:-1], 99]
    logits = random_logits(1)[0]
    found = logits.clone().unsqueeze(0)
    used.next_tokens(found, [second])

    assert torch.equal(found[0], changed_logits(second, logits))
    assert (found[0] != logits).nonzero().flatten().tolist() == [4, 9, 50, 51, 52, 53, 99]


def test_a_sequence_that_lost_tokens_is_counted_again() -> None:
    used = sampler()
    seq = sequence([4, 4, 9], [50, 51, 52], PENALIZED)
    continued(used, [seq], 0)
    del seq.token_ids[4:]
    logits = random_logits(1)[0]
    found = logits.clone().unsqueeze(0)

    used.next_tokens(found, [seq])

    assert torch.equal(found[0], changed_logits(seq, logits))
    assert (found[0] != logits).nonzero().flatten().tolist() == [4, 9, 50]


def test_another_sequence_of_the_same_name_is_counted_anew() -> None:
    used = sampler()
    continued(used, [sequence([10, 11, 12], [13], PENALIZED, name="x")], 0)
    again = sequence([20, 21, 22], [23, 24], PENALIZED, name="x")
    logits = random_logits(1)[0]
    found = logits.clone().unsqueeze(0)

    used.next_tokens(found, [again])

    assert torch.equal(found[0], changed_logits(again, logits))


def test_sequences_beyond_the_cache_push_one_another_out_unharmed() -> None:
    """Groups of 9 and 3 take turns, so that one always evicts some of the other."""
    used = sampler()
    groups = [
        [sequence([4, 4, 9], [], replace(PENALIZED, seed=seed)) for seed in range(first, last)]
        for first, last in ((0, 9), (9, 18), (18, 21))
    ]
    for step in range(12):
        for group in groups:
            continued(used, group, step)

    for seq in (seq for group in groups for seq in group):
        reference = sequence([4, 4, 9], [], seq.params)
        for step in range(12):
            continued(sampler(), [reference], step)
        assert seq.token_ids == reference.token_ids
    assert len({tuple(seq.token_ids) for group in groups for seq in group}) == 21
    assert len(used._penalties._entries) == 16  # the most at once was 9, in eights


def test_a_newcomer_takes_no_row_that_the_same_step_needs() -> None:
    used = sampler()
    full = [sequence([i], [i, 40], PENALIZED) for i in range(8)]
    used.next_tokens(random_logits(8), full)
    newcomer = sequence([90, 91], [92], PENALIZED)
    logits = random_logits(2)

    used.next_tokens(found := logits.clone(), [full[0], newcomer])

    assert len(used._penalties._entries) == 8
    assert torch.equal(found[0], changed_logits(full[0], logits[0]))
    assert torch.equal(found[1], changed_logits(newcomer, logits[1]))


# ------------------------------------------------------------------------------ logprobs


def test_logprobs_are_log_softmax_and_equal_ones_go_by_id() -> None:
    logits = random_logits(1)[0].round()
    logits[[5, 99, 120]] = 20.0
    expected = logits.log_softmax(-1)

    (found,) = untagged(select(tagged_logprobs(logits[None]), torch.tensor([99]), 12), [12])

    assert (found.token_id, found.logprob) == (99, expected[99].item())
    order = sorted(range(VOCAB), key=lambda i: (-expected[i].item(), i))[:12]
    assert found.top == tuple((i, expected[i].item()) for i in order)
    assert [i for i, _ in found.top[:3]] == [5, 99, 120]
    assert math.log(1 / 3) == pytest.approx(found.logprob, abs=1e-3)


def test_more_logprobs_than_tokens_are_all_of_them() -> None:
    logits = random_logits(2)

    few, many = untagged(select(tagged_logprobs(logits), torch.tensor([0, 1]), 1000), [0, 1000])

    assert few.top == ()
    assert sorted(i for i, _ in many.top) == list(range(VOCAB))


def test_biases_are_those_of_the_request_and_not_of_one_with_its_id_before() -> None:
    """Kept per sequence, renewed where the parameters are others, and bounded."""
    one = sampler()
    for round_ in range(3):
        for i in range(300):
            token = (7 * i + round_) % VOCAB
            params = SamplingParams(max_tokens=1, temperature=0, logit_bias=((token, 1000.0),))
            seq = sequence([1], [], params, name=f"reused{i}")
            assert one.next_tokens(random_logits(1), [seq]).tolist() == [token]
    assert len(one._biases._kept) == 300
    for i in range(600):
        params = SamplingParams(max_tokens=1, temperature=0, logit_bias=((5, 1000.0),))
        one.next_tokens(random_logits(1), [sequence([1], [], params, name=f"other{i}")])
    assert len(one._biases._kept) == 512
