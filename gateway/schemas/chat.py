"""Body of POST /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from gateway.schemas.generation import NEUTRAL, GenerationBody, NumLogprobs, TokenLimit
from gateway.schemas.parsing import Body, Neutral, refuse, unsupported

MAX_MESSAGES = 4096
MAX_PARTS = 1024


class ChatMessage(Body):
    """One turn; content is plain text once validated."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        for name in ("tool_calls", "function_call", "audio") if isinstance(data, dict) else ():
            if data.get(name):
                raise unsupported(f"'{name}' in a message is not supported.", name)
        return data

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if len(value) > MAX_PARTS:
            raise refuse(f"at most {MAX_PARTS} content parts")
        texts = []
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            elif isinstance(kind, str) and kind != "text":
                raise unsupported(f"Content parts of type '{kind[:32]}' are not supported.")
            else:
                raise refuse("each content part must be {'type': 'text', 'text': ...}")
        return "\n".join(texts)

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise refuse(f"a message of role '{self.role}' must have content", "content")
        return self


class ChatBody(GenerationBody):
    """A conversation."""

    unsupported: ClassVar[Neutral] = NEUTRAL | {"best_of": (None, 1), "echo": (None, False)}

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("only allowed when 'logprobs' is true", "top_logprobs")
        return self

    @property
    def requested_tokens(self) -> int | None:
        """The smaller of the two names of one limit."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given, default=None)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
