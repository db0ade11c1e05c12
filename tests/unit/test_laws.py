"""Laws of any scheduler, on the real one: no room is wasted, no class is served before a higher
one beyond its floor, each token is charged once, time and names have no say.

The laws of fair shares are in test_laws_fairness.py; both follow docs/decisions.md, sections 1, 2
and 7.
"""

import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.cost_model import LinearCost
from engine.events import (
    Event,
    GroupFinished,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    StepFinished,
    TokensGenerated,
)
from engine.plan import StepPlan
from engine.sequence import Sequence as EngineSequence
from engine.simulated_runner import SimulatedRunner, VirtualClock
from tests.laws import Heads, Ledger, Request, Tenants, play, record_charges, requests, use, watch
from tests.scripted import make_core

happened: Counter[str] = Counter()

CLASSES: dict[str, dict[str, Any]] = {
    "a": {"rank": 0, "weight": 2.0},
    "b": {"rank": 0},
    "c": {"rank": 1},
    "d": {"rank": 2, "preemptible": True},
}


# ---------------------------------------------------------------------------- work conservation


@settings(max_examples=150, deadline=None)
@given(
    load=st.lists(
        requests("abcd", topics=(None, None, 0, 1), n=(1, 1, 1, 2), patience=(None, None, 0.1)),
        min_size=20,
        max_size=50,
    ),
    policy=st.sampled_from(["wfq", "vtc", "drr", "fcfs", "priority"]),
    num_blocks=st.sampled_from([12, 20, 64]),
    max_step_tokens=st.sampled_from([6, 16, 64]),
    max_seqs=st.sampled_from([3, 6]),
    max_bypasses=st.sampled_from([0, 2, 8]),
    lead=st.sampled_from([0.0, 32.0, 512.0]),
    watermark=st.sampled_from([0.0, 0.1]),
)
def no_room_is_left(
    load: list[Request],
    policy: str,
    num_blocks: int,
    max_step_tokens: int,
    max_seqs: int,
    max_bypasses: int,
    lead: float,
    watermark: float,
) -> None:
    core, _ = make_core(
        policy=policy,
        num_blocks=num_blocks,
        max_step_tokens=max_step_tokens,
        max_seqs=max_seqs,
        max_bypasses=max_bypasses,
        max_bypass_lead=lead,
        watermark=watermark,
        class_floor=0.2,
        check=False,
    )
    use(core, policy)
    heads = Heads(core)

    def look(plan: StepPlan) -> None:
        idle = heads.idle(plan, core._clock())
        num_budget = heads.num_budget(plan)
        happened["steps"] += 1
        happened["with room"] += num_budget > 0 and heads.num_slots > 0
        happened["preempting"] += bool(plan.preempted)
        assert not (idle and num_budget), (idle, core.scheduler)
        if num_budget:
            unfinished = [one for one in prompts(core) if one.id not in chunks(plan)]
            assert not unfinished

    watch(core, look)
    for _ in play(core, load, CLASSES):
        pass
    happened.update(heads.seen)


def prompts(core: EngineCore) -> list[EngineSequence]:
    """Running sequences that do not decode yet."""
    return [one for one in core.scheduler.running.values() if not one.is_decoding]


def chunks(plan: StepPlan) -> dict[str, int]:
    """Number of tokens by sequence."""
    return {chunk.seq.id: chunk.num_tokens for chunk in plan.chunks}


def test_no_step_leaves_room_in_which_a_queue_head_fits() -> None:
    """Work conservation of grade (a), a little more: not only the first head of all, the head of
    every tenant's queue in every class. Not grade (b), any waiting request: a tenant's own queue
    is served in order.

    So by design, and for no other reason, a step leaves tokens, slots and blocks unused beside a
    head that fits: it preempted; room is kept for a head that does not fit, by the rules of
    engine/scheduling/bypass.py; a twin waits, at most `max_prefix_delays` times, and who is ahead
    of it in its class with it. (And three that this load has not: floors and caps of KV, and more
    than `MAX_PASSED_HEADS` heads that do not fit.)
    """
    happened.clear()

    no_room_is_left()

    assert happened["with room"] > happened["steps"] / 5
    for one in ("preempting", "misfits", "twins", "held"):
        assert happened[one] > 30, happened


