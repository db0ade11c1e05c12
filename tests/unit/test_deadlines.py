"""What nobody waits for any more is ended, and what could not be in time is not begun."""

from collections import Counter

import pytest

from engine.core import EngineCore
from engine.cost_model import LinearCost
from engine.deadlines import Deadlines
from engine.events import (
    Event,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    TokensGenerated,
)
from engine.plan import StepPlan
from engine.sequence import BeamSearch, SamplingParams, TenantShare
from engine.waits import WaitCause
from tests.scripted import add, find, make_core
from tests.unit.test_forecast import chunk_of

PRICE = LinearCost(step=0.01, prompt_token=0.0001, decode=0.0001, context_token=0.0)


def ask(
    core: EngineCore, request_id: str, seconds: float | None, prompt: int = 8, **params: object
):
    core.add(
        request_id,
        tuple(range(prompt)),
        SamplingParams(**{"max_tokens": 20, **params}),  # type: ignore[arg-type]
        share=TenantShare(tenant="acme"),
        namespace="acme",
        deadline_seconds=seconds,
    )


def run(core: EngineCore) -> list[Event]:
    events: list[Event] = []
    while core.has_work:
        events += core.step()
    assert core.scheduler.pool.num_held == 0
    return events


def ends(events: list[Event]) -> dict[tuple[str, int], tuple[str, int]]:
    """Reason and output tokens of each sequence."""
    return {
        (e.request_id, e.index): (str(e.reason), e.usage.output_tokens)
        for e in events
        if isinstance(e, SequenceFinished)
    }


def test_a_running_request_ends_at_its_deadline_with_what_it_has() -> None:
    core, _ = make_core()
    ask(core, "a", 0.05)
    ask(core, "b", None)

    events = run(core)

    assert ends(events) == {("a", 0): ("deadline", 5), ("b", 0): ("length", 20)}
    last = max(e.at for e in events if isinstance(e, TokensGenerated) and e.request_id == "a")
    assert 0.05 <= last < 0.0625  # the step that ran when it passed


def test_a_waiting_request_ends_at_its_deadline_without_having_begun() -> None:
    core, _ = make_core(max_seqs=1)
    ask(core, "a", None)
    ask(core, "b", 0.05)
    ask(core, "c", None)

    events = run(core)

    assert ends(events)["b", 0] == ("deadline", 0)
    (end,) = [e for e in events if isinstance(e, SequenceFinished) and e.request_id == "b"]
    assert end.timings.admitted is None
    assert end.usage.computed_tokens == 0
    assert ends(events)["c", 0] == ("length", 20)


def test_a_prompt_that_takes_longer_than_its_deadline_is_not_begun() -> None:
    """80 tokens in steps of 16 take 58 ms at the least; what follows it is looked at at once."""
    core, _ = make_core(max_step_tokens=16)
    core.scheduler.step_times.assume(PRICE)
    ask(core, "busy", None, prompt=1)
    core.step()
    ask(core, "late", 0.057, prompt=80)
    ask(core, "late too", 0.057, prompt=79)
    ask(core, "behind", 0.057, prompt=8, max_tokens=2)

    events = core.step()

    assert ends(events) == {("late", 0): ("deadline", 0), ("late too", 0): ("deadline", 0)}
    causes = [one.cause for one in core.recent_steps(1)[0].heads]
    assert causes == [WaitCause.TOO_LATE, WaitCause.TOO_LATE, None]
    explanation = core.explain("late")
    assert explanation is not None
    assert explanation.sequences[0].is_finished
    assert ends(run(core)) == {("behind", 0): ("length", 2), ("busy", 0): ("length", 20)}


def test_what_costs_nobody_anything_is_tried() -> None:
    """Prices are learned by running: once too high, they would else keep every prompt out."""
    core, _ = make_core(max_step_tokens=16)
    times = core.scheduler.step_times
    for _ in range(8):
        times.observe(StepPlan(1, (chunk_of(80),)), 5.0)
    assert times.cost is not None
    assert times.cost.prompt_seconds(80, 16) > 1
    for number in range(60):
        ask(core, f"r{number}", 0.5, prompt=80, max_tokens=1)
        assert ends(run(core)) == {(f"r{number}", 0): ("length", 1)}
    assert times.cost.prompt_seconds(80, 16) < 0.2


def test_beside_decodes_a_prompt_is_tried_now_and_then() -> None:
    core, _ = make_core(max_step_tokens=16)
    for _ in range(8):
        core.scheduler.step_times.observe(StepPlan(1, (chunk_of(80),)), 5.0)
    ask(core, "busy", None, prompt=1, max_tokens=200)
    core.step()
    found = Counter[str]()
    for number in range(120):
        ask(core, f"r{number}", 0.4, prompt=80, max_tokens=1)
        found.update(reason for reason, _ in ends(core.step()).values())
    found.update(reason for reason, _ in ends(run(core)).values())

    assert found["deadline"] > 20
    assert found["length"] > 1


