"""The scheduler and the core on a scripted runner: behaviour, one rule per test."""

from collections import Counter

import pytest

from engine.core import EngineCore
from engine.errors import ConfigError, DuplicateRequestError, NeverFitsError
from engine.events import (
    Event,
    PromptScored,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    StepFinished,
    TokensGenerated,
)
from engine.scheduling.policies import make_policy
from tests.scripted import add, make_core


def run(core: EngineCore, max_steps: int = 10_000) -> list[Event]:
    """Step until nothing is left; every sequence must end."""
    events: list[Event] = []
    for _ in range(max_steps):
        if not core.has_work:
            return events
        events += core.step()
    raise AssertionError(f"still working after {max_steps} steps: {core.scheduler!r}")


def finished(events: list[Event]) -> dict[str, SequenceFinished]:
    ends = [e for e in events if isinstance(e, SequenceFinished)]
    assert len({e.request_id for e in ends}) == len(ends), "a sequence ended twice"
    return {e.request_id: e for e in ends}


def tokens_of(events: list[Event], seq_id: str) -> list[int]:
    return [
        token
        for e in events
        if isinstance(e, TokensGenerated) and e.request_id == seq_id
        for token in e.token_ids
    ]


def test_one_sequence_is_prefilled_decoded_and_finished() -> None:
    core, _ = make_core()
    add(core, "a", "acme", prompt=5, output=3)
    assert repr(core.scheduler) == (
        "<Scheduler wfq [waiting 1 | running 0 | blocks 0/64 | acme 0]>"
    )

    events = run(core)

    assert tokens_of(events, "a") == [1005, 1006, 1007]
    end = finished(events)["a"]
    assert end.reason == "length"
    assert (end.usage.prompt_tokens, end.usage.output_tokens) == (5, 3)
    assert (end.usage.cached_tokens, end.usage.computed_tokens) == (0, 5)
    # 5 prompt tokens at 1, 3 outputs at 2.
    assert repr(core.scheduler) == (
        "<Scheduler wfq [waiting 0 | running 0 | blocks 0/64 | acme 11]>"
    )


def test_a_long_prompt_is_chunked_while_decodes_go_on() -> None:
    """Stall-free: one token for every decode in each step, the rest of the budget for chunks."""
    core, runner = make_core(max_step_tokens=16)
    runner.keep_plans = True
    add(core, "short", "acme", prompt=4, output=20)
    core.step()
    add(core, "long", "acme", prompt=50, output=1)

    events = run(core)

    chunks = [[(c.seq.id, c.num_tokens) for c in plan.chunks] for plan in runner.plans[1:5]]
    assert chunks == [
        [("short", 1), ("long", 15)],
        [("short", 1), ("long", 15)],
        [("short", 1), ("long", 15)],
        [("short", 1), ("long", 5)],
    ]
    assert len(tokens_of(events, "long")) == 1


def test_a_long_prompt_of_one_tenant_cannot_keep_the_whole_budget() -> None:
    """A newcomer starts level with it; one chunk later it goes before the rest of that prompt."""
    core, runner = make_core(max_step_tokens=16)
    runner.keep_plans = True
    add(core, "long", "acme", prompt=100, output=1)
    core.step()
    add(core, "other", "zeta", prompt=24, output=1)
    for _ in range(3):
        core.step()

    assert [[(c.seq.id, c.num_tokens) for c in plan.chunks] for plan in runner.plans[1:]] == [
        [("long", 16)],
        [("other", 16)],
        [("long", 16)],
    ]


def test_service_given_in_a_step_counts_in_the_same_step() -> None:
    """The rest of a prompt puts its tenant ahead: the other tenant's head goes next, not the
    same tenant's."""
    core, runner = make_core(max_step_tokens=8)
    runner.keep_plans = True
    add(core, "a1", "acme", prompt=12, output=1)
    core.step()
    add(core, "a2", "acme", prompt=2, output=1)
    add(core, "z1", "zeta", prompt=2, output=1)
    core.step()

    assert [c.seq.id for c in runner.plans[1].chunks] == ["a1", "z1", "a2"]


