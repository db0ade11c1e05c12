"""Abort wherever a request can be: everything is freed at once, exact ids only, others go on."""

from collections.abc import Callable

import pytest

from engine.core import EngineCore
from engine.events import Event, SequenceFinished, SequencePreempted
from engine.sequence import BeamSearch, FinishReason, SequenceStatus
from tests.scripted import add, find, make_core


def queued(core: EngineCore) -> None:
    assert find(core, "x").status is SequenceStatus.WAITING
    assert find(core, "x").admitted is None


def prefilling(core: EngineCore) -> None:
    core.step()
    seq = find(core, "x")
    assert 0 < seq.num_computed_tokens < seq.num_prompt_tokens


def decoding(core: EngineCore) -> None:
    for _ in range(5):
        core.step()
    assert find(core, "x").is_decoding


def preempted(core: EngineCore) -> None:
    """By a request of a higher class that needs the room."""
    decoding(core)
    add(core, "y", "zeta", prompt=20, output=20, rank=-1)
    for _ in range(100):
        if any(isinstance(e, SequencePreempted) for e in core.step()):
            break
    core.abort("y")
    assert find(core, "x").status is SequenceStatus.WAITING


def migrating(core: EngineCore) -> None:
    """Its prompt is computed, and the decoding pool has no room for it yet."""
    add(core, "y", "zeta", prompt=3, output=40, rank=-1)
    for _ in range(8):
        core.step()
    seq = find(core, "x")
    assert seq.parked is not None
    assert seq.parked.source == "prefill"


def recomputed(core: EngineCore) -> None:
    preempted(core)
    assert find(core, "x").parked is None


def swapped(core: EngineCore) -> None:
    preempted(core)
    parked = find(core, "x").parked
    assert parked is not None
    assert parked.source == "host"


def forked(core: EngineCore) -> None:
    decoding(core)
    group = find(core, "x").group
    assert group is not None
    assert group.is_forked


def one_child_ended(core: EngineCore) -> None:
    forked(core)
    core._finish(find(core, "x", 1), FinishReason.LENGTH)


CASES: dict[str, tuple[Callable[[EngineCore], None], dict[str, object], dict[str, object]]] = {
    "queued": (queued, {}, {}),
    "prefilling": (prefilling, {}, {}),
    "decoding": (decoding, {}, {}),
    "recomputed": (recomputed, {}, {}),
    "swapped": (swapped, {"num_host_blocks": 16, "preemption": "swap"}, {}),
    "migrating": (migrating, {"prefill_blocks": 16, "max_seqs": 1}, {}),
    "decoding in the second pool": (decoding, {"prefill_blocks": 16}, {}),
    "a group that is queued": (queued, {}, {"n": 3}),
    "a group before its fork": (prefilling, {}, {"n": 3}),
    "a group after its fork": (forked, {}, {"n": 3}),
    "the last children of a group": (one_child_ended, {}, {"n": 3}),
    "beams before their fork": (prefilling, {}, {"beam": BeamSearch(width=2)}),
    "beams": (forked, {"num_blocks": 32}, {"beam": BeamSearch(width=2)}),
    "a group in the second pool": (forked, {"prefill_blocks": 16}, {"n": 3}),
}


@pytest.mark.parametrize("case", CASES)
def test_abort_frees_everything_and_nothing_else(case: str) -> None:
    reach, engine, params = CASES[case]
    defaults = {"num_blocks": 16, "watermark": 0.0, "max_step_tokens": 8, "max_seqs": 4}
    core, _ = make_core(**defaults | engine)  # type: ignore[arg-type]
    output = 12 if "beam" in params else 20
    add(core, "x", "acme", prompt=20, output=output, **params)
    reach(core)
    add(core, "x1", "acme", prompt=4, output=2)  # its id begins like the other one's
    live = {s.index for s in core._requests["x"] if s.status is not SequenceStatus.FINISHED}

    assert core.abort("") == core.abort("x/") == core.abort("x/1") == core.abort("X") == []
    events = core.abort("x")

    ends = [e for e in events if isinstance(e, SequenceFinished)]
    assert {e.index for e in ends} == live
    assert {(e.request_id, e.reason) for e in ends} == {("x", "abort")}
    assert core.abort("x") == []
    left: list[Event] = []
    for stage in core.stages:
        stage.scheduler.check()
        held = {seq.request_id for seq in stage.scheduler.places.all_live}
        assert "x" not in held
    while core.has_work:
        left += core.step()
    assert {e.request_id for e in left if isinstance(e, SequenceFinished)} - {"y"} == {"x1"}
    for stage in core.stages:
        assert stage.scheduler.pool.num_held == 0
        assert stage.scheduler.places.num_slots == stage.scheduler.places.num_handed_over == 0
        assert stage.scheduler.memory.host.num_free == stage.scheduler.memory.host.num_blocks
