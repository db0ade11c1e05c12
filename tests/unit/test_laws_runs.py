"""Laws of whole runs of any policy, on the real core: each token is charged once, nothing happens
before its cause, Little's law is exact, and neither time nor names nor the process have a say.
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

from engine.core import EngineCore
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
from tests.laws import CLASSES, Request, Tenants, play, record_charges, requests, watch
from tests.scripted import make_core

happened: Counter[str] = Counter()


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


@settings(max_examples=60, deadline=None)
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
        assert happened[one] > 10, happened


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
    for events in play(core, load, {}):
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
    shares = {t: {**share, **waits[t]} for t, share in tenants.items()}
    return [event for found in play(core, slow, shares) for event in found]


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
        "import random; from tests.unit.test_laws_runs import history, Request\n"
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
