"""Body of POST /v1/completions."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from gateway.schemas.generation import MAX_CHOICES, MAX_TOKENS, NEUTRAL, GenerationBody, NumLogprobs
from gateway.schemas.parsing import Neutral, Whole, refuse

MAX_PROMPTS = 64
MAX_SEQUENCES = 128  # of all prompts together


class CompletionBody(GenerationBody):
    """Plain prompts: text or token ids."""

    unsupported: ClassVar[Neutral] = NEUTRAL | {"top_logprobs": (None,)}

    prompt: tuple[str | tuple[int, ...], ...]
    max_tokens: Annotated[Whole, Field(ge=0, le=MAX_TOKENS)] | None = None
    best_of: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and value:
            if len(value) > MAX_PROMPTS and not isinstance(value[0], int):
                raise refuse(f"at most {MAX_PROMPTS} prompts")
            if all(isinstance(item, str) for item in value):
                return tuple(value)
            if _is_token_ids(value):
                return (tuple(value),)
            if all(isinstance(item, list) and _is_token_ids(item) for item in value):
                return tuple(tuple(item) for item in value)
        raise refuse(
            "must be a string, a list of strings, a list of token ids, or a list of such lists, "
            "and not empty"
        )

    @model_validator(mode="after")
    def _choices(self) -> Self:
        if self.best_of is not None and self.best_of < self.num_choices:
            raise refuse("must be at least 'n'", "best_of")
        if self.stream and self.num_sequences > self.num_choices:
            raise refuse("more than 'n' cannot be streamed", "best_of")
        if len(self.prompt) * self.num_sequences > MAX_SEQUENCES:
            reason = f"at most {MAX_SEQUENCES} sequences of all prompts together"
            raise refuse(reason, "n" if self.best_of is None else "best_of")
        return self

    @model_validator(mode="after")
    def _only_scoring_needs_no_output(self) -> Self:
        scores = self.echo or self.prompt_logprobs is not None
        if self.max_tokens == 0 and (not scores or self.use_beam_search):
            raise refuse("at least 1, unless the prompt is echoed or scored", "max_tokens")
        return self

    @property
    def num_sequences(self) -> int:
        return self.best_of or self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        asked = [n for n in (self.prompt_logprobs, echoed) if n is not None]
        return max(asked, default=None)


def _is_token_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int for item in value)
