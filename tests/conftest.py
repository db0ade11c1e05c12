"""Shared fixtures. Tests in tests/<folder> cost what the folder's name says."""

import os

import pytest
from hypothesis import Phase, settings

# A failure is not shrunk: for whole histories that takes minutes and seldom makes them shorter.
# The blob that is printed repeats it; HEADRACE_SHRINK=1 shrinks.
QUICK = [one for one in Phase if one not in (Phase.shrink, Phase.explain)]
settings.register_profile("quick", phases=QUICK, print_blob=True)
if os.environ.get("HEADRACE_SHRINK") != "1":
    settings.load_profile("quick")

# As engine/model does for the product: tests import torch before it, and OpenMP threads that spin
# while they wait make a step ten times as long when anything else wants the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that would download fails instead

REQUIRED = frozenset(filter(None, os.environ.get("HEADRACE_REQUIRE", "").split(",")))


def skip_or_fail(what: str, reason: str) -> None:
    """Skip because `what` is absent here; fail instead when HEADRACE_REQUIRE names it."""
    if what in REQUIRED:
        pytest.fail(f"HEADRACE_REQUIRE names {what}, but {reason}", pytrace=False)
    pytest.skip(f"no {what}: {reason}")
