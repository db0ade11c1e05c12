"""The fairness bound of the `wfq` policy, and a meter for the gap that it bounds.

Theorem (derivation in docs/decisions.md). Let two tenants f and g of one class both have waiting
requests throughout [t1, t2]. Then their received service W, divided by their weights w, obeys

    |dW_f / w_f - dW_g / w_g|  <=  R_f / w_f + R_g / w_g + 2 * S

where R is the most service that sequences resident at one instant can still receive, and S is
`max_bypass_lead`, by which a tenant may lead the head that it passes when memory blocks that head.
It follows VTC (OSDI'24, lemma 4.3, theorem 4.4) with R in the place of U = max(w_p L, w_q M).
"""

from collections.abc import Mapping, Set
from itertools import combinations

from engine.config import CacheConfig, SchedulerConfig


def max_resident_service(
    config: SchedulerConfig,
    cache: CacheConfig,
    *,
    max_prompt_tokens: int,
    max_output_tokens: int,
    num_pools: int = 1,
) -> float:
    """R: the most service, in units before division by the weight, that the sequences resident
    at one instant can still receive. Prompts are resident together, so they fit the pool at once;
    outputs are not: each may grow into what the sequences that ended before it have freed. With a
    pool for prompts and one for decodes, `cache` is either's, and each has slots of its own."""
    pool = cache.num_tokens
    prompts = min(config.max_seqs * max_prompt_tokens, pool)
    outputs = num_pools * config.max_seqs * min(max_output_tokens, pool)
    per_prompt_token = max(config.charge.prompt, config.charge.cached)
    return per_prompt_token * prompts + config.charge.output * outputs


def service_bound(
    config: SchedulerConfig,
    cache: CacheConfig,
    *,
    weights: tuple[float, float],
    max_prompt_tokens: int,
    max_output_tokens: int,
    num_pools: int = 1,
) -> float:
    """The bound of the theorem for two tenants of these weights, per unit of weight."""
    resident = max_resident_service(
        config,
        cache,
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=max_output_tokens,
        num_pools=num_pools,
    )
    return resident / weights[0] + resident / weights[1] + 2 * config.max_bypass_lead


class ServiceGapMeter:
    """Largest |dW_f/w_f - dW_g/w_g| seen over any interval in which both tenants waited.

    Feed it every state, or samples; between samples both are assumed to have kept waiting.
    """

    def __init__(self) -> None:
        # Least and greatest difference of the two counters in the current interval.
        self._range: dict[tuple[str, str], tuple[float, float]] = {}
        self.largest: dict[tuple[str, str], float] = {}

    @property
    def max_gap(self) -> float:
        return max(self.largest.values(), default=0.0)

    def observe(self, waiting: Set[str], counters: Mapping[str, float]) -> None:
        """`counters` are virtual counters: service received over weight, by tenant."""
        current: dict[tuple[str, str], tuple[float, float]] = {}
        for pair in combinations(sorted(waiting), 2):
            difference = counters[pair[0]] - counters[pair[1]]
            low, high = self._range.get(pair, (difference, difference))
            current[pair] = low, high = min(low, difference), max(high, difference)
            self.largest[pair] = max(self.largest.get(pair, 0.0), high - low)
        self._range = current
