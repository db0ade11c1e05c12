"""From one request to its sequences."""

from dataclasses import replace

from engine.beam_search import num_candidates
from engine.detokenizer import Detokenizer, TokenBytes
from engine.sequence import (
    Constraint,
    SamplingParams,
    Sequence,
    SequenceGroup,
    SequenceStatus,
    TenantShare,
    child_seed,
)


def make_sequences(
    request_id: str,
    prompt_token_ids: tuple[int, ...],
    params: SamplingParams,
    *,
    share: TenantShare,
    namespace: str,
    arrived: float,
    deadline: float | None = None,
    use_prefix_cache: bool = True,
    end_token_ids: frozenset[int] = frozenset(),
    token_bytes: TokenBytes | None = None,
    constraint: Constraint | None = None,
) -> tuple[Sequence, ...]:
    """All sequences of a request; the first has its id. Several, and beams, are a group."""
    prompt = list(prompt_token_ids)  # one list until they fork
    sequences = tuple(
        Sequence(
            id=f"{request_id}/{index}" if index else request_id,
            index=index,
            share=share,
            namespace=namespace,
            token_ids=prompt,
            params=_params_of(params, index, end_token_ids),
            end_token_ids=end_token_ids,
            arrived=arrived,
            deadline=deadline,
            use_prefix_cache=use_prefix_cache,
            detokenizer=Detokenizer(token_bytes, params.stop) if token_bytes else None,
            constraint=constraint and constraint.fork(),
            status=SequenceStatus.PENDING if index else SequenceStatus.WAITING,
        )
        for index in range(params.num_sequences)
    )
    if len(sequences) > 1 or params.beam is not None:
        group = SequenceGroup(sequences, is_beam=params.beam is not None)
        for seq in sequences:
            seq.group = group
    return sequences


def _params_of(params: SamplingParams, index: int, end_token_ids: frozenset[int]) -> SamplingParams:
    """What differs between the sequences of a request."""
    if params.beam is not None:
        # The search chooses among each beam's likeliest tokens.
        among = num_candidates(params.beam, end_token_ids)
        params = replace(params, logprobs=among, temperature=0.0)
    if index == 0:
        return params
    return replace(params, seed=child_seed(params.seed, index), prompt_logprobs=None)
