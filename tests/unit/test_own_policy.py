"""An operator's own policy, refused when it cannot be used and replaced when it fails."""

import logging

import pytest

from engine.config import ChargeRates
from engine.errors import ConfigError
from engine.events import Event, SequenceFinished
from engine.forecast import capture
from engine.scheduling.own_policy import load_policy
from engine.scheduling.policies import DominantShare, Key, WeightedFair, make_policy
from engine.scheduling.shares import VirtualCounters
from engine.sequence import Sequence
from tests.scripted import add, make_core
from tests.unit.test_forecast import EXACT


class ShortestFirst(WeightedFair):
    """The shortest prompt first."""

    name = "shortest"

    def order(self, seq: Sequence, counters: VirtualCounters) -> Key:
        return (seq.num_prompt_tokens, seq.place)


class FailsLater(WeightedFair):
    """Raises once a sequence of the name `bad` is asked about."""

    name = "fails"

    def order(self, seq: Sequence, counters: VirtualCounters) -> Key:
        if seq.id == "bad":
            raise KeyError("no such thing")
        return super().order(seq, counters)


class ChargesNothingLater(WeightedFair):
    name = "nan"

    def charge(self, rates: ChargeRates, *, prompt: int, cached: int, output: int) -> float:
        return float("nan") if prompt > 10 else float(prompt + output)


class ForgetsMemoryLater(DominantShare):
    name = "forgets"

    def charge_memory(self, *, part: float, total: float) -> float:
        return -1.0 if total > 20 else part * total


class NoMemoryCharge(WeightedFair):
    weighs_memory = True

    def charge_memory(self, *, part: float, total: float) -> float:
        return float("inf")


class WeighsPerhaps(WeightedFair):
    weighs_memory = 1  # type: ignore[assignment]


class WrittenBefore:
    """As policies were before any weighed memory."""

    name = "before"
    is_flat = False

    def order(self, seq: Sequence, counters: VirtualCounters) -> Key:
        return (seq.place,)

    def victim(self, seq: Sequence, counters: VirtualCounters) -> Key:
        return (0, -seq.place)

    def charge(self, rates: ChargeRates, *, prompt: int, cached: int, output: int) -> float:
        return float(prompt + output)


class DearMemory(DominantShare):
    """Memory costs three times what all tokens do."""

    name = "dear"

    def charge_memory(self, *, part: float, total: float) -> float:
        return 3 * part * total


class NoKey(WeightedFair):
    def order(self, seq: Sequence, counters: VirtualCounters) -> Key:
        return [1.0]  # type: ignore[return-value]


class NeedsArguments(WeightedFair):
    def __init__(self, what: int) -> None:
        self.what = what


def run(core) -> list[Event]:  # type: ignore[no-untyped-def]
    events: list[Event] = []
    while core.has_work:
        events += core.step()
    return events


def order_of_ends(events: list[Event]) -> list[str]:
    return [e.request_id for e in events if isinstance(e, SequenceFinished)]


def test_it_decides_who_is_served() -> None:
    core, _ = make_core(policy=f"{__name__}:ShortestFirst", max_seqs=1)
    for name, prompt in (("long", 20), ("middle", 9), ("short", 3)):
        add(core, name, "acme" if name == "long" else "zeta" + name, prompt, 2)
    assert order_of_ends(run(core)) == ["short", "middle", "long"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{__name__}:NoKey", "a key must be a tuple"),
        (f"{__name__}:NoMemoryCharge", "a charge must be a finite number"),
        (f"{__name__}:WeighsPerhaps", "weighs_memory must be a bool"),
        (f"{__name__}:NeedsArguments", "missing 1 required positional argument"),
        (f"{__name__}:Absent", "has no attribute 'Absent'"),
        ("no.such.module:Policy", "No module named"),
        (f"{__name__}:order_of_ends", "cannot be used"),
    ],
)
def test_what_cannot_serve_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_core(policy=name)


def test_what_is_no_class_is_not_called() -> None:
    """It might do anything."""
    with pytest.raises(ConfigError, match="do_harm is no class"):
        load_policy("tests.unit.test_own_policy:do_harm")


def do_harm() -> None:
    raise AssertionError("it was called")


def test_nothing_is_foreseen_under_it() -> None:
    """A forecast runs in another thread: nobody but the scheduler may ask an operator's policy."""
    core, _ = make_core(policy="tests.unit.test_own_policy:ShortestFirst")
    core.scheduler.step_times.assume(EXACT)
    add(core, "a", "acme", 4, 4)

    assert capture(core, 0.0) is None


@pytest.mark.parametrize("policy", ["FailsLater", "ChargesNothingLater", "ForgetsMemoryLater"])
def test_one_that_fails_while_it_serves_is_replaced_loudly_and_nothing_is_lost(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    core, _ = make_core(policy=f"{__name__}:{policy}", max_seqs=2, num_blocks=16, watermark=0.0)
    for i in range(6):
        add(core, f"r{i}", "ab"[i % 2], 5, 12, rank=i % 2)
    for _ in range(4):
        core.step()
    names = {"FailsLater": "fails", "ChargesNothingLater": "nan", "ForgetsMemoryLater": "forgets"}
    assert core.scheduler.policy.name == names[policy]
    add(core, "bad", "c", 20, 3, rank=1)
    with caplog.at_level(logging.ERROR):
        events = run(core)
    assert core.scheduler.policy.name == "fcfs"
    assert sorted(order_of_ends(events)) == sorted(["bad", *(f"r{i}" for i in range(6))])
    assert all(e.reason == "length" for e in events if isinstance(e, SequenceFinished))
    (record,) = caplog.records
    assert "fcfs takes its place" in record.getMessage()


def test_it_may_charge_for_memory_as_it_likes() -> None:
    core, _ = make_core(policy=f"{__name__}:DearMemory", num_blocks=8, watermark=0.0)
    add(core, "r", "acme", prompt=16, output=2)
    core.step()
    assert core.scheduler.counters[0]["acme"] == 3 * (4 / 8) * 18


def test_one_that_was_written_before_memory_counted_still_serves() -> None:
    core, _ = make_core(policy=f"{__name__}:WrittenBefore")
    for name in "abc":
        add(core, name, name, prompt=4, output=3)
    assert order_of_ends(run(core)) == ["a", "b", "c"]
    assert core.scheduler.policy.name == "before"


def test_switching_policies_loses_and_reorders_nothing() -> None:
    """Through all of them while work waits and runs; each tenant's requests end in order."""
    core, _ = make_core(max_seqs=2, num_blocks=16, watermark=0.0)
    for i in range(30):
        add(core, f"{'abc'[i % 3]}{i:02}", "abc"[i % 3], 5, 3, rank=i % 2)
    names = ["vtc", "drr", "drf", "fcfs", "priority", "wfq"]
    events: list[Event] = []
    step = 0
    while core.has_work:
        events += core.step()
        step += 1
        if step % 5 == 0:
            core.scheduler.switch_policy(make_policy(names[step // 5 % len(names)]))
            core.scheduler.check()
    ends = order_of_ends(events)
    assert len(ends) == 30
    for tenant in "abc":
        for rank in (0, 1):
            own = [e for e in ends if e[0] == tenant and int(e[1:]) % 2 == rank]
            assert own == sorted(own)
