"""What an operator may set."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.errors import InvalidNameError, InvalidPolicyError
from tenants.policy import (
    MAX_KV_BLOCKS,
    MAX_LIMIT,
    MAX_RANK,
    MAX_WEIGHT,
    MAX_WINDOW_SECONDS,
    KVBounds,
    Limit,
    ServiceClass,
    check_limits,
    check_slug,
    check_weight,
    parse_limits,
)


@pytest.mark.parametrize(
    "number", [0, -1, MAX_LIMIT + 1, 1.5, 60.0, float("nan"), True, "60", None]
)
def test_a_limit_is_a_whole_number_in_range(number: Any) -> None:
    with pytest.raises(InvalidPolicyError, match="whole number from 1"):
        Limit(metric="concurrent", limit=number)


@pytest.mark.parametrize(
    "seconds", [0, -60, MAX_WINDOW_SECONDS + 1, 0.5, float("nan"), float("inf"), True, "60", None]
)
def test_a_window_is_a_whole_number_in_range(seconds: Any) -> None:
    with pytest.raises(InvalidPolicyError, match="window_seconds"):
        Limit(metric="requests", limit=1, window_seconds=seconds)


@pytest.mark.parametrize("metric", ["concurrent", "queued", "context_tokens"])
def test_what_has_no_window_refuses_one(metric: str) -> None:
    with pytest.raises(InvalidPolicyError, match="leave it out"):
        Limit(metric=metric, limit=1, window_seconds=60)


def test_an_unknown_metric_is_refused_naming_the_known_ones() -> None:
    with pytest.raises(
        InvalidPolicyError,
        match="requests, tokens_total, kv_block_seconds, concurrent, queued, context",
    ):
        Limit(metric="rpm", limit=1, window_seconds=60)


def test_the_same_counter_cannot_be_limited_twice_in_one_scope() -> None:
    per_minute = Limit(metric="requests", limit=5, window_seconds=60)
    per_hour = Limit(metric="requests", limit=50, window_seconds=3600)
    assert check_limits([per_minute, per_hour]) == (per_minute, per_hour)
    with pytest.raises(InvalidPolicyError, match="set twice"):
        check_limits([per_minute, per_hour, Limit(metric="requests", limit=6, window_seconds=60)])


@pytest.mark.parametrize(
    "document",
    [
        None,
        {"metric": "concurrent", "limit": 1},
        ["concurrent"],
        [{"metric": "concurrent"}],
        [{"limit": 1}],
        [{"metric": "concurrent", "limit": 1, "burst": 2}],
        [{"metric": ["concurrent"], "limit": 1}],
    ],
)
def test_a_malformed_document_is_refused(document: object) -> None:
    with pytest.raises(InvalidPolicyError):
        parse_limits(document)


@given(
    st.lists(
        st.one_of(
            st.builds(
                Limit,
                metric=st.sampled_from(["requests", "tokens_total", "kv_block_seconds"]),
                limit=st.integers(1, MAX_LIMIT),
                window_seconds=st.integers(1, MAX_WINDOW_SECONDS),
            ),
            st.builds(
                Limit,
                metric=st.sampled_from(["concurrent", "queued", "context_tokens"]),
                limit=st.integers(1, MAX_LIMIT),
            ),
        ),
        unique_by=lambda limit: (limit.metric, limit.window_seconds),
    )
)
def test_documents_are_read_back_unchanged(limits: list[Limit]) -> None:
    assert parse_limits([limit.to_document() for limit in limits]) == tuple(limits)


@pytest.mark.parametrize("weight", [0, -1, 1e-4, 1e7, float("nan"), float("inf"), True, "1", None])
def test_a_weight_is_a_number_in_range(weight: object) -> None:
    with pytest.raises(InvalidPolicyError, match="must be a number from"):
        check_weight(weight)


def test_a_whole_weight_becomes_a_float() -> None:
    assert repr(check_weight(2)) == "2.0"


@pytest.mark.parametrize("number", [-1, MAX_KV_BLOCKS + 1, 1.5, 8.0, float("nan"), True, "8", None])
def test_a_kv_floor_is_a_whole_number_in_range(number: Any) -> None:
    with pytest.raises(InvalidPolicyError, match=r"KV floor .* from 0 to"):
        KVBounds(floor_blocks=number)


@pytest.mark.parametrize("number", [0, -1, MAX_KV_BLOCKS + 1, 1.5, float("inf"), True, "8"])
def test_a_kv_cap_is_a_whole_number_in_range(number: Any) -> None:
    with pytest.raises(InvalidPolicyError, match=r"KV cap .* from 1 to"):
        KVBounds(cap_blocks=number)


def test_a_kv_floor_is_not_above_the_cap() -> None:
    assert KVBounds(floor_blocks=8, cap_blocks=8).cap_blocks == 8
    with pytest.raises(InvalidPolicyError, match="floor 9 is above the cap 8"):
        KVBounds(floor_blocks=9, cap_blocks=8)


def a_class(**fields: Any) -> ServiceClass:
    return ServiceClass(**{"name": "c", "rank": 0, "preemptible": False} | fields)


@pytest.mark.parametrize("field", ["max_queue_seconds", "max_wait_seconds"])
@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e9, True, "1"])
def test_a_time_of_a_class_is_a_number_in_range(field: str, seconds: Any) -> None:
    with pytest.raises(InvalidPolicyError, match=f"{field} .* above 0 and at most"):
        a_class(**{field: seconds})


@pytest.mark.parametrize("weight", [0, -1, 1e-4, 1e7, float("nan"), float("inf"), True, "1", None])
def test_a_class_has_the_weight_that_a_tenant_may_have(weight: Any) -> None:
    with pytest.raises(InvalidPolicyError, match=r"must be a number from 0\.001 to 1e"):
        a_class(weight=weight)


@pytest.mark.parametrize("rank", [-1, MAX_RANK + 1, 1.0, float("nan"), True, "1", None])
def test_a_rank_is_a_whole_number_in_range(rank: Any) -> None:
    with pytest.raises(InvalidPolicyError, match=r"rank .* from 0 to 10000; .* goes first"):
        a_class(rank=rank)


@pytest.mark.parametrize("depth", [0, -1, MAX_LIMIT + 1, 2.0, float("nan"), True, "2"])
def test_a_queue_depth_is_a_whole_number_in_range(depth: Any) -> None:
    with pytest.raises(InvalidPolicyError, match=r"max_queued .* whole number from 1"):
        a_class(max_queued=depth)


def test_the_widest_class_is_one() -> None:
    widest = a_class(
        rank=MAX_RANK,
        weight=MAX_WEIGHT,
        max_wait_seconds=MAX_WINDOW_SECONDS,
        max_queue_seconds=MAX_WINDOW_SECONDS,
        max_queued=MAX_LIMIT,
    )
    assert widest.max_queued == MAX_LIMIT
    assert a_class().max_wait_seconds is None


@pytest.mark.parametrize("name", ["", "Gold", "-gold", "a b", "gold\n", "g" * 64])
def test_what_is_called_by_its_name_has_a_plain_one(name: str) -> None:
    with pytest.raises(InvalidNameError, match=r"class .*: use 1 to 63 of a-z"):
        check_slug("class", name)
    assert check_slug("class", "g" * 63) == "g" * 63
