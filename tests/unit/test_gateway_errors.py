"""Exception class -> status, type, code, headers; and the headers about limits."""

import math

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from engine.errors import EngineStoppedError, NeverFitsError, TemplateError
from gateway import errors
from gateway.errors import answer
from gateway.ratelimits import go_duration, limit_headers, refusal_headers
from tenants.errors import (
    DuplicateRequestError,
    ExpiredKeyError,
    LimitExceededError,
    LimitStatus,
    NeverFitsLimitError,
    RevokedKeyError,
    StoreUnavailableError,
    TenantSuspendedError,
    UnknownKeyError,
)

INVALID, UNAVAILABLE = "invalid_request_error", "service_unavailable_error"


def exceeded(metric, *, window=60, retry=12.3, scope="tenant", limits=()):
    return LimitExceededError(
        metric=metric,
        scope=scope,
        window_seconds=window,
        limit=10,
        used=9,
        needed=2,
        retry_after_seconds=retry,
        limits=limits,
    )


def never_fits(metric, limits=()):
    return NeverFitsLimitError(metric=metric, scope="tenant", limit=100, needed=500, limits=limits)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (errors.InvalidRequestError("x", param="p"), 400, INVALID, "invalid_value", "p"),
        (errors.InvalidRequestError("x", code=None), 400, INVALID, None, None),
        (
            errors.UnsupportedParameterError("x", param="n"),
            400,
            INVALID,
            "unsupported_parameter",
            "n",
        ),
        (
            errors.ContextLengthError("x", param="prompt"),
            400,
            INVALID,
            "context_length_exceeded",
            "prompt",
        ),
        (TemplateError("x"), 400, INVALID, "invalid_value", "messages"),
        (NeverFitsError("x"), 400, INVALID, "context_length_exceeded", None),
        (errors.InvalidKeyError(), 401, INVALID, "invalid_api_key", None),
        (errors.ModelNotFoundError("x"), 404, INVALID, "model_not_found", None),
        (errors.BodyTimeoutError("x"), 408, "timeout", "request_timeout", None),
        (errors.BodyTooLargeError("x"), 413, INVALID, "request_too_large", None),
        (errors.UnsupportedMediaTypeError("x"), 415, INVALID, "unsupported_media_type", None),
        (exceeded("requests"), 429, "requests", "rate_limit_exceeded", None),
        (exceeded("tokens_total"), 429, "tokens", "rate_limit_exceeded", None),
        (
            exceeded("concurrent", window=0, retry=None),
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
            None,
        ),
        (never_fits("tokens_total"), 429, "tokens", "request_too_large_for_limit", None),
        (never_fits("context_tokens"), 400, INVALID, "context_length_exceeded", None),
        (errors.ClientGoneError(), 499, INVALID, "client_closed_request", None),
        (ClientDisconnect(), 499, INVALID, "client_closed_request", None),
        (errors.GenerationFailedError("secret"), 500, "server_error", "engine_error", None),
        (DuplicateRequestError("secret"), 500, "server_error", "internal_error", None),
        (RuntimeError("secret"), 500, "server_error", "internal_error", None),
        (StoreUnavailableError("x"), 503, UNAVAILABLE, "policy_store_unavailable", None),
        (errors.EngineNotReadyError("x"), 503, UNAVAILABLE, "server_is_overloaded", None),
        (EngineStoppedError("x"), 503, UNAVAILABLE, "server_is_overloaded", None),
        (errors.GenerationAbortedError(), 503, UNAVAILABLE, "server_is_overloaded", None),
        (HTTPException(404), 404, INVALID, "unknown_url", None),
        (HTTPException(405), 405, INVALID, "method_not_supported", None),
    ],
)
def test_the_table(error, status, kind, code, param):
    said = answer(error)

    assert said.status == status
    assert set(said.body["error"]) == {"message", "type", "param", "code"}
    assert (said.body["error"]["type"], said.body["error"]["code"]) == (kind, code)
    assert said.body["error"]["param"] == param
    assert said.body["error"]["message"]
    assert "secret" not in said.body["error"]["message"]


