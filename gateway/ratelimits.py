"""Headers about limits, as OpenAI writes them, what is left and when to come back; and about how
long an answer was expected to take."""

import math
import random
from collections.abc import Iterable

from tenants.errors import LimitExceededError, LimitStatus
from tenants.policy import Metric, Scope

# SDKs retry by themselves within a minute; a limit that opens later is the caller's decision.
MAX_USEFUL_RETRY_SECONDS = 60.0
# Nobody knows when another request of the tenant will end.
UNKNOWN_RETRY_SECONDS = 1.0
# Spread of the retries of clients that were refused at the same instant.
JITTER = 0.1

_HEADER_NAMES = {Metric.REQUESTS: "requests", Metric.TOKENS_TOTAL: "tokens"}


def go_duration(seconds: float) -> str:
    """Seconds as Go prints a time.Duration: 12ms, 1s, 17.5s, 6m0s, 1h0m0s. Rounded up to ms."""
    total_ms = max(0, math.ceil(seconds * 1000 - 1e-6))
    if total_ms == 0:
        return "0s"
    if total_ms < 1000:
        return f"{total_ms}ms"
    minutes, ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


def limit_headers(limits: Iterable[LimitStatus]) -> dict[str, str]:
    """The tightest limit of requests and of tokens in OpenAI's headers; slots in our own.

    Limits of the platform are left out: what remains of them tells what other tenants do.
    """
    headers = {}
    limits = tuple(one for one in limits if one.scope != Scope.PLATFORM)
    for metric, name in _HEADER_NAMES.items():
        if tightest := _tightest(limits, metric):
            headers[f"x-ratelimit-limit-{name}"] = str(tightest.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(tightest.remaining)
            headers[f"x-ratelimit-reset-{name}"] = go_duration(tightest.reset_seconds or 0.0)
    if slots := _tightest(limits, Metric.CONCURRENT):
        headers["x-headrace-limit-concurrent"] = str(slots.limit)
        headers["x-headrace-remaining-concurrent"] = str(slots.remaining)
    return headers


def estimate_headers(seconds: float) -> dict[str, str]:
    """When the first token was expected, from the request's arrival on."""
    return {"x-headrace-estimated-ttft-ms": str(max(0, round(seconds * 1000)))}


def refusal_headers(error: LimitExceededError) -> dict[str, str]:
    """When to retry, and whether an SDK should try by itself at all."""
    seconds = error.retry_after_seconds
    wait = UNKNOWN_RETRY_SECONDS if seconds is None else seconds
    # Only ever later than the true time, so that who obeys is never refused for being early.
    spread = wait + random.uniform(0, min(1.0, JITTER * wait))  # noqa: S311 -- not a secret
    headers = limit_headers(error.limits)
    headers["retry-after"] = str(max(1, math.ceil(wait)))
    headers["retry-after-ms"] = str(max(1, math.ceil(spread * 1000)))
    if wait > MAX_USEFUL_RETRY_SECONDS:
        headers["x-should-retry"] = "false"
    return headers


def refusal_message(error: LimitExceededError) -> str:
    """OpenAI's wording: which limit, what is used, what was asked, when to come back.

    Of the limits of the platform and of a class no numbers: others' use is not this tenant's
    business.
    """
    unit = "at once" if not error.window_seconds else f"per {go_duration(error.window_seconds)}"
    when = (
        "as soon as another request ends"
        if error.retry_after_seconds is None
        else f"in {go_duration(error.retry_after_seconds)}"
    )
    if error.scope not in (Scope.TENANT, Scope.KEY):
        whose = "this server" if error.scope == Scope.PLATFORM else f"the {error.scope}"
        return f"Rate limit reached for {whose} on {error.metric} {unit}. Please try again {when}."
    return (
        f"Rate limit reached for this {error.scope} on {error.metric} {unit}: Limit {error.limit}, "
        f"Used {error.used}, Requested {error.needed}. Please try again {when}."
    )


def _tightest(limits: tuple[LimitStatus, ...], metric: Metric) -> LimitStatus | None:
    """The limit of this metric with the least left; of equals, the one that resets last."""
    return min(
        (one for one in limits if one.metric == metric),
        key=lambda one: (one.remaining, -(one.reset_seconds or 0.0)),
        default=None,
    )
