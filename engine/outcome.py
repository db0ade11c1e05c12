"""What became of a plan, of a sequence, of a group, of a step: as records."""

from collections.abc import Iterable

from engine.events import (
    Event,
    GroupFinished,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    StageName,
    StepFinished,
    Timings,
    Usage,
)
from engine.plan import StepPlan
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence, SequenceGroup


def finished(
    seq: Sequence, reason: FinishReason, now: float, error: str | None
) -> SequenceFinished:
    """The one end of a sequence. What a group shares is in the usage of its first sequence: the
    prompt, and what all beams of a search generated."""
    group = seq.group
    is_first = seq.index == 0
    output_tokens = seq.num_output_tokens
    if group is not None and group.is_beam:
        output_tokens = group.num_drawn if is_first else 0
    scored = seq.params.logprobs is not None
    return SequenceFinished(
        request_id=seq.request_id,
        index=seq.index,
        tenant=seq.tenant,
        at=now,
        reason=reason,
        text=seq.detokenizer.flush() if seq.detokenizer else "",
        usage=Usage(
            prompt_tokens=seq.num_prompt_tokens if is_first else 0,
            cached_tokens=seq.num_cached_tokens,
            output_tokens=output_tokens,
            computed_tokens=max(0, seq.num_charged_tokens - seq.num_cached_tokens)
            if is_first
            else 0,
            recomputed_tokens=seq.num_recomputed_tokens,
            kv_block_seconds=seq.kv_block_seconds,
        ),
        timings=Timings(
            arrived=seq.arrived,
            admitted=seq.admitted,
            first_token=seq.first_token,
            finished=now,
        ),
        num_preemptions=seq.num_preemptions,
        error=error,
        cumulative_logprob=seq.cumulative_logprob if scored else None,
    )


def step_finished(
    stage: StageName, scheduler: Scheduler, plan: StepPlan, times: tuple[float, float, float]
) -> StepFinished:
    """An executed step; `times`: when it began, was planned, and had run."""
    started, scheduled, executed = times
    num_decodes = sum(
        chunk.num_tokens == 1 and chunk.start >= chunk.seq.num_prompt_tokens
        for chunk in plan.chunks
    )
    pool, copies = scheduler.pool, plan.copies
    return StepFinished(
        step=plan.step,
        started=started,
        scheduled=scheduled,
        executed=executed,
        num_prefill_tokens=plan.num_tokens - num_decodes,
        num_decode_tokens=num_decodes,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.queues),
        num_preempted=len(plan.preempted),
        free_blocks=pool.num_free,
        cached_blocks=pool.num_cached,
        held_blocks=pool.num_held,
        stage=stage,
        num_swapped_out_blocks=len(copies.swapped_out),
        num_swapped_in_blocks=len(copies.swapped_in),
        num_copied_blocks=len(copies.copied),
        num_received_blocks=len(copies.received),
    )


def group_finished(group: SequenceGroup, now: float) -> GroupFinished:
    """The last sequence of a group has ended."""
    first = group.sequences[0]
    return GroupFinished(
        request_id=first.request_id,
        tenant=first.tenant,
        at=now,
        num_sequences=len(group.sequences),
        block_steps=group.block_steps,
        unshared_block_steps=group.unshared_block_steps,
    )


def preemptions(sequences: Iterable[Sequence], now: float) -> list[Event]:
    """Who gave way."""
    return [
        SequencePreempted(
            request_id=seq.request_id,
            index=seq.index,
            tenant=seq.tenant,
            at=now,
            swapped=seq.parked is not None,
        )
        for seq in sequences
    ]


def admissions(stage: StageName, plan: StepPlan, now: float) -> list[Event]:
    """Who got a place in this plan."""
    return [
        SequenceAdmitted(
            request_id=seq.request_id,
            index=seq.index,
            tenant=seq.tenant,
            at=now,
            num_cached_tokens=seq.num_hit_tokens,
            waited_seconds=now - seq.queued,
            stage=stage,
        )
        for seq in plan.admitted
    ]
