"""Bodies that ask for tools or for a form of the answer."""

import json
from typing import Any

import pytest

from engine.sequence import Grammar
from gateway.errors import InvalidRequestError, UnsupportedParameterError
from gateway.schemas.chat import ChatBody
from gateway.schemas.completions import CompletionBody
from gateway.schemas.parsing import parse

USER = {"role": "user", "content": "x"}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | function}


def chat(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"model": "m", "messages": [USER]} | fields).encode())


def completion(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, json.dumps({"model": "m", "prompt": "x"} | fields).encode())


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


# ---------------------------------------------------------------------------------------- tools


def test_tools_are_offered_with_what_they_take():
    tools = [
        tool(parameters=OBJECT, description="d", strict=True),
        tool("g"),
        tool("h", parameters=OBJECT | {"additionalProperties": True}),
        tool("i", parameters={"$ref": "#/$defs/a", "$defs": {"a": OBJECT}}),
    ]
    f, g, h, i = chat(tools=tools).offered_tools()

    assert (f.name, f.description, f.strict) == ("f", "d", True)
    assert f.parameters == OBJECT | {"additionalProperties": False}
    # A function without parameters takes none.
    assert g.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert (g.description, g.strict) == (None, False)
    assert h.parameters["additionalProperties"] is True
    assert "additionalProperties" not in i.parameters


@pytest.mark.parametrize(
    ("choice", "offered", "callable_names", "required"),
    [
        (None, "fg", "fg", False),
        ("auto", "fg", "fg", False),
        ("required", "fg", "fg", True),
        (named("g"), "fg", "g", True),
        (allowed("auto", "f"), "fg", "f", False),
        (allowed("required", "g", "f"), "fg", "fg", True),
        ("none", "", "", False),
    ],
)
def test_which_tools_may_be_called(choice, offered, callable_names, required):
    body = chat(tools=[tool("f"), tool("g")], tool_choice=choice)

    assert "".join(one.name for one in body.offered_tools()) == offered
    grammar = body.grammar()
    if not callable_names:
        assert grammar is None
        assert not body.is_constrained
        return
    assert grammar is not None
    names = [name for name in "fg" if f'\\"{name}\\", \\"arguments\\": ' in grammar.source]
    assert "".join(names) == callable_names
    assert ("TEXT" not in grammar.source) == required
    assert body.grammar_param == "tools"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool("a b")]}, "tools.0.function.name"),
        ({"tools": [tool("x" * 65)]}, "tools.0.function.name"),
        ({"tools": [tool("")]}, "tools.0.function.name"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters"),
        ({"tools": [tool(parameters={"type": "string"})]}, "tools.0.function.parameters"),
        ({"tools": [tool(description="x" * 16_385)]}, "tools.0.function.description"),
        ({"tools": [tool(strict="yes")]}, "tools.0.function.strict"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": named("f")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": named("g")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": allowed("auto", "f", "g")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": allowed("none", "f")}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": 3}, "tool_choice"),
        ({"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [tool()], "min_tokens": 2}, "min_tokens"),
        ({"tools": [tool()], "use_beam_search": True, "n": 2}, "tools"),
        ({"tools": [tool()], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs.a b.[key]"),
        ({"chat_template_kwargs": {f"a{i}": 1 for i in range(17)}}, "chat_template_kwargs"),
    ],
)
def test_what_is_no_tool_or_no_choice_is_refused(fields, param):
    with pytest.raises(InvalidRequestError) as error:
        chat(**fields)

    assert error.value.param == param


def test_variables_of_the_template_are_plain_values():
    body = chat(chat_template_kwargs={"enable_thinking": False, "effort": "low", "k": 2, "z": None})
    assert body.chat_template_kwargs == {
        "enable_thinking": False, "effort": "low", "k": 2, "z": None
    }  # fmt: skip
    with pytest.raises(InvalidRequestError):
        chat(chat_template_kwargs={"a": [1]})


def call(arguments: str = "{}", **changes: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function} | changes


def test_a_history_of_calls_reaches_the_template_as_values():
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call('{"a": "é"}'), call("{oops")]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "42"}]},
        {"role": "developer", "content": "d"},
    ]
    assert [message.as_message() for message in chat(messages=messages).messages] == [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {**call(), "function": {"name": "f", "arguments": {"a": "é"}}},
                {**call(), "function": {"name": "f", "arguments": "{oops"}},
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
        {"role": "system", "content": "d"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "tool_calls": [call()]}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": [call()] * 129}, "messages.0.tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages.0.tool_calls.0.type"),
        ({"role": "assistant", "tool_calls": [call(id="")]}, "messages.0.tool_calls.0.id"),
        (
            {"role": "assistant", "tool_calls": [call({})]},  # type: ignore[arg-type]
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"role": "tool", "content": "x", "tool_call_id": 3}, "messages.0.tool_call_id"),
    ],
)
def test_a_call_that_is_none_is_refused(message, param):
    with pytest.raises(InvalidRequestError) as error:
        chat(messages=[message])

    assert error.value.param == param


# ----------------------------------------------------------------------------- forms of answers

SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": OBJECT, "strict": True}}


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"json_object": False}}, None),
        (
            {"response_format": {"type": "json_object"}},
            Grammar("json_schema", '{"type": "object"}'),
        ),
        ({"response_format": SCHEMA}, Grammar("json_schema", json.dumps(OBJECT))),
        ({"structured_outputs": {"json": OBJECT}}, Grammar("json_schema", json.dumps(OBJECT))),
        ({"structured_outputs": {"json": "{}"}}, Grammar("json_schema", "{}")),
        (
            {"structured_outputs": {"json_object": True}},
            Grammar("json_schema", '{"type": "object"}'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        (
            {"structured_outputs": {"choice": ['é"', "b\n"]}},
            Grammar("lark", r'start: "é\"" | "b\n"'),
        ),
        ({"structured_outputs": {"grammar": "start: /x/"}}, Grammar("lark", "start: /x/")),
        ({"guided_json": OBJECT}, Grammar("json_schema", json.dumps(OBJECT))),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a"]}, Grammar("lark", 'start: "a"')),
        ({"guided_grammar": "start: /x/"}, Grammar("lark", "start: /x/")),
    ],
)
def test_a_form_of_the_answer_becomes_a_grammar(make, fields, expected):
    body = make(**fields)

    assert body.grammar() == expected
    assert body.is_constrained == (expected is not None)


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a b", "schema": {}},
                }
            },
            "response_format.json_schema.name",
        ),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a" * 65_537}}, "structured_outputs.regex"),
        ({"response_format": SCHEMA, "guided_regex": "a"}, "structured_outputs"),
        ({"response_format": SCHEMA, "min_tokens": 3}, "min_tokens"),
        ({"response_format": SCHEMA, "use_beam_search": True, "n": 2}, "response_format"),
        ({"guided_choice": ["a"], "min_tokens": 3}, "min_tokens"),
    ],
)
def test_a_form_that_cannot_be_is_refused(make, fields, param):
    with pytest.raises(InvalidRequestError) as error:
        make(**fields)

    assert error.value.param == param


def test_a_structural_tag_is_not_supported():
    with pytest.raises(UnsupportedParameterError) as error:
        chat(structured_outputs={"structural_tag": "{}"})

    assert error.value.param == "structured_outputs.structural_tag"
