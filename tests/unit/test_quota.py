"""Arithmetic of limits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.errors import LimitExceededError, LimitStatus, NeverFitsLimitError
from tenants.policy import Limit, Scope, ScopedLimit
from tenants.quota import (
    Demand,
    WindowKey,
    check_fit,
    demands,
    settled_amount,
    statuses,
    window_start,
)


def scoped(scope: Scope, metric: str, limit: int, window_seconds: int = 0) -> ScopedLimit:
    rule = Limit(metric=metric, limit=limit, window_seconds=window_seconds)
    return ScopedLimit(scope=scope, scope_id=f"the-{scope}", rule=rule)


def key(scope: str, metric: str, window_seconds: int = 0, start: int = 0) -> WindowKey:
    return WindowKey(scope, f"the-{scope}", metric, window_seconds, start)


PER_MINUTE = scoped(Scope.TENANT, "requests", 20, 60)
TOKENS = scoped(Scope.KEY, "tokens_total", 1000, 60)
BLOCK_SECONDS = scoped(Scope.TENANT, "kv_block_seconds", 100, 60)
SLOTS = scoped(Scope.PLATFORM, "concurrent", 5)
CONTEXT = scoped(Scope.TENANT, "context_tokens", 100)


@pytest.mark.parametrize(
    ("now", "seconds", "start"),
    [(0.0, 60, 0), (59.9, 60, 0), (60.0, 60, 60), (60.1, 60, 60), (119.99, 60, 60), (7.0, 0, 0)],
)
def test_windows_are_aligned_to_the_epoch(now: float, seconds: int, start: int) -> None:
    assert window_start(now, seconds) == start


@given(now=st.floats(0, 1e11), seconds=st.integers(1, 10**8))
def test_a_window_contains_its_moment(now: float, seconds: int) -> None:
    start = window_start(now, seconds)
    assert start % seconds == 0
    assert start <= now < start + seconds


def test_each_limit_gets_its_demand_in_lock_order() -> None:
    wanted = demands(
        [PER_MINUTE, TOKENS, SLOTS, BLOCK_SECONDS, CONTEXT],
        prompt_tokens=30,
        max_output_tokens=12,
        now=130.5,
    )
    assert wanted == (
        Demand(key("key", "tokens_total", 60, 120), 1000, 42),
        Demand(key("platform", "concurrent"), 5, 1),
        Demand(key("tenant", "kv_block_seconds", 60, 120), 100, 1),
        Demand(key("tenant", "requests", 60, 120), 20, 1),
    )


@given(st.permutations([PER_MINUTE, TOKENS, SLOTS, CONTEXT]))
def test_lock_order_does_not_depend_on_the_order_of_limits(limits: list[ScopedLimit]) -> None:
    wanted = demands(limits, prompt_tokens=1, max_output_tokens=1, now=0)
    assert wanted == demands(
        [PER_MINUTE, TOKENS, SLOTS, CONTEXT], prompt_tokens=1, max_output_tokens=1, now=0
    )


def test_what_needs_more_than_a_limit_never_fits_and_names_the_smallest() -> None:
    limits = [TOKENS, scoped(Scope.TENANT, "tokens_total", 500, 60), SLOTS]
    wanted = demands(limits, prompt_tokens=1000, max_output_tokens=1, now=70.0)
    with pytest.raises(NeverFitsLimitError) as caught:
        check_fit(wanted, {key("platform", "concurrent"): 5}, now=70.0)
    error = caught.value
    assert (error.metric, error.scope, error.limit, error.needed) == (
        "tokens_total",
        "tenant",
        500,
        1001,
    )
    assert [(one.scope, one.remaining) for one in error.limits] == [
        ("platform", 0),
        ("tenant", 500),
        ("key", 1000),
    ]


def test_what_is_longer_than_the_context_limit_is_refused_before_any_counter_is_read() -> None:
    with pytest.raises(NeverFitsLimitError) as caught:
        demands([TOKENS, CONTEXT], prompt_tokens=1000, max_output_tokens=1, now=0)
    error = caught.value
    assert (error.metric, error.scope, error.limit, error.needed) == (
        "context_tokens",
        "tenant",
        100,
        1001,
    )


def test_what_needs_exactly_the_limit_fits_an_idle_tenant() -> None:
    (wanted,) = demands([TOKENS], prompt_tokens=990, max_output_tokens=10, now=0)
    check_fit([wanted], {}, now=0)
    (wanted,) = demands([TOKENS], prompt_tokens=990, max_output_tokens=11, now=0)
    with pytest.raises(NeverFitsLimitError):
        check_fit([wanted], {}, now=0)


@pytest.mark.parametrize("tokens", [(-1, 5), (5, -1)])
def test_negative_tokens_are_a_mistake_of_the_caller(tokens: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="negative"):
        demands([], prompt_tokens=tokens[0], max_output_tokens=tokens[1], now=0)


def test_the_last_one_fits_and_the_next_does_not() -> None:
    wanted = demands([PER_MINUTE], prompt_tokens=1, max_output_tokens=1, now=70.0)
    check_fit(wanted, {wanted[0].key: 19}, now=70.0)
    with pytest.raises(LimitExceededError) as caught:
        check_fit(wanted, {wanted[0].key: 20}, now=70.0)
    error = caught.value
    assert (error.metric, error.scope, error.window_seconds) == ("requests", "tenant", 60)
    assert (error.limit, error.used, error.needed) == (20, 20, 1)
    assert error.retry_after_seconds == 50.0
    assert str(error) == (
        "the tenant's requests limit is 20 per 60 s: 20 in use, 1 needed; retry in 50.0 s"
    )
    assert error.limits == (
        LimitStatus(
            metric="requests",
            scope="tenant",
            window_seconds=60,
            limit=20,
            remaining=0,
            reset_seconds=50.0,
        ),
    )


def test_nobody_knows_when_a_slot_is_free() -> None:
    wanted = demands([SLOTS], prompt_tokens=1, max_output_tokens=1, now=70.0)
    with pytest.raises(LimitExceededError, match="retry when another request ends") as caught:
        check_fit(wanted, {wanted[0].key: 5}, now=70.0)
    assert caught.value.retry_after_seconds is None
    assert caught.value.limits[0].reset_seconds is None


def test_the_limit_that_bars_longest_is_named() -> None:
    hourly = scoped(Scope.KEY, "requests", 100, 3600)
    wanted = demands([SLOTS, hourly, PER_MINUTE], prompt_tokens=1, max_output_tokens=1, now=70.0)
    full = {one.key: one.limit for one in wanted}
    with pytest.raises(LimitExceededError) as caught:
        check_fit(wanted, full, now=70.0)
    assert (caught.value.scope, caught.value.retry_after_seconds) == ("key", 3530.0)


def test_of_limits_that_bar_equally_long_the_smallest_is_named() -> None:
    limits = [scoped(Scope.TENANT, "requests", 9, 60), scoped(Scope.KEY, "requests", 3, 60)]
    wanted = demands(limits, prompt_tokens=1, max_output_tokens=1, now=0)
    with pytest.raises(LimitExceededError) as caught:
        check_fit(wanted, {one.key: one.limit for one in wanted}, now=0)
    assert caught.value.scope == "key"


def test_statuses_come_from_the_outermost_scope_in_and_never_below_zero() -> None:
    wanted = demands([TOKENS, PER_MINUTE, SLOTS], prompt_tokens=1, max_output_tokens=1, now=0)
    # The tenant's limit was lowered to 20 after 25 had been used.
    held = {key("tenant", "requests", 60): 25, key("platform", "concurrent"): 2}
    assert [(one.scope, one.remaining, one.reset_seconds) for one in statuses(wanted, held, 0)] == [
        ("platform", 3, None),
        ("tenant", 0, 60.0),
        ("key", 1000, 0.0),
    ]


@pytest.mark.parametrize(
    ("metric", "started", "amount"),
    [
        ("requests", True, 1),
        ("requests", False, 0),
        ("tokens_total", True, 7),
        ("concurrent", True, 0),
        ("kv_block_seconds", True, 3),
        ("kv_block_seconds", False, 0),
    ],
)
def test_what_remains_of_a_reservation(metric: str, started: bool, amount: int) -> None:
    settled = settled_amount(metric, started=started, num_tokens=7, kv_block_seconds=2.25)
    assert settled == amount


@pytest.mark.parametrize(
    ("used", "amount"), [(0.0, 0), (1e-9, 1), (1.0, 1), (1.0000001, 2), (41.5, 42), (42.0, 42)]
)
def test_block_seconds_are_rounded_up_to_whole_ones(used: float, amount: int) -> None:
    settled = settled_amount("kv_block_seconds", started=True, num_tokens=9, kv_block_seconds=used)
    assert (settled, type(settled)) == (amount, int)


def test_one_block_second_must_be_left_and_what_overran_leaves_none() -> None:
    """However much the request will hold: nobody knows."""
    wanted = demands([BLOCK_SECONDS], prompt_tokens=10**6, max_output_tokens=10**6, now=70.0)
    (window,) = (one.key for one in wanted)
    check_fit(wanted, {window: 99}, now=70.0)
    for used in (100, 250):
        with pytest.raises(LimitExceededError) as caught:
            check_fit(wanted, {window: used}, now=70.0)
        error = caught.value
        assert (error.metric, error.limit, error.used, error.needed) == (
            "kv_block_seconds",
            100,
            used,
            1,
        )
        assert error.retry_after_seconds == 50.0
        assert [one.remaining for one in error.limits] == [0]


@given(
    limit=st.integers(1, 50),
    amounts=st.lists(st.integers(1, 60), max_size=30),
    gaps=st.lists(st.floats(0, 30), min_size=30, max_size=30),
)
def test_admission_is_exact_and_retrying_after_the_hint_succeeds(
    limit: int, amounts: list[int], gaps: list[float]
) -> None:
    """Against a plain list of what was admitted in each window."""
    rule = [scoped(Scope.TENANT, "tokens_total", limit, 60)]
    admitted: list[tuple[float, int]] = []
    now = 0.0

    def held_at(moment: float) -> int:
        window = moment // 60
        return sum(amount for at, amount in admitted if at // 60 == window)

    for amount, gap in zip(amounts, gaps, strict=False):
        now += gap
        wanted = demands(rule, prompt_tokens=amount, max_output_tokens=0, now=now)
        if amount > limit:
            with pytest.raises(NeverFitsLimitError):
                check_fit(wanted, {wanted[0].key: held_at(now)}, now)
            continue
        if held_at(now) + amount <= limit:
            check_fit(wanted, {wanted[0].key: held_at(now)}, now)
            admitted.append((now, amount))
            continue
        with pytest.raises(LimitExceededError) as caught:
            check_fit(wanted, {wanted[0].key: held_at(now)}, now)
        assert caught.value.retry_after_seconds is not None
        assert caught.value.retry_after_seconds > 0
        # As a client does it: whole seconds, rounded up.
        later = now + math.ceil(caught.value.retry_after_seconds)
        again = demands(rule, prompt_tokens=amount, max_output_tokens=0, now=later)
        check_fit(again, {again[0].key: held_at(later)}, later)
