"""What the bodies of completions and chat completions have in common.

Names are OpenAI's; beyond those, vLLM's.
"""

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from engine.sequence import Grammar
from gateway.schemas.formats import (
    ResponseFormat,
    StructuredOutputs,
    json_grammar,
    with_legacy_names,
)
from gateway.schemas.parsing import Body, Neutral, Whole, refuse, refuse_unsupported

MAX_CHOICES = 64  # sequences of one prompt
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BAD_WORDS = 128
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_TOKENS = 2**31  # far beyond any context

NEUTRAL: Neutral = {
    "suffix": (None, ""),
    "allowed_token_ids": (None, []),
    "truncate_prompt_tokens": (None,),
    "include_stop_str_in_output": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
}

# Beams rank what the model itself finds likely: whatever shapes a draw has no meaning for them.
_NEUTRAL_TO_BEAMS: Neutral = {
    "stream": (None, False),
    "temperature": (None, 0, 1),
    "top_p": (None, 1),
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "min_tokens": (None, 0),
    "stop": ((),),
}


def finite(least: float, most: float) -> Any:
    """A number within bounds, both included."""
    return Field(ge=least, le=most, allow_inf_nan=False)


TokenLimit = Annotated[Whole, Field(ge=1, le=MAX_TOKENS)]
Penalty = Annotated[float, finite(-2, 2)]
NumLogprobs = Annotated[Whole, Field(ge=0, le=MAX_LOGPROBS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopTokenId = Annotated[int, Field(ge=0)]


class StreamOptions(Body):
    include_usage: bool | None = None


class GenerationBody(Body):
    """Fields and bounds of both resources."""

    unsupported: ClassVar[Neutral] = NEUTRAL

    model: Annotated[str, Field(min_length=1, max_length=256)]
    max_tokens: TokenLimit | None = None
    min_tokens: Annotated[Whole, Field(ge=0, le=MAX_TOKENS)] | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, finite(0, 2)] | None = None
    top_p: Annotated[float, finite(0, 1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, finite(0, 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    logit_bias: dict[int, Annotated[float, finite(-100, 100)]] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: Annotated[list[StopTokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, finite(-10, 10)] | None = None
    early_stopping: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Splits the tenant's own prefix cache further, for example by its end users.
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    use_prefix_cache: bool | None = None
    service_tier: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        refuse_unsupported(data, cls.unsupported)
        return with_legacy_names(data)

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> tuple[str, ...]:
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
            raise refuse("must be a string or a list of strings")
        if len(stops) > MAX_STOPS:
            raise refuse(f"at most {MAX_STOPS} stop strings")
        if not all(0 < len(item) <= MAX_STOP_CHARACTERS for item in stops):
            raise refuse(f"each stop string has 1 to {MAX_STOP_CHARACTERS} characters")
        return tuple(stops)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_BIASES:
            raise refuse(f"at most {MAX_BIASES} tokens")
        # JSON's keys are strings.
        if not all(key.isascii() and key.isdecimal() and len(key) <= 10 for key in value):
            raise refuse("each key must be a token id")
        return {int(key): bias for key, bias in value.items()}

    @model_validator(mode="after")
    def _options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("only allowed when 'stream' is true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise refuse("not available in a stream", "prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _beams_stand_alone(self) -> Self:
        if not self.use_beam_search:
            return self
        for name, neutral in _NEUTRAL_TO_BEAMS.items():
            if getattr(self, name) not in neutral:
                raise refuse("not available with 'use_beam_search'", name)
        if self.num_logprobs is not None:
            raise refuse("not available with 'use_beam_search'", "logprobs")
        return self

    @model_validator(mode="after")
    def _grammars_stand_alone(self) -> Self:
        """Of two constraints on the text, one would have to give way."""
        if not self.is_constrained:
            return self
        field = self.grammar_param
        if self.min_tokens:
            raise refuse(f"not available with '{field}', which says when a text ends", "min_tokens")
        if self.use_beam_search:
            raise refuse("not available with 'use_beam_search'", field)
        if self._schema is not None and self._outputs is not None:
            raise refuse("not available with 'response_format'", "structured_outputs")
        return self

    @property
    def _schema(self) -> dict[str, Any] | None:
        return self.response_format.schema_document if self.response_format else None

    @property
    def _outputs(self) -> Grammar | None:
        return self.structured_outputs.as_grammar if self.structured_outputs else None

    @property
    def is_constrained(self) -> bool:
        """Whether the text has to match a grammar."""
        return self._schema is not None or self._outputs is not None

    @property
    def grammar_param(self) -> str:
        """The field that asks for a grammar."""
        return "response_format" if self._schema is not None else "structured_outputs"

    def grammar(self) -> Grammar | None:
        """What the text has to match, not yet compiled."""
        return json_grammar(self._schema) if self._schema is not None else self._outputs

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def requested_tokens(self) -> int | None:
        """The output limit that the client asked for, if any."""
        return self.max_tokens

    @property
    def num_choices(self) -> int:
        """Choices that the client gets for each prompt."""
        return self.n or 1

    @property
    def num_sequences(self) -> int:
        """Sequences that run for each prompt, or beams."""
        return self.num_choices

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Of how many likeliest tokens the client sees logprobs; None: of no token at all."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same, of the prompt's tokens."""
        return self.prompt_logprobs
