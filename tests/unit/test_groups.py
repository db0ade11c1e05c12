"""Several sequences of one request: forks, copies on write, slots, charges, ends."""

import pytest

from engine.errors import DuplicateRequestError, NeverFitsError
from engine.events import (
    Event,
    GroupFinished,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    StepFinished,
    TokensGenerated,
)
from engine.sequence import BeamSearch, child_seed
from tests.scripted import add, find, make_core, run_to_end


def tokens_of(events: list[Event], request_id: str, index: int) -> list[int]:
    return [
        token
        for e in events
        if isinstance(e, TokensGenerated) and (e.request_id, e.index) == (request_id, index)
        for token in e.token_ids
    ]


def ends_of(events: list[Event], request_id: str) -> list[SequenceFinished]:
    """By index; one for each."""
    ends = [e for e in events if isinstance(e, SequenceFinished) and e.request_id == request_id]
    ends.sort(key=lambda e: e.index)
    assert [e.index for e in ends] == list(range(len(ends)))
    return ends


def test_the_prompt_is_computed_and_charged_once_and_its_full_blocks_are_shared() -> None:
    core, _ = make_core(block_size=4)
    add(core, "r", "acme", prompt=10, output=5, n=3)

    first = core.step()
    assert len([e for e in first if isinstance(e, SequenceAdmitted)]) == 1
    tables = [find(core, "r", i).block_table for i in range(3)]
    assert tables[0] == tables[1] == tables[2]  # the partial block too, until it is written
    assert core.scheduler.pool.num_held == 3

    (step,) = [e for e in core.step() if isinstance(e, StepFinished)]
    assert step.num_copied_blocks == 2  # the last of the three keeps the original
    tables = [find(core, "r", i).block_table for i in range(3)]
    assert len({table[2] for table in tables}) == 3
    assert {tuple(table[:2]) for table in tables} == {tuple(tables[0][:2])}

    events = first + run_to_end(core)
    assert [tokens_of(first + events, "r", i)[0] for i in range(3)] == [1010, 101_010, 201_010]
    ends = ends_of(events, "r")
    assert [end.usage.prompt_tokens for end in ends] == [10, 0, 0]
    assert [end.usage.computed_tokens for end in ends] == [10, 0, 0]
    assert [end.usage.output_tokens for end in ends] == [5, 5, 5]
    # 10 prompt tokens at 1, 15 outputs at 2.
    assert core.scheduler.counters[0]["acme"] == 10 + 2 * 15


def test_what_sharing_saves_is_reported() -> None:
    """Prompt of 8 in two full blocks, 5 tokens each in a third and a fourth: the first step after
    the fork holds 2 blocks for 4 tables' 8, then 2 + 4 for 12, at last 2 + 4 * 2 for 16."""
    core, _ = make_core(block_size=4)
    add(core, "r", "acme", prompt=8, output=6, n=4)

    (group,) = [e for e in run_to_end(core) if isinstance(e, GroupFinished)]

    assert (group.request_id, group.num_sequences) == ("r", 4)
    # Six steps: the fork, four that compute tokens 9 to 12, one that computes the 13th.
    assert group.block_steps == 2 + 4 * 6 + 10
    assert group.unshared_block_steps == 8 + 4 * 12 + 16


def test_seeds_differ_and_the_first_is_the_requests_own() -> None:
    core, _ = make_core()
    add(core, "r", "acme", prompt=3, output=1, n=4, seed=7)
    seeds = [find(core, "r", i).params.seed for i in range(4)]
    assert seeds[0] == 7
    assert seeds[1:] == [child_seed(7, i) for i in (1, 2, 3)]
    assert len(set(seeds)) == 4
    assert len({child_seed(seed, i) for seed in range(50) for i in range(50)}) == 49 * 50 + 50


def test_a_group_takes_all_its_slots_from_the_beginning() -> None:
    core, _ = make_core(max_seqs=4, max_step_tokens=4, max_bypasses=0)
    add(core, "wide", "acme", prompt=9, output=4, n=3)
    add(core, "pair", "zeta", prompt=2, output=4, n=2)
    add(core, "one", "zeta", prompt=2, output=4)

    core.step()
    assert list(core.scheduler.running) == ["wide"]
    for _ in range(3):
        core.step()
    assert len(core.scheduler.running) == 3  # `pair` is held, and `one` behind it
    events = run_to_end(core)
    assert [len(ends_of(events, name)) for name in ("wide", "pair", "one")] == [3, 2, 1]


def test_more_sequences_than_the_engine_runs_are_refused() -> None:
    core, _ = make_core(max_seqs=4)
    with pytest.raises(NeverFitsError, match="5 sequences of one request do not fit"):
        add(core, "r", "acme", prompt=3, output=1, n=5)
    core, _ = make_core(num_blocks=8, block_size=4)
    with pytest.raises(NeverFitsError, match="3 x 12 tokens need 9 KV blocks at once"):
        add(core, "r", "acme", prompt=8, output=4, beam=BeamSearch(width=3))
    with pytest.raises(NeverFitsError, match="max_tokens >= 1"):
        add(core, "r", "acme", prompt=8, output=0, beam=BeamSearch(width=2))
    assert not core.has_work