def served(policy: str, load: Sequence[Request]) -> tuple[float, float, float]:
    """Service of all tenants, when it was done, and how much of it at half of that time, on a
    device whose steps cost what they compute."""
    clock = VirtualClock()
    cost = LinearCost(step=0.02, prompt_token=0.0005, decode=0.001, context_token=0.00001)
    config = EngineConfig(
        cache=CacheConfig(num_blocks=160, block_size=4, enable_prefix_cache=False),
        scheduler=SchedulerConfig(policy=policy, max_step_tokens=32, max_seqs=16),
    )
    core = EngineCore(config, SimulatedRunner(clock, cost), clock=clock)
    use(core, policy)
    ledger, half = record_charges(core), 0.0
    for _ in play(core, load, CLASSES):
        if clock() < 2.0:
            half = ledger.total()
    return ledger.total(), clock(), half


@settings(max_examples=8, deadline=None)
@given(st.lists(requests("abcd", gaps=(0.0, 0.001)), min_size=150, max_size=160))
def test_policies_share_out_the_same_amount_of_work(load: list[Request]) -> None:
    """Overload: every policy keeps the batch full, so all do the same work in the same time."""
    total, makespan, half = served("wfq", load)
    for policy in ("vtc", "drr", "fcfs", "priority"):
        other_total, other_makespan, other_half = served(policy, load)
        assert other_total == pytest.approx(total)
        assert other_makespan == pytest.approx(makespan, rel=0.05)
        assert other_half == pytest.approx(half, rel=0.05)


# ----------------------------------------------------------------------------------- inversion


class Inversions:
    """What a class is given while a higher one wants more.

    Let W be what is charged to classes, U the same and, at the rate of prompts, the tokens that
    are computed again; Q a step's budget of prompt tokens; aged 1 if the class has a `max_wait`,
    else 0. Over any steps at whose planning a class before j still wanted more, up to and with the
    prompts of the last step in which j went first:

        U_j  <=  class_floor * (sum of W_r over classes r < j) + (2 + aged) * Q

    Proof. In these steps j goes first on credit, or computes what it has begun. Its credit was at
    most 2 Q at the first, rose by the floor's part of W_r (less where it was at its limit) and
    fell by U_j, and was not forgiven, as a class before it wanted more. When j went first the last
    time, its credit was at least Q (0 if aged), and it took at most another Q in that step. QED.
    After that, its running sequences decode on: one token each step, however long.

    Two ways to see that j went first: it got prompt tokens though a class before it had a prompt to
    compute or a head that fits; or it was admitted though one had a head that does not fit, for
    which what is freed is kept. (Beside such a head a running prompt of j may use what is left.)
    """

    def __init__(self, core: EngineCore, ledger: Ledger, num_aged: int) -> None:
        config = core.config.scheduler
        self.core, self.ledger, self.heads = core, ledger, Heads(core)
        self.floor, self.rate = config.class_floor, config.charge.prompt
        self.quantum = config.max_step_tokens * self.rate
        self.limit = (2 + num_aged) * self.quantum
        self.again: Counter[int] = Counter()  # tokens, by rank
        self.before: dict[int, float] = {}
        self.least: dict[tuple[str, int], float] = {}
        self.largest = 0.0  # in quanta

    def balance(self, rank: int) -> float:
        above = sum(map(self.ledger.of_class, range(rank)))
        used = self.ledger.of_class(rank) + self.rate * self.again[rank]
        return used - self.floor * above

    def start(self) -> None:
        """Before a step."""
        self.before = {rank: self.balance(rank) for rank in (1, 2)}

    def look(self, plan: StepPlan) -> None:
        for seq, start, num_tokens, _ in plan.chunks:
            again = max(0, min(start + num_tokens, seq.num_reached_tokens) - start)
            self.again[seq.rank] += again
            happened["again"] += again > 0
        could_run = self.could_run(plan)
        given = {chunk.seq.rank for chunk in plan.chunks if not chunk.seq.is_decoding}
        self.check("out of turn", could_run, given)
        blocked = {one.rank for one in self.heads.misfits}
        self.check("passed", could_run | blocked, {one.rank for one in plan.admitted})

    def check(self, how: str, wanting: set[int], given: set[int]) -> None:
        for rank in (1, 2):
            if min(wanting, default=rank) >= rank:
                self.least.pop((how, rank), None)
                continue
            before = self.before[rank]
            least = self.least[how, rank] = min(self.least.get((how, rank), before), before)
            if rank in given:
                excess = self.balance(rank) - least
                self.largest = max(self.largest, excess / self.quantum)
                assert excess <= self.limit + 1e-6, (how, rank, excess, self.limit)
                happened[how] += 1

    def could_run(self, plan: StepPlan) -> set[int]:
        """Ranks of classes to which a full step did not give what it could have."""
        idle = self.heads.idle(plan, self.core._clock())
        if plan.num_tokens < self.core.config.scheduler.max_step_tokens:
            return set()
        computed = chunks(plan)
        unfinished = {
            one.rank
            for one in prompts(self.core)
            if computed.get(one.id, 0) < one.num_uncomputed_tokens
        }
        return unfinished | ({one.rank for one in idle} if not plan.preempted else set())