def test_never_fitting_requests_are_refused_and_leave_nothing() -> None:
    core, _ = make_core(num_blocks=8, block_size=4, max_model_len=256)

    with pytest.raises(NeverFitsError, match="30 prompt tokens and up to 3 output tokens"):
        add(core, "a", "acme", prompt=30, output=3)
    add(core, "b", "acme", prompt=30, output=2)
    with pytest.raises(NeverFitsError):
        add(core, "c", "acme", prompt=[], output=2)
    with pytest.raises(DuplicateRequestError):
        add(core, "b", "acme", prompt=3, output=2)

    assert set(finished(run(core))) == {"b"}


def test_a_tenant_hits_its_own_prefix_and_no_other() -> None:
    core, _ = make_core()
    prompt = list(range(13))
    for seq_id, tenant in [("a1", "acme"), ("a2", "acme"), ("z1", "zeta")]:
        add(core, seq_id, tenant, prompt, output=2)
        ends = finished(run(core))
        hit = 12 if seq_id == "a2" else 0
        assert ends[seq_id].usage.cached_tokens == hit
        assert ends[seq_id].usage.computed_tokens == 13 - hit
    # a1: 13 + 2 * 2; a2: 12 hits at 0.1, 1 computed, 2 * 2.
    assert core.scheduler.counters[0]["acme"] == pytest.approx(17 + 1.2 + 1 + 4)


def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation() -> None:
    core, _ = make_core()
    add(core, "a", "acme", list(range(6)), output=7)
    answer = tokens_of(run(core), "a")

    add(core, "b", "acme", [*range(6), *answer, 77, 78], output=1)

    # 13 tokens, the last never computed: 12 are in three full blocks.
    assert finished(run(core))["b"].usage.cached_tokens == 12


def test_preemption_keeps_tokens_place_and_charge() -> None:
    """Too small a pool: sequences give way, come back, and end as if nothing had happened."""
    core, _ = make_core(num_blocks=16, block_size=4, watermark=0.0, prefix_cache=False)
    for i in range(4):
        add(core, f"s{i}", "acme", prompt=8, output=24)

    events = run(core)

    preemptions = [e for e in events if isinstance(e, SequencePreempted)]
    assert preemptions
    ends = finished(events)
    for i in range(4):
        assert tokens_of(events, f"s{i}") == list(range(1008, 1032))
        assert ends[f"s{i}"].usage.computed_tokens == 8
    assert sum(e.usage.recomputed_tokens for e in ends.values()) > 0
    assert sum(e.num_preemptions for e in ends.values()) == len(preemptions)
    assert core.scheduler.counters[0]["acme"] == 4 * (8 + 24 * 2)


def test_a_preempted_sequence_is_not_readmitted_in_the_same_step_and_goes_first() -> None:
    core, _ = make_core(num_blocks=8, block_size=4, watermark=0.0, policy="fcfs")
    add(core, "first", "acme", prompt=8, output=20)
    add(core, "second", "acme", prompt=8, output=20)
    add(core, "third", "acme", prompt=8, output=20)
    order: list[str] = []
    while core.has_work:
        events = core.step()
        victims = {e.request_id for e in events if isinstance(e, SequencePreempted)}
        admitted = [e.request_id for e in events if isinstance(e, SequenceAdmitted)]
        assert not victims or not admitted
        order += admitted

    assert order[0] == "first"
    assert order.count("second") > 1  # it was preempted and came back ...
    assert order[-1] == "third"  # ... before the newer one


def test_victim_of_wfq_is_the_tenant_most_ahead() -> None:
    core, _ = make_core(num_blocks=8, block_size=4, watermark=0.0, max_step_tokens=64)
    add(core, "rich", "acme", prompt=12, output=12)
    add(core, "poor", "zeta", prompt=8, output=12)

    events = run(core)

    assert {e.request_id for e in events if isinstance(e, SequencePreempted)} == {"rich"}


