"""The suite `overload` as the VTC authors measured it (OSDI'24), replayed on virtual time: two
clients that send 1.5 and 3 requests/s to a device that serves 1.74. docs/reproductions.md has all
the suites."""

from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.reproductions.vtc import (
    OUTPUT_RATE,
    POOL_TOKENS,
    PROMPT_RATE,
    Run,
    backlogged_gaps,
    find_traces,
    gap_growth,
    mean_ttft,
    plotted_gaps,
    read_cost,
    read_run,
    replay,
    requests_per_second,
    settings_for,
)
from engine.config import CacheConfig
from engine.scheduling.fairness import service_bound
from tests.conftest import skip_or_fail

PROMPT, OUTPUT = 256, 256  # tokens of every request
SERVICE = PROMPT_RATE * PROMPT + OUTPUT_RATE * OUTPUT
BOUND = 2 * max(PROMPT_RATE * PROMPT, OUTPUT_RATE * POOL_TOKENS)  # 2 U, theorem 4.4


@pytest.fixture(scope="module")
def traces() -> Path:
    folder = find_traces()
    if folder is None:
        skip_or_fail("traces", "HEADRACE_TRACES names no folder (docs/reproductions.md)")
    return folder


@pytest.fixture(scope="module")
def measured(traces: Path) -> Run:
    return read_run(traces, "VTC", "overload")


@pytest.fixture(scope="module")
def replays(traces: Path, measured: Run) -> dict[str, Run]:
    """The same arrivals under both policies."""
    settings = settings_for(measured.requests, grown=1.0)
    assert settings.max_seqs == POOL_TOKENS // (PROMPT + OUTPUT) == 19
    cost = read_cost(traces)
    return {
        policy: replay(measured.requests, policy, cost, settings=settings)
        for policy in ("vtc", "fcfs")
    }


def test_the_replayed_run_is_the_measured_one(measured: Run, replays: dict[str, Run]):
    assert {(one.prompt_tokens, one.output_tokens) for one in measured.requests} == {
        (PROMPT, OUTPUT)
    }
    assert len(measured.requests) == 1620
    # What the authors' own plot shows, from their records: our statistics are theirs.
    assert max(plotted_gaps(measured.requests)) == pytest.approx(7654, abs=1)
    for run in replays.values():
        assert [(one.client, one.arrival) for one in run.requests] == [
            (one.client, one.arrival) for one in measured.requests
        ]
        assert all(one.arrival < one.first_token < one.end < 1000 for one in run.requests)
        assert run.num_preemptions == 0  # S-LoRA never preempts


def test_throughput_is_the_measured_one_whatever_the_policy(measured: Run, replays: dict[str, Run]):
    vtc, fcfs = (requests_per_second(replays[policy].requests) for policy in ("vtc", "fcfs"))

    assert vtc == pytest.approx(requests_per_second(measured.requests), rel=0.01)  # calibrated
    assert fcfs / vtc == pytest.approx(1.00, abs=0.03)


def test_the_gap_of_vtc_is_within_its_bound_and_that_of_fcfs_is_not(replays: dict[str, Run]):
    """On the scheduler's own counters, after every step of the whole run."""
    vtc, fcfs = replays["vtc"], replays["fcfs"]
    own_bound = service_bound(
        settings_for(vtc.requests, grown=1.0),
        CacheConfig(num_blocks=POOL_TOKENS // 16),
        weights=(1.0, 1.0),
        max_prompt_tokens=PROMPT,
        max_output_tokens=OUTPUT,
    )

    assert 0 < vtc.exact_gap <= min(BOUND, own_bound)
    assert fcfs.exact_gap > 10 * BOUND
    # What can be known from outside agrees: first tokens lag admissions by less than a second.
    assert backlogged_gaps(vtc.requests)[0] == pytest.approx(vtc.exact_gap, abs=SERVICE)
    assert max(plotted_gaps(vtc.requests)) < BOUND < max(plotted_gaps(fcfs.requests))


def test_the_gap_of_fcfs_grows_by_a_third_of_the_capacity(traces: Path, replays: dict[str, Run]):
    """Arrivals are 1 : 2, so service is, and one client pulls away by 2/3 - 1/3 of it."""
    fcfs = replays["fcfs"].requests
    growth = gap_growth(fcfs, 60, 340)

    assert growth == pytest.approx(requests_per_second(fcfs) * SERVICE / 3, rel=0.02)
    theirs = gap_growth(read_run(traces, "FCFS", "overload").requests, 60, 340)
    assert growth == pytest.approx(theirs, rel=0.05)
    assert abs(gap_growth(replays["vtc"].requests, 60, 340)) < 0.02 * growth


def test_waits_are_the_measured_ones(measured: Run, replays: dict[str, Run]):
    theirs, vtc = mean_ttft(measured.requests), mean_ttft(replays["vtc"].requests)
    fcfs = mean_ttft(replays["fcfs"].requests)

    assert vtc["1"] / vtc["0"] == pytest.approx(theirs["1"] / theirs["0"], rel=0.05)
    assert vtc == pytest.approx(theirs, rel=0.05)
    assert fcfs["1"] / fcfs["0"] == pytest.approx(1.0, abs=0.02)
    # One client's gain is the other's loss: the work is the same.
    means = [
        fmean(one.first_token - one.arrival for one in run.requests) for run in replays.values()
    ]
    assert means[0] == pytest.approx(means[1], rel=0.02)
