"""What an answer has to look like: OpenAI's response_format, vLLM's structured_outputs."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from engine.sequence import Grammar
from gateway.schemas.parsing import Body, refuse, unsupported

MAX_PATTERN_CHARACTERS = 64 * 1024  # the engine's bound, in bytes
MAX_ALTERNATIVES = 1024

AnyObject: dict[str, Any] = {"type": "object"}
Pattern = Annotated[str, Field(max_length=MAX_PATTERN_CHARACTERS)]
Alternatives = Annotated[list[Pattern], Field(min_length=1, max_length=MAX_ALTERNATIVES)]


class JsonSchema(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Pattern | None = None
    document: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # the schema is held in either case


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise refuse("required with type 'json_schema'", "json_schema")
        return self

    @property
    def schema_document(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for free text."""
        if self.type == "text":
            return None
        return AnyObject if self.json_schema is None else self.json_schema.document


class StructuredOutputs(Body):
    """Exactly one of them."""

    document: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: Pattern | None = None
    choice: Alternatives | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("structural_tag") is not None:
            raise unsupported("'structural_tag' is not supported.", "structural_tag")
        return data

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name)]
        if len(given) > 1:
            raise refuse("only one of json, regex, choice, grammar and json_object")
        return self

    @property
    def as_grammar(self) -> Grammar | None:
        if self.document is not None:
            return json_grammar(self.document)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            texts = (json.dumps(text, ensure_ascii=False) for text in self.choice)
            return Grammar("lark", "start: " + " | ".join(texts))
        if self.grammar is not None:
            return Grammar("lark", self.grammar)
        return json_grammar(AnyObject) if self.json_object else None


_LEGACY = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}


def with_legacy_names(data: Any) -> Any:
    """A body in which vLLM's older fields stand where they do now."""
    if not isinstance(data, dict):
        return data
    given = {new: data[old] for old, new in _LEGACY.items() if data.get(old) is not None}
    if given and data.get("structured_outputs") is None:
        return data | {"structured_outputs": given}
    return data


def json_grammar(schema: dict[str, Any] | str) -> Grammar:
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
