"""The forecast is the scheduler's own state run forward: with nothing unknown, it is what happens."""

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
from tests.scripted import VirtualClock, add, make_core

EXACT = LinearCost(step=0.01, prompt_token=0.0001, decode=0.0001, context_token=0.0)
happened: Counter[str] = Counter()


def look(core: EngineCore, clock: VirtualClock) -> Outlook:
    """A capture, at the scripted runner's true prices."""
    core.scheduler.step_times._cost = EXACT
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
    policy=st.sampled_from(["wfq", "wfq", "vtc", "drr", "priority", "fcfs"]),
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
        )
        for _ in range(steps):
            if core.has_work:
                core.step()
    outlook = look(core, runner.clock)
    happened["running"] += any(one.block_table for one in outlook.sequences)
    happened["waiting"] += any(one.block_table is None for one in outlook.sequences)

    forecast = run_forward(outlook)

    happened["foreseen"] += len(forecast.first_tokens)
    actual = first_tokens(core)
    assert set(forecast.first_tokens) == outlook.awaited
    for request_id, seconds in forecast.first_tokens.items():
        assert outlook.now + seconds == pytest.approx(actual[request_id], abs=1e-9), request_id


def test_with_nothing_unknown_the_forecast_comes_true() -> None:
    happened.clear()
    _check_that_it_comes_true()
    for event, least in [("running", 80), ("waiting", 60), ("preempted", 20), ("foreseen", 300)]:
        assert happened[event] >= least, happened
