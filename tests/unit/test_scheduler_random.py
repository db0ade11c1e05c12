"""Tens of thousands of random operations on the whole core: every invariant after each.

The scripted runner checks in addition that every sequence finds exactly its own KV, through
sharing, copies on write, swaps, hand-overs, preemptions and reuse.
"""

import os
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

from engine.errors import NeverFitsError
from engine.events import (
    Event,
    GroupFinished,
    PromptScored,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    StepFinished,
    TokensGenerated,
)
from engine.sequence import BeamSearch, SamplingParams
from engine.snapshot import take_snapshot
from tests.scripted import add, make_core

NUM_EXAMPLES = 1100 if os.environ.get("HEADRACE_FULL") == "1" else 700
happened: Counter[str] = Counter()

Key = tuple[str, int]


class CoreMachine(RuleBasedStateMachine):
    """Arrivals that share prefixes, steps, and aborts at any moment, on a small pool."""

    @initialize(
        policy=st.sampled_from(["wfq", "drf", "fcfs", "priority"]),
        num_blocks=st.sampled_from([8, 9, 10, 30]),
        max_step_tokens=st.sampled_from([4, 10, 64]),
        max_seqs=st.sampled_from([1, 4, 4]),
        watermark=st.sampled_from([0.0, 0.1]),
        preemption=st.sampled_from(["swap", "swap", "recompute", "auto"]),
        num_host_blocks=st.sampled_from([0, 6, 40, 40]),
        host_budget=st.sampled_from([None, 8]),
        prefill_blocks=st.sampled_from([None, None, 8, 20]),
        prefix_cache=st.booleans(),
        public_prompts=st.sampled_from([(), (tuple(range(9)),)]),
        floors=st.sampled_from([{}, {}, {"a": 3}, {"a": 2, "b": 3}]),
        caps=st.sampled_from([{}, {}, {"b": 5}, {"b": 4, "c": 6}]),
        preemptible=st.booleans(),
    )
    def start(
        self, floors: dict[str, int], caps: dict[str, int], preemptible: bool, **settings: object
    ) -> None:
        self.floors, self.caps, self.preemptible = floors, caps, preemptible
        self.core, self.runner = make_core(eos=frozenset({2003}), **settings)  # type: ignore[arg-type]
        self.requests: dict[str, tuple[int, SamplingParams]] = {}
        self.outputs: dict[Key, list[int]] = {}
        self.ends: dict[Key, SequenceFinished] = {}
        self.scored: set[str] = set()

    @rule(
        tenant=st.sampled_from("abc"),
        rank=st.sampled_from([0, 1]),
        prefix=st.integers(0, 2),
        prompt=st.integers(1, 14),
        output=st.integers(0, 18),
        width=st.sampled_from([1, 1, 1, 2, 3]),
        beams=st.booleans(),
        score=st.sampled_from([None, None, 0]),
    )
    def arrive(
        self,
        tenant: str,
        rank: int,
        prefix: int,
        prompt: int,
        output: int,
        width: int,
        beams: bool,
        score: int | None,
    ) -> None:
        request_id = f"r{len(self.requests)}"
        tokens = [prefix * 100 + i for i in range(prompt)]
        params: dict[str, object] = {"n": width, "prompt_logprobs": score}
        if beams and width > 1:
            params = {"beam": BeamSearch(width=width), "prompt_logprobs": score}
        try:
            add(
                self.core,
                request_id,
                tenant,
                tokens,
                output,
                rank=rank,
                weight=1 + rank,
                floor=self.floors.get(tenant, 0),
                cap=self.caps.get(tenant),
                preemptible=self.preemptible and rank > 0,
                **params,
            )
        except NeverFitsError:
            happened["refusals"] += 1
            return
        self.requests[request_id] = (prompt, SamplingParams(max_tokens=output, **params))  # type: ignore[arg-type]
        self.outputs.update({(request_id, i): [] for i in range(width)})
        happened["arrivals"] += 1

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        self.run(steps)

    @rule(steps=st.integers(4, 20))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.core.has_work:
                self.record(self.core.step())
                happened["steps"] += 1
        self.core.scheduler.places.prune_counters()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted({request for request, _ in self.live})
        request_id = data.draw(st.sampled_from([*live, "r", "unknown"]))
        events = self.core.abort(request_id)
        ended = [e for e in events if isinstance(e, SequenceFinished)]
        assert {(e.request_id, e.index) for e in ended} == {
            k for k in self.live if k[0] == request_id
        }
        self.record(events)
        happened["aborts"] += bool(ended)

    @rule(tenant=st.sampled_from(["a", "b", None]), really=st.integers(0, 3))
    def reset_cache(self, tenant: str | None, really: int) -> None:
        if really == 0:
            for stage in self.core.stages:
                stage.scheduler.memory.reset_cache(tenant)
            happened["resets"] += 1

    @rule(really=st.integers(0, 3), stage=st.integers(0, 1))
    def fail(self, really: int, stage: int) -> None:
        """One step's execution fails: its sequences end with an error, no other does."""
        if really == 0 and self.core.has_work:
            runner = self.core.stages[stage % len(self.core.stages)].runner
            runner.explode = True  # type: ignore[attr-defined]
            self.record(self.core.step())
            runner.explode = False  # type: ignore[attr-defined]
            happened["failures"] += 1

    @property
    def live(self) -> set[Key]:
        return set(self.outputs) - set(self.ends)

    def record(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case TokensGenerated():
                    key = (event.request_id, event.index)
                    assert key not in self.ends
                    self.outputs[key] += event.token_ids
                case SequenceFinished():
                    key = (event.request_id, event.index)
                    assert key not in self.ends, "ended twice"
                    assert event.error in (None, "RuntimeError: the device is gone"), event.error
                    self.ends[key] = event
                case PromptScored():
                    assert event.request_id not in self.scored
                    self.scored.add(event.request_id)
                    prompt, _ = self.requests[event.request_id]
                    found = [one.logprob for one in event.logprobs]
                    assert found == [-float(i) for i in range(1, prompt)]
                    happened["scored"] += 1
                case SequencePreempted():
                    happened["swapped" if event.swapped else "recomputed"] += 1
                    happened["preempted_children"] += event.index > 0
                case SequenceAdmitted():
                    happened["hits"] += event.num_cached_tokens > 0
                case GroupFinished():
                    happened["groups"] += 1
                    assert event.block_steps <= event.unshared_block_steps
                    happened["shared"] += event.block_steps < event.unshared_block_steps
                case StepFinished():
                    happened["copied"] += event.num_copied_blocks
                    happened["swapped_in"] += event.num_swapped_in_blocks > 0
                    happened["received"] += event.num_received_blocks > 0

    @invariant()
    def books_balance(self) -> None:
        found: list[Key] = []
        for stage in self.core.stages:
            scheduler = stage.scheduler
            scheduler.check()
            seqs = [*scheduler.running.values(), *scheduler.queues]
            found += [(s.request_id, s.index) for s in seqs]
            assert scheduler.places.num_slots == sum(
                s.num_slots for s in scheduler.running.values()
            )
            assert scheduler.places.num_slots <= scheduler.config.max_seqs
            for tenant, cap in self.caps.items():
                assert scheduler.pool.held_by_tenant[tenant] <= cap
                happened["at_cap"] += scheduler.pool.held_by_tenant[tenant] == cap
        assert len(found) == len(set(found))
        assert set(found) <= self.live
        for request_id, index in self.live - set(found):
            # A sequence that does not wait itself is bound to the one that does.
            sequences = self.core._requests[request_id]
            assert sequences[index].gang[0] is sequences[0]
            assert (request_id, 0) in found
        assert self.core.has_work == bool(self.live)

    @invariant()
    def block_seconds_are_those_of_held_blocks(self) -> None:
        """What tenants were charged and owe is all that was held; what a sequence owes is >= 0."""
        held = sum(stage.scheduler.pool.held_block_seconds for stage in self.core.stages)
        rows = take_snapshot(self.core).memory
        assert sum(row.kv_block_seconds for row in rows) == pytest.approx(held)
        for stage in self.core.stages:
            for seq in stage.scheduler.places.live.values():
                owed = seq.kv_block_seconds + stage.scheduler.memory.owed_by(seq)
                assert owed >= -1e-9
                happened["metered"] += owed > 0

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.record(self.core.step())
        assert not self.live, "a sequence never ended"
        for request_id, (prompt, params) in self.requests.items():
            ends = [self.ends[request_id, i] for i in range(params.num_sequences)]
            outputs = [self.outputs[request_id, i] for i in range(params.num_sequences)]
            self.check_usage(prompt, params, ends, outputs)
        self.check_block_seconds()
        for stage in self.core.stages:
            assert stage.scheduler.pool.num_held == 0
            assert stage.scheduler.memory.host.num_free == stage.scheduler.memory.host.num_blocks
            assert not stage.scheduler.places.num_handed_over

    def check_block_seconds(self) -> None:
        """All have ended: their usage is what their tenants were charged, and all that was held."""
        of_tenant: Counter[str] = Counter()
        for end in self.ends.values():
            assert end.usage.kv_block_seconds >= -1e-9
            of_tenant[end.tenant] += end.usage.kv_block_seconds  # type: ignore[assignment]
        rows = {row.tenant: row.kv_block_seconds for row in take_snapshot(self.core).memory}
        assert rows == pytest.approx({tenant: of_tenant[tenant] for tenant in rows})
        held = sum(stage.scheduler.pool.held_block_seconds for stage in self.core.stages)
        assert of_tenant.total() == pytest.approx(held)
        happened["charged"] += held > 0

    def check_usage(
        self,
        prompt: int,
        params: SamplingParams,
        ends: list[SequenceFinished],
        outputs: list[list[int]],
    ) -> None:
        aborted = any(end.reason in ("abort", "error") for end in ends)
        usage = ends[0].usage
        assert usage.cached_tokens + usage.computed_tokens == prompt or aborted
        assert usage.cached_tokens + usage.computed_tokens <= prompt
        assert all(end.usage.prompt_tokens == 0 for end in ends[1:])
        if params.beam is None:
            for index, (end, output) in enumerate(zip(ends, outputs, strict=True)):
                first = 1000 + prompt + 100_000 * index
                assert output == [first + i for i in range(len(output))]
                assert end.usage.output_tokens == len(output)
                assert len(output) == params.max_tokens or end.reason in ("abort", "error")
        elif not aborted:
            scores = [end.cumulative_logprob for end in ends]
            assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
            assert all(outputs)
            assert len({tuple(output) for output in outputs}) == len(outputs)
            assert ends[0].usage.output_tokens % len(ends) == 0
            assert sum(map(len, outputs)) <= ends[0].usage.output_tokens
            happened["searches"] += 1


@pytest.mark.timeout(600)
def test_random_operations_keep_every_invariant() -> None:
    happened.clear()

    run_state_machine_as_test(
        CoreMachine,
        settings=settings(max_examples=NUM_EXAMPLES, stateful_step_count=60, deadline=None),
    )

    operations = ("arrivals", "steps", "aborts", "resets", "failures")
    assert sum(happened[one] for one in operations) > 18 * NUM_EXAMPLES, happened
    for event in (
        *("recomputed", "swapped", "swapped_in", "preempted_children", "hits", "aborts"),
        *("groups", "shared", "copied", "searches", "received", "scored", "resets", "failures"),
        *("metered", "charged"),
    ):
        assert happened[event] > 60, f"too few {event} to prove anything: {happened}"
