"""A request's sequences when the engine breaks off in the middle of them."""

import pytest

from engine.client import GenerationRequest
from engine.events import SequenceFinished, Timings, TokensGenerated, Usage
from engine.sequence import FinishReason, SamplingParams, TenantShare
from gateway.client import Client
from gateway.deadlines import Arrival
from gateway.errors import GenerationFailedError
from gateway.generation import Generation
from tenants.ledger import Status


def request(number, n):
    return GenerationRequest(
        id=f"req_1-{number}",
        share=TenantShare(tenant="acme"),
        namespace="acme",
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(max_tokens=9, n=n),
    )


def tokens(index, *token_ids):
    return TokensGenerated(
        request_id="req_1-0", tenant="acme", at=5.0, token_ids=token_ids, text="", index=index
    )


def finished(index):
    return SequenceFinished(
        request_id="req_1-0",
        tenant="acme",
        at=5.0,
        reason=FinishReason.STOP,
        text="",
        usage=Usage(
            prompt_tokens=0 if index else 3,
            cached_tokens=0,
            output_tokens=1,
            computed_tokens=0 if index else 3,
            kv_block_seconds=0.75 + index,
        ),
        timings=Timings(arrived=1.0, admitted=2.0, first_token=3.0, finished=5.0),
        num_preemptions=0,
        index=index,
    )


class BrokenEngine:
    """Says some events of each request and then nothing more."""

    def __init__(self, *events):
        self._events = events

    async def submit(self, request):
        async def stream():
            for event in self._events:
                yield event

        return stream()

    async def estimate_first_token(self, request_id):
        return None

    def abort(self, request_id):
        pass


def generation(engine, num_sequences):
    return Generation(
        request_id="req_1",
        tenant="acme",
        limits=(),
        requests=[request(0, num_sequences)],
        engine=engine,
        client=Client(),
        arrival=Arrival(at=0.0),
    )


@pytest.mark.parametrize(
    ("events", "tokens_in"),
    [
        ((tokens(0, 7), finished(0), tokens(1, 8), tokens(1, 9)), 3),
        ((tokens(0, 7), tokens(1, 8), finished(1), tokens(0, 9)), 3),
        ((), 0),
    ],
)
async def test_every_sequence_ends_and_the_prompt_counts_once(events, tokens_in):
    work = generation(BrokenEngine(*events), 2)
    await work.start()

    with pytest.raises(GenerationFailedError):
        async for _ in work.events(None):
            pass
    await work.end()

    assert set(work.finished) == {(0, 0), (0, 1)}
    settlement = work.settlement(now=100.0)
    assert (settlement.status, settlement.finish_reason) == (Status.FAILED, FinishReason.ERROR)
    assert settlement.tokens_in == tokens_in
    assert settlement.tokens_out == (3 if events else 0)


async def test_a_whole_request_is_complete_after_its_last_sequence():
    work = generation(BrokenEngine(tokens(1, 8), finished(1), tokens(0, 7), finished(0)), 2)
    await work.start()

    seen = [event async for event in work.events(None)]
    await work.end()

    assert [(number, event.index) for number, event in seen] == [(0, 1), (0, 1), (0, 0), (0, 0)]
    settlement = work.settlement(now=100.0)
    assert (settlement.status, settlement.tokens_in, settlement.tokens_out) == (
        Status.COMPLETED,
        3,
        2,
    )
    assert (settlement.admitted_at, settlement.first_token_at) == (97.0, 98.0)
    assert settlement.kv_block_seconds == 0.75 + 1.75
