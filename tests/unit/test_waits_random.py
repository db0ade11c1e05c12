"""Random histories: explanations partition every wait, say who is first in its queue, and keep
other tenants' names to themselves."""

import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engine.core import EngineCore
from engine.cost_model import LinearCost
from engine.errors import NeverFitsError
from engine.events import (
    Event,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    TokensGenerated,
)
from engine.sequence import BeamSearch, SequenceStatus
from engine.sequence import Sequence as EngineSequence
from engine.waits import Interval, SequenceExplanation, WaitCause
from tests.scripted import add, find, make_core

NUM_HISTORIES = 10_000 if os.environ.get("HEADRACE_FULL") == "1" else 3_000
NUM_WITNESSED = 600
MAX_LAST_STEPS = 40

TENANTS = ("alder", "birch", "cedar")
Key = tuple[str, int]
Span = tuple[int, int]


def microseconds(time: float) -> int:
    return round(1e6 * time)


def waits(intervals: Sequence[Interval]) -> list[Span]:
    """When it did not run, as what was reported at the boundaries of running."""
    spans: list[Span] = []
    for one in intervals:
        start, end = microseconds(one.start), microseconds(one.end)
        if one.cause is None:
            continue
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return spans


def merged(spans: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in spans:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        if start < end:
            found.append((start, end))
    return found


def random_core(rng: random.Random, seed: int) -> EngineCore:
    core, runner = make_core(
        policy=rng.choice(["wfq", "wfq", "wfq", "vtc", "drr", "drf", "fcfs", "priority"]),
        num_blocks=rng.choice([8, 9, 12, 30]),
        max_step_tokens=rng.choice([4, 10, 64]),
        max_seqs=rng.choice([1, 2, 4, 4]),
        watermark=rng.choice([0.0, 0.1]),
        preemption=rng.choice(["swap", "recompute", "auto"]),
        num_host_blocks=rng.choice([0, 6, 40]),
        prefill_blocks=rng.choice([None, None, 8, 20]),
        prefix_cache=rng.random() < 0.7,
        max_bypasses=rng.choice([0, 1, 8]),
        check=seed % 20 == 0,
    )
    runner.base_seconds = rng.uniform(0.001, 0.02)

    def clock() -> float:
        runner.clock.now += 1e-5  # no two looks at a real clock find the same time
        return runner.clock.now

    core._clock = clock
    return core


@dataclass
class History:
    """One core's random life; what its events say of waiting, by sequence."""

    seed: int
    core: EngineCore = field(init=False)
    tenants: dict[str, str] = field(default_factory=dict)  # by request
    beams: set[str] = field(default_factory=set)
    spans: defaultdict[Key, list[Span]] = field(default_factory=lambda: defaultdict(list))
    open: dict[Key, int] = field(default_factory=dict)
    began: set[Key] = field(default_factory=set)
    ends: dict[Key, SequenceFinished] = field(default_factory=dict)
    causes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.core = random_core(self.rng, self.seed)
        self.clock = self.core.stages[0].runner.clock  # type: ignore[attr-defined]
        self.floors = self.rng.choice([{}, {}, {"alder": 3}, {"alder": 2, "birch": 3}])
        for stage in self.core.stages:
            base = stage.runner.base_seconds  # type: ignore[attr-defined]
            stage.scheduler.step_times._cost = LinearCost(
                step=base, prompt_token=1e-4, decode=1e-4, context_token=0.0
            )
            for tenant, floor in self.floors.items():
                # A floor that comes after what it leaves no room for would block it for ever.
                stage.scheduler.pool.set_floor(tenant, floor)
        self.caps = self.rng.choice([{}, {}, {"birch": 5}, {"birch": 4, "cedar": 6}])

    def live(self) -> Iterator[None]:
        """Advance; yields after each step."""
        rng = self.rng
        for _ in range(rng.randint(2, 5)):
            for _ in range(rng.choice([0, 1, 2, 3])):
                self.arrive()
            if rng.random() < 0.06 and self.tenants:
                self.record(self.core.abort(rng.choice(list(self.tenants))))
            self.clock.now += rng.choice([0.0, rng.random() / 50])
            self.step(fails=rng.random() < 0.03)
            yield
        for _ in range(MAX_LAST_STEPS):
            self.step(fails=False)
            yield
            if not self.core.has_work:
                return
        for request_id in self.tenants:
            self.record(self.core.abort(request_id))

    def arrive(self) -> None:
        rng = self.rng
        request_id, tenant = f"r{len(self.tenants)}", rng.choice(TENANTS)
        rank, width = rng.choice([0, 0, 1]), rng.choice([1, 1, 1, 1, 2, 3])
        is_beam = width > 1 and rng.random() < 0.4
        shape = {"beam": BeamSearch(width=width)} if is_beam else {"n": width}
        prefix = rng.randrange(3) * 100
        try:
            add(
                self.core,
                f"{tenant}-{request_id}",
                tenant,
                [prefix + i for i in range(rng.randint(1, 14))],
                rng.randint(0, 8),
                rank=rank,
                weight=1 + rank,
                floor=self.floors.get(tenant, 0),
                cap=self.caps.get(tenant),
                preemptible=rank > 0,
                deadline=rng.uniform(0.001, 0.3) if rng.random() < 0.15 else None,
                **shape,
            )
        except NeverFitsError:
            return
        request_id = f"{tenant}-{request_id}"
        self.tenants[request_id] = tenant
        if is_beam:
            self.beams.add(request_id)
        self.open[request_id, 0] = microseconds(find(self.core, request_id).arrived)
        self.began.add((request_id, 0))

    def step(self, *, fails: bool) -> None:
        runner = self.rng.choice(self.core.stages).runner
        runner.explode = fails  # type: ignore[attr-defined]
        if self.core.has_work:
            self.record(self.core.step())
        runner.explode = False  # type: ignore[attr-defined]

    def record(self, events: list[Event]) -> None:
        for event in events:
            if not isinstance(
                event, SequenceAdmitted | SequencePreempted | SequenceFinished | TokensGenerated
            ):
                continue
            key, at = (event.request_id, event.index), microseconds(event.at)
            if key not in self.began and not isinstance(event, SequenceFinished):
                self.began.add(key)  # it forked from the first, whose wait is its own
                self.spans[key] = list(self.spans[event.request_id, 0])
            match event:
                case SequenceAdmitted():
                    start = microseconds(event.at - event.waited_seconds)  # handed over
                    self.spans[key].append((self.open.pop(key, start), at))
                case SequencePreempted():
                    self.open[key] = at
                case SequenceFinished():
                    self.ends[key] = event
                    if key in self.open:
                        self.spans[key].append((self.open.pop(key), at))

    # -- what must hold -----------------------------------------------------------------------

    def check_partition(self, one: SequenceExplanation, request_id: str) -> None:
        intervals = one.intervals
        assert all(i.start < i.end for i in intervals)
        assert all(a.end == b.start for a, b in pairwise(intervals))
        end = self.ends.get((request_id, one.index))
        assert one.is_finished == (end is not None)
        assert intervals[-1].end == (self.clock.now if end is None else end.at)
        self.causes.update(str(i.cause) for i in intervals)

    def check_end(self, request_id: str) -> None:
        explanation = self.core.explain(request_id)
        assert explanation is not None
        assert explanation.tenant == self.tenants[request_id]
        for one in explanation.sequences:
            self.check_partition(one, request_id)
            key = (request_id, one.index)
            end = self.ends[key]
            assert one.intervals[0].start == end.timings.arrived
            admitted = end.at if end.timings.admitted is None else end.timings.admitted
            first_wait = 0
            for interval in one.intervals:
                if interval.start < admitted:
                    assert interval.cause is not None
                    first_wait += microseconds(interval.end) - microseconds(interval.start)
            assert first_wait == microseconds(admitted) - microseconds(end.timings.arrived)
            found = merged(waits(one.intervals))
            if request_id not in self.beams or one.index == 0:
                # A handed-over beam's wait is not in events before its fetch: an abort hides it.
                assert found == merged(self.spans[key]) or self.is_cut(found, key)

    def is_cut(self, found: list[Span], key: Key) -> bool:
        """Ended after its hand-over and before its fetch, of which no event tells."""
        known = merged(self.spans[key])
        has_two = len(self.core.stages) > 1
        return has_two and found[:-1] == known and found[-1][1] == microseconds(self.ends[key].at)

    def check_secrets(self) -> None:
        for request_id, tenant in self.tenants.items():
            said = repr(self.core.explain(request_id))
            assert tenant in said
            assert not any(other in said for other in TENANTS if other != tenant)


def test_explanations_partition_every_wait_and_never_name_another_tenant() -> None:
    causes: Counter[str] = Counter()
    num_waits = 0
    for seed in range(NUM_HISTORIES):
        history = History(seed)
        for number, _ in enumerate(history.live()):
            if number % 4 == 0 and history.tenants:
                asked = history.rng.choice(list(history.tenants))
                explanation = history.core.explain(asked)
                assert explanation is not None
                for one in explanation.sequences:
                    history.check_partition(one, asked)
        for request_id in history.tenants:
            history.check_end(request_id)
        history.check_secrets()
        causes += history.causes
        num_waits += sum(map(len, history.spans.values()))

    assert causes.keys() >= {*WaitCause, "None"} - {
        WaitCause.UNRECORDED,
        WaitCause.NOT_REACHED,  # there are too few tenants
    }
    assert causes[WaitCause.UNRECORDED] == 0
    assert num_waits > 5 * NUM_HISTORIES


def expected_cause(history: History, seq: EngineSequence) -> set[WaitCause | None]:
    """What may be said of a waiting sequence after a step, by that step's own record."""
    (stage,) = (stage for stage in history.core.stages if stage.scheduler.owns(seq))
    queues = stage.scheduler.queues
    records = [one for one in history.core.recent_steps(8) if one.stage == stage.name]
    if not records or max(seq.arrived, seq.queued) > records[-1].at:
        return {WaitCause.HANDED_OVER, WaitCause.PREEMPTED}
    if seq.id in records[-1].preempted:
        return {WaitCause.PREEMPTED}
    heads = records[-1].heads
    looked = {one.cause for one in heads if one.sequence_id == seq.id and one.cause is not None}
    if looked:
        return looked
    if not queues.is_head(seq):
        return {WaitCause.OWN_QUEUE}
    if records[-1].stopped_by is WaitCause.PREEMPTING:
        return {WaitCause.PREEMPTING}
    next_rank = heads[-1].rank
    return {WaitCause.FAIR_SHARE if next_rank == seq.rank else WaitCause.CLASS}


def test_causes_are_those_of_the_steps_own_records() -> None:
    """Seen after each step: who is first in its queue, and what the step looked at."""
    num_seen: Counter[WaitCause] = Counter()
    for seed in range(NUM_WITNESSED):
        history = History(seed)
        seen: list[tuple[str, float, set[WaitCause | None]]] = []
        for _ in history.live():
            history.clock.now += 0.0005
            for request_id in history.core._requests:
                seq = find(history.core, request_id)
                if seq.status is SequenceStatus.WAITING:
                    at = history.clock.now - 0.00025
                    seen.append((request_id, at, expected_cause(history, seq)))
        for request_id, at, expected in seen:
            explanation = history.core.explain(request_id)
            assert explanation is not None
            intervals = explanation.sequences[0].intervals
            (cause,) = (i.cause for i in intervals if i.start <= at < i.end)
            assert cause in expected, (seed, request_id, at)
            num_seen[cause] += 1

    assert num_seen[WaitCause.OWN_QUEUE] > 100
    assert num_seen.keys() == set(WaitCause) - {
        WaitCause.UNRECORDED,
        WaitCause.NOT_REACHED,
        WaitCause.STEP,  # over when the step begins
        WaitCause.TOO_LATE,  # ended in the step that finds it
        WaitCause.HANDED_OVER,
    }
