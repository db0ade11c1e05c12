"""Laws of fair shares inside a class, for every policy that keeps them, and what a lower class is
sure of: nothing starves, idleness saves up no claim, identities buy nothing.

What each service is measured by, and the law that bounds it, is `RivalMeter` in tests/laws.py; the
lemma behind it is proved in docs/decisions.md, section 1.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.events import SequenceAdmitted, SequencePreempted
from engine.plan import StepPlan
from engine.scheduling.fairness import ServiceGapMeter, max_resident_service
from engine.sequence import TenantShare
from tests.laws import (
    Ledger,
    Request,
    RivalMeter,
    play,
    record_charges,
    requests,
    resident_service,
    saturate,
    submit,
    use,
    watch,
)
from tests.scripted import make_core

happened: Counter[str] = Counter()
fair_policies = st.sampled_from(["wfq", "drr", "vtc"])
weights = st.fixed_dictionaries({t: st.sampled_from([0.5, 1.0, 2.0, 3.0]) for t in "abcd"})

Weights = Mapping[str, float]


def shares(weight: Weights) -> dict[str, dict[str, Any]]:
    return {tenant: {"weight": w} for tenant, w in weight.items()}


def small_core(policy: str, **settings: Any) -> EngineCore:
    defaults = {"max_step_tokens": 8, "max_seqs": 3, "max_bypass_lead": 0.0, "prefix_cache": False}
    core, _ = make_core(policy=policy, check=False, **defaults | settings)
    return core


def bound(core: EngineCore, slack: float, sizes: Mapping[str, tuple[int, int]]) -> float:
    """R of the longest of these."""
    return resident_service(core, [Request(t, *size) for t, size in sizes.items()])


# ------------------------------------------------------------------------- lemma, rivals, starts


@settings(max_examples=70, deadline=None)
@given(
    load=st.lists(
        requests(
            "aaabcd",
            prompt=12,
            output=6,
            topics=(None, None, 0),
            n=(1, 1, 1, 2),
            patience=(None, None, 0.2),
        ),
        min_size=30,
        max_size=90,
    ),
    weight=weights,
    policy=fair_policies,
    num_blocks=st.sampled_from([6, 8, 40]),
    max_seqs=st.sampled_from([2, 3]),
    num_host_blocks=st.sampled_from([0, 12]),
    lead=st.sampled_from([0.0, 16.0]),
)
def nobody_gets_ahead(
    load: list[Request],
    weight: dict[str, float],
    policy: str,
    num_blocks: int,
    max_seqs: int,
    num_host_blocks: int,
    lead: float,
) -> None:
    core = small_core(
        policy,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_seqs=max_seqs,
        max_bypass_lead=lead,
        prefix_cache=True,
        watermark=0.0,
    )
    slack, resident = use(core, policy), resident_service(core, load)
    meter, gaps = RivalMeter(record_charges(core), weight), ServiceGapMeter()
    counters = core.scheduler.counters[0]
    for events in play(core, load, shares(weight)):
        waiting = set(core.scheduler.queues.tenants(0))
        meter.observe(waiting)
        gaps.observe(waiting, counters.as_dict())
        happened["preempted"] += sum(isinstance(e, SequencePreempted) for e in events)
        happened["hits"] += sum(
            isinstance(e, SequenceAdmitted) and e.num_cached_tokens > 0 for e in events
        )
        for f in waiting:  # the lemma
            for g in weight:
                assert counters[g] <= counters[f] + slack + resident / weight[g] + 1e-6
                happened["waited beside another"] += f != g
    meter.check(slack, resident)
    for (f, g), gap in gaps.largest.items():  # the theorem
        assert gap <= resident / weight[f] + resident / weight[g] + 2 * slack + 1e-6


def test_no_rival_gets_ahead_of_who_waits_by_more_than_the_bound() -> None:
    """Lemma and theorem on raw counters, and the law of `RivalMeter` on charges, after every
    event, for `wfq`, `drr` and `vtc`, with weights.

    The lemma's slack S is what the order lets an admitted tenant be ahead of one that waits. By
    least counter that is nothing, and `max_bypass_lead` where it passes a head that does not fit.
    Under `drr` it is a quantum: g goes before f only in the same round or an earlier one,
    floor(c_g / Q) <= floor(c_f / Q), so c_g < c_f + Q; the rest of the proof stands. So the gap of
    two that wait is at most R_f/w_f + R_g/w_g + 2 max(Q, lead): the 2 L of the published
    Q + 2 L is what one packet may overshoot, here what is resident; the second Q is for intervals
    that begin anywhere. Published VTC's U is R here (see engine/scheduling/fairness.py).
    """
    happened.clear()

    nobody_gets_ahead()

    assert happened["waited beside another"] > 1000
    for one in ("preempted", "hits"):
        assert happened[one] > 5, happened


@settings(max_examples=50, deadline=None)
@given(
    load=st.lists(requests("aaabcd", prompt=12, output=6), min_size=30, max_size=80),
    weight=weights,
    policy=fair_policies,
)
def test_every_request_starts_within_so_many_steps(
    load: list[Request], weight: dict[str, float], policy: str
) -> None:
    """Starvation. Each step serves at least one unit while anything waits (a prompt token; nothing
    is preempted here, so none is computed again). From the arrival of a request of f to its start
    f waits, so by the law of `RivalMeter` the number of steps is at most

        W_f + sum over g of w_g * (W_f / w_f + R / w_f + 2 S) + 2 R

    where W_f is what f got meanwhile, for requests of its own before this one.
    """
    core = small_core(policy, num_blocks=200)
    slack, resident = use(core, policy), resident_service(core, load)
    ledger, steps, num_started = record_charges(core), 0, 0
    arrived: dict[str, tuple[int, float]] = {}
    for events in play(core, load, shares(weight)):
        if not events:  # an arrival
            name = f"r{len(arrived)}"
            arrived[name] = steps, ledger.of(load[len(arrived)].tenant)
            continue
        for event in events:
            if not isinstance(event, SequenceAdmitted):
                continue
            since, before = arrived[event.request_id]
            f, own = event.tenant, ledger.of(event.tenant) - before
            others = sum(
                w * ((own + resident) / weight[f] + 2 * slack) + 2 * resident
                for g, w in weight.items()
                if g != f
            )
            assert steps - since <= own + others
            num_started += 1
        steps += 1
        assert ledger.total() >= steps
    assert num_started == len(load)


# --------------------------------------------------------------------------- lift, on and off


@settings(max_examples=25, deadline=None)
@given(
    alone=st.integers(30, 120),
    policy=fair_policies,
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 6)),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
)
def test_who_comes_first_after_an_idle_system_gets_its_share_and_no_more(
    alone: int, policy: str, sizes: tuple[int, int], weight: float
) -> None:
    """A is served for long alone, all ends, B comes first and A just after it. Published rule: B is
    lifted to A's counter; without it B would be served alone until it has caught up."""
    core = small_core(policy, num_blocks=40)
    both = {"a": 1.0, "b": weight}
    slack, resident = use(core, policy), bound(core, 0.0, {"a": sizes})
    ledger = record_charges(core)
    for _ in play(core, [Request("a", *sizes)] * alone, shares(both), prefix="alone"):
        pass
    before = ledger.of("a")
    assert core.scheduler.counters[0]["a"] == pytest.approx(before)

    submit(core, "first", Request("b", *sizes), shares(both))
    meter = RivalMeter(ledger, both)
    for _ in saturate(core, shares(both), dict.fromkeys("ba", sizes), steps=200):
        meter.observe({"a", "b"})

    meter.check(slack, resident)
    got_a, got_b = ledger.of("a") - before, ledger.of("b")
    assert got_a > 200
    limit = resident / weight + resident + 2 * slack
    assert abs(got_b / weight - got_a) <= limit + sum(sizes) * 2


