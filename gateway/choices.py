"""From the engine's events to what the client sees: text, and logprobs of exactly that text."""

import codecs
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from engine.detokenizer import TokenBytes
from engine.events import (
    PromptScored,
    SequenceEvent,
    SequenceFinished,
    TokenLogprobs,
    TokensGenerated,
)
from engine.sequence import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to continue, and what the client gets back of it."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    echo: str = ""  # stands before the text of each choice


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose text the client gets."""

    token_id: int
    offset: int  # characters before it in the choice's text
    logprob: float | None  # None for a prompt's first token, which nothing predicts
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Output:
    """New text of choice `index` with its tokens, None where no logprobs are asked for;
    `finish_reason` on its last one."""

    index: int
    text: str
    finish_reason: str | None = None
    tokens: tuple[ShownToken, ...] | None = None


@dataclass(slots=True)
class Choice:
    """The whole of one choice."""

    text: str = ""
    finish_reason: str = ""
    tokens: list[ShownToken] | None = None
    prompt: tuple[ShownToken, ...] | None = None  # where prompt_logprobs are asked for

    def add(self, output: Output) -> None:
        self.text += output.text
        self.finish_reason = output.finish_reason or ""
        if output.tokens is not None:
            if self.tokens is None:
                self.tokens = []
            self.tokens.extend(output.tokens)


class TokenAligner:
    """Which tokens' text has been sent.

    The engine releases text later than its token (half a character, what may become a stop string)
    or never (a stop string, the token that ends a sequence). A token is shown once all its
    characters are sent; one without text of its own goes with the text after it.
    """

    def __init__(self, token_bytes: TokenBytes, offset: int = 0) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_spelled = offset  # characters
        self._num_sent = offset
        self._unsent: deque[tuple[int, ShownToken]] = deque()  # with the end of its last character

    def add(self, token_id: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> None:
        token = ShownToken(token_id, self._num_spelled, logprob, top)
        data = self._token_bytes(token_id)
        self._num_spelled += len(self._decoder.decode(data))
        unfinished = bool(self._decoder.getstate()[0])
        self._unsent.append((self._num_spelled + unfinished + (not data), token))

    def sent(self, text: str) -> tuple[ShownToken, ...]:
        """The tokens that are shown with this text, which follows what was sent before."""
        self._num_sent += len(text)
        shown = []
        while self._unsent and self._unsent[0][0] <= self._num_sent:
            shown.append(self._unsent.popleft()[1])
        return tuple(shown)

    def rest(self) -> tuple[ShownToken, ...]:
        """All others, where nothing of the text was cut off."""
        shown = tuple(token for _, token in self._unsent)
        self._unsent.clear()
        return shown


@dataclass(slots=True)
class _Progress:
    """Of one sequence."""

    aligner: TokenAligner
    begun: bool = False


@dataclass(slots=True, eq=False)
class ChoiceReader:
    """Reads the events of a request's sequences. Choice i of prompt p of n has index p * n + i."""

    prompts: Sequence[Prompt]
    token_bytes: TokenBytes
    num_logprobs: int | None  # that the client sees, of how many likeliest tokens
    scores: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)  # by prompt
    _progress: dict[int, _Progress] = field(default_factory=dict)

    async def outputs(
        self, events: AsyncGenerator[tuple[int, SequenceEvent] | None]
    ) -> AsyncGenerator[Output | None]:
        """Text as it comes, of all choices interleaved; None where nothing comes."""
        async with aclosing(events):
            async for item in events:
                if item is None:
                    yield None
                elif (output := self._read(*item)) is not None:
                    yield output

    def _read(self, number: int, event: SequenceEvent) -> Output | None:
        if isinstance(event, PromptScored):
            self.scores[number] = event.logprobs
        if not isinstance(event, TokensGenerated | SequenceFinished):
            return None
        prompt = self.prompts[number]
        index = number * prompt.params.num_sequences + event.index
        progress = self._progress.get(index)
        if progress is None:
            progress = _Progress(TokenAligner(self.token_bytes, len(prompt.echo)))
            self._progress[index] = progress
        reason = event.reason if isinstance(event, SequenceFinished) else None
        tokens = self._tokens(event, progress.aligner)
        text = event.text
        if not progress.begun:
            progress.begun = True
            text = prompt.echo + text
            tokens = self._echoed(number) + tokens
        return Output(index, text, reason, None if self.num_logprobs is None else tokens)

    def _tokens(
        self, event: TokensGenerated | SequenceFinished, aligner: TokenAligner
    ) -> tuple[ShownToken, ...]:
        if isinstance(event, TokensGenerated):
            for token in event.logprobs:
                aligner.add(token.token_id, token.logprob, token.top)
        shown = aligner.sent(event.text)
        if isinstance(event, SequenceFinished) and event.reason == FinishReason.LENGTH:
            shown += aligner.rest()
        return shown

    def _echoed(self, number: int) -> tuple[ShownToken, ...]:
        shown = self.prompt_tokens(number, self.num_logprobs) if self.prompts[number].echo else None
        return shown or ()

    def prompt_tokens(self, number: int, num_top: int | None) -> tuple[ShownToken, ...] | None:
        """A prompt's tokens, each with `num_top` likeliest; None where `num_top` is."""
        if num_top is None:
            return None
        aligner = TokenAligner(self.token_bytes)
        aligner.add(self.prompts[number].token_ids[0], None, ())
        for score in self.scores.get(number, ()):
            aligner.add(score.token_id, score.logprob, score.top[:num_top])
        return aligner.rest()


def best_of(ends: Sequence[SequenceFinished], num: int) -> list[int]:
    """Which of one prompt's sequences are returned: those of the highest logprob per token."""

    def mean(index: int) -> float:
        end = ends[index]
        return (end.cumulative_logprob or 0.0) / max(1, end.usage.output_tokens)

    return sorted(range(len(ends)), key=mean, reverse=True)[:num]
