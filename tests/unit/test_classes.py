"""Priority classes: strict with a floor, weighted, and what age brings forward."""

import pytest

from engine.core import EngineCore
from engine.errors import ConfigError
from engine.events import (
    Event,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    StepFinished,
)
from engine.sequence import SequenceStatus
from tests.scripted import add, find, make_core, run_to_end


def flood(core: EngineCore, rank: int, tenant: str, count: int, **share: object) -> None:
    """Short requests, so that slots change hands often."""
    for i in range(count):
        add(core, f"{tenant}{i}", tenant, 6, 2, rank=rank, **share)  # type: ignore[arg-type]


def admitted(events: list[Event], tenant: str) -> list[int]:
    """Numbers of the events that admitted one of the tenant's."""
    return [
        i for i, e in enumerate(events) if isinstance(e, SequenceAdmitted) and e.tenant == tenant
    ]


def service(core: EngineCore, rank: int) -> float:
    return sum(core.scheduler.counters[rank].as_dict().values())


def test_a_lower_class_gets_its_floor_and_no_more_while_a_higher_one_has_work() -> None:
    core, _ = make_core(max_step_tokens=24, max_seqs=4, class_floor=0.1)
    flood(core, 0, "live", 400)
    flood(core, 1, "batch", 400)
    while core.scheduler.queues.num_waiting(0, "live") > 20:
        core.step()
    share = service(core, 1) / service(core, 0)
    assert share == pytest.approx(0.1, abs=0.02)


def test_without_a_floor_a_lower_class_waits_for_ever() -> None:
    core, _ = make_core(max_step_tokens=24, max_seqs=4, class_floor=0.0)
    flood(core, 0, "live", 100)
    flood(core, 1, "batch", 100)
    while core.scheduler.queues.num_waiting(0, "live"):
        core.step()
    assert core.scheduler.queues.num_waiting(1, "batch") == 100


def test_a_lower_class_out_of_its_turn_takes_one_steps_budget_at_most() -> None:
    """Prompt tokens of the lower class while the higher one has prompts to compute: never more
    than a step's budget before the higher one is served again."""
    core, runner = make_core(max_step_tokens=16, max_seqs=8, class_floor=0.2, num_blocks=400)
    runner.keep_plans = True
    for i in range(12):
        add(core, f"live{i}", "live", 60, 2, rank=0)
        add(core, f"batch{i}", "batch", 60, 2, rank=1)
    while core.scheduler.queues.num_waiting(0, "live"):
        core.step()
    in_a_row, longest, lower = 0, 0, 0
    for plan in runner.plans:
        tokens = {0: 0, 1: 0}
        for chunk in plan.chunks:
            if chunk.start < chunk.seq.num_prompt_tokens:
                tokens[chunk.seq.rank] += chunk.num_tokens
        in_a_row = in_a_row + tokens[1] if not tokens[0] else 0
        longest, lower = max(longest, in_a_row), lower + tokens[1]
    assert lower > 60
    assert 0 < longest <= 16


def test_age_brings_a_turn_forward_and_buys_nothing() -> None:
    """With `max_wait` the batch class is first served early, and gets its floor all the same."""

    def served(max_wait: float | None) -> tuple[int, float]:
        core, _ = make_core(max_step_tokens=24, max_seqs=4, class_floor=0.05)
        flood(core, 0, "live", 600)
        for i in range(600):
            add(core, f"batch{i}", "batch", 6, 2, rank=1, max_wait=max_wait)
        events: list[Event] = []
        while core.scheduler.queues.num_waiting(0, "live") > 20:
            events += core.step()
        first = admitted(events, "batch")[0]
        before = len(admitted(events[:first], "live"))
        return before, service(core, 1) / service(core, 0)

    patient, share = served(None)
    hasty, share_aged = served(0.05)
    assert hasty < patient / 2
    assert share_aged == pytest.approx(share, abs=0.02)


def test_what_a_class_uses_of_others_leavings_costs_it_no_turn_later() -> None:
    """A batch class that lived on what a light live class left, until that floods: it waits for
    its floor's next turn, and not until all that it ever used is earned back."""
    core, _ = make_core(max_seqs=8, num_blocks=200, class_floor=0.1)
    flood(core, 1, "batch", 800)
    for i in range(200):
        add(core, f"small{i}", "live", 2, 1, rank=0)
        core.step()
    assert service(core, 1) > 5 * service(core, 0)
    flood(core, 0, "flood", 400)
    core.step()
    before, waiting = service(core, 0), core.scheduler.queues.num_waiting(1, "batch")
    assert waiting > 50
    while core.scheduler.queues.num_waiting(1, "batch") == waiting:
        core.step()
    # Two steps' budgets of 32 over the floor, and what was served in the step itself.
    assert service(core, 0) - before < 2 * 32 / 0.1 + 50


