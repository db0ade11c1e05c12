"""The measured runs of the VTC authors (OSDI'24) against this scheduler on virtual time.

    HEADRACE_TRACES=folder python -m benchmarks.reproductions.vtc [suite ...]

The folder holds `vtc_results/*.csv` and `vtc_cost_profile.json` (docs/reproductions.md says where
they come from). Each run's own arrivals are replayed under the policy that it was measured with;
the same statistics are then computed from their records and from ours. Prints a markdown table.
"""

import csv
import json
import os
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean

import numpy as np

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.cost_model import LinearCost
from engine.events import SequenceFinished, SequencePreempted, TokensGenerated
from engine.scheduling.fairness import ServiceGapMeter
from engine.sequence import SamplingParams, TenantShare
from engine.simulated_runner import TOKEN, SimulatedRunner, VirtualClock

POOL_TOKENS = 10_000
BLOCK_SIZE = 16
PROMPT_RATE, OUTPUT_RATE = 1.0, 2.0  # service units per token, theirs and ours

# What a step of their server takes beyond the profiled forward pass. The one number that is fitted
# to a measured run: to the requests per second of VTC on the suite `overload`.
OVERHEAD_SECONDS = 0.002

SETTINGS = SchedulerConfig(
    max_step_tokens=3072,  # their largest batch of prompts
    max_model_len=2048,
    max_bypasses=0,  # a head that does not fit is not passed
    preemption="recompute",
)

SUITES = (
    "overload",
    "overload-multi",
    "proportional",
    "on_off_less",
    "on_off_overload",
    "increase",
    "poisson_on_off_overload",
    "poisson_short_long",
    "poisson_short_long_2",
    "real",
)


@dataclass(slots=True)
class Request:
    """One request and what became of it; seconds since the run began."""

    client: str
    prompt_tokens: int
    output_tokens: int
    arrival: float
    first_token: float = float("inf")
    end: float = float("inf")

    @property
    def service(self) -> float:
        return PROMPT_RATE * self.prompt_tokens + OUTPUT_RATE * self.output_tokens


@dataclass(slots=True)
class Run:
    """Requests by arrival. What only a replay knows: the greatest gap between two backlogged
    clients on the scheduler's own counters, looked at after every step, and preemptions."""

    requests: list[Request]
    exact_gap: float | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0


# -- reading ----------------------------------------------------------------------------------


def find_traces() -> Path | None:
    """The folder of trace files, which are not part of this repository: HEADRACE_TRACES, or beside
    the checkout."""
    beside = Path(__file__).parents[3] / "shared" / "traces"
    folder = Path(os.environ.get("HEADRACE_TRACES", beside))
    return folder if folder.is_dir() else None


def read_run(folder: Path, scheduler: str, suite: str) -> Run:
    """A measured run, e.g. `VTC`, `overload`."""
    with (folder / "vtc_results" / f"{scheduler}__{suite}.csv").open() as lines:
        next(lines)  # the configuration
        requests = [
            Request(
                client=row["client"],
                prompt_tokens=int(row["prompt_tokens"]),
                output_tokens=int(row["output_tokens"]),
                arrival=float(row["arrival_s"]),
                first_token=float(row["arrival_s"]) + float(row["ttft_s"]),
                end=float(row["arrival_s"]) + float(row["latency_s"]),
            )
            for row in csv.DictReader(lines)
        ]
    return Run(sorted(requests, key=lambda request: request.arrival))


def read_cost(folder: Path, overhead: float = OVERHEAD_SECONDS) -> LinearCost:
    """Fit the authors' profile of the A10G, {prompt: {output: [batch, seconds of prefill, seconds
    of decoding]}}, both per request: least squares of relative errors. Batches beyond 160, which
    the pool never holds here, are left out of the decodes."""
    profile = json.loads((folder / "vtc_cost_profile.json").read_text())
    prefills, decodes = [], []
    for prompt, by_output in profile.items():
        for output, (batch, prefill, decoding) in by_output.items():
            context = int(prompt) + (int(output) + 1) / 2  # mean over the steps
            prefills.append((1, batch * int(prompt), batch * prefill))
            if batch <= 160:
                decodes.append((1, batch, batch * context, batch * decoding / int(output)))
    _, prompt_token = _fit(prefills)
    step, decode, context_token = _fit(decodes)
    return LinearCost(
        step=step + overhead,
        prompt_token=prompt_token,
        decode=decode,
        context_token=context_token,
    )


def _fit(rows: Sequence[tuple[float, ...]]) -> list[float]:
    """Coefficients of all columns but the last, for the last."""
    table = np.array(rows)
    scaled = table[:, :-1] / table[:, -1:]
    return [float(x) for x in np.linalg.lstsq(scaled, np.ones(len(rows)), rcond=None)[0]]


# -- replaying --------------------------------------------------------------------------------


