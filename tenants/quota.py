"""Arithmetic of limits: pure, exact, in whole numbers. `now` is UTC in epoch seconds.

Windows are fixed and aligned to the epoch. A window is known by its start and never reset: a new
one begins at zero, and what was charged to an old one is corrected in that old one only.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tenants.errors import LimitExceededError, LimitStatus, NeverFitsLimitError
from tenants.policy import Metric, Scope, ScopedLimit


class WindowKey(NamedTuple):
    """Identity of one counter. Sorting by it is the order in which counters are locked."""

    scope: str
    scope_id: str
    metric: str
    window_seconds: int  # 0 with start 0: what is held now, without a window
    window_start: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request needs of one counter."""

    key: WindowKey
    limit: int
    amount: int


def window_start(now: float, window_seconds: int) -> int:
    """Start of the window that contains `now`; 0 where there is no window."""
    return math.floor(now) // window_seconds * window_seconds if window_seconds else 0


def demands(
    limits: Iterable[ScopedLimit], *, prompt_tokens: int, max_output_tokens: int, now: float
) -> tuple[Demand, ...]:
    """What the request needs of each counter, in lock order.

    Nobody knows before the work how long a request will hold how many KV blocks: it holds one
    block-second, so that one must be left, and settling puts in its place what was used. What is
    in flight when a window fills can therefore overrun it; what comes after is refused.

    Raises NeverFitsLimitError for a limit on the context, which bounds one request alone and has
    no counter. Queues are counted where they are: in each gateway.
    """
    if prompt_tokens < 0 or max_output_tokens < 0:
        raise ValueError(f"negative tokens: prompt {prompt_tokens}, output {max_output_tokens}")
    num_tokens = prompt_tokens + max_output_tokens
    needed = {
        Metric.REQUESTS: 1,
        Metric.CONCURRENT: 1,
        Metric.TOKENS_TOTAL: num_tokens,
        Metric.KV_BLOCK_SECONDS: 1,
    }
    limits = tuple(limits)
    bounds = [one for one in limits if one.rule.metric == Metric.CONTEXT_TOKENS]
    tightest = min(bounds, key=lambda one: one.rule.limit, default=None)
    if tightest is not None and num_tokens > tightest.rule.limit:
        raise NeverFitsLimitError(
            metric=tightest.rule.metric,
            scope=tightest.scope,
            limit=tightest.rule.limit,
            needed=num_tokens,
            limits=(),
        )
    return tuple(
        sorted(
            (
                Demand(_key(one, now), one.rule.limit, needed[Metric(one.rule.metric)])
                for one in limits
                if one.rule.metric in needed
            ),
            key=lambda demand: demand.key,
        )
    )


def check_fit(wanted: Iterable[Demand], held: Mapping[WindowKey, int], now: float) -> None:
    """All or nothing: raise unless every demand fits on top of `held`.

    held   used + reserved of each counter before this request; a missing one is at zero

    Raises NeverFitsLimitError if it could not fit even when all counters were at zero, else
    LimitExceededError.
    """
    wanted = tuple(wanted)
    if too_small := [one for one in wanted if one.amount > one.limit]:
        smallest = min(too_small, key=lambda one: one.limit)
        raise NeverFitsLimitError(
            metric=smallest.key.metric,
            scope=smallest.key.scope,
            limit=smallest.limit,
            needed=smallest.amount,
            limits=statuses(wanted, held, now),
        )
    over = [one for one in wanted if held.get(one.key, 0) + one.amount > one.limit]
    if not over:
        return
    # A window that ends late bars longest; slots without a window may be free at any moment.
    tightest = max(over, key=lambda one: (_reset_seconds(one.key, now) or 0.0, -one.limit))
    raise LimitExceededError(
        metric=tightest.key.metric,
        scope=tightest.key.scope,
        window_seconds=tightest.key.window_seconds,
        limit=tightest.limit,
        used=held.get(tightest.key, 0),
        needed=tightest.amount,
        retry_after_seconds=_reset_seconds(tightest.key, now),
        limits=statuses(wanted, held, now),
    )


def statuses(
    wanted: Iterable[Demand], held: Mapping[WindowKey, int], now: float
) -> tuple[LimitStatus, ...]:
    """Each limit with what is left of it, from the outermost scope in."""
    scopes = list(Scope)
    return tuple(
        LimitStatus(
            metric=one.key.metric,
            scope=one.key.scope,
            window_seconds=one.key.window_seconds,
            limit=one.limit,
            # A limit lowered below what is in use leaves nothing, not less than nothing.
            remaining=max(0, one.limit - held.get(one.key, 0)),
            reset_seconds=_reset_seconds(one.key, now) if held.get(one.key, 0) else 0.0,
        )
        for one in sorted(wanted, key=lambda one: scopes.index(Scope(one.key.scope)))
    )


def settled_amount(metric: str, *, started: bool, num_tokens: int, kv_block_seconds: float) -> int:
    """What finally counts against a metric, in place of its reservation.

    A request counts once it has cost compute; block-seconds count as whole ones, begun ones too.
    Slots count only while they are held.
    """
    if metric == Metric.REQUESTS:
        return 1 if started else 0
    if metric == Metric.KV_BLOCK_SECONDS:
        return math.ceil(kv_block_seconds) if started else 0
    return num_tokens if metric == Metric.TOKENS_TOTAL else 0


def _key(one: ScopedLimit, now: float) -> WindowKey:
    seconds = one.rule.window_seconds
    return WindowKey(
        str(one.scope), one.scope_id, str(one.rule.metric), seconds, window_start(now, seconds)
    )


def _reset_seconds(key: WindowKey, now: float) -> float | None:
    """Until the window ends and its successor begins at zero; None without a window."""
    return key.window_start + key.window_seconds - now if key.window_seconds else None
