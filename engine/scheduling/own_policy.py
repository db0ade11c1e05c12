"""An operator's own policy: a class by dotted name, tried before it serves, and watched then."""

import importlib
import logging
import math
from typing import Any

from engine.config import ChargeRates
from engine.errors import ConfigError
from engine.scheduling.policies import FirstCome, Key, Policy, make_policy
from engine.scheduling.shares import VirtualCounters
from engine.sequence import SamplingParams, Sequence, TenantShare

logger = logging.getLogger(__name__)


class GuardedPolicy:
    """Hands every question to an operator's policy, until it raises or answers what is no answer.
    From then on `fcfs` answers, and `error` says why: the scheduler then serves by that alone.

    Its keys for a waiting sequence should only grow: the scheduler looks again at the least one, so
    a key that shrank is noticed late.
    """

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.is_flat = bool(policy.is_flat)
        self.weighs_memory = _weighs_memory(policy)
        self.error: str | None = None
        self._policy = policy
        self._fallback = FirstCome()

    def order(self, seq: Sequence, counters: VirtualCounters) -> Key:
        if self.error is None:
            try:
                return _key(self._policy.order(seq, counters))
            except Exception as error:  # foreign code: whatever it raises, the loop goes on
                self._fail("order", error)
        return self._fallback.order(seq, counters)

    def victim(self, seq: Sequence, counters: VirtualCounters) -> Key:
        if self.error is None:
            try:
                return _key(self._policy.victim(seq, counters))
            except Exception as error:
                self._fail("victim", error)
        return self._fallback.victim(seq, counters)

    def charge(self, rates: ChargeRates, *, prompt: int, cached: int, output: int) -> float:
        if self.error is None:
            try:
                service = self._policy.charge(rates, prompt=prompt, cached=cached, output=output)
                return _service(service)
            except Exception as error:
                self._fail("charge", error)
        return self._fallback.charge(rates, prompt=prompt, cached=cached, output=output)

    def charge_memory(self, *, part: float, total: float) -> float:
        if self.error is None:
            try:
                return _service(self._policy.charge_memory(part=part, total=total))
            except Exception as error:
                self._fail("charge_memory", error)
        return self._fallback.charge_memory(part=part, total=total)

    def _fail(self, question: str, error: Exception) -> None:
        self.error = f"{question} failed: {type(error).__name__}: {error}"
        logger.error("policy %s: %s; fcfs takes its place", self.name, self.error)


def policy_named(name: str) -> Policy:
    """One of ours, or an operator's own as "package.module:Class". Raises ConfigError."""
    return load_policy(name) if ":" in name else make_policy(name)


def load_policy(name: str) -> GuardedPolicy:
    """The policy at "package.module:Class", tried on a sample. Raises ConfigError saying what is
    wrong with it."""
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
        if not isinstance(found, type):  # to call it might do anything
            raise TypeError(f"{class_name} is no class")
        policy = found()
        _try_out(policy)
        return GuardedPolicy(policy)
    except Exception as error:  # foreign code
        raise ConfigError(
            f"policy {name!r} cannot be used: {type(error).__name__}: {error}; it must be a class "
            "without arguments that has name, is_flat, order, victim and charge, and "
            "charge_memory if weighs_memory is true"
        ) from error


def _try_out(policy: Any) -> None:
    params = SamplingParams(max_tokens=1)
    share = TenantShare(tenant="sample")
    seq = Sequence("sample", share, "sample", [1, 2, 3], params, arrived=0.0)
    counters = VirtualCounters()
    _key(policy.order(seq, counters))
    _key(policy.victim(seq, counters))
    _service(policy.charge(ChargeRates(), prompt=3, cached=2, output=1))
    if not isinstance(policy.name, str) or not isinstance(policy.is_flat, bool):
        raise TypeError("name must be a string and is_flat a bool")
    if _weighs_memory(policy):
        _service(policy.charge_memory(part=0.5, total=8.0))


def _weighs_memory(policy: Any) -> bool:
    """Policies need not say, if they do not."""
    weighs = getattr(policy, "weighs_memory", False)
    if not isinstance(weighs, bool):
        raise TypeError("weighs_memory must be a bool")
    return weighs


def _key(value: Any) -> Key:
    """The value, if it orders."""
    if not isinstance(value, tuple) or not value or any(math.isnan(part) for part in value):
        raise TypeError(f"a key must be a tuple of numbers, not {value!r}")
    return value


def _service(value: Any) -> float:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"a charge must be a finite number >= 0, not {value!r}")
    return float(value)