@settings(max_examples=25, deadline=None)
@given(
    phases=st.lists(st.tuples(st.integers(5, 60), st.booleans(), st.booleans()), min_size=6),
    weight=weights,
    policy=fair_policies,
    sizes=st.fixed_dictionaries(
        {t: st.tuples(st.integers(1, 12), st.integers(1, 6)) for t in "abc"}
    ),
    num_blocks=st.sampled_from([8, 40]),
)
def test_who_is_on_and_off_gets_no_more_beside_who_is_always_there(
    phases: list[tuple[int, bool, bool]],
    weight: dict[str, float],
    policy: str,
    sizes: dict[str, tuple[int, int]],
    num_blocks: int,
) -> None:
    """VTC's theorem 4.9: f always backlogged, b and c on and off at random. However long they
    were away, from any moment on they get at most what f gets, by weight, and the bound."""
    core = small_core(policy, num_blocks=num_blocks, watermark=0.0)
    slack, resident = use(core, policy), bound(core, 0.0, sizes)
    meter = RivalMeter(record_charges(core), {t: weight[t] for t in "abc"})
    for number, (steps, b, c) in enumerate(phases):
        on = {t: sizes[t] for t, is_on in (("a", True), ("b", b), ("c", c)) if is_on}
        tenants = shares(weight)
        for _ in saturate(core, tenants, on, steps, prefix=f"{number}:"):
            meter.observe(set(core.scheduler.queues.tenants(0)) | {"a"})
    meter.check(slack, resident)


