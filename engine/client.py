"""The engine boundary: what a gateway may ask of an engine, wherever it runs."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from engine.events import SequenceEvent, SequenceFinished, Timings, Usage
from engine.sequence import FinishReason, SamplingParams, TenantShare
from engine.snapshot import EngineHealth, EngineSnapshot
from engine.waits import Explanation, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to complete. `id` is made by the server and unique; never a client's own."""

    id: str
    share: TenantShare
    namespace: str  # prefix-cache root, from the API key's tenant
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    use_prefix_cache: bool = True
    # From its submission on: what is not done by then is of no use to anybody.
    deadline_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class FirstTokenEstimate:
    """When a request will have its first token."""

    seconds: float  # from its submission on
    at_least: bool = False  # it will be later than that; how much, is not known


class EngineClient(Protocol):
    """An engine, in this process or elsewhere. Only frozen records cross this line."""

    async def submit(self, request: GenerationRequest) -> AsyncIterator[SequenceEvent]:
        """Enqueue; iterate the result for events, of which SequenceFinished is the last.

        A request for several sequences has an end for each. Raises NeverFitsError, GrammarError,
        DuplicateRequestError or EngineStoppedError before any work.
        """

    async def estimate_first_token(self, request_id: str) -> FirstTokenEstimate | None:
        """What was foreseen for a request when it came, as soon as that is known; None if nothing
        can be foreseen, or it has ended before."""

    def abort(self, request_id: str) -> None:
        """End a request early. Exact id; unknown or finished ids are ignored."""

    async def drain(self, timeout_seconds: float) -> bool:
        """Accept no more work and wait for what runs; True if all of it finished in time."""

    async def reset_prefix_cache(self, tenant: str | None = None) -> int:
        """Forget cached prefixes, of one tenant or of all; how many blocks became free."""

    async def explain(self, request_id: str) -> Explanation | None:
        """Where a request's time went; None if it is unknown, or ended long ago."""

    async def recent_steps(self, limit: int) -> tuple[StepRecord, ...]:
        """What the last steps decided, oldest first."""

    async def switch_policy(self, name: str) -> None:
        """Schedule by another policy from the next step on. Raises ConfigError if it is unknown."""
        ...

    def health(self) -> EngineHealth: ...

    def snapshot(self) -> EngineSnapshot: ...


def lost_sequence(
    request: GenerationRequest, index: int, *, num_output_tokens: int, at: float, error: str
) -> SequenceFinished:
    """The end of a sequence whose engine says nothing more; counts what was delivered."""
    num_prompt_tokens = len(request.prompt_token_ids) if index == 0 else 0
    return SequenceFinished(
        request_id=request.id,
        index=index,
        tenant=request.share.tenant,
        at=at,
        reason=FinishReason.ERROR,
        text="",
        usage=Usage(
            prompt_tokens=num_prompt_tokens,
            cached_tokens=0,
            output_tokens=num_output_tokens,
            # One output token means that the whole prompt was computed.
            computed_tokens=num_prompt_tokens if num_output_tokens else 0,
        ),
        timings=Timings(arrived=at, admitted=None, first_token=None, finished=at),
        num_preemptions=0,
        error=error,
    )