def test_counters_of_two_classes_are_not_compared() -> None:
    """The batch head, whose turn it is, does not fit; the live tenant passes it though its own
    class's counter is far higher."""
    core, _ = make_core(num_blocks=16, block_size=4, watermark=0.0, max_bypasses=4, class_floor=0.5)
    add(core, "long", "live", 30, 20, rank=0)
    core.step()
    add(core, "big", "batch", 50, 4, rank=1)
    core.step()
    core.scheduler.counters[0].charge("live", 1e6)
    core.scheduler.charging.classes.charge(0, 1e6)  # the batch class is due
    add(core, "small", "live", 4, 4, rank=0)
    assert len(admitted(core.step(), "live")) == 1


def test_weighted_classes_share_in_proportion() -> None:
    core, _ = make_core(max_step_tokens=12, max_seqs=4, class_sharing="weighted")
    flood(core, 0, "live", 400, class_weight=3.0)
    flood(core, 1, "batch", 400, class_weight=1.0)
    while min(core.scheduler.queues.num_waiting(r, t) for r, t in ((0, "live"), (1, "batch"))) > 30:
        core.step()
    assert service(core, 0) / service(core, 1) == pytest.approx(3.0, rel=0.1)


def test_a_weighted_class_that_was_idle_has_saved_nothing_up() -> None:
    core, _ = make_core(max_step_tokens=12, max_seqs=4, class_sharing="weighted")
    flood(core, 0, "live", 300)
    while core.scheduler.queues.num_waiting(0, "live") > 150:
        core.step()
    before = service(core, 0)
    flood(core, 1, "batch", 300)
    while core.scheduler.queues.num_waiting(0, "live") > 50:
        core.step()
    assert (service(core, 0) - before) / service(core, 1) == pytest.approx(1.0, rel=0.15)


def test_everything_ends_whatever_the_classes_are() -> None:
    for sharing in ("strict", "weighted"):
        core, _ = make_core(max_step_tokens=12, max_seqs=3, class_sharing=sharing)
        for i in range(40):
            add(core, f"r{i}", "abc"[i % 3], 5 + i % 7, 1 + i % 5, rank=i % 4)
        events: list[Event] = []
        while core.has_work:
            events += core.step()
        assert len([e for e in events if isinstance(e, SequenceFinished)]) == 40
        assert any(isinstance(e, StepFinished) for e in events)


def test_a_class_that_is_due_and_preempted_each_time_lets_others_go_on() -> None:
    """What it computes again uses up its credit: else it would be due for ever, and nothing would
    end. Found by random operations; several tenants of the class are needed."""
    core, _ = make_core(max_seqs=1, max_step_tokens=4, watermark=0.0, prefix_cache=False)
    for name, output in (("first", 100), ("second", 100), ("third", 1)):
        add(core, name, "live", 1, output)
    add(core, "b", "batch", 12, 4, rank=1, preemptible=True, weight=100)
    add(core, "o", "other", 12, 4, rank=1, preemptible=True)
    ends = [e for e in run_to_end(core) if isinstance(e, SequenceFinished)]
    assert [e.request_id for e in ends][:3] == ["first", "second", "third"]
    # Each computed its first four tokens in vain once: one turn is not followed by another.
    again = {e.request_id: e.usage.recomputed_tokens for e in ends if e.num_preemptions}
    assert again == {"b": 4, "o": 4}


def test_flat_policies_know_no_classes() -> None:
    for policy in ("fcfs", "vtc"):
        core, _ = make_core(policy=policy, max_seqs=1)
        add(core, "low", "acme", 5, 2, rank=3)
        add(core, "high", "zeta", 5, 2, rank=0)
        core.step()
        assert list(core.scheduler.running) == ["low"]
        assert find(core, "high").rank == 0


def test_settings_that_mean_nothing_are_refused() -> None:
    for settings in ({"class_floor": -0.1}, {"class_floor": 1.0}, {"class_sharing": "lottery"}):
        with pytest.raises(ConfigError):
            make_core(**settings)  # type: ignore[arg-type]


