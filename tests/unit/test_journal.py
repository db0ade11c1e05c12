"""One case for each cause of waiting; what is kept, and for how long."""

from itertools import pairwise

import pytest

from engine.core import EngineCore
from engine.plan import StepOutput, StepPlan
from engine.scheduling import journal
from engine.scheduling.policies import make_policy
from engine.waits import Interval, WaitCause
from tests.scripted import add, make_core

STEP_SECONDS = 0.01


def intervals(core: EngineCore, request_id: str, index: int = 0) -> tuple[Interval, ...]:
    explanation = core.explain(request_id)
    assert explanation is not None
    return explanation.sequences[index].intervals


def causes(core: EngineCore, request_id: str) -> list[WaitCause | None]:
    return [one.cause for one in intervals(core, request_id)]


def steps(core: EngineCore, number: int) -> None:
    for _ in range(number):
        core.step()


def test_it_came_while_a_step_ran() -> None:
    core, runner = make_core()
    add(core, "first", "a", 3, 5)
    core.step()
    runner.clock.now = 1.0
    add(core, "second", "b", 3, 5)
    runner.clock.now = 1.5
    steps(core, 2)

    assert intervals(core, "second")[0] == Interval(WaitCause.STEP, 1.0, 1.5)
    assert causes(core, "second") == [WaitCause.STEP, None]


def test_earlier_requests_of_its_own_wait_before_it() -> None:
    core, _ = make_core(max_seqs=1)
    for number in range(3):
        add(core, f"r{number}", "a", 3, 2)
    while core.has_work:
        core.step()

    own_queue, slots, ran = intervals(core, "r2")
    assert (own_queue.cause, slots.cause, ran.cause) == (WaitCause.OWN_QUEUE, WaitCause.SLOTS, None)
    assert own_queue.detail == "2 before it at its arrival"
    assert own_queue.end == intervals(core, "r1")[-1].start  # then it was the head
    assert causes(core, "r0") == [None]


def test_slots_are_full_for_the_next_head_and_others_have_another_cause() -> None:
    core, _ = make_core(max_seqs=1)
    add(core, "runs", "a", 3, 9)
    core.step()
    add(core, "next", "b", 3, 9)
    add(core, "same class", "c", 3, 9)
    add(core, "lower class", "b", 3, 9, rank=1)
    steps(core, 3)

    assert causes(core, "next") == [WaitCause.SLOTS]
    assert causes(core, "same class") == [WaitCause.FAIR_SHARE]
    assert causes(core, "lower class") == [WaitCause.CLASS]


def test_the_step_spent_its_tokens() -> None:
    core, _ = make_core(max_step_tokens=8)
    add(core, "long", "a", 8, 3)
    add(core, "next", "b", 3, 3)
    core.step()

    assert causes(core, "next") == [WaitCause.BUDGET]


def test_the_pool_has_not_enough_blocks_and_keeps_them_for_the_first() -> None:
    core, _ = make_core(num_blocks=8, max_bypasses=0)
    add(core, "runs", "a", 16, 4)
    core.step()
    add(core, "big", "b", 16, 4)
    add(core, "small", "c", 1, 4)
    steps(core, 2)

    assert causes(core, "big") == [WaitCause.KV]
    assert causes(core, "small") == [WaitCause.HEAD_HELD]


def test_its_tenant_holds_what_it_may() -> None:
    core, _ = make_core()
    add(core, "runs", "a", 8, 8, cap=4)
    core.step()
    add(core, "more", "a", 8, 8, cap=4)
    steps(core, 2)

    assert causes(core, "more") == [WaitCause.CAP]


def test_a_twin_is_about_to_compute_most_of_it() -> None:
    core, _ = make_core(max_step_tokens=12)
    prompt = list(range(20))
    add(core, "first", "a", prompt, 4)
    core.step()
    add(core, "twin", "a", prompt, 4)
    core.step()

    assert causes(core, "twin") == [WaitCause.TWIN]


def test_sixteen_heads_before_it_do_not_fit() -> None:
    core, _ = make_core(num_blocks=8, max_bypass_lead=1e9)
    add(core, "runs", "a", 20, 4)
    core.step()
    for number in range(18):
        add(core, f"r{number}", f"t{number}", 16, 4)
    core.step()

    assert [causes(core, f"r{n}") for n in (0, 15, 16, 17)] == [
        [WaitCause.KV],
        [WaitCause.KV],
        [WaitCause.NOT_REACHED],
        [WaitCause.FAIR_SHARE],
    ]


@pytest.mark.parametrize(
    ("num_host_blocks", "how"), [(0, "to be computed again"), (8, "swapped out")]
)
@pytest.mark.parametrize("whose", ["own", "other"])
def test_it_gave_way_and_nobody_was_admitted(num_host_blocks: int, how: str, whose: str) -> None:
    core, _ = make_core(num_blocks=8, num_host_blocks=num_host_blocks, preemption="swap")
    add(core, "grows", "alder", 7, 12)
    add(core, "gives way", "alder" if whose == "own" else "birch", 7, 12, rank=1)
    add(core, "waits", "cedar", 12, 12, rank=1)
    while "preempted" not in causes(core, "gives way"):
        core.step()

    gave_way = intervals(core, "gives way")[-1]
    whom = "alder" if whose == "own" else "other tenants"
    assert (gave_way.cause, gave_way.detail) == (WaitCause.PREEMPTED, f"{how}: for {whom}")
    assert causes(core, "waits")[-1] is WaitCause.PREEMPTING
    assert gave_way.start == intervals(core, "waits")[-1].start == core.recent_steps(1)[0].at
    core.step()
    assert intervals(core, "gives way")[-1].start == core.recent_steps(1)[0].at