def check_victims(core: EngineCore, plan: StepPlan) -> None:
    """Nothing of a class gives way while something of a lower one runs on, but for what was
    displaced again and again before it came any further, and is left alone until it has."""
    bound = core.config.scheduler.max_preemptions
    lowest = max(
        (
            one.rank
            for one in core.scheduler.running.values()
            if one.num_fruitless < bound or one.num_reached_tokens > one.num_tokens_at_preemption
        ),
        default=0,
    )
    assert all(victim.rank >= lowest for victim in plan.preempted)
    happened["victims"] += len(plan.preempted)
    happened["class conflicts"] += len({one.rank for one in plan.preempted} - {lowest})


@settings(max_examples=120, deadline=None)
@given(
    load=st.lists(requests("aabbcd", n=(1, 1, 1, 2)), min_size=20, max_size=80),
    policy=st.sampled_from(["wfq", "drr", "priority"]),
    num_blocks=st.sampled_from([14, 24, 64]),
    max_step_tokens=st.sampled_from([6, 16, 32]),
    max_seqs=st.sampled_from([3, 6]),
    max_bypasses=st.sampled_from([0, 2, 8]),
    floor=st.sampled_from([0.0, 0.1, 0.4]),
    max_wait=st.sampled_from([None, None, 0.2]),
)
def classes_in_order(
    load: list[Request],
    policy: str,
    num_blocks: int,
    max_step_tokens: int,
    max_seqs: int,
    max_bypasses: int,
    floor: float,
    max_wait: float | None,
) -> None:
    core, _ = make_core(
        policy=policy,
        num_blocks=num_blocks,
        max_step_tokens=max_step_tokens,
        max_seqs=max_seqs,
        max_bypasses=max_bypasses,
        class_floor=floor,
        watermark=0.0,
        prefix_cache=False,
        check=False,
    )
    use(core, policy)
    inversions = Inversions(core, record_charges(core), num_aged=max_wait is not None)

    def look(plan: StepPlan) -> None:
        inversions.look(plan)
        check_victims(core, plan)

    watch(core, look)
    lower = {"max_wait": max_wait, "preemptible": True}
    tenants = {t: share | (lower if share["rank"] else {}) for t, share in CLASSES.items()}
    inversions.start()
    for _ in play(core, load, tenants):
        inversions.start()
    happened["at the limit"] += inversions.largest > 1.0