def test_every_reason_to_refuse_a_key_has_the_same_answer():
    refused = [UnknownKeyError, RevokedKeyError, ExpiredKeyError, TenantSuspendedError]

    answers = [answer(cls("why")) for cls in refused] + [answer(errors.InvalidKeyError())]

    assert all(one == answers[0] for one in answers)
    assert answers[0].headers == {"www-authenticate": "Bearer"}


def test_what_can_never_fit_is_not_worth_a_retry():
    assert answer(never_fits("tokens_total", (limit("tokens_total", 40),))).headers == {
        "x-should-retry": "false",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "40",
        "x-ratelimit-reset-tokens": "30s",
    }


def test_unavailable_says_when_to_come_back():
    for error in (StoreUnavailableError("x"), errors.EngineNotReadyError("x")):
        assert answer(error).headers == {"retry-after": "5", "retry-after-ms": "5000"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-1, "0s"),
        (0.0001, "1ms"),
        (0.012, "12ms"),
        (0.9991, "1s"),
        (1, "1s"),
        (17.5, "17.5s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (3600, "1h0m0s"),
        (3661.25, "1h1m1.25s"),
        (86400, "24h0m0s"),
    ],
)
def test_durations_as_go_prints_them(seconds, text):
    assert go_duration(seconds) == text


def limit(metric, remaining, *, reset=30.0, scope="tenant", total=100):
    return LimitStatus(
        metric=metric,
        scope=scope,
        window_seconds=60,
        limit=total,
        remaining=remaining,
        reset_seconds=reset,
    )


def test_the_tightest_limit_of_each_kind_is_reported():
    headers = limit_headers(
        [
            limit("requests", 50, total=1000),
            limit("requests", 7, reset=6.5),
            limit("tokens_total", 900, total=1000),
            limit("tokens_total", 400, total=500, reset=3600),
            limit("concurrent", 2, total=3, reset=None),
        ]
    )

    assert headers == {
        "x-ratelimit-limit-requests": "100",
        "x-ratelimit-remaining-requests": "7",
        "x-ratelimit-reset-requests": "6.5s",
        "x-ratelimit-limit-tokens": "500",
        "x-ratelimit-remaining-tokens": "400",
        "x-ratelimit-reset-tokens": "1h0m0s",
        "x-headrace-limit-concurrent": "3",
        "x-headrace-remaining-concurrent": "2",
    }


def test_what_all_tenants_use_together_is_told_to_none():
    limits = (
        limit("requests", 0, scope="platform", total=7777),
        limit("concurrent", 0, scope="platform", total=7777),
        limit("requests", 3, scope="key"),
    )

    said = answer(exceeded("requests", scope="platform", limits=limits))

    assert said.body["error"]["message"] == (
        "Rate limit reached for this server on requests per 1m0s. Please try again in 12.3s."
    )
    shown = {name: value for name, value in said.headers.items() if "retry" not in name}
    assert shown == {
        "x-ratelimit-limit-requests": "100",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "30s",
    }


def test_without_limits_there_are_no_headers():
    assert limit_headers([]) == {}


@pytest.mark.parametrize("seconds", [0.004, 0.5, 12.3, 59.2])
def test_a_refusal_says_when_a_retry_will_fit_never_earlier(seconds):
    for _ in range(50):
        headers = refusal_headers(exceeded("requests", retry=seconds))

        assert int(headers["retry-after"]) == max(1, math.ceil(seconds))
        assert seconds * 1000 <= int(headers["retry-after-ms"]) <= seconds * 1100 + 1
        assert "x-should-retry" not in headers


def test_a_limit_that_opens_in_hours_stops_automatic_retries():
    headers = refusal_headers(exceeded("tokens_total", window=86400, retry=7200.0))

    assert (headers["retry-after"], headers["x-should-retry"]) == ("7200", "false")


def test_a_slot_that_frees_when_another_request_ends_is_retried_soon():
    headers = refusal_headers(exceeded("concurrent", window=0, retry=None))

    assert headers["retry-after"] == "1"


def test_the_message_names_the_limit_and_the_numbers():
    message = answer(exceeded("tokens_total")).body["error"]["message"]

    assert message == (
        "Rate limit reached for this tenant on tokens_total per 1m0s: Limit 10, Used 9, "
        "Requested 2. Please try again in 12.3s."
    )