def settings_for(requests: Sequence[Request], *, grown: float) -> SchedulerConfig:
    """S-LoRA admits a request only if the batch will still fit when all its outputs have grown.
    This scheduler knows no output lengths, and preempts when it must; slots stand for that
    estimate: the pool over the size of a resident request, mean over time, with that part of its
    output. 1: as if all ended together, nothing is preempted; 0.5: as if they ended evenly."""
    residence = sum(one.output_tokens for one in requests)  # in steps
    sizes = sum(
        one.output_tokens * (one.prompt_tokens + grown * one.output_tokens) for one in requests
    )
    return replace(SETTINGS, max_seqs=int(POOL_TOKENS * residence / sizes))


def replay(
    arrivals: Iterable[Request],
    policy: str,
    cost: LinearCost,
    *,
    settings: SchedulerConfig,
    until: float = float("inf"),
) -> Run:
    """Serve the requests by the engine's core; stops at `until`, with what is unfinished."""
    run = Run(
        [replace(one, first_token=float("inf"), end=float("inf")) for one in arrivals], exact_gap=0
    )
    clock = VirtualClock()
    cache = CacheConfig(
        num_blocks=POOL_TOKENS // BLOCK_SIZE, block_size=BLOCK_SIZE, enable_prefix_cache=False
    )
    config = EngineConfig(cache=cache, scheduler=replace(settings, policy=policy))
    core = EngineCore(config, SimulatedRunner(clock, cost), clock=clock)
    meter = ServiceGapMeter()
    num_added = 0
    while clock.now < until and (core.has_work or num_added < len(run.requests)):
        if not core.has_work:
            clock.now = max(clock.now, run.requests[num_added].arrival)
        while num_added < len(run.requests) and run.requests[num_added].arrival <= clock.now:
            _add(core, str(num_added), run.requests[num_added])
            num_added += 1
        for event in core.step():
            if isinstance(event, TokensGenerated):
                request = run.requests[int(event.request_id)]
                request.first_token = min(request.first_token, event.at)
            elif isinstance(event, SequenceFinished):
                run.requests[int(event.request_id)].end = event.at
                run.num_recomputed_tokens += event.usage.recomputed_tokens
            elif isinstance(event, SequencePreempted):
                run.num_preemptions += 1
        meter.observe(set(core.scheduler.queues.tenants(0)), core.scheduler.counters[0].as_dict())
    run.exact_gap = meter.max_gap
    return run


def _add(core: EngineCore, request_id: str, request: Request) -> None:
    core.add(
        request_id,
        (TOKEN,) * request.prompt_tokens,
        SamplingParams(max_tokens=request.output_tokens, ignore_eos=True),
        share=TenantShare(tenant=request.client),
        namespace=request.client,
    )


# -- statistics, the same for their records and ours ------------------------------------------


def service_curve(
    requests: Iterable[Request], times: Sequence[float], *, spread: bool
) -> list[float]:
    """Service received until each of the rising `times`, if outputs come at an even pace between
    first token and end. With `spread`, prompts too count evenly over that time, as in the authors'
    plots; else at the first token."""
    changes = []  # (time, service at once, change of service per second)
    for one in requests:
        if one.end == float("inf"):
            continue
        at_once = 0.0 if spread else PROMPT_RATE * one.prompt_tokens
        pace = (one.service - at_once) / (one.end - one.first_token)
        changes += [(one.first_token, at_once, pace), (one.end, 0.0, -pace)]
    changes.sort()
    curve, served, pace, now, i = [], 0.0, 0.0, 0.0, 0
    for until in times:
        while i < len(changes) and changes[i][0] <= until:
            served += pace * (changes[i][0] - now) + changes[i][1]
            now, pace = changes[i][0], pace + changes[i][2]
            i += 1
        curve.append(served + pace * (until - now))
    return curve


def by_client(requests: Iterable[Request]) -> dict[str, list[Request]]:
    found = defaultdict(list)
    for one in requests:
        found[one.client].append(one)
    return dict(sorted(found.items()))


def plotted_gaps(requests: Sequence[Request]) -> list[float]:
    """Greatest less least service of the clients at 19 times of the arrivals' duration."""
    duration = int(max(one.arrival for one in requests))
    times = [duration / 20 * i for i in range(1, 20)]
    curves = [service_curve(own, times, spread=True) for own in by_client(requests).values()]
    return [max(at) - min(at) for at in zip(*curves, strict=True)]


