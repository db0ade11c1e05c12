"""What can never run here is refused before it waits."""

from engine.config import CacheConfig, SchedulerConfig
from engine.errors import ConfigError, NeverFitsError
from engine.sequence import SamplingParams, TenantShare


def check_fits(
    num_prompt_tokens: int,
    params: SamplingParams,
    share: TenantShare,
    config: SchedulerConfig,
    cache: CacheConfig,
    num_kept_blocks: int = 0,
) -> None:
    """Raise NeverFitsError for a request that could not run even alone, and ConfigError where its
    tenant's floor does not fit the pool beside the others.

    num_kept_blocks  of the pool, which floors of other tenants keep for them
    """
    if num_kept_blocks + share.kv_floor_blocks > cache.num_blocks:
        raise ConfigError(
            f"a KV floor of {share.kv_floor_blocks} blocks for {share.tenant} does not fit: "
            f"other floors take {num_kept_blocks} of {cache.num_blocks} blocks"
        )
    most = num_prompt_tokens + params.max_tokens
    limit = min(config.max_model_len, cache.num_tokens)
    least = 1 if params.beam is not None else 0
    if num_prompt_tokens < 1 or params.max_tokens < least or most > limit:
        raise NeverFitsError(
            f"{num_prompt_tokens} prompt tokens and up to {params.max_tokens} output "
            f"tokens do not fit: this engine holds {limit} tokens per request, and a request "
            f"needs a prompt and max_tokens >= {least}; shorten the prompt or lower max_tokens"
        )
    if params.num_sequences > config.max_seqs:
        raise NeverFitsError(
            f"{params.num_sequences} sequences of one request do not fit: this engine runs "
            f"{config.max_seqs} at once; ask for fewer"
        )
    # Beams run together or not at all, and after a preemption they may share nothing.
    num_together = params.num_sequences if params.beam is not None else 1
    num_blocks = -(-most // cache.block_size) * num_together
    limit = cache.num_blocks - num_kept_blocks
    if share.kv_cap_blocks is not None:
        limit = min(limit, share.kv_cap_blocks)
    if num_blocks > limit:
        raise NeverFitsError(
            f"{num_together} x {most} tokens need {num_blocks} KV blocks at once, and "
            f"{share.tenant} can have {limit}; ask for fewer beams or tokens"
        )