def test_a_class_is_served_before_a_higher_one_within_its_floor_only() -> None:
    happened.clear()

    classes_in_order()

    for one in ("out of turn", "passed", "victims", "class conflicts", "again"):
        assert happened[one] > 50, happened
    assert happened["at the limit"] > 2, happened


@settings(max_examples=80, deadline=None)
@given(
    load=st.lists(
        requests("abc", prompt=12, output=6, gaps=(0.0, 0.004)), min_size=25, max_size=50
    ),
    big=st.integers(30, 46),
    policy=st.sampled_from(["fcfs", "priority"]),
    max_bypasses=st.sampled_from([0, 1, 3]),
)
def big_heads(load: list[Request], big: int, policy: str, max_bypasses: int) -> None:
    core, _ = make_core(
        policy=policy,
        num_blocks=12,
        max_bypasses=max_bypasses,
        max_bypass_seconds=1e9,
        max_bypass_lead=1e9,
        prefix_cache=False,
        check=False,
    )
    load = [*load[:8], Request("big", big, 2), *load[8:]]
    num_younger: int | None = None  # let in since the big one was first seen not to fit

    def look(plan: StepPlan) -> None:
        nonlocal num_younger
        (waiting,) = [one for one in core.scheduler.queues if one.id == "r8"] or [None]
        if waiting is None:
            return
        # The step in which it is first looked at in vain: nobody older waits, and slots are left.
        older = any(one.place < waiting.place for one in core.scheduler.queues)
        if num_younger is None and not older and not plan.preempted:
            num_younger = 0
        if num_younger is not None:
            num_younger += sum(one.place > waiting.place for one in plan.admitted)
            happened["passes"] += sum(one.place > waiting.place for one in plan.admitted)
            assert num_younger <= max_bypasses

    watch(core, look)
    for _ in play(core, load, {}):
        pass
    assert core.scheduler.pool.num_held == 0


def test_a_head_that_does_not_fit_is_passed_as_often_as_may_be_and_no_more() -> None:
    """In order of arrival, where to pass is to come later and to be let in before."""
    happened.clear()

    big_heads()

    assert happened["passes"] > 10, happened


# ----------------------------------------------------------------------------------- charges


class Paid:
    """What each tenant should have paid, found from the plans: each prompt token once, at the
    rate for its first time, computed or found in the cache; each token that was delivered.

    Whatever a sequence covers again after a preemption is covered already, and costs nobody.
    """

    def __init__(self, core: EngineCore) -> None:
        rates = core.config.scheduler.charge
        self.prompt, self.output = rates.prompt, rates.output
        self.cached = rates.prompt if core.scheduler.policy.name == "vtc" else rates.cached
        self.covered: dict[EngineSequence, int] = {}
        self.by_tenant: defaultdict[str, float] = defaultdict(float)

    def look(self, plan: StepPlan) -> None:
        for seq, start, num_tokens, _ in plan.chunks:
            covered = self.covered.get(seq, 0 if seq.index == 0 else seq.num_prompt_tokens)
            found = max(covered, min(start, seq.num_prompt_tokens))
            end = max(found, min(start + num_tokens, seq.num_prompt_tokens))
            self.covered[seq] = end
            self.by_tenant[seq.tenant] += self.cached * (found - covered)
            self.by_tenant[seq.tenant] += self.prompt * (end - found)
            happened["hits"] += found > covered
            happened["again"] += start < covered and num_tokens > 1

    def deliver(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TokensGenerated):
                self.by_tenant[event.tenant] += self.output * len(event.token_ids)


