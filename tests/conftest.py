"""Shared fixtures. Tests in tests/<folder> cost what the folder's name says."""

import os

import pytest
from hypothesis import Phase, settings

# The same examples each time, so that who finds a failure can repeat it; HEADRACE_FULL=1 draws new
# ones. None is shrunk: for whole histories that takes minutes, and seldom makes them shorter.
UNSHRUNK = [one for one in Phase if one not in (Phase.shrink, Phase.explain)]
settings.register_profile("same", phases=UNSHRUNK, derandomize=True, database=None)
settings.register_profile("new", phases=UNSHRUNK, print_blob=True)
settings.load_profile("new" if os.environ.get("HEADRACE_FULL") == "1" else "same")

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