def test_one_that_cannot_grow_gives_way_itself() -> None:
    core, _ = make_core(num_blocks=8)
    add(core, "stays", "a", 7, 12)
    add(core, "gives way", "b", 8, 12, rank=1)
    while "preempted" not in causes(core, "gives way"):
        core.step()

    detail = intervals(core, "gives way")[-1].detail
    assert detail == "to be computed again: it could not grow, and nobody had to give way before it"


def test_a_failed_step_sends_back_whose_blocks_it_copied() -> None:
    core, runner = make_core(num_blocks=8, num_host_blocks=9, preemption="swap")
    add(core, "grows", "a", 7, 12)
    add(core, "gives way", "b", 7, 12, rank=1)
    execute = runner.execute

    def fail_once(plan: StepPlan) -> StepOutput:
        runner.explode = bool(plan.preempted)
        return execute(plan)

    runner.execute = fail_once  # type: ignore[method-assign]
    while not runner.explode:
        core.step()
    runner.clock.now += 1

    assert intervals(core, "gives way")[-1].detail == (
        "to be computed again: its blocks were lost when a step failed"
    )


def test_between_two_pools_it_is_handed_over() -> None:
    core, _ = make_core(prefill_blocks=16)
    ticks = iter(range(1000))
    core._clock = lambda: float(next(ticks))
    add(core, "r", "a", 5, 4)
    core.step()

    step, prompt, handed, _ = intervals(core, "r")
    assert (step.cause, prompt.cause, handed.cause) == (WaitCause.STEP, None, WaitCause.HANDED_OVER)
    assert handed.end == core.recent_steps(1)[0].at
    assert [one.stage for one in core.recent_steps(2)] == ["prefill", "decode"]


def test_sequences_of_a_request_share_the_wait_for_their_prompt() -> None:
    core, runner = make_core()
    add(core, "r", "a", 5, 4, n=2)
    runner.clock.now = 1.0
    while core.has_work:
        core.step()

    explanation = core.explain("r")
    assert explanation is not None
    first, second = explanation.sequences
    assert (first.index, second.index) == (0, 1)
    assert first.intervals[0] == second.intervals[0] == Interval(WaitCause.STEP, 0.0, 1.0)


def test_a_policy_switch_keeps_the_partition_and_finds_new_causes() -> None:
    core, _ = make_core(max_seqs=1)
    add(core, "runs", "a", 3, 30)
    core.step()
    add(core, "first", "b", 3, 3)
    add(core, "second", "b", 3, 3, rank=1)
    steps(core, 2)
    core.scheduler.switch_policy(make_policy("fcfs"))
    steps(core, 2)

    assert causes(core, "first") == [WaitCause.SLOTS]
    assert causes(core, "second") == [WaitCause.CLASS, WaitCause.OWN_QUEUE]
    assert intervals(core, "second")[0].end == core.recent_steps(2)[0].at


def test_what_no_longer_is_known_is_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_TURNS", 2)
    core, _ = make_core(max_seqs=1)
    add(core, "runs", "a", 3, 60)
    core.step()
    add(core, "waits", "b", 3, 3, rank=2)
    for number in range(6):  # whose turn it is changes at each step
        add(core, f"r{number}", "c", 3, 3, rank=number % 2)
        core.step()
        core.abort(f"r{number}")
    found = intervals(core, "waits")

    assert [one.cause for one in found] == [WaitCause.UNRECORDED, WaitCause.CLASS]
    assert found[1].end == core._clock()


def test_a_sequence_keeps_its_first_and_its_last_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_MARKS", 8)
    monkeypatch.setattr(journal, "MAX_FIRST_MARKS", 2)
    core, _ = make_core(max_seqs=1)
    add(core, "runs", "a", 3, 60)
    core.step()
    add(core, "waits", "b", 3, 3, rank=2)
    for number in range(12):
        core.step()
        add(core, f"r{number}", "c", 3, 3)
        core.step()
        core.abort(f"r{number}")
    found = intervals(core, "waits")

    assert [one.cause for one in found[:3]] == ["slots", "class", "unrecorded"]
    assert len(found) > 5
    assert all(a.end == b.start for a, b in pairwise(found))
    assert WaitCause.UNRECORDED not in [one.cause for one in found[3:]]


def test_the_newest_ended_requests_and_steps_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_ENDED_REQUESTS", 2)
    core, _ = make_core()
    for number in range(4):
        add(core, f"r{number}", "a", 3, 1)
        core.step()

    assert not core.has_work
    assert [core.explain(f"r{n}") is not None for n in range(4)] == [False, False, True, True]
    assert core.explain("unknown") is None
    assert [one.step for one in core.recent_steps(2)] == [3, 4]


def test_a_step_says_what_it_did_and_whom_it_looked_at() -> None:
    core, _ = make_core(max_step_tokens=8, max_seqs=2)
    add(core, "a0", "a", 3, 5)
    core.step()
    add(core, "b0", "b", 9, 5)
    add(core, "c0", "c", 9, 5, rank=1)
    core.step()

    (record,) = core.recent_steps(1)
    assert (record.stage, record.step, record.decodes, record.admitted) == (
        "all",
        2,
        ("a0",),
        ("b0",),
    )
    assert record.prompts == (("b0", "b", 0, 7),)
    assert record.heads == (("b0", "b", 0, 5.0, None), ("c0", "c", 1, 0.0, WaitCause.SLOTS))
    assert record.stopped_by is WaitCause.SLOTS
    assert (record.num_running, record.num_waiting) == (2, 1)