@settings(max_examples=100, deadline=None)
@given(
    load=st.lists(
        requests("abcd", topics=(None, 0, 1), n=(1, 1, 2), patience=(None, None, 0.1)),
        min_size=15,
        max_size=50,
    ),
    policy=st.sampled_from(["wfq", "vtc", "drr", "fcfs", "priority"]),
    num_blocks=st.sampled_from([12, 16]),
    max_step_tokens=st.sampled_from([6, 16]),
    num_host_blocks=st.sampled_from([0, 16]),
)
def everything_is_paid_once(
    load: list[Request],
    policy: str,
    num_blocks: int,
    max_step_tokens: int,
    num_host_blocks: int,
) -> None:
    core, _ = make_core(
        policy=policy,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_step_tokens=max_step_tokens,
        max_seqs=6,
        watermark=0.0,
        check=False,
    )
    ledger, paid = record_charges(core), Paid(core)
    watch(core, paid.look)
    events: list[Event] = []
    for found in play(core, load, CLASSES):
        paid.deliver(found)
        events += found
        for tenant, service in paid.by_tenant.items():
            assert ledger.of(tenant) == pytest.approx(service), tenant

    ends = [event for event in events if isinstance(event, SequenceFinished)]
    rates = core.config.scheduler.charge
    usage = [one.usage for one in ends]
    assert ledger.total() == pytest.approx(
        sum(
            rates.prompt * one.computed_tokens
            + paid.cached * one.cached_tokens
            + rates.output * one.output_tokens
            for one in usage
        )
    )
    for end in ends:
        if end.reason == "length" and end.index == 0:
            assert end.usage.computed_tokens + end.usage.cached_tokens == end.usage.prompt_tokens
        happened[end.reason] += 1
    preempted = [event for event in events if isinstance(event, SequencePreempted)]
    happened["swapped"] += sum(event.swapped for event in preempted)
    happened["recomputed"] += sum(not event.swapped for event in preempted)


def test_each_token_is_charged_once_whatever_is_preempted_or_aborted() -> None:
    """Conservation of charge: what tenants paid, after every event, is the rate of each prompt
    token's first time and of each token that was delivered; and what their requests' usage says.
    """
    happened.clear()

    everything_is_paid_once()

    for one in ("hits", "again", "swapped", "recomputed", "abort", "length"):
        assert happened[one] > 50, happened


# ------------------------------------------------------------------------- causality and Little


def check_causes(story: list[Event]) -> None:
    """A sequence's events: arrived <= admitted <= first token <= ended, as its timings say."""
    end = story[-1]
    assert isinstance(end, SequenceFinished)
    times = [end.timings.arrived, *(one.at for one in story)]  # type: ignore[union-attr]
    assert times == sorted(times)
    kinds = {type(one): one.at for one in reversed(story)}  # type: ignore[union-attr]
    assert kinds.get(SequenceAdmitted) == end.timings.admitted
    assert kinds.get(TokensGenerated) == end.timings.first_token
    assert end.at == end.timings.finished
    order = [type(one) for one in story if not isinstance(one, SequencePreempted)]
    assert TokensGenerated not in order or order[0] is SequenceAdmitted


def waited(story: list[Event]) -> float:
    """How long a sequence was in the queue: until it was admitted, and after each preemption."""
    end = story[-1]
    assert isinstance(end, SequenceFinished)
    since: float | None = end.timings.arrived
    seconds = 0.0
    for event in story:
        if since is not None and isinstance(event, SequenceAdmitted | SequenceFinished):
            seconds, since = seconds + event.at - since, None
        elif isinstance(event, SequencePreempted):
            since = event.at
    return seconds


