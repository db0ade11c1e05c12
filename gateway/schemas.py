"""Bodies of requests: every bound is checked here, before any costly work.

Unknown fields are ignored, as every OSS client sends some. Fields that are known, would change the
answer and are not supported are refused by name: silence would be a wrong answer.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.errors import InvalidRequestError, UnsupportedParameterError

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_PROMPTS = 64  # each becomes a sequence of its own
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_TOKENS = 2**31  # far beyond any context

# Values of a known, unsupported field that ask for nothing special.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None,),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "min_tokens": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None, {}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
}


def _same(value: Any, neutral: Any) -> bool:
    return type(value) is type(neutral) and value == neutral  # so that 0 is not False, nor 1 True


def _refuse(reason: str, field: str = "") -> PydanticCustomError:
    return PydanticCustomError("refused", "{reason}", {"reason": reason, "field": field})


def _unsupported(reason: str, field: str = "") -> PydanticCustomError:
    return PydanticCustomError(
        "unsupported_parameter", "{reason}", {"reason": reason, "field": field}
    )


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# JSON has one kind of number: 256.0 is a whole one.
Whole = Annotated[int, BeforeValidator(_whole)]
TokenLimit = Annotated[Whole, Field(ge=1, le=MAX_TOKENS)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(_Body):
    include_usage: bool | None = None


class GenerationBody(_Body):
    """What completions and chat completions have in common."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    max_tokens: TokenLimit | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=2**31)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKEN_IDS)] | None
    ) = None
    ignore_eos: bool | None = None
    # Splits the tenant's own prefix cache further, for example by its end users.
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        for name, neutral in _NEUTRAL.items() if isinstance(data, dict) else ():
            if name in data and not any(_same(data[name], value) for value in neutral):
                raise _unsupported(f"This value of '{name}' is not supported.", name)
        return data

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> tuple[str, ...]:
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
            raise _refuse("must be a string or a list of strings")
        if len(stops) > MAX_STOPS:
            raise _refuse(f"at most {MAX_STOPS} stop strings")
        if not all(0 < len(item) <= MAX_STOP_CHARACTERS for item in stops):
            raise _refuse(f"each stop string has 1 to {MAX_STOP_CHARACTERS} characters")
        return tuple(stops)

    @model_validator(mode="after")
    def _options_need_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise _refuse("only allowed when 'stream' is true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def requested_tokens(self) -> int | None:
        """The output limit that the client asked for, if any."""
        return self.max_tokens


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: tuple[str | tuple[int, ...], ...]

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> tuple[str | tuple[int, ...], ...]:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and value:
            if len(value) > MAX_PROMPTS and not isinstance(value[0], int):
                raise _refuse(f"at most {MAX_PROMPTS} prompts")
            if all(isinstance(item, str) for item in value):
                return tuple(value)
            if _is_token_ids(value):
                return (tuple(value),)
            if all(isinstance(item, list) and _is_token_ids(item) for item in value):
                return tuple(tuple(item) for item in value)
        raise _refuse(
            "must be a string, a list of strings, a list of token ids, or a list of such lists, "
            "and not empty"
        )


def _is_token_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int for item in value)


class ChatMessage(_Body):
    """One turn; content is plain text once validated."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        for name in ("tool_calls", "function_call", "audio") if isinstance(data, dict) else ():
            if data.get(name):
                raise _unsupported(f"'{name}' in a message is not supported.", name)
        return data

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if len(value) > MAX_PARTS:
            raise _refuse(f"at most {MAX_PARTS} content parts")
        texts = []
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            elif isinstance(kind, str) and kind != "text":
                raise _unsupported(f"Content parts of type '{kind[:32]}' are not supported.")
            else:
                raise _refuse("each content part must be {'type': 'text', 'text': ...}")
        return "\n".join(texts)

    @model_validator(mode="after")
    def _has_content(self) -> "ChatMessage":
        if self.content is None and self.role != "assistant":
            raise _refuse(f"a message of role '{self.role}' must have content", "content")
        return self


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenLimit | None = None

    @property
    def requested_tokens(self) -> int | None:
        """The smaller of the two names of one limit."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given, default=None)


BodyT = TypeVar("BodyT", bound=GenerationBody)


def parse(schema: type[BodyT], raw: bytes) -> BodyT:
    """A validated body, or InvalidRequestError naming the field."""
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        raise _first_error(error) from None


def _first_error(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    message, kind = first["msg"], first["type"]
    if kind == "json_invalid":
        return InvalidRequestError(f"The body is not valid JSON: {message}", code=None)
    # A check over several fields knows itself which one is at fault.
    pieces = (*first["loc"], first.get("ctx", {}).get("field"))
    path = ".".join(str(piece) for piece in pieces if piece not in (None, ""))
    if kind == "unsupported_parameter":
        return UnsupportedParameterError(message, param=path)
    if kind == "missing":
        return InvalidRequestError(f"Missing required parameter: '{path}'.", param=path)
    return InvalidRequestError(
        f"Invalid value for '{path}': {message}." if path else f"Invalid body: {message}.",
        param=path or None,
    )