def test_a_class_in_its_turn_and_one_that_displaces_it_both_come_to_an_end() -> None:
    """A batch request had its turn by the floor, was displaced before its prompt was computed,
    and computed it again in the next turn, which cost its class nothing: so its turn never ended,
    the request that had displaced it never began, and neither did anything else."""
    core, _ = make_core(num_blocks=10, max_step_tokens=4, max_seqs=4, watermark=0.0)
    sizes = [("b", 14, 7, 1, 3), ("b", 24, 10, 0, 3), ("c", 23, 0, 1, 1), ("b", 22, 10, 0, 1)]
    for number, (tenant, prompt, output, rank, n) in enumerate(sizes):
        add(core, f"r{number}", tenant, prompt, output, rank=rank, preemptible=rank > 0, n=n)
        for _ in range((2, 0, 1, 1)[number]):
            core.step()

    events = run_to_end(core)

    displaced = [e for e in events if isinstance(e, SequencePreempted)]
    assert displaced
    assert len([e for e in events if isinstance(e, SequenceFinished)]) == sum(s[-1] for s in sizes)


def test_what_is_computed_again_is_part_of_its_classs_turn() -> None:
    """Else a long prompt that is computed again would delay higher classes for as many steps as
    it takes, and not for the one that its class is owed."""
    core, _ = make_core(max_step_tokens=8, max_seqs=8, prefix_cache=False, class_floor=0.5)
    add(core, "low", "b", 60, 4, rank=1)
    for _ in range(7):
        core.step()
    for number in range(6):
        add(core, f"high{number}", "a", 60, 4, rank=0)
    core.scheduler._preempt(core.scheduler.running["low"], now=1.0)

    turns = []
    while find(core, "low").num_computed_tokens < 56:
        core.step()
        turns.append(core.recent_steps(1)[0].prompts[0].tenant)

    assert turns.count("b") >= 7
    assert "bb" not in "".join(turns)


def test_what_a_class_computes_in_its_turns_is_not_lost_for_ever() -> None:
    """Displaced twice in a row before it had come any further, it is left alone until it has."""
    core, _ = make_core(
        num_blocks=10, max_seqs=2, max_preemptions=2, max_step_tokens=8, prefix_cache=False
    )
    add(core, "low", "b", 24, 4, rank=1, preemptible=True)
    low = find(core, "low")
    core.step()
    fruitless = []
    for number in range(5):
        add(core, f"high{number}", "a", 28, 1, rank=0)
        for _ in range(5):
            core.step()
        fruitless.append((low.num_preemptions, low.num_fruitless))
        while low.num_computed_tokens < 8 and low.status is not SequenceStatus.FINISHED:
            core.step()

    # Before the fourth time it had come further.
    assert fruitless == [(1, 0), (2, 1), (3, 2), (4, 0), (5, 1)]


def test_work_that_advances_gives_way_however_often_it_did() -> None:
    """Else batch requests with long outputs keep all slots, after a while, until they end."""
    core, _ = make_core(num_blocks=256, max_seqs=4, max_preemptions=3)
    for number in range(4):
        add(core, f"batch{number}", "b", 8, 240, rank=1, preemptible=True)
    waits = []
    for number in range(12):
        for _ in range(12):
            core.step()
        add(core, f"live{number}", "a", 8, 2, rank=0)
        waits.append(0)
        while find(core, f"live{number}").admitted is None:
            core.step()
            waits[-1] += 1

    assert max(waits) <= 2
    assert sum(find(core, f"batch{number}").num_preemptions for number in range(4)) >= 12


def test_heads_of_a_due_class_that_do_not_fit_hide_no_head_of_a_higher_one() -> None:
    """A step looks at sixteen heads in vain, of each class."""
    core, _ = make_core(
        num_blocks=24, max_seqs=8, max_bypass_lead=1e9, prefix_cache=False, watermark=0.0
    )
    add(core, "runs", "z", 60, 30)
    core.step()
    for number in range(20):
        add(core, f"big{number}", f"tenant-{number}", 60, 4, rank=1)
    add(core, "small", "a", 4, 2, rank=0)
    core.scheduler.charging.classes._busy = frozenset({0, 1})
    core.scheduler.charging.classes.charge(0, 1e6)  # the lower class is due

    core.step()

    heads = core.recent_steps(1)[0].heads
    assert [one.tenant for one in heads].count("a") == 1
    assert len([one for one in heads if one.rank == 1 and one.cause is not None]) >= 16
    assert "small" in core.scheduler.running
