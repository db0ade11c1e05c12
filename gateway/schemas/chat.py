"""Body of POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.model.tool_format import Tool, tool_call_grammar
from engine.sequence import Grammar
from gateway.schemas.generation import NEUTRAL, GenerationBody, NumLogprobs, TokenLimit
from gateway.schemas.parsing import Body, Neutral, refuse, unsupported
from gateway.schemas.tools import (
    MAX_CALLS,
    MAX_TOOLS,
    CallId,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    read_tool_choice,
)

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_VARIABLES = 16

# Models know the older, or the newer, name of these roles.
_ROLES: Mapping[str, str] = {"developer": "system", "function": "tool"}
_TOOL_FIELDS = ("tools", "tool_choice", "chat_template_kwargs")  # which completions have not

VariableName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
VariableValue = bool | int | float | Annotated[str, Field(max_length=1024)] | None


class ChatMessage(Body):
    """One turn; content is plain text once validated."""

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: CallId | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        for name in ("function_call", "audio") if isinstance(data, dict) else ():
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
        if self.tool_calls and self.role != "assistant":
            raise refuse("only in a message of role 'assistant'", "tool_calls")
        return self

    def as_message(self) -> dict[str, Any]:
        """As templates expect it."""
        message: dict[str, Any] = {"role": _ROLES.get(self.role, self.role)}
        message["content"] = self.content or ""
        if self.tool_calls:
            message["tool_calls"] = [call.as_message() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatBody(GenerationBody):
    """A conversation."""

    unsupported: ClassVar[Neutral] = {
        name: neutral for name, neutral in NEUTRAL.items() if name not in _TOOL_FIELDS
    } | {"best_of": (None, 1), "echo": (None, False)}

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice = ToolChoice("auto")
    parallel_tool_calls: bool | None = None
    # Of the model's template, such as enable_thinking.
    chat_template_kwargs: (
        Annotated[dict[VariableName, VariableValue], Field(max_length=MAX_VARIABLES)] | None
    ) = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _choice(cls, value: Any) -> ToolChoice:
        return read_tool_choice(value)

    @model_validator(mode="after")
    def _choice_is_offered(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise refuse("each function needs a name of its own", "tools")
        choice = self.tool_choice
        if choice.mode == "required" and not names:
            raise refuse("only allowed when 'tools' are given", "tool_choice")
        if unknown := sorted((choice.names or frozenset()).difference(names)):
            raise refuse(f"'{unknown[0][:64]}' is not one of the 'tools'", "tool_choice")
        if self.calls_tools and self._outputs is not None:
            raise refuse("not available with 'tools'", "structured_outputs")
        return self

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("only allowed when 'logprobs' is true", "top_logprobs")
        return self

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice.mode != "none"

    @property
    def is_constrained(self) -> bool:
        return self.calls_tools or super().is_constrained

    @property
    def grammar_param(self) -> str:
        return "tools" if self.calls_tools else super().grammar_param

    def offered_tools(self) -> tuple[Tool, ...]:
        """What the model is told of: all, whichever of them it may call now."""
        return tuple(tool.as_tool() for tool in self.tools or ()) if self.calls_tools else ()

    def grammar(self) -> Grammar | None:
        if not self.calls_tools:
            return super().grammar()
        choice = self.tool_choice
        return tool_call_grammar(
            [t for t in self.offered_tools() if choice.names is None or t.name in choice.names],
            required=choice.mode == "required",
            parallel=self.parallel_tool_calls is not False and not choice.is_named,
            answer_schema=self._schema,
        )

    @property
    def requested_tokens(self) -> int | None:
        """The smaller of the two names of one limit."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given, default=None)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
