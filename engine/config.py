"""Frozen configuration, validated once when it is made and passed down by constructor."""

import math
from dataclasses import dataclass, field

from engine.errors import ConfigError


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChargeRates:
    """What one token costs on a tenant's virtual counter, before division by the weight."""

    prompt: float = 1.0
    cached: float = 0.1
    output: float = 2.0

    def __post_init__(self) -> None:
        for name in ("prompt", "cached", "output"):
            rate = getattr(self, name)
            _require(
                math.isfinite(rate) and rate >= 0, f"charge rate {name} must be >= 0, not {rate}"
            )
        _require(self.output > 0, "charge rate output must be > 0: a free token is never fair")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache: one pool of equal blocks."""

    num_blocks: int
    block_size: int = 16  # tokens
    enable_prefix_cache: bool = True

    def __post_init__(self) -> None:
        _require(self.num_blocks >= 1, f"num_blocks must be >= 1, not {self.num_blocks}")
        _require(self.block_size >= 1, f"block_size must be >= 1, not {self.block_size}")

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and rules of admission."""

    policy: str = "wfq"
    max_step_tokens: int = 512
    max_seqs: int = 32
    max_model_len: int = 8192  # tokens of prompt and output together
    charge: ChargeRates = field(default_factory=ChargeRates)
    # Fraction of the pool that an admission must leave free, so that running sequences can grow.
    watermark: float = 0.01
    # A queue head that does not fit may be passed this often, for this long, by tenants whose
    # counter leads the head's by at most this much (service units); then blocks are kept for it.
    max_bypasses: int = 8
    max_bypass_seconds: float = 2.0
    max_bypass_lead: float = 512.0
    # After this many preemptions a sequence is a victim only if every candidate is at the bound.
    max_preemptions: int = 3

    def __post_init__(self) -> None:
        for name in ("max_step_tokens", "max_seqs", "max_model_len"):
            _require(getattr(self, name) >= 1, f"{name} must be >= 1, not {getattr(self, name)}")
        _require(
            self.max_step_tokens >= self.max_seqs,
            f"max_step_tokens ({self.max_step_tokens}) must be >= max_seqs ({self.max_seqs}): "
            "every running sequence decodes one token per step",
        )
        _require(0 <= self.watermark < 1, f"watermark must be in [0, 1), not {self.watermark}")
        _require(self.max_bypasses >= 0, f"max_bypasses must be >= 0, not {self.max_bypasses}")
        for name in ("max_bypass_seconds", "max_bypass_lead"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value >= 0, f"{name} must be >= 0, not {value}")
        _require(
            self.max_preemptions >= 0, f"max_preemptions must be >= 0, not {self.max_preemptions}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: its KV pool and its scheduler."""

    cache: CacheConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    # Check every invariant of the KV pool after each step (tests, debugging): O(blocks) per step.
    check_invariants: bool = False