def test_lower_classes_wait_and_give_way_first() -> None:
    core, _ = make_core(num_blocks=8, block_size=4, max_seqs=2, watermark=0.0)
    add(core, "batch", "acme", prompt=8, output=12, rank=2)
    add(core, "live", "zeta", prompt=8, output=12, rank=0)
    add(core, "live2", "zeta", prompt=8, output=12, rank=0)

    events = run(core)

    admitted = [e.request_id for e in events if isinstance(e, SequenceAdmitted)]
    assert admitted[:2] == ["live", "live2"]
    assert list(finished(events))[-1] == "batch"


def test_the_bound_on_preemptions_protects_only_inside_a_class() -> None:
    """A batch sequence that was preempted often still gives way to a live one."""
    core, _ = make_core(
        num_blocks=8, block_size=4, max_seqs=2, watermark=0.0, max_preemptions=0, max_bypasses=0
    )
    add(core, "batch", "acme", prompt=8, output=20, rank=2)
    core.step()
    core.scheduler.running["batch"].num_preemptions = 3
    add(core, "live", "zeta", prompt=8, output=20, rank=0)

    events = run(core)

    assert {e.request_id for e in events if isinstance(e, SequencePreempted)} == {"batch"}
    assert list(finished(events)) == ["live", "batch"]


def test_an_error_of_one_sequence_ends_only_that_one() -> None:
    core, runner = make_core()
    runner.fail_on = frozenset({"bad"})
    add(core, "bad", "acme", prompt=4, output=4)
    add(core, "good", "acme", prompt=4, output=4)

    ends = finished(run(core))

    assert (ends["bad"].reason, ends["bad"].error) == ("error", "logits are not finite")
    assert ends["good"].reason == "length"
    assert core.scheduler.pool.num_held == 0


def test_what_a_failed_sequence_computed_is_never_found_again() -> None:
    """Logits that are not finite mean KV that is not: neither this chunk's nor earlier ones'."""
    core, runner = make_core(max_step_tokens=8)
    runner.fail_on = frozenset({"bad"})
    prompt = list(range(20))
    add(core, "bad", "acme", prompt, output=4)
    core.step()
    assert len(core.scheduler.memory.prefix_cache) == 2  # the first chunk seemed good
    run(core)
    assert len(core.scheduler.memory.prefix_cache) == 0

    add(core, "again", "acme", prompt, output=4)

    assert finished(run(core))["again"].usage.cached_tokens == 0


def test_a_failing_runner_ends_the_step_but_not_the_loop() -> None:
    core, runner = make_core()
    add(core, "a", "acme", prompt=4, output=4)
    runner.explode = True
    ends = finished(core.step())
    assert ends["a"].error == "RuntimeError: the device is gone"

    runner.explode = False
    add(core, "b", "acme", prompt=4, output=4)

    assert finished(run(core))["b"].reason == "length"
    core.scheduler.check()


def test_stop_tokens_end_a_sequence_and_are_counted_but_eos_can_be_ignored() -> None:
    core, _ = make_core()
    core._eos_token_ids = frozenset({1006})
    add(core, "eos", "acme", prompt=5, output=9)
    add(core, "ignores", "acme", prompt=5, output=9, ignore_eos=True)
    add(core, "stops", "acme", prompt=5, output=9, stop_token_ids=frozenset({1007}))

    ends = finished(run(core))

    assert (ends["eos"].reason, ends["eos"].usage.output_tokens) == ("stop", 2)
    assert (ends["ignores"].reason, ends["ignores"].usage.output_tokens) == ("length", 9)
    assert (ends["stops"].reason, ends["stops"].usage.output_tokens) == ("stop", 2)


def test_a_big_head_is_passed_a_bounded_number_of_times() -> None:
    """The head does not fit; small requests of others pass, then what is freed is kept for it."""
    core, _ = make_core(
        num_blocks=16, block_size=4, watermark=0.0, max_bypasses=3, max_bypass_lead=1e9
    )
    add(core, "runner", "acme", prompt=30, output=20)
    core.step()
    add(core, "big", "acme", prompt=50, output=4)
    for i in range(10):
        add(core, f"small{i}", "zeta", prompt=4, output=4)

    events = run(core)

    order = [e.request_id for e in events if isinstance(e, SequenceAdmitted)]
    assert order.index("big") == 1 + 3
    assert core.scheduler.pool.num_held == 0


