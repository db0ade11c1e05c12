"""What an operator may set, checked when it is set: limits, weights, and to whom they apply."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

from tenants.errors import InvalidNameError, InvalidPolicyError

MAX_LIMIT = 10**15  # far below 2**63, so that sums of counters stay exact in every database
MAX_WINDOW_SECONDS = 366 * 86_400
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e6
MAX_KV_BLOCKS = 2**31
MAX_RANK = 10_000
PLATFORM_ID = "platform"
_SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


class Scope(StrEnum):
    """To whom a limit applies. A request is under all three, from the outermost in."""

    PLATFORM = "platform"
    TENANT = "tenant"
    KEY = "key"


class Metric(StrEnum):
    """What a limit counts."""

    REQUESTS = "requests"  # started in a window
    TOKENS_TOTAL = "tokens_total"  # prompt and output together in a window
    # KV blocks times the seconds that they were held, by requests admitted in a window. Known when
    # a request ends, so that what runs when a window fills can overrun it.
    KV_BLOCK_SECONDS = "kv_block_seconds"
    CONCURRENT = "concurrent"  # requests held at once
    QUEUED = "queued"  # requests that wait for one engine at once
    CONTEXT_TOKENS = "context_tokens"  # prompt and asked output of one request


WINDOWED = frozenset({Metric.REQUESTS, Metric.TOKENS_TOTAL, Metric.KV_BLOCK_SECONDS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """At most `limit` of a metric, per window where the metric has one."""

    metric: str
    limit: int
    window_seconds: int = 0

    def __post_init__(self) -> None:
        if self.metric not in list(Metric):
            known = ", ".join(Metric)
            raise InvalidPolicyError(f"unknown metric {self.metric!r}; use one of: {known}")
        if not _is_whole(self.limit) or not 1 <= self.limit <= MAX_LIMIT:
            raise InvalidPolicyError(
                f"{self.metric} limit {self.limit!r}: must be a whole number from 1 to "
                f"{MAX_LIMIT}; to stop a tenant suspend it, for no limit leave it out"
            )
        if self.metric not in WINDOWED and self.window_seconds != 0:
            raise InvalidPolicyError(
                f"{self.metric} has no window, but window_seconds is {self.window_seconds!r}; "
                "leave it out"
            )
        if self.metric in WINDOWED and (
            not _is_whole(self.window_seconds) or not 1 <= self.window_seconds <= MAX_WINDOW_SECONDS
        ):
            raise InvalidPolicyError(
                f"{self.metric} window_seconds {self.window_seconds!r}: must be a whole number "
                f"from 1 to {MAX_WINDOW_SECONDS}; 60 makes it a limit per minute"
            )

    def to_document(self) -> dict[str, Any]:
        """The JSON form; `parse_limits` reads it back unchanged."""
        return {
            "metric": str(self.metric),
            "limit": self.limit,
            "window_seconds": self.window_seconds,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopedLimit:
    """A limit together with the one it applies to."""

    scope: Scope
    scope_id: str
    rule: Limit


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBounds:
    """The KV blocks that a tenant can always have, and the most that it may hold."""

    floor_blocks: int = 0
    cap_blocks: int | None = None

    def __post_init__(self) -> None:
        if not _is_whole(self.floor_blocks) or not 0 <= self.floor_blocks <= MAX_KV_BLOCKS:
            raise InvalidPolicyError(
                f"KV floor {self.floor_blocks!r}: must be a whole number of blocks from 0 to "
                f"{MAX_KV_BLOCKS}; 0 keeps none"
            )
        if self.cap_blocks is None:
            return
        if not _is_whole(self.cap_blocks) or not 1 <= self.cap_blocks <= MAX_KV_BLOCKS:
            raise InvalidPolicyError(
                f"KV cap {self.cap_blocks!r}: must be a whole number of blocks from 1 to "
                f"{MAX_KV_BLOCKS}; for no cap leave it out"
            )
        if self.cap_blocks < self.floor_blocks:
            raise InvalidPolicyError(
                f"KV floor {self.floor_blocks} is above the cap {self.cap_blocks}: raise the cap "
                "or lower the floor"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """A priority class: how soon its requests are served, and at whose cost."""

    name: str
    rank: int  # lower goes first
    preemptible: bool  # a higher class that does not fit may take the place of what runs
    weight: float = 1.0  # against other classes, where classes share by weight
    max_wait_seconds: float | None = None  # after which its turn is brought forward
    max_queue_seconds: float | None = None  # a request that waits longer is refused
    max_queued: int | None = None  # of its requests, all tenants' together, at one engine at once

    def __post_init__(self) -> None:
        if not _is_whole(self.rank) or not 0 <= self.rank <= MAX_RANK:
            raise InvalidPolicyError(
                f"rank {self.rank!r}: must be a whole number from 0 to {MAX_RANK}; the class of "
                "rank 0 goes first"
            )
        check_weight(self.weight)
        for name in ("max_wait_seconds", "max_queue_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not (
                _is_number(seconds) and 0 < seconds <= MAX_WINDOW_SECONDS
            ):
                raise InvalidPolicyError(
                    f"{name} {seconds!r}: must be a number above 0 and at most "
                    f"{MAX_WINDOW_SECONDS}; for no limit leave it out"
                )
        depth = self.max_queued
        if depth is not None and not (_is_whole(depth) and 1 <= depth <= MAX_LIMIT):
            raise InvalidPolicyError(
                f"max_queued {depth!r}: must be a whole number from 1 to {MAX_LIMIT}; for no "
                "limit leave it out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Whom a key speaks for, and under which policy: all that admission needs, from one read."""

    tenant_id: str
    tenant: str  # slug
    key_id: str
    weight: float
    service_class: ServiceClass
    kv: KVBounds
    limits: tuple[ScopedLimit, ...]  # platform, then tenant, then key; all of them apply
    generation: int
    policy_version: int  # of the tenant's policy