# ------------------------------------------------------------------------------ who counts


def got(
    weight: Weights, sizes: Mapping[str, tuple[int, int]], policy: str = "wfq", steps: int = 400
) -> tuple[Ledger, float, float]:
    """Service of tenants that are always backlogged; the slack, and R."""
    core = small_core(policy, num_blocks=40)
    slack, ledger = use(core, policy), record_charges(core)
    for _ in saturate(core, shares(weight), sizes, steps):
        pass
    return ledger, slack, bound(core, slack, sizes)


@settings(max_examples=8, deadline=None)
@given(
    num_keys=st.integers(2, 5),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 6)),
    rival=st.tuples(st.integers(1, 12), st.integers(1, 6)),
    policy=fair_policies,
)
def test_splitting_a_weight_over_identities_changes_nothing(
    num_keys: int, sizes: tuple[int, int], rival: tuple[int, int], policy: str
) -> None:
    """k tenants of weight w/k get together what one of weight w gets beside the same rival: each
    is within R k/w + R/u + 2 S of it, per weight (the theorem), all k within
    k R + w (R/u + 2 S). What an operator gives counts, not among how many it is divided."""
    weight = {"v": 1.0} | {f"k{i}": 2.0 / num_keys for i in range(num_keys)}
    ledger, slack, resident = got(
        weight, {"v": rival} | {f"k{i}": sizes for i in range(num_keys)}, policy
    )
    together = sum(ledger.of(f"k{i}") for i in range(num_keys))
    limit = num_keys * resident + 2.0 * (resident + 2 * slack)
    assert abs(together - 2.0 * ledger.of("v")) <= limit
    assert together + ledger.of("v") > 2 * limit / num_keys  # enough was served to tell

    one, slack, resident = got({"v": 1.0, "k": 2.0}, {"v": rival, "k": sizes}, policy)
    assert abs(one.of("k") - 2.0 * one.of("v")) <= resident + 2.0 * (resident + 2 * slack)


def test_keys_of_one_tenant_are_one_identity() -> None:
    """The scheduler knows tenants alone. Where weights are for the taking, identities would pay:
    three of full weight beside one get three quarters."""
    assert not any("key" in one.name for one in fields(TenantShare))

    ledger, _, _ = got(dict.fromkeys("vxyz", 1.0), dict.fromkeys("vxyz", (6, 3)), steps=2000)

    assert ledger.of("v") / ledger.total() == pytest.approx(1 / 4, abs=0.02)


