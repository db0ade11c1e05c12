"""Tools, which of them are to be called, and calls in the history of a conversation."""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from engine.model.tool_format import Tool
from gateway.schemas.parsing import Body, refuse

MAX_TOOLS = 128
MAX_CALLS = 128  # in one message
MAX_DESCRIPTION_CHARACTERS = 16 * 1024
MAX_ARGUMENTS_CHARACTERS = 256 * 1024

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class FunctionDefinition(Body):
    name: FunctionName
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARACTERS)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _describe_an_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type", "object") != "object":
            raise refuse("must be a JSON schema of type 'object'")
        return value


class ToolDefinition(Body):
    type: Literal["function"]
    function: FunctionDefinition

    def as_tool(self) -> Tool:
        """With the arguments that are not declared excluded, unless the schema speaks of them."""
        function = self.function
        parameters = {"type": "object", "properties": {}} | (function.parameters or {})
        # What the function does not know is of no use, and a weak model invents it without end.
        if not {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"} & parameters.keys():
            parameters.setdefault("additionalProperties", False)
        return Tool(
            name=function.name,
            description=function.description,
            parameters=parameters,
            strict=bool(function.strict),
        )


class FunctionCall(Body):
    name: FunctionName
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENTS_CHARACTERS)]

    def as_message(self) -> dict[str, Any]:
        """With the arguments as values, for templates; as they are if they are no JSON."""
        arguments: Any = self.arguments
        with suppress(ValueError, RecursionError):
            arguments = json.loads(self.arguments)
        return {"name": self.name, "arguments": arguments}


class ToolCall(Body):
    id: CallId
    type: Literal["function"]
    function: FunctionCall

    def as_message(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.as_message()}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model calls tools; `names`, if given, are those that it may call."""

    mode: Literal["none", "auto", "required"]
    names: frozenset[str] | None = None
    is_named: bool = False  # one function was named, which OpenAI ends like a plain answer


def read_tool_choice(value: Any) -> ToolChoice:
    """OpenAI's forms of `tool_choice`. Raises PydanticCustomError."""
    match value:
        case None | "auto":
            return ToolChoice("auto")
        case "none" | "required":
            return ToolChoice(value)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", frozenset({name}), is_named=True)
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as tools},
        } if len(tools) <= MAX_TOOLS:
            return ToolChoice(mode, frozenset(map(_function_name, tools)))
    raise refuse(
        "must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': ..., 'tools': [...]}}"
    )


def _function_name(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise refuse("each allowed tool must be {'type': 'function', 'function': {'name': ...}}")