def test_the_id_is_taken_until_the_last_sequence_has_ended() -> None:
    core, _ = make_core()
    add(core, "r", "acme", prompt=3, output=9, n=2, stop_token_ids=frozenset({1005}))
    for _ in range(4):
        core.step()
    assert list(core.scheduler.running) == ["r/1"]
    with pytest.raises(DuplicateRequestError):
        add(core, "r", "acme", prompt=3, output=1)
    assert [e.index for e in core.abort("r") if isinstance(e, SequenceFinished)] == [1]
    assert not core.has_work


def test_children_are_preempted_alone_and_share_again_when_they_return() -> None:
    core, _ = make_core(num_blocks=14, block_size=4, max_seqs=4, watermark=0.0, max_step_tokens=64)
    add(core, "r", "acme", prompt=16, output=24, n=3)
    events = run_to_end(core)

    preempted = {e.index for e in events if isinstance(e, SequencePreempted)}
    assert preempted
    again = [e for e in events if isinstance(e, SequenceAdmitted)][1:]
    assert all(e.num_cached_tokens >= 16 for e in again)  # the prompt's blocks, at least
    for i in range(3):
        assert tokens_of(events, "r", i) == [1016 + 100_000 * i + j for j in range(24)]
    assert core.scheduler.counters[0]["acme"] == 16 + 2 * 72  # nothing twice


def test_one_childs_error_ends_that_child_alone() -> None:
    core, runner = make_core()
    add(core, "r", "acme", prompt=6, output=4, n=3)
    core.step()
    runner.fail_on = frozenset({"r/1"})
    events = run_to_end(core)
    assert [e.reason for e in ends_of(events, "r")] == ["length", "error", "length"]


@pytest.mark.parametrize("beam", [None, BeamSearch(width=3)])
def test_an_error_before_the_fork_ends_all(beam: BeamSearch | None) -> None:
    core, runner = make_core()
    add(core, "r", "acme", prompt=6, output=4, n=3, beam=beam)
    runner.fail_on = frozenset({"r", "r/1", "r/2"})
    events = run_to_end(core)
    assert [e.reason for e in ends_of(events, "r")] == ["error"] * 3
    assert not any(isinstance(e, GroupFinished) for e in events)


def test_a_failed_step_ends_all_that_were_to_fork() -> None:
    core, runner = make_core()
    add(core, "r", "acme", prompt=6, output=4, n=2)
    runner.explode = True
    events = core.step()
    assert [e.error for e in ends_of(events, "r")] == ["RuntimeError: the device is gone"] * 2
    assert core.scheduler.pool.num_held == 0


def test_beams_decode_in_step_and_are_preempted_together() -> None:
    core, _ = make_core(num_blocks=18, block_size=4, max_seqs=8, watermark=0.0, prefix_cache=False)
    for name in "abcd":
        add(core, name, name, prompt=8, output=14, beam=BeamSearch(width=2))
    events: list[Event] = []
    while core.has_work:
        events += core.step()
        for name in "abcd":
            if name in core._requests:
                beams = core._requests[name]
                if beams[0].group and beams[0].group.is_forked:
                    assert len({seq.num_tokens for seq in beams}) == 1
                    assert len({seq.status for seq in beams}) == 1
    victims = [(e.request_id, e.index) for e in events if isinstance(e, SequencePreempted)]
    assert victims
    assert len(victims) % 2 == 0
    for name in "abcd":
        ends = ends_of(events, name)
        assert [len(tokens_of(events, name, i)) for i in range(2)] == [14] * 2
        assert ends[0].usage.output_tokens == 2 * 14
        scores = [end.cumulative_logprob for end in ends]
        assert scores == sorted(scores, reverse=True)


def test_scoring_only_ends_without_a_token() -> None:
    core, _ = make_core(max_step_tokens=8)
    add(core, "r", "acme", prompt=11, output=0, n=2)
    events = run_to_end(core)
    assert [e.reason for e in ends_of(events, "r")] == ["length", "length"]
    assert not any(isinstance(e, TokensGenerated) for e in events)
    assert core.scheduler.counters[0]["acme"] == 11


def test_a_beam_that_may_draw_nothing_ends_the_search() -> None:
    core, runner = make_core()
    add(core, "r", "acme", prompt=6, output=4, beam=BeamSearch(width=3))
    core.step()
    runner.refuse_on = frozenset({"r/1"})
    assert [e.error for e in ends_of(run_to_end(core), "r")] == ["no token is allowed"] * 3
