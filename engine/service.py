"""The engine boundary: what a gateway may ask of an engine, wherever that engine runs."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from engine.events import SequenceAdmitted, SequenceFinished, SequencePreempted, TokensGenerated
from engine.sequence import SamplingParams, TenantShare


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to complete. `id` is made by the server and unique; never a client's own."""

    id: str
    share: TenantShare
    namespace: str  # prefix-cache root, from the API key's tenant
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    use_prefix_cache: bool = True


SequenceEvent = SequenceAdmitted | SequencePreempted | TokensGenerated | SequenceFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Whether the engine's loop lives. `ready` also means that it accepts work."""

    alive: bool  # the loop runs, and has stepped recently if it has work
    ready: bool
    reason: str  # "ok", "starting", "draining", "stopped", "stalled" or "failed: ..."
    seconds_since_step: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Counters of this instant, for metrics and pages."""

    num_running: int
    num_waiting: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    running_by_tenant: dict[str, int]
    waiting_by_tenant: dict[str, int]
    counters: dict[str, float]  # virtual counter by tenant


class EngineClient(Protocol):
    """An engine, in this process or elsewhere. Only frozen records cross this line."""

    async def submit(self, request: GenerationRequest) -> AsyncIterator[SequenceEvent]:
        """Enqueue; iterate the result for events, of which SequenceFinished is the last.

        Raises NeverFitsError, DuplicateRequestError or EngineStoppedError before any work.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request early. Exact id; unknown or finished ids are ignored."""
        ...

    async def drain(self, timeout_seconds: float) -> bool:
        """Accept no more work and wait for what runs; True if all of it finished in time."""
        ...

    def health(self) -> EngineHealth: ...

    def snapshot(self) -> EngineSnapshot: ...
