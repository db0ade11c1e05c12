"""EngineCore: one step is schedule, execute, update. Everything else is bookkeeping of events."""

from collections.abc import Callable
from dataclasses import replace

from engine.config import EngineConfig
from engine.detokenizer import Detokenizer, TokenBytes
from engine.events import (
    Event,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    StepFinished,
    Timings,
    TokensGenerated,
    Usage,
)
from engine.plan import Runner, StepOutput, StepPlan
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, SamplingParams, Sequence, TenantShare


class EngineCore:
    """Drives one scheduler and one runner; single-threaded.

    `clock` is called for every timestamp: time.monotonic in a server, a virtual clock that the
    runner advances in a simulation. `token_bytes` may be None where nobody reads text.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        clock: Callable[[], float],
        token_bytes: TokenBytes | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config.scheduler, config.cache)
        self._runner = runner
        self._clock = clock
        self._token_bytes = token_bytes
        self._eos_token_ids = eos_token_ids

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(
        self,
        seq_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        share: TenantShare,
        namespace: str,
        use_prefix_cache: bool = True,
    ) -> None:
        """Queue a sequence. Raises NeverFitsError or DuplicateRequestError."""
        detokenizer = Detokenizer(self._token_bytes, params.stop) if self._token_bytes else None
        self.scheduler.add(
            Sequence(
                id=seq_id,
                share=share,
                namespace=namespace,
                token_ids=list(prompt_token_ids),
                params=params,
                arrived=self._clock(),
                use_prefix_cache=use_prefix_cache,
                detokenizer=detokenizer,
            )
        )

    def abort(self, seq_id: str) -> list[Event]:
        """End a sequence at once, wherever it is; no events if it is not live."""
        seq = self.scheduler.find(seq_id)
        return [self._finish(seq, FinishReason.ABORT)] if seq is not None else []

    def step(self) -> list[Event]:
        """Run one step. A failure of the runner ends that step's sequences, not the loop."""
        started = self._clock()
        plan = self.scheduler.schedule(started)
        scheduled = self._clock()
        events: list[Event] = [
            SequencePreempted(request_id=seq.id, tenant=seq.tenant, at=started)
            for seq in plan.preempted
        ]
        events += [
            SequenceAdmitted(
                request_id=seq.id,
                tenant=seq.tenant,
                at=started,
                num_cached_tokens=seq.num_computed_tokens,
                waited_seconds=started - seq.queued,
            )
            for seq in plan.admitted
        ]
        if not plan.chunks:
            return events
        step = self._step_finished(plan, started, scheduled)
        try:
            output = self._runner.execute(plan)
        except Exception as error:  # the boundary to tensors: whatever it is, it ends here
            message = f"{type(error).__name__}: {error}"
            return events + [self._finish(c.seq, FinishReason.ERROR, message) for c in plan.chunks]
        events += self._update(plan, output)
        if self.config.check_invariants:
            self.scheduler.check()
        events.append(replace(step, executed=self._clock()))
        return events

    def _update(self, plan: StepPlan, output: StepOutput) -> list[Event]:
        self.scheduler.update(plan, output.token_ids)
        events: list[Event] = []
        for chunk in plan.chunks:
            if not chunk.draws:
                continue
            if chunk.seq.id in output.token_ids:
                events += self._accept(chunk.seq, output.token_ids[chunk.seq.id])
            else:
                error = output.errors.get(chunk.seq.id, "the model returned no token")
                events.append(self._finish(chunk.seq, FinishReason.ERROR, error))
        return events

    def _accept(self, seq: Sequence, token_id: int) -> list[Event]:
        """What a new token means: its text, and whether it is the last."""
        now = self._clock()
        if seq.first_token is None:
            seq.first_token = now
        ends = token_id in seq.params.stop_token_ids or (
            token_id in self._eos_token_ids and not seq.params.ignore_eos
        )
        # The token that ends a sequence is counted but not shown.
        text = seq.detokenizer.push(token_id) if seq.detokenizer and not ends else ""
        stopped = seq.detokenizer is not None and seq.detokenizer.stopped
        events: list[Event] = [
            TokensGenerated(
                request_id=seq.id, tenant=seq.tenant, at=now, token_ids=(token_id,), text=text
            )
        ]
        if ends or stopped:
            events.append(self._finish(seq, FinishReason.STOP))
        elif seq.num_output_tokens >= seq.params.max_tokens:
            events.append(self._finish(seq, FinishReason.LENGTH))
        return events

    def _finish(
        self, seq: Sequence, reason: FinishReason, error: str | None = None
    ) -> SequenceFinished:
        # What a failed sequence computed before may be bad as well: nobody may reuse it.
        self.scheduler.finish(seq, discard=reason is FinishReason.ERROR)
        now = self._clock()
        return SequenceFinished(
            request_id=seq.id,
            tenant=seq.tenant,
            at=now,
            reason=reason,
            text=seq.detokenizer.flush() if seq.detokenizer else "",
            usage=Usage(
                prompt_tokens=seq.num_prompt_tokens,
                cached_tokens=seq.num_cached_tokens,
                output_tokens=seq.num_output_tokens,
                computed_tokens=max(0, seq.num_charged_tokens - seq.num_cached_tokens),
                recomputed_tokens=seq.num_recomputed_tokens,
            ),
            timings=Timings(
                arrived=seq.arrived,
                admitted=seq.admitted,
                first_token=seq.first_token,
                finished=now,
            ),
            num_preemptions=seq.num_preemptions,
            error=error,
        )

    def _step_finished(self, plan: StepPlan, started: float, scheduled: float) -> StepFinished:
        """The step's record as planned; `executed` is filled in when it has run."""
        num_decodes = sum(
            c.num_tokens == 1 and c.start >= c.seq.num_prompt_tokens for c in plan.chunks
        )
        pool = self.scheduler.pool
        return StepFinished(
            step=plan.step,
            started=started,
            scheduled=scheduled,
            executed=scheduled,
            num_prefill_tokens=plan.num_tokens - num_decodes,
            num_decode_tokens=num_decodes,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.queues),
            num_preempted=len(plan.preempted),
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            held_blocks=pool.num_held,
        )