def test_a_head_is_passed_only_within_the_lead() -> None:
    """Bypassing must not undo fairness: whoever leads the blocked head by more waits as well."""
    core, _ = make_core(
        num_blocks=16, block_size=4, watermark=0.0, max_bypasses=99, max_bypass_lead=20.0
    )
    add(core, "runner", "acme", prompt=30, output=20)
    core.step()
    add(core, "big", "zeta", prompt=50, output=4)
    for i in range(10):
        add(core, f"small{i}", "yota", prompt=4, output=4)

    order = [e.request_id for e in run(core) if isinstance(e, SequenceAdmitted)]

    # Each prompt costs 4 at once: with the sixth admission yota leads by 24 > 20.
    assert order[6] == "big"


def test_a_head_is_not_passed_for_longer_than_the_bound() -> None:
    core, runner = make_core(
        num_blocks=16,
        block_size=4,
        watermark=0.0,
        max_bypasses=99,
        max_bypass_lead=1e9,
        max_bypass_seconds=1.0,
    )
    add(core, "runner", "acme", prompt=30, output=25)
    core.step()
    add(core, "big", "yota", prompt=50, output=4)
    core.step()
    runner.clock.now += 1.5
    add(core, "small", "zeta", prompt=4, output=4)

    order = [e.request_id for e in run(core) if isinstance(e, SequenceAdmitted)]

    assert order == ["big", "small"]


def test_watermark_keeps_blocks_for_those_that_run() -> None:
    core, _ = make_core(num_blocks=20, block_size=4, watermark=0.25)
    add(core, "a", "acme", prompt=40, output=4)
    core.step()
    add(core, "b", "acme", prompt=20, output=4)  # 5 blocks fit, 5 + 1 + 5 do not
    core.step()
    assert "b" not in core.scheduler.running

    assert finished(run(core))["b"].reason == "length"


def test_step_records_add_up() -> None:
    core, _ = make_core()
    add(core, "a", "acme", prompt=40, output=10)
    add(core, "b", "zeta", prompt=10, output=5)

    steps = [e for e in run(core) if isinstance(e, StepFinished)]

    assert sum(s.num_prefill_tokens for s in steps) == 50
    assert sum(s.num_decode_tokens for s in steps) == (10 - 1) + (5 - 1)
    assert all(s.free_blocks + s.cached_blocks + s.held_blocks == 64 for s in steps)
    assert all(s.started <= s.scheduled <= s.executed for s in steps)


def test_two_cores_do_not_interact() -> None:
    first, _ = make_core()
    second, _ = make_core()
    add(first, "a", "acme", list(range(9)), output=2)
    run(first)
    add(second, "a", "acme", list(range(9)), output=2)

    assert finished(run(second))["a"].usage.cached_tokens == 0
    assert second.scheduler.counters[0]["acme"] == 9 + 4


def test_fcfs_serves_in_order_of_arrival_and_wfq_in_order_of_service() -> None:
    for policy, expected in [
        ("fcfs", ["a0", "a1", "a2", "z0", "z1", "z2"]),
        ("wfq", ["a0", "z0", "a1", "z1", "a2", "z2"]),
    ]:
        core, _ = make_core(policy=policy, max_seqs=1)
        for i in range(3):
            add(core, f"a{i}", "acme", prompt=4, output=2)
        for i in range(3):
            add(core, f"z{i}", "zeta", prompt=4, output=2)
        assert [e.request_id for e in run(core) if isinstance(e, SequenceAdmitted)] == expected