def check_limits(limits: Iterable[Limit]) -> tuple[Limit, ...]:
    """The limits of one scope, each metric and window at most once."""
    checked = tuple(limits)
    seen = set()
    for limit in checked:
        if (limit.metric, limit.window_seconds) in seen:
            raise InvalidPolicyError(
                f"{limit.metric} with window_seconds {limit.window_seconds} is set twice; "
                "keep the one you mean"
            )
        seen.add((limit.metric, limit.window_seconds))
    return checked


def parse_limits(document: object) -> tuple[Limit, ...]:
    """Limits from their JSON form, a list of {metric, limit, window_seconds}."""
    if not isinstance(document, list):
        raise InvalidPolicyError(f"limits must be a list of objects, not {document!r}")
    limits = []
    for entry in document:
        if not isinstance(entry, dict) or not {"metric", "limit"} <= set(entry):
            raise InvalidPolicyError(f"a limit needs metric and limit: {entry!r}")
        if unknown := set(entry) - {"metric", "limit", "window_seconds"}:
            raise InvalidPolicyError(f"unknown field in a limit: {', '.join(sorted(unknown))}")
        limits.append(Limit(**entry))
    return check_limits(limits)


def check_slug(kind: str, slug: str) -> str:
    """What a tenant or a class is called in commands and requests. Raises InvalidNameError."""
    if _SLUG.fullmatch(slug) is None:
        raise InvalidNameError(
            f"{kind} {slug!r}: use 1 to 63 of a-z, 0-9 and '-', not starting with '-'"
        )
    return slug


def check_weight(weight: object) -> float:
    """The weight of a tenant or a class, as a float."""
    if not _is_number(weight) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:  # false for NaN too
        raise InvalidPolicyError(
            f"weight {weight!r}: must be a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}; "
            "1 is an equal share"
        )
    return float(weight)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
