"""The scheduler's own state run forward: with nothing unknown, it is what happens."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.cost_model import LinearCost, StepTimes
from engine.events import SequenceFinished, SequencePreempted, TokensGenerated
from engine.forecast import Outlook, capture, run_forward
from engine.plan import ScheduledChunk, StepPlan
from engine.sequence import SamplingParams, Sequence, TenantShare
from engine.simulated_runner import VirtualClock
from tests.scripted import add, make_core

EXACT = LinearCost(step=0.01, prompt_token=0.0001, decode=0.0001, context_token=0.0)
happened: Counter[str] = Counter()


def look(core: EngineCore, clock: VirtualClock) -> Outlook:
    """A capture, at the scripted runner's true prices."""
    core.scheduler.step_times.assume(EXACT)
    outlook = capture(core, clock.now)
    assert outlook is not None
    return outlook


def first_tokens(core: EngineCore) -> dict[str, float]:
    """When each request really has its first token, or its end if it asks for none."""
    found: dict[str, float] = {}
    for _ in range(5000):
        if not core.has_work:
            return found
        for event in core.step():
            if isinstance(event, TokensGenerated | SequenceFinished):
                found.setdefault(event.request_id, event.at)
            happened["preempted"] += isinstance(event, SequencePreempted)
            is_end = isinstance(event, SequenceFinished)
            happened["late"] += is_end and event.reason == "deadline"
    raise AssertionError("still working")