def test_priority_serves_classes_in_order_whatever_was_served() -> None:
    core, _ = make_core(policy="priority", max_seqs=1)
    add(core, "b0", "acme", prompt=4, output=2, rank=2)
    add(core, "s0", "acme", prompt=4, output=2, rank=1)
    add(core, "s1", "acme", prompt=4, output=2, rank=1)
    add(core, "s2", "zeta", prompt=4, output=2, rank=1)

    admitted = [e.request_id for e in run(core) if isinstance(e, SequenceAdmitted)]

    assert admitted == ["s0", "s1", "s2", "b0"]


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="'lottery'; choose one of drf, drr, fcfs, priority, vtc, wfq"
    ):
        make_policy("lottery")


def test_same_requests_give_the_same_steps() -> None:
    def history() -> list[Event]:
        core, _ = make_core(num_blocks=24)
        for i in range(12):
            add(core, f"s{i}", "abc"[i % 3], prompt=5 + i, output=3 + i)
        return run(core)

    first = history()
    assert Counter(type(e).__name__ for e in first)["SequenceFinished"] == 12
    assert first == history()


def test_a_sequence_that_may_draw_nothing_leaves_the_cache_alone() -> None:
    """Its logits were good: what it computed, and what it found, is still worth finding."""
    core, runner = make_core()
    prompt = list(range(17))
    add(core, "a", "acme", prompt, output=2)
    run(core)
    runner.refuse_on = frozenset({"b"})
    add(core, "b", "acme", prompt, output=2)
    end = finished(run(core))["b"]
    assert (end.reason, end.error) == ("error", "no token is allowed")
    add(core, "c", "acme", prompt, output=2)
    assert finished(run(core))["c"].usage.cached_tokens == 16


def test_bad_logits_inside_a_prompt_end_all_that_share_it_and_score_nothing() -> None:
    core, runner = make_core(max_step_tokens=8)
    runner.fail_prompt_on = frozenset({"r"})
    add(core, "r", "acme", 12, output=4, n=2, prompt_logprobs=0)
    events = run(core)
    ends = [e for e in events if isinstance(e, SequenceFinished)]
    assert [(e.index, e.reason) for e in ends] == [(0, "error"), (1, "error")]
    assert not any(isinstance(e, PromptScored | TokensGenerated) for e in events)


def test_a_preempted_request_does_not_bring_its_old_weight_back() -> None:
    core, _ = make_core(num_blocks=8, block_size=4, watermark=0.0)
    add(core, "old", "acme", prompt=11, output=12, weight=1.0)
    core.step()
    add(core, "new", "acme", prompt=11, output=12, weight=10.0)
    events = run(core)
    assert any(isinstance(e, SequencePreempted) for e in events)
    # The first prompt at weight 1, all the rest at 10 from its next charge on.
    assert core.scheduler.counters[0]["acme"] == pytest.approx(11 + 2 + (11 + 2 * 23) / 10)


def test_those_that_a_failed_step_touched_are_reported_as_preempted() -> None:
    """Children whose partial block was being copied compute again; those of the step's own
    chunks end."""
    core, runner = make_core(max_seqs=8, max_step_tokens=8)
    add(core, "r", "acme", prompt=10, output=6, n=2)
    for _ in range(2):
        core.step()
    copied = [seq for seq in core._requests["r"] if seq.num_computed_tokens == 10]
    assert len(copied) == 2
    runner.explode = True
    events = core.step()
    runner.explode = False
    ends = {(e.request_id, e.index) for e in events if isinstance(e, SequenceFinished)}
    again = {(e.request_id, e.index) for e in events if isinstance(e, SequencePreempted)}
    assert ends | again == {("r", 0), ("r", 1)}
    assert not ends & again
    run(core)


def test_an_id_that_is_used_again_is_another_sequence() -> None:
    """The one before left an entry among the heads that were in order."""
    core, _ = make_core(max_seqs=1)
    add(core, "running", "acme", prompt=4, output=30)
    core.step()
    add(core, "a", "acme", prompt=4, output=2)
    core.step()
    core.abort("a")
    add(core, "a", "acme", prompt=9, output=3)
    events = run(core)
    assert finished(events)["a"].usage.prompt_tokens == 9
    assert tokens_of(events, "a") == [1009, 1010, 1011]