@settings(max_examples=15, deadline=None)
@given(
    num_tenants=st.integers(1, 5),
    weight=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=6, max_size=6),
    policy=fair_policies,
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), min_size=6, max_size=6),
)
def test_a_newcomer_leaves_everybody_their_share(
    num_tenants: int, weight: list[float], policy: str, sizes: list[tuple[int, int]]
) -> None:
    """From when tenant n + 1 comes, of the service W each backlogged tenant f gets at least
    w_f / (sum of w) of W, less sum over g of w_f w_g / (sum of w) times the theorem's bound."""
    core = small_core(policy, num_blocks=40)
    slack, ledger = use(core, policy), record_charges(core)
    names = [f"t{i}" for i in range(num_tenants + 1)]
    by_name = dict(zip(names, weight, strict=False))
    load = dict(zip(names, sizes, strict=False))
    old = {name: load[name] for name in names[:-1]}
    for _ in saturate(core, shares(by_name), old, steps=100):
        pass
    before = Ledger(ledger)
    for _ in saturate(core, shares(by_name), load, steps=300, prefix="then"):
        pass

    resident, all_weights = bound(core, slack, load), sum(by_name.values())
    service = ledger.total() - before.total()
    for f, w in by_name.items():
        gaps = sum(
            u * (resident / w + resident / u + 2 * slack) for g, u in by_name.items() if g != f
        )
        assert ledger.of(f) - before.of(f) >= w * (service - gaps) / all_weights - 1e-6


# -------------------------------------------------------------------------- a lower class


@settings(max_examples=25, deadline=None)
@given(
    phases=st.lists(
        st.tuples(st.integers(5, 80), st.sampled_from([0, 1, 3]), st.booleans()),
        min_size=3,
        max_size=6,
    ),
    floor=st.sampled_from([0.1, 0.25, 0.5]),
)
def class_floors(phases: list[tuple[int, int, bool]], floor: float) -> None:
    core = small_core("wfq", num_blocks=200, max_step_tokens=16, max_seqs=4, class_floor=floor)
    ledger = record_charges(core)
    config, cache = core.config.scheduler, core.config.cache
    resident = max_resident_service(config, cache, max_prompt_tokens=6, max_output_tokens=3)
    quantum, step = 16.0, 16.0 + 2.0 * 4
    limit = (2 * quantum + resident) / floor + resident + step
    since: float | None = None  # what the higher class had got when the lower one was left waiting
    tenants = {"low": {"rank": 1}, "high": {"rank": 0}}
    number = 0

    def look(plan: StepPlan) -> None:
        nonlocal since
        running = any(one.rank == 1 for one in core.scheduler.running.values())
        if running or not core.scheduler.queues.num_waiting(1, "low"):
            since = None
            return
        since = ledger.of_class(0) if since is None else since
        happened["waits"] += 1
        happened["long waits"] += ledger.of_class(0) - since > quantum / floor
        assert ledger.of_class(0) - since <= limit

    watch(core, look)
    for steps, num_high, has_low in [*phases, (60, 3, True)]:
        for _ in range(steps):
            wanted = {"high": 4 * num_high if num_high > 1 else num_high, "low": 4 * has_low}
            for tenant, least in wanted.items():
                rank = tenants[tenant]["rank"]
                while core.scheduler.queues.num_waiting(rank, tenant) < least:
                    submit(core, f"r{number}", Request(tenant, 6, 3), tenants)
                    number += 1
            core.step()


def test_a_lower_class_starts_within_what_its_floor_costs_the_higher_ones() -> None:
    """While a class with nothing running waits, the classes before it get at most

        (2 Q + R) / class_floor + R + one step's service.

    Its credit is at least -(Q + R): whenever the others had all that they wanted it owed nothing,
    and after that it took at most a step's budget Q, out of its turn only on credit, and what its
    residents still had to get, R. It rises by class_floor of what the others get, so it is Q, and
    the class due, after (2 Q + R) / class_floor. From then on it goes first in every step; should
    all slots be taken, that is until one of their residents ends, R at most. All fits in memory.
    """
    happened.clear()

    class_floors()

    assert happened["waits"] > 100, happened
    assert happened["long waits"] > 20, happened