arrivals = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from([0, 0, 1]),  # rank
        st.integers(1, 24),
        st.integers(0, 14),
        st.sampled_from([1, 1, 1, 2, 3]),
        st.integers(0, 3),  # steps after it
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    load=arrivals,
    policy=st.sampled_from(["wfq", "wfq", "vtc", "drr", "drf", "priority", "fcfs"]),
    num_blocks=st.sampled_from([10, 14, 64]),
    max_step_tokens=st.sampled_from([4, 12, 48]),
    floors=st.sampled_from([{}, {"a": 3}]),
    sharing=st.sampled_from(["strict", "weighted"]),
)
def _check_that_it_comes_true(
    load: list[tuple[str, int, int, int, int, int]],
    policy: str,
    num_blocks: int,
    max_step_tokens: int,
    floors: dict[str, int],
    sharing: str,
) -> None:
    core, runner = make_core(
        policy=policy,
        num_blocks=num_blocks,
        max_step_tokens=max_step_tokens,
        max_seqs=4,
        watermark=0.0,
        prefix_cache=False,
        class_sharing=sharing,
    )
    core.scheduler.step_times.assume(EXACT)
    for number, (tenant, rank, prompt, output, n, steps) in enumerate(load):
        if -(-(prompt + output) // 4) > num_blocks - sum(floors.values()):
            continue
        add(
            core,
            f"r{number}",
            tenant,
            prompt,
            output,
            rank=rank,
            n=n,
            weight=1.0 + (tenant == "a"),
            floor=floors.get(tenant, 0),
            preemptible=rank > 0,
            deadline=(number * prompt % 40) / 100 if number % 5 == 4 else None,
        )
        for _ in range(steps):
            if core.has_work:
                core.step()
    outlook = look(core, runner.clock)
    happened["running"] += any(one.block_table for one in outlook.sequences)
    happened["waiting"] += any(one.block_table is None for one in outlook.sequences)

    forecast = run_forward(outlook)

    happened["foreseen"] += len(forecast.first_tokens)
    happened["foreseen late"] += len(forecast.expired)
    actual = first_tokens(core)
    foreseen = forecast.first_tokens | forecast.expired
    assert set(foreseen) == outlook.awaited
    for request_id, seconds in foreseen.items():
        assert outlook.now + seconds == pytest.approx(actual[request_id], abs=1e-9), request_id


def test_with_nothing_unknown_the_forecast_comes_true() -> None:
    happened.clear()
    _check_that_it_comes_true()
    for event, least in [
        ("running", 60),
        ("waiting", 40),
        ("preempted", 10),
        ("foreseen", 150),
        ("late", 5),
        ("foreseen late", 2),
    ]:
        assert happened[event] >= least, happened


def test_what_is_found_in_the_cache_is_foreseen() -> None:
    core, runner = make_core(max_step_tokens=8)
    prompt = list(range(40))
    add(core, "first", "acme", prompt, 1)
    while core.has_work:
        core.step()
    add(core, "warm", "acme", prompt, 1)
    add(core, "cold", "zeta", prompt, 1)

    outlook = look(core, runner.clock)
    forecast = run_forward(outlook)

    # Four of its 40 tokens are left to compute, beside four of the other's.
    assert forecast.first_tokens["warm"] == pytest.approx(0.0108)
    assert forecast.first_tokens["cold"] == pytest.approx(first_tokens(core)["cold"] - outlook.now)


def test_lengths_are_those_of_the_tenants_last_requests() -> None:
    """One slot: the second begins when the first ends, after 4 tokens as before, not after 60."""
    core, runner = make_core(max_seqs=1, eos=frozenset({1008}))
    for number in range(3):
        add(core, f"old{number}", "acme", 4, 60)
    while core.has_work:
        core.step()
    add(core, "running", "acme", 4, 60)
    core.step()
    add(core, "next", "acme", 4, 60)

    outlook = look(core, runner.clock)
    forecast = run_forward(outlook)

    assert forecast.first_tokens["next"] == pytest.approx(4 * 0.0101 + 0.0104)
    assert outlook.now + forecast.first_tokens["next"] == pytest.approx(first_tokens(core)["next"])


def test_what_waits_behind_more_than_is_captured_waits_at_least_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.forecast.MAX_WAITING", 6)
    core, runner = make_core(policy="fcfs", max_seqs=1)
    for number in range(20):
        add(core, f"flood{number}", "flood", 4, 4)
    add(core, "late", "other", 4, 4)

    outlook = look(core, runner.clock)
    forecast = run_forward(outlook)

    # One of each tenant in turn: five of the flood are known, and `late` comes behind all twenty.
    assert outlook.cut_queues == {(0, "flood")}
    assert set(forecast.first_tokens) == {f"flood{number}" for number in range(5)}
    assert 0 < forecast.horizon < first_tokens(core)["late"]


def test_patience_ends_a_forecast() -> None:
    core, runner = make_core(max_seqs=1)
    for number in range(10):
        add(core, f"r{number}", "acme", 4, 20)
    times = iter(range(1000))

    forecast = run_forward(look(core, runner.clock), computing_clock=lambda: next(times) / 10)

    assert list(forecast.first_tokens) == ["r0"]
    assert forecast.horizon > 0


def test_nothing_is_foreseen_before_steps_have_a_price_nor_with_two_pools() -> None:
    core, _ = make_core()
    add(core, "a", "acme", 4, 4)
    assert capture(core, 0.0) is None

    core, _ = make_core(prefill_blocks=16)
    core.scheduler.step_times.assume(EXACT)
    assert capture(core, 0.0) is None


def chunk_of(num_tokens: int, start: int = 0) -> ScheduledChunk:
    params, share = SamplingParams(max_tokens=1), TenantShare(tenant="a")
    return ScheduledChunk(Sequence("a", share, "a", [0], params, arrived=0.0), start, num_tokens)


def test_prices_are_learned_from_steps() -> None:
    price = LinearCost(step=0.012, prompt_token=0.0007, decode=0.0006, context_token=3e-7)
    times = StepTimes()
    for number in range(640):
        decodes = [chunk_of(1, 50 * number % 900) for _ in range(number % 7)]
        prompts = [chunk_of(2 + 13 * number % 97)] if number % 3 == 0 else []
        plan = StepPlan(number, (*decodes, *prompts))
        times.observe(plan, price.seconds(plan) * (0.95, 1.05)[number % 2])
        assert (times.cost is None) == (number < 7)

    learned = times.cost
    assert learned is not None
    assert learned.step == pytest.approx(price.step, rel=0.1)
    assert learned.prompt_token == pytest.approx(price.prompt_token, rel=0.1)
    for _ in range(10_000):  # decodes alone do not make it forget what a prompt costs
        times.observe(StepPlan(1, (chunk_of(1, 100),)), 0.02)
    assert times.cost is not None
    assert times.cost.prompt_token == pytest.approx(price.prompt_token, rel=0.2)


def test_a_prompt_alone_takes_its_chunks() -> None:
    price = LinearCost(step=1.0, prompt_token=0.01, decode=5.0, context_token=0.001)
    # Three chunks of 40 tokens after 0, 40 and 80.
    assert price.prompt_seconds(120, 40) == pytest.approx(3 + 1.2 + 0.12)
