"""What nobody waits for any more is ended, and what could not be in time is not begun."""

import pytest

from engine.core import EngineCore
from engine.cost_model import LinearCost
from engine.deadlines import Deadlines
from engine.events import Event, SequenceFinished, TokensGenerated
from engine.sequence import BeamSearch, SamplingParams, TenantShare
from engine.waits import WaitCause
from tests.scripted import find, make_core

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
    core.scheduler.step_times._cost = PRICE
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
    assert ends(run(core)) == {("behind", 0): ("length", 2)}


def test_a_prompt_that_can_be_in_time_is_begun() -> None:
    core, _ = make_core(max_step_tokens=16)
    core.scheduler.step_times._cost = PRICE
    ask(core, "a", 0.0581, prompt=80, max_tokens=1)

    assert ends(run(core)) == {("a", 0): ("length", 1)}


def test_what_is_cached_needs_no_time() -> None:
    core, _ = make_core(max_step_tokens=16)
    ask(core, "first", None, prompt=80, max_tokens=1)
    run(core)
    core.scheduler.step_times._cost = PRICE
    ask(core, "again", 0.015, prompt=80, max_tokens=1)

    assert ends(run(core)) == {("again", 0): ("length", 1)}


@pytest.mark.parametrize("params", [{"n": 3}, {"beam": BeamSearch(width=3)}])
@pytest.mark.parametrize(("seconds", "price"), [(0.05, None), (0.001, PRICE)])
def test_all_sequences_of_a_request_end(
    params: dict[str, object], seconds: float, price: LinearCost | None
) -> None:
    """Before the fork and after it."""
    core, _ = make_core()
    core.scheduler.step_times._cost = price
    ask(core, "a", seconds, **params)

    found = ends(run(core))

    assert {key: reason for key, (reason, _) in found.items()} == {
        ("a", index): "deadline" for index in range(3)
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
