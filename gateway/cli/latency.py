"""What a load test says about latency: pure functions over request records.

Definitions are the field's, so that numbers compare: TTFT runs from arrival and so includes the
queue; TPOT = (E2E - TTFT) / (output tokens - 1); ITL is each gap between two arrivals of text,
pooled over requests; E2E ends with the last text.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request as its client saw it. Times are seconds on one monotonic clock."""

    arrived: float  # when it was due, which in an open loop may be before it was sent
    text_times: tuple[float, ...] = ()  # when each piece of text came
    finished: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = True  # else output_tokens counts pieces of text
    error: str | None = None

    @property
    def ttft_seconds(self) -> float | None:
        return self.text_times[0] - self.arrived if self.text_times else None

    @property
    def e2el_seconds(self) -> float | None:
        return self.text_times[-1] - self.arrived if self.text_times else None

    @property
    def tpot_seconds(self) -> float | None:
        """None for fewer than two tokens: such a request has no pace."""
        if not self.text_times or self.output_tokens < 2:
            return None
        return (self.text_times[-1] - self.text_times[0]) / (self.output_tokens - 1)

    @property
    def itl_seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.text_times, self.text_times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """p50, p90 and p99 in milliseconds; None where nothing was measured."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of_seconds(cls, values: Iterable[float | None]) -> "Percentiles":
        known = sorted(1000 * v for v in values if v is not None)
        return cls(*(percentile(known, q) if known else None for q in (50, 90, 99)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """One level of load. Tokens and latencies are of the requests that succeeded."""

    num_requests: int
    num_errors: int
    errors: dict[str, int] = field(default_factory=dict)
    num_without_usage: int
    seconds: float  # first arrival to last completion
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    total_tokens_per_second: float
    requests_per_second: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles
    e2el_ms: Percentiles
    goodput_per_second: float | None  # None when no objective was asked for
    attainment: float | None  # share of all requests that met every objective

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile of ascending values, linear between neighbours (numpy's default)."""
    position = (len(ordered) - 1) * q / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def parse_objectives(text: str) -> dict[str, float]:
    """`ttft:500,tpot:100` (milliseconds) as seconds by name. Raises ValueError."""
    objectives = {}
    for part in text.split(","):
        name, _, limit = part.partition(":")
        if name not in OBJECTIVES:
            raise ValueError(f"{name!r} is not one of {', '.join(OBJECTIVES)}")
        objectives[name] = float(limit) / 1000
    return objectives


def meets(record: RequestRecord, objectives: Mapping[str, float]) -> bool:
    """Whether the request succeeded within every objective (seconds)."""
    if record.error is not None or not record.text_times:
        return False
    measured = {
        "ttft": record.ttft_seconds,
        "tpot": record.tpot_seconds,
        "e2el": record.e2el_seconds,
    }
    # A single token has no pace to miss.
    return all((measured[name] or 0.0) <= limit for name, limit in objectives.items())


def summarize(
    records: Sequence[RequestRecord], objectives: Mapping[str, float] | None = None
) -> LoadSummary:
    """One level's summary; failed requests count as errors and in the duration, nowhere else."""
    if not records:
        raise ValueError("no request was made")
    done = [r for r in records if r.error is None]
    seconds = max(r.finished for r in records) - min(r.arrived for r in records)
    prompt = sum(r.prompt_tokens for r in done)
    output = sum(r.output_tokens for r in done)
    num_good = sum(meets(r, objectives) for r in records) if objectives else None
    return LoadSummary(
        num_requests=len(records),
        num_errors=len(records) - len(done),
        errors=dict(Counter(r.error for r in records if r.error is not None)),
        num_without_usage=sum(not r.has_usage for r in done),
        seconds=seconds,
        prompt_tokens=prompt,
        cached_tokens=sum(r.cached_tokens for r in done),
        output_tokens=output,
        output_tokens_per_second=output / seconds,
        total_tokens_per_second=(prompt + output) / seconds,
        requests_per_second=len(done) / seconds,
        ttft_ms=Percentiles.of_seconds(r.ttft_seconds for r in done),
        tpot_ms=Percentiles.of_seconds(r.tpot_seconds for r in done),
        itl_ms=Percentiles.of_seconds(gap for r in done for gap in r.itl_seconds),
        e2el_ms=Percentiles.of_seconds(r.e2el_seconds for r in done),
        goodput_per_second=None if num_good is None else num_good / seconds,
        attainment=None if num_good is None else num_good / len(records),
    )