@settings(max_examples=60, deadline=None)
@given(
    load=st.lists(
        requests("abcd", topics=(None, 0), patience=(None, None, 0.1)), min_size=10, max_size=40
    ),
    num_blocks=st.sampled_from([12, 20, 64]),
    num_host_blocks=st.sampled_from([0, 16]),
)
def test_nothing_happens_before_its_cause_and_littles_law_is_exact(
    load: list[Request], num_blocks: int, num_host_blocks: int
) -> None:
    """L T = sum of W: how many there are, and how many wait, summed over the time that steps take,
    is how long all were there, and how long all waited; for each tenant."""
    core, _ = make_core(
        num_blocks=num_blocks, num_host_blocks=num_host_blocks, max_seqs=4, check=False
    )
    live: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    area: defaultdict[tuple[str, str], float] = defaultdict(float)
    stories: defaultdict[str, list[Event]] = defaultdict(list)

    def look(plan: StepPlan) -> None:
        live.clear()
        live.update(one[0].tenant for one in core._requests.values())
        waiting.clear()
        waiting.update(one.tenant for one in core.scheduler.queues)

    watch(core, look)
    for events in play(core, load, CLASSES):
        for event in events:
            if not isinstance(event, StepFinished | GroupFinished):
                stories[event.request_id].append(event)
                continue
            for tenant in live:
                took = event.executed - event.scheduled
                area["live", tenant] += live[tenant] * took
                area["waiting", tenant] += waiting[tenant] * took

    total: defaultdict[tuple[str, str], float] = defaultdict(float)
    assert len(stories) == len(load)
    for story in stories.values():
        check_causes(story)
        end = story[-1]
        total["live", end.tenant] += end.at - end.timings.arrived
        total["waiting", end.tenant] += waited(story)
    assert area.keys() == total.keys()
    assert sum(total.values()) > 0
    for key, seconds in total.items():
        assert area[key] == pytest.approx(seconds), key


