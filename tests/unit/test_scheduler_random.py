"""Tens of thousands of random operations on the whole core: every invariant after each."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from engine.events import (
    Event,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    TokensGenerated,
)
from tests.scripted import add, make_core

happened: Counter[str] = Counter()


class CoreMachine(RuleBasedStateMachine):
    """Arrivals that share prefixes, steps, and aborts at any moment, on a small pool."""

    @initialize(
        policy=st.sampled_from(["wfq", "fcfs", "priority"]),
        num_blocks=st.sampled_from([8, 14, 40]),
        max_step_tokens=st.sampled_from([4, 10, 64]),
        max_seqs=st.sampled_from([1, 4]),
        watermark=st.sampled_from([0.0, 0.1]),
    )
    def start(self, **settings: object) -> None:
        self.core, self.runner = make_core(**settings)  # type: ignore[arg-type]
        self.outputs: dict[str, list[int]] = {}
        self.expected: dict[str, tuple[int, int]] = {}
        self.ends: dict[str, SequenceFinished] = {}

    @rule(
        tenant=st.sampled_from("abc"),
        rank=st.sampled_from([0, 1]),
        prefix=st.integers(0, 2),
        prompt=st.integers(1, 20),
        output=st.integers(1, 10),
    )
    def arrive(self, tenant: str, rank: int, prefix: int, prompt: int, output: int) -> None:
        seq_id = f"s{len(self.expected)}"
        tokens = [prefix * 100 + i for i in range(prompt)]
        add(self.core, seq_id, tenant, tokens, output, rank=rank, weight=1 + rank)
        self.expected[seq_id] = (prompt, output)
        self.outputs[seq_id] = []
        happened["arrivals"] += 1

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.core.has_work:
                self.record(self.core.step())
                happened["steps"] += 1

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted(set(self.expected) - set(self.ends))
        seq_id = data.draw(st.sampled_from([*live, "s", "unknown"]))
        events = self.core.abort(seq_id)
        assert len(events) == (seq_id in live)
        self.record(events)
        happened["aborts"] += len(events)

    def record(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case TokensGenerated():
                    assert event.request_id not in self.ends
                    self.outputs[event.request_id] += event.token_ids
                case SequenceFinished():
                    assert event.request_id not in self.ends, "ended twice"
                    self.ends[event.request_id] = event
                case SequencePreempted():
                    happened["preemptions"] += 1
                case SequenceAdmitted(num_cached_tokens=hit):
                    happened["hits"] += hit > 0
                case _:
                    pass

    @invariant()
    def books_balance(self) -> None:
        self.core.scheduler.check()
        live = set(self.expected) - set(self.ends)
        scheduler = self.core.scheduler
        waiting = {s.id for s in scheduler.queues}
        assert waiting | set(scheduler.running) == live
        assert not waiting & set(scheduler.running)
        assert len(scheduler.running) <= scheduler.config.max_seqs
        assert scheduler.has_work == bool(live)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.record(self.core.step())
        assert set(self.ends) == set(self.expected), "a sequence never ended"
        for seq_id, (prompt, output) in self.expected.items():
            got, end = self.outputs[seq_id], self.ends[seq_id]
            assert got == [1000 + prompt + i for i in range(len(got))]
            assert end.reason == "abort" or len(got) == output
            usage = end.usage
            assert usage.cached_tokens + usage.computed_tokens == prompt or end.reason == "abort"
            assert usage.cached_tokens + usage.computed_tokens <= prompt
        assert self.core.scheduler.pool.num_held == 0


@pytest.mark.timeout(600)
def test_random_operations_keep_every_invariant() -> None:
    happened.clear()

    run_state_machine_as_test(
        CoreMachine,
        settings=settings(max_examples=700, stateful_step_count=60, deadline=None),
    )

    assert happened["arrivals"] + happened["steps"] + happened["aborts"] > 20_000
    for event in ("preemptions", "hits", "aborts"):
        assert happened[event] > 100, f"too few {event} to prove anything: {happened}"
