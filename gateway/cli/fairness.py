"""Who got how much, from samples of a server's own counters: pure functions.

A tenant's virtual counter is its service divided by its weight. Growth is looked at only over
intervals in which the tenants were backlogged at every sample: on a return from idle a counter is
lifted, which is no service.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The server's view at one instant."""

    at: float
    counters: Mapping[str, float]  # virtual counter by tenant
    waiting: Mapping[str, float]  # queued requests by tenant
    running: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, float] = field(default_factory=dict)  # of ended requests, ever growing

    def backlogged(self, tenants: Iterable[str]) -> bool:
        return all(self.waiting.get(t, 0) > 0 and t in self.counters for t in tenants)


def backlogged_runs(samples: Sequence[Sample], tenants: Sequence[str]) -> Iterator[list[Sample]]:
    """Longest runs of two or more consecutive samples in which all `tenants` are backlogged."""
    run: list[Sample] = []
    for sample in samples:
        if sample.backlogged(tenants):
            run.append(sample)
            continue
        if len(run) > 1:
            yield run
        run = []
    if len(run) > 1:
        yield run


def shares(samples: Sequence[Sample], weights: Mapping[str, float]) -> dict[str, float] | None:
    """Each tenant's share of the service given while all of them were backlogged.

    None if they never were, or got nothing.
    """
    served = dict.fromkeys(weights, 0.0)
    for run in backlogged_runs(samples, list(weights)):
        for tenant, weight in weights.items():
            growth = run[-1].counters[tenant] - run[0].counters[tenant]
            served[tenant] += growth * weight
    total = math.fsum(served.values())
    return {t: s / total for t, s in served.items()} if total > 0 else None


def entitlements(weights: Mapping[str, float]) -> dict[str, float]:
    """The share that each weight stands for."""
    total = math.fsum(weights.values())
    return {tenant: weight / total for tenant, weight in weights.items()}


def backlogged_seconds(samples: Sequence[Sample], tenants: Sequence[str]) -> float:
    """For how long all `tenants` were backlogged together."""
    return math.fsum(run[-1].at - run[0].at for run in backlogged_runs(samples, tenants))