@settings(max_examples=30, deadline=None)
@given(st.lists(requests("abcd", gaps=(0.0, 0.02, 0.1)), min_size=5, max_size=30))
def test_littles_law_for_blocks_in_closed_form(load: list[Request]) -> None:
    """Where nothing is shared or preempted, a sequence of p prompt and j generated tokens holds
    ceil((p + j) / B) blocks: summed over its life and over all, that is what the pool held."""
    core, _ = make_core(num_blocks=200, max_seqs=32, prefix_cache=False, check=False)
    size, held, number = core.config.cache.block_size, 0.0, 0
    num_tokens: Counter[str] = Counter()
    since: dict[str, float] = {}
    closed = 0.0

    def look(plan: StepPlan) -> None:
        nonlocal number
        number = core.scheduler.pool.num_held

    watch(core, look)
    for events in play(core, load, CLASSES):
        for event in events:
            match event:
                case StepFinished():
                    held += number * (event.executed - event.scheduled)
                case SequenceAdmitted():
                    request = load[int(event.request_id[1:])]
                    since[event.request_id] = event.at
                    num_tokens[event.request_id] = request.prompt
                case TokensGenerated():
                    blocks = -(-num_tokens[event.request_id] // size)
                    closed += blocks * (event.at - since[event.request_id])
                    since[event.request_id] = event.at
                    num_tokens[event.request_id] += 1
    assert held == pytest.approx(closed)
    assert held > 0


# --------------------------------------------------------------------------------- metamorphic

TIMES = frozenset(
    {"at", "waited_seconds", "arrived", "admitted", "first_token", "finished"}
    | {"started", "scheduled", "executed", "kv_block_seconds"}
)
SMALL: dict[str, Any] = {"num_blocks": 14, "num_host_blocks": 12, "max_seqs": 4, "watermark": 0.0}
policies = st.sampled_from(["wfq", "vtc", "drr", "fcfs", "priority"])
mixed_loads = st.lists(
    requests("abcd", topics=(None, None, 0), n=(1, 1, 2), patience=(None, None, 0.125)),
    min_size=15,
    max_size=40,
)


def history(
    load: Sequence[Request], tenants: Tenants = CLASSES, scale: float = 1.0, **settings: Any
) -> list[Event]:
    """All events of a load on a small core, on which all that is time takes `scale` times as
    long: gaps, steps, swaps, limits. All are whole multiples of a power of two: none is rounded."""
    core, runner = make_core(
        **SMALL | settings, check=False, class_floor=0.2, max_bypass_seconds=scale / 4
    )
    runner.base_seconds, runner.seconds_per_token = scale / 64, scale / 8192
    runner.swap_seconds = scale / 512
    slow = [
        replace(
            one,
            gap=one.gap * scale,
            patience=None if one.patience is None else one.patience * scale,
        )
        for one in load
    ]
    waits = {t: {"max_wait": 0.25 * scale} if s["rank"] else {} for t, s in tenants.items()}
    events = [
        event
        for found in play(core, slow, {t: s | waits[t] for t, s in tenants.items()})
        for event in found
    ]
    happened.update(type(event).__name__ for event in events)
    return events


def changed(value: Any, scale: float, names: dict[str, str], key: str = "") -> Any:
    """An event as plain data, with its times divided by `scale` and its tenants renamed."""
    if is_dataclass(value) and not isinstance(value, type):
        fields = asdict(value).items()
        return type(value).__name__, {k: changed(v, scale, names, k) for k, v in fields}
    if isinstance(value, dict):
        return {k: changed(v, scale, names, k) for k, v in value.items()}
    if key in TIMES and value is not None:
        return value / scale
    return names.get(value, value) if key == "tenant" else value


@settings(max_examples=40, deadline=None)
@given(load=mixed_loads, policy=policies, scale=st.sampled_from([0.125, 4.0]))
def test_scaling_all_times_changes_nothing_else(
    load: list[Request], policy: str, scale: float
) -> None:
    usual = history(load, policy=policy)
    slow = history(load, policy=policy, scale=scale)
    assert [changed(event, scale, {}) for event in slow] == [changed(e, 1.0, {}) for e in usual]


@settings(max_examples=40, deadline=None)
@given(load=mixed_loads, policy=policies, order=st.permutations("abcd"))
def test_names_of_tenants_have_no_say(load: list[Request], policy: str, order: list[str]) -> None:
    """Not even in ties, which go to whoever came first. (Without the prefix cache: of two tenants
    that cache equally much, the first by name is evicted from.)"""
    names = dict(zip("abcd", order, strict=True))
    other = [replace(one, tenant=names[one.tenant]) for one in load]
    off: dict[str, Any] = {"policy": policy, "prefix_cache": False}
    shares = {names[tenant]: share for tenant, share in CLASSES.items()}
    renamed = [changed(event, 1.0, {}) for event in history(other, shares, **off)]
    assert renamed == [changed(event, 1.0, names) for event in history(load, **off)]


@settings(max_examples=40, deadline=None)
@given(load=st.lists(requests("abcd", topics=(None, 0)), min_size=15, max_size=40), policy=policies)
def test_a_run_is_the_replay_of_its_own_trace(load: list[Request], policy: str) -> None:
    """From the events alone: when each request came, whose it was and how long it was. The
    same topic means the same prompt, which no event tells."""
    events = history(load, policy=policy)
    ends = [event for event in events if isinstance(event, SequenceFinished)]
    ends.sort(key=lambda end: (end.timings.arrived, int(end.request_id[1:])))
    trace, last = [], 0.0
    for end in ends:
        usage, at = end.usage, end.timings.arrived
        topic = load[int(end.request_id[1:])].topic
        trace.append(
            Request(end.tenant, usage.prompt_tokens, usage.output_tokens, at - last, topic=topic)
        )
        last = at
    assert history(trace, policy=policy) == events


def test_the_event_log_is_the_same_to_the_byte_in_every_process() -> None:
    """Sets of tenants and of sequences must not leak their order, which differs by process."""
    script = (
        "import random; from tests.unit.test_laws import history, Request\n"
        "rng = random.Random(5)\n"
        "load = [Request(rng.choice('abcd'), rng.randint(1, 24), rng.randint(1, 12),\n"
        "    rng.choice([0.0, 1 / 256]), topic=rng.choice([None, 0])) for _ in range(120)]\n"
        "print(*history(load), sep=chr(10))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    first, second = [process.communicate(timeout=60)[0] for process in processes]
    assert first == second
    assert first.count(b"SequenceFinished") == 120
    assert first.count(b"SequencePreempted") > 10
