"""Frozen configuration, validated once when it is made and passed down by constructor."""

import math
from dataclasses import dataclass, field
from typing import Literal

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
    # Host memory for preempted sequences, in blocks; a tenant may hold at most so many of them.
    num_host_blocks: int = 0
    max_host_blocks_per_tenant: int | None = None
    # Token ids of prompts that every tenant may find in the cache, whoever computed them. Only
    # for what is public anyway: a hit is measurable.
    public_prompts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        _require(self.num_blocks >= 1, f"num_blocks must be >= 1, not {self.num_blocks}")
        _require(self.block_size >= 1, f"block_size must be >= 1, not {self.block_size}")
        _require(
            self.num_host_blocks >= 0, f"num_host_blocks must be >= 0, not {self.num_host_blocks}"
        )
        budget = self.max_host_blocks_per_tenant
        _require(
            budget is None or budget >= 0, f"max_host_blocks_per_tenant must be >= 0, not {budget}"
        )

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
    # How a preempted sequence gets its KV back: by swapping it out to host memory and in again,
    # by recomputing it, or by whichever measured costs say is quicker. Without room in the host
    # pool it is recomputed.
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    # A queue head waits at most so many steps for a running sequence of its tenant to compute
    # blocks that both need.
    max_prefix_delays: int = 8
    # Between classes: strict by rank, where a class that waits is guaranteed this fraction of the
    # service of those before it; or in proportion to the classes' weights.
    class_sharing: Literal["strict", "weighted"] = "strict"
    class_floor: float = 0.05

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
            self.preemption in ("auto", "swap", "recompute"),
            f"preemption must be auto, swap or recompute, not {self.preemption!r}",
        )
        _require(
            self.class_sharing in ("strict", "weighted"),
            f"class_sharing must be strict or weighted, not {self.class_sharing!r}",
        )
        _require(
            0 <= self.class_floor < 1, f"class_floor must be in [0, 1), not {self.class_floor}"
        )
        _require(
            self.max_prefix_delays >= 0,
            f"max_prefix_delays must be >= 0, not {self.max_prefix_delays}",
        )
        _require(
            self.max_preemptions >= 0, f"max_preemptions must be >= 0, not {self.max_preemptions}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: its KV pool and its scheduler."""

    cache: CacheConfig
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    # Prompts are computed in a pool of their own and handed over to `cache` to decode (DistServe,
    # OSDI'24); None computes everything in one pool.
    prefill_cache: CacheConfig | None = None
    # Check every invariant of the KV pool after each step (tests, debugging): O(blocks) per step.
    check_invariants: bool = False

    def __post_init__(self) -> None:
        prefill = self.prefill_cache
        _require(
            prefill is None or prefill.block_size == self.cache.block_size,
            "prefill_cache and cache must have blocks of one size: they are copied whole",
        )
        _require(
            prefill is None or not prefill.num_host_blocks,
            "prefill_cache needs no host blocks: nothing is preempted there",
        )
