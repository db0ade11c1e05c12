"""Shared fixtures. Tests in tests/<folder> cost what the folder's name says."""

import os

import pytest

REQUIRED = frozenset(filter(None, os.environ.get("HEADRACE_REQUIRE", "").split(",")))


def skip_or_fail(what: str, reason: str) -> None:
    """Skip because `what` is absent here; fail instead when HEADRACE_REQUIRE names it."""
    if what in REQUIRED:
        pytest.fail(f"HEADRACE_REQUIRE names {what}, but {reason}", pytrace=False)
    pytest.skip(f"no {what}: {reason}")
