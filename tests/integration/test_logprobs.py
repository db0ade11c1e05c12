"""Logprobs are the model's own, and one for each token, whatever happened to the sequence.

The oracle is log_softmax of transformers' logits on the same weights.
"""

import pytest
import torch

from engine.events import TokenLogprobs
from engine.sequence import BeamSearch, SamplingParams
from tests.model_oracle import oracle_logits
from tests.tiny import Request, Session, assert_same_logprobs, make_core, tiny_model

NEW_TOKENS, TOP = 20, 4
PROMPT = tuple((7 * i * i + 3 * i) % 256 for i in range(70))
PARAMS = SamplingParams(
    max_tokens=NEW_TOKENS, seed=3, logprobs=TOP, prompt_logprobs=TOP, ignore_eos=True
)


def oracle(tokens: list[int]) -> list[TokenLogprobs]:
    """Of each token but the first, after those before it."""
    logprobs = oracle_logits(tiny_model()[1], tokens).log_softmax(-1)
    values, ids = torch.topk(logprobs[:-1], TOP, dim=-1)
    return [
        TokenLogprobs(
            token, logprobs[i, token].item(), tuple(zip(ids[i].tolist(), row, strict=True))
        )
        for i, (token, row) in enumerate(zip(tokens[1:], values.tolist(), strict=True))
    ]


def check(session: Session, request_id: str) -> None:
    """Every sequence's logprobs, and its prompt's, are the oracle's."""
    request = session.requests[request_id]
    for index in range(request.params.num_sequences):
        answer = session.answers[request_id, index]
        expected = oracle([*request.prompt, *answer.tokens])
        first = len(request.prompt) - 1
        assert len(answer.logprobs) == len(answer.tokens) == request.params.max_tokens
        assert_same_logprobs(answer.logprobs, expected[first:], 2e-5)
        assert answer.end is not None
        assert answer.end.cumulative_logprob == pytest.approx(
            sum(one.logprob for one in answer.logprobs)
        )
    if request.params.prompt_logprobs is not None:
        assert_same_logprobs(session.scored[request_id], expected[:first], 2e-5)


@pytest.mark.parametrize("two_pools", [False, True], ids=["one_pool", "two_pools"])
@pytest.mark.parametrize("chunk", [7, 512])
def test_cold_and_warm(chunk: int, two_pools: bool) -> None:
    """The second time, all that the cache has is found, unless the prompt is to be scored."""
    core = make_core(
        tiny_model()[0],
        prefix_cache=True,
        max_step_tokens=chunk,
        max_seqs=4,
        prefill_blocks=64 if two_pools else None,
    )
    session = Session(core)
    unscored = SamplingParams(max_tokens=NEW_TOKENS, seed=3, logprobs=TOP, ignore_eos=True)
    for request_id, params in {"cold": PARAMS, "scored": PARAMS, "warm": unscored}.items():
        session.add(request_id, Request(PROMPT, params))
        session.run()
        check(session, request_id)

    cached = {name: session.answers[name, 0].end for name in session.requests}
    assert {name: end and end.usage.cached_tokens for name, end in cached.items()} == {
        "cold": 0,
        "scored": 0,
        "warm": 64,
    }
    assert session.happened["prefill_steps"] == (21 if chunk == 7 else 3)


@pytest.mark.parametrize("two_pools", [False, True], ids=["one_pool", "two_pools"])
@pytest.mark.parametrize("prefix_cache", [False, True], ids=["cold", "hits"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_after_every_token(preemption: str, prefix_cache: bool, two_pools: bool) -> None:
    """One sequence, children of a group, and beams, each with all that it has computed."""
    core = make_core(
        tiny_model()[0],
        num_host_blocks=64,
        prefill_blocks=64 if two_pools else None,
        prefix_cache=prefix_cache,
        preemption=preemption,
    )
    session = Session(core)
    session.add("one", Request(PROMPT, PARAMS))
    group = SamplingParams(max_tokens=NEW_TOKENS, seed=4, logprobs=TOP, n=3, ignore_eos=True)
    session.add("group", Request(PROMPT[:37], group))
    told = 0
    while core.has_work:
        session.step()
        before, told = told, sum(len(answer.tokens) for answer in session.answers.values())
        for answer in session.answers.values():
            assert len(answer.logprobs) == len(answer.tokens)
        if told > before:
            session.force_preemptions()
    session.run()

    for request_id in session.requests:
        check(session, request_id)
    # After each token but the last; with two pools, after those that the second one drew: what is
    # recomputed draws its next token in the first, where nothing is preempted.
    per_sequence = NEW_TOKENS - 1
    if two_pools:
        per_sequence = 9 if preemption == "recompute" else 18
    assert session.happened["forced"] == 4 * per_sequence
    num_swapped, num_recomputed = (
        session.happened[what] for what in ("swapped_in_blocks", "recomputed_tokens")
    )
    assert (num_swapped > 0, num_recomputed > 0) == (preemption == "swap", preemption != "swap")


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preempted_in_the_middle_of_a_scored_prompt(preemption: str) -> None:
    """Each position is scored once, though recomputation scores some again."""
    core = make_core(
        tiny_model()[0],
        num_host_blocks=64,
        preemption=preemption,
        max_step_tokens=16,
        prefix_cache=True,
    )
    session = Session(core)
    session.add("one", Request(PROMPT, PARAMS))
    for _ in range(3):
        session.step()
    assert session.scored == {}
    session.force_preemptions()
    session.run()

    assert session.happened["forced"] == 1
    assert (session.happened["recomputed_tokens"] == 48) == (preemption == "recompute")
    assert (session.happened["swapped_in_blocks"] == 3) == (preemption == "swap")
    check(session, "one")


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_beams_preempted_after_every_step(preemption: str) -> None:
    """The score of what a search returns is the sum of transformers' logprobs."""
    core = make_core(tiny_model()[0], num_host_blocks=64, preemption=preemption)
    session = Session(core)
    params = SamplingParams(max_tokens=NEW_TOKENS, beam=BeamSearch(width=3), ignore_eos=True)
    session.add("beams", Request(PROMPT, params))
    longest = len(PROMPT)
    while core.has_work:
        session.step()
        beams = core._requests.get("beams")
        if beams is not None and beams[0].num_tokens > longest:
            longest = beams[0].num_tokens
            session.force_preemptions()
    session.run()

    assert session.happened["forced"] == NEW_TOKENS - 1  # all three at once
    for index in range(3):
        answer = session.answers["beams", index]
        scores = [one.logprob for one in oracle([*PROMPT, *answer.tokens])[len(PROMPT) - 1 :]]
        assert answer.end is not None
        assert answer.end.cumulative_logprob == pytest.approx(sum(scores) / NEW_TOKENS, abs=1e-5)