def backlogged_gaps(requests: Sequence[Request]) -> tuple[float, float]:
    """Over the intervals in which two clients f and g both wait, seen at every arrival and first
    token: the greatest |dW_f - dW_g| of any part of them; and the mean over time, since they began,
    of the pair that is furthest apart. Clients are taken to be served in order of arrival."""
    times = sorted({time for one in requests for time in (one.arrival, one.first_token)})
    curves, num_waiting = {}, {}
    for client, own in by_client(requests).items():
        curves[client] = service_curve(own, times, spread=False)
        arrivals = sorted(one.arrival for one in own)
        starts = sorted(one.first_token for one in own)
        num_waiting[client] = [bisect_right(arrivals, t) - bisect_right(starts, t) for t in times]
    meter = ServiceGapMeter()
    began: dict[tuple[str, str], float] = {}
    total, seconds = 0.0, 0.0
    for i, (time, following) in enumerate(pairwise(times)):
        served = {client: curves[client][i] for client, n in num_waiting.items() if n[i]}
        meter.observe(served.keys(), served)
        now = {(f, g): served[f] - served[g] for f, g in combinations(served, 2)}
        began = {pair: began.get(pair, difference) for pair, difference in now.items()}
        if now:
            gap = max(abs(difference - began[pair]) for pair, difference in now.items())
            total += gap * (following - time)
            seconds += following - time
    return meter.max_gap, total / seconds if seconds else 0.0


def requests_per_second(requests: Sequence[Request]) -> float:
    """All of them, until the last one ended."""
    return len(requests) / max(one.end for one in requests)


def mean_ttft(requests: Iterable[Request]) -> dict[str, float]:
    """Seconds from arrival to first token, by client."""
    return {
        client: fmean(one.first_token - one.arrival for one in own)
        for client, own in by_client(requests).items()
    }


def gap_growth(requests: Sequence[Request], start: float, end: float) -> float:
    """Service units per second by which the last client pulls away from the first."""
    curves = [service_curve(own, (start, end), spread=True) for own in by_client(requests).values()]
    return ((curves[-1][1] - curves[0][1]) - (curves[-1][0] - curves[0][0])) / (end - start)


# -- the tables -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    suite: str
    policy: str
    num_slots: int
    measured: Run
    ours: Run

    @property
    def name(self) -> str:
        return f"{self.suite} | {self.policy} | {self.num_slots}"

    def fairness(self) -> str:
        runs = (self.measured, self.ours)
        gaps = [plotted_gaps(run.requests) for run in runs]
        plotted = (f"{max(of_run):,.0f} / {fmean(of_run):,.0f}" for of_run in gaps)
        backlogged = ("{:,.0f} / {:,.0f}".format(*backlogged_gaps(run.requests)) for run in runs)
        return _row(self.name, *plotted, *backlogged, f"{self.ours.exact_gap:,.0f}")

    def service(self) -> str:
        runs = (self.measured, self.ours)
        rates = (f"{requests_per_second(run.requests):.3f}" for run in runs)
        waits = (_waits(run.requests) for run in runs)
        preempted = f"{self.ours.num_preemptions:,} / {self.ours.num_recomputed_tokens:,}"
        return _row(self.name, *rates, *waits, preempted)


def _waits(requests: Sequence[Request]) -> str:
    found = list(mean_ttft(requests).values())
    if len(found) <= 3:
        return " / ".join(f"{value:.1f}" for value in found)
    return f"{fmean(found):.1f} ({min(found):.1f} to {max(found):.1f})"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def compare(folder: Path, suite: str, cost: LinearCost) -> list[Comparison]:
    found = []
    for policy in ("fcfs", "vtc"):
        measured = read_run(folder, policy.upper(), suite)
        lengths = {(one.prompt_tokens, one.output_tokens) for one in measured.requests}
        overcommits = len(lengths) > 1 or suite == "overload"
        for grown in (1.0, 0.5) if overcommits else (1.0,):
            settings = settings_for(measured.requests, grown=grown)
            ours = replay(measured.requests, policy, cost, settings=settings)
            found.append(Comparison(suite, policy, settings.max_seqs, measured, ours))
    return found


def main() -> None:
    folder = find_traces()
    if folder is None:
        sys.exit("no traces found; next: name their folder in HEADRACE_TRACES")
    cost = read_cost(folder)
    print(cost, end="\n\n")
    found = [one for suite in sys.argv[1:] or SUITES for one in compare(folder, suite, cost)]
    names = ("suite", "policy", "slots")
    gaps = (
        *("plotted, max / mean: theirs", "ours"),
        *("backlogged, max / mean: theirs", "ours"),
        "exact: ours",
    )
    service = (
        *("requests/s: theirs", "ours"),
        *("mean TTFT by client, s: theirs", "ours"),
        "preempted / tokens recomputed",
    )
    for columns, cells in (
        ((*names, *gaps), Comparison.fairness),
        ((*names, *service), Comparison.service),
    ):
        print(_row(*columns))
        print("|---" * len(columns) + "|")
        print("\n".join(cells(one) for one in found), end="\n\n")
    for one in found:
        if (one.suite, one.policy) == ("overload", "fcfs"):
            growth = (gap_growth(run.requests, 60, 540) for run in (one.measured, one.ours))
            print(f"fcfs, {one.num_slots} slots: the gap of overload grows by", *growth, "per s")


if __name__ == "__main__":
    main()