def test_one_that_ran_is_not_dropped_for_what_it_would_take_again() -> None:
    """Preempted, two sequences of one request wait apart, and have something to show for it."""
    core, _ = make_core(max_step_tokens=16, prefix_cache=False)
    core.scheduler.step_times.assume(PRICE)
    ask(core, "busy", None, prompt=1, max_tokens=60)
    ask(core, "a", 0.12, prompt=80, n=2)
    while find(core, "a").num_output_tokens < 2:
        core.step()
    for seq_id in ("a", "a/1"):
        core.scheduler._preempt(core.scheduler.running[seq_id], now=0.07)

    admitted = [e.request_id for e in core.step() if isinstance(e, SequenceAdmitted)]
    assert admitted == ["a"]
    assert ends(run(core))["a", 0][0] == "deadline"


def test_a_head_that_is_too_late_preempts_nobody() -> None:
    core, _ = make_core(max_step_tokens=16, num_blocks=24, watermark=0.0)
    core.scheduler.step_times.assume(PRICE)
    add(core, "low", "b", 40, 20, rank=1, preemptible=True)
    for _ in range(4):
        core.step()
    add(core, "high", "a", 80, 4, rank=0, deadline=0.05)

    events = run(core)

    assert ends(events)["high", 0] == ("deadline", 0)
    assert not [e for e in events if isinstance(e, SequencePreempted)]


def test_one_step_looks_at_so_many_that_are_too_late() -> None:
    core, _ = make_core(max_step_tokens=16)
    core.scheduler.step_times.assume(PRICE)
    ask(core, "busy", None, prompt=1, max_tokens=60)
    core.step()
    for number in range(40):
        ask(core, f"r{number}", 0.05, prompt=80)

    assert [len(ends(core.step())) for _ in range(3)] == [16, 16, 8]


def test_a_prompt_that_can_be_in_time_is_begun() -> None:
    core, _ = make_core(max_step_tokens=16)
    core.scheduler.step_times.assume(PRICE)
    ask(core, "a", 0.0581, prompt=80, max_tokens=1)

    assert ends(run(core)) == {("a", 0): ("length", 1)}


def test_what_is_cached_needs_no_time() -> None:
    core, _ = make_core(max_step_tokens=16)
    ask(core, "first", None, prompt=80, max_tokens=1)
    run(core)
    core.scheduler.step_times.assume(PRICE)
    ask(core, "again", 0.015, prompt=80, max_tokens=1)

    assert ends(run(core)) == {("again", 0): ("length", 1)}


@pytest.mark.parametrize("params", [{"n": 3}, {"beam": BeamSearch(width=3)}])
@pytest.mark.parametrize(("seconds", "price"), [(0.05, None), (0.001, PRICE)])
def test_all_sequences_of_a_request_end(
    params: dict[str, object], seconds: float, price: LinearCost | None
) -> None:
    """Before the fork and after it."""
    core, _ = make_core()
    ask(core, "busy", None, prompt=1)
    if price is not None:
        core.scheduler.step_times.assume(price)
        core.step()
    ask(core, "a", seconds, **params)

    found = ends(run(core))

    assert {key: reason for key, (reason, _) in found.items()} == {
        **{("a", index): "deadline" for index in range(3)},
        ("busy", 0): "length",
    }


def test_a_swapped_out_request_ends_too() -> None:
    core, _ = make_core(num_host_blocks=16, preemption="swap", max_seqs=1)
    ask(core, "a", 0.06)
    for _ in range(3):
        core.step()
    ask(core, "b", None)
    core.scheduler._preempt(core.scheduler.running["a"], now=0.03)
    assert find(core, "a").parked is not None
    events = run(core)

    assert ends(events)["a", 0][0] == "deadline"
    assert core.scheduler.memory.host.num_free == 16


def test_deadlines_by_themselves() -> None:
    deadlines = Deadlines()
    for number in range(1000):
        deadlines.set(f"r{number}", 100.0 + number)
    deadlines.set("soon", 1.0)
    deadlines.set("dropped", 0.5)
    deadlines.drop("dropped")
    deadlines.drop("unknown")

    assert deadlines.passed(0.9) == []
    assert deadlines.passed(1.0) == ["soon"]
    assert deadlines.passed(101.0) == ["r0", "r1"]
    for number in range(1000):
        deadlines.drop(f"r{number}")
    assert len(deadlines._heap) <= 64  # what has ended is not kept until its deadline
    deadlines.set("r5", 1e6)  # an id is free again
    assert deadlines.passed(1e5) == []
