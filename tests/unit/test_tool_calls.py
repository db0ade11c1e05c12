"""Tool calls: offered as text, constrained by a grammar, read from text."""

import json
import random
from itertools import count
from typing import Any

import pytest

from engine.model.chat_template import ChatTemplate
from engine.model.tool_format import Tool, tool_call_grammar, tools_as_text
from gateway.tool_calls import CallDelta, Piece, ToolCallParser

WEATHER = Tool(
    name="get_weather",
    description="Weather of a city",
    parameters={"type": "object", "properties": {"city": {"type": "string"}}},
    strict=False,
)
OFFERED = (
    '{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}'
)


def call(name: str, arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def read(pieces: list[str]) -> tuple[list[Piece], ToolCallParser]:
    numbers = count()
    parser = ToolCallParser(lambda: f"call_{next(numbers)}")
    found = [piece for text in pieces for piece in parser.push(text)]
    return found + parser.finish(), parser


def together(pieces: list[Piece]) -> tuple[str, list[tuple[str, str, str]]]:
    """Content and calls, as a client puts them together."""
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallDelta):
            if piece.id is not None:
                assert piece.name is not None
                assert piece.index == len(calls)
                assert piece.arguments == ""
                calls.append([piece.id, piece.name, ""])
            else:
                calls[piece.index][2] += piece.arguments
    return content, [(a, b, c) for a, b, c in calls]


ANSWERS = [
    ("Plain text, a < b, <tool and <tools>.\n ", [], "Plain text, a < b, <tool and <tools>.\n "),
    (call("f", {}), [("f", "{}")], ""),
    (
        "Let me see. \n" + call("f", {"a": 'x "}{" \\" </tool_call> <tool_call>', "b": [{}, []]}),
        [("f", json.dumps({"a": 'x "}{" \\" </tool_call> <tool_call>', "b": [{}, []]}))],
        "Let me see.",
    ),
    (
        call("f", {"a": 1}) + "\n" + call("g-2_x", {"é": None}) + "\n",
        [("f", '{"a": 1}'), ("g-2_x", '{"\\u00e9": null}')],
        "",
    ),
    (f"A {call('f', {})} B {call('g', {})} C", [("f", "{}"), ("g", "{}")], "ABC"),
    # Cut off by the output limit: what is certain is shown, and nothing of a tag.
    ("Wait <tool_ca", [], "Wait"),
    ("Wait\n<tool_call>\n", [], "Wait"),
    ('<tool_call>\n{"name": "get_wea', [], ""),
    ('<tool_call>\n{"name": "f", "argum', [], ""),
    ('<tool_call>\n{"name": "f", "arguments": {"a": [1, "x', [("f", '{"a": [1, "x')], ""),
    (call("f", {"a": 1})[:-4], [("f", '{"a": 1}')], ""),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: repr(answer[0][:24]))
def test_an_answer_reads_alike_whole_and_in_any_pieces(
    answer: tuple[str, list[tuple[str, str]], str],
) -> None:
    text, calls, content = answer
    expected = (content, [(f"call_{i}", *one) for i, one in enumerate(calls)])
    rng = random.Random(text)
    splits = [[text], list(text)]
    for _ in range(50):
        cuts = sorted(rng.sample(range(len(text) + 1), min(len(text), rng.randint(1, 6))))
        splits.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    for pieces in splits:
        found, parser = read(pieces)
        assert together(found) == expected
        shown = "".join(piece for piece in found if isinstance(piece, str))
        assert "<tool_call>" not in shown
        assert parser.is_inside == (text.count("<tool_call>") > text.count("</tool_call>"))


def test_content_and_arguments_come_as_soon_as_they_are_certain() -> None:
    parser = ToolCallParser(lambda: "call_x")
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" <") == []
    assert parser.push("b") == [" <b"]
    assert parser.push("<tool_call>") == []
    assert parser.push('\n{"name": "f", "arguments": ') == []
    assert parser.push('{"a') == [CallDelta(0, id="call_x", name="f"), CallDelta(0, '{"a')]
    assert parser.push('": 1') == [CallDelta(0, '": 1')]
    assert parser.push("}}") == [CallDelta(0, "}")]
    assert parser.push("\n</tool_call>\n") == []
    assert not parser.is_inside
    assert parser.finish() == []


# ------------------------------------------------------------------------------------- prompts

HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Paris and Rome?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"c": "é"}}},
            {"id": "b", "type": "function", "function": {"name": "f", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "sun"},
    {"role": "tool", "tool_call_id": "b", "content": "rain"},
    {"role": "user", "content": "Thanks"},
]


def test_a_template_without_tools_gets_them_as_text() -> None:
    plain = tools_as_text([{"role": "system", "content": "Be brief."}, *HISTORY], [WEATHER])
    system = plain[0]["content"]
    assert system.startswith("Be brief.\n\nYou may call functions.")
    assert f"<tools>\n{OFFERED}\n</tools>" in system
    assert plain[1:] == [
        {"role": "user", "content": "Weather in Paris and Rome?"},
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "f", "arguments": {"c": "é"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        },
        {
            "role": "user",
            "content": "<tool_response>\nsun\n</tool_response>\n"
            "<tool_response>\nrain\n</tool_response>",
        },
        {"role": "user", "content": "Thanks"},
    ]
    assert tools_as_text([{"role": "user", "content": "x"}], [WEATHER])[0]["role"] == "system"


WRITES_ALL = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}{{ m.tool_calls or '' }}]{% endfor %}"
)


def test_only_a_template_that_knows_the_format_gets_tools() -> None:
    knows = WRITES_ALL + "{% if tools %}{{ tools | tojson }}{% endif %}{# <tool_call> #}"
    asked = [{"role": "user", "content": "x"}]
    assert ChatTemplate(knows).render(asked, tools=[WEATHER]) == f"[user:x][{OFFERED}]"
    assert ChatTemplate(knows).render(asked) == "[user:x]"
    for source in (
        WRITES_ALL,
        WRITES_ALL + "{{ tools }}",  # another format
        WRITES_ALL + "{{ tools }}{# <tool_call> <function= #}",
    ):
        text = ChatTemplate(source).render(asked, tools=[WEATHER])
        assert text.startswith("[system:You may call functions.")
        assert OFFERED in text
        assert "[user:x]" in text
    # Without tools, a conversation that called some is still told in plain messages.
    assert "[user:<tool_response>" in ChatTemplate(WRITES_ALL).render(HISTORY)
    assert "[tool:sun]" in ChatTemplate(knows).render(HISTORY)


def test_variables_of_a_template_cannot_replace_what_is_rendered() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ enable_thinking }}{{ bos_token }}")
    text = template.render(
        [{"role": "user", "content": "x"}],
        variables={"enable_thinking": False, "messages": [{"content": "y"}], "bos_token": "<s>"},
    )
    assert text == "xFalse"


def test_a_tool_call_grammar_is_compact_and_lenient_unless_strict() -> None:
    source = tool_call_grammar([WEATHER], required=True, parallel=False).source
    assert '"lenient": true' in source
    strict = Tool(name="f", description=None, parameters={"type": "object"}, strict=True)
    source = tool_call_grammar([strict], required=True, parallel=False).source
    assert '"lenient": false' in source
    assert '"whitespace_flexible": false' in source
