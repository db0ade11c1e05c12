"""How tools are offered to a model and how it calls them: the Hermes format, which Qwen uses too.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Models whose chat template does not know it are told in a system message, and their calls are held
to it by a grammar.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.model.json_style import COMPACT
from engine.sequence import Grammar

CALL_OPENS, CALL_CLOSES = "<tool_call>", "</tool_call>"
# Between the two, exactly: the head, the name as JSON, the middle, the arguments, the foot.
CALL_HEAD, CALL_MIDDLE, CALL_FOOT = '\n{"name": ', ', "arguments": ', "}\n"

_OFFER = """\
You may call functions. Each line between <tools> and </tools> describes one, as JSON:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <object of arguments>}}
</tool_call>"""

_MAX_CALLS = 16  # that must be made: a weak model would go on to its output limit
_ANY_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]  # JSON schema of an object
    strict: bool  # a keyword that cannot be enforced is an error, not ignored

    def as_openai(self) -> dict[str, Any]:
        """As templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": dict(self.parameters)}}


def tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """The conversation in plain messages, for templates that know nothing of tools.

    messages   as OpenAI has them, but for the arguments of a call, which are no longer text
    """
    plain: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        content = message.get("content") or ""
        if is_result:
            content = f"<tool_response>\n{content}\n</tool_response>"
        calls = [_call_as_text(call["function"]) for call in message.get("tool_calls") or ()]
        text = "\n".join([content, *calls] if content else calls)
        if is_result and was_result:  # results of one turn's calls come in one turn
            plain[-1]["content"] += "\n" + text
        else:
            plain.append({"role": "user" if is_result else message["role"], "content": text})
        was_result = is_result
    if not tools:
        return plain
    offer = _OFFER.format(tools="\n".join(json.dumps(tool.as_openai()) for tool in tools))
    if plain and plain[0]["role"] == "system":
        plain[0]["content"] = "\n\n".join(filter(None, (plain[0]["content"], offer)))
        return plain
    return [{"role": "system", "content": offer}, *plain]


def _call_as_text(function: Mapping[str, Any]) -> str:
    name, arguments = (json.dumps(function[key], ensure_ascii=False) for key in _CALL_KEYS)
    return f"{CALL_OPENS}{CALL_HEAD}{name}{CALL_MIDDLE}{arguments}{CALL_FOOT}{CALL_CLOSES}"


_CALL_KEYS = ("name", "arguments")


def tool_call_grammar(
    tools: Iterable[Tool],
    *,
    required: bool,
    parallel: bool,
    answer_schema: Mapping[str, Any] | None = None,
) -> Grammar:
    """Calls of these tools, or, unless they are required, an answer.

    required        calls from the first token; else free text before, between and after them
    parallel        several calls, not one
    answer_schema   what an answer without calls must match, instead of being free
    """
    rules = [
        f'call: "{CALL_OPENS}" body',
        f"body: {_text(CALL_HEAD)} ({_alternatives(tools)}) {_text(CALL_FOOT + CALL_CLOSES)}",
    ]
    calls = f'call ("\\n" call){{0,{_MAX_CALLS - 1}}}' if parallel else "call"
    if required:
        start = calls
    elif answer_schema is not None:
        start = f"{calls} | {_json(answer_schema, COMPACT)}"
    else:
        # A lazy lexeme ends the text where the tag does: what follows it can be nothing else.
        rules += [f'lead[lazy]: {_ANY_TEXT} "{CALL_OPENS}"', f"TEXT: {_ANY_TEXT}"]
        start = "(lead body)* TEXT" if parallel else "TEXT | lead body"
        del rules[0]
    return Grammar("lark", "\n".join([f"start: {start}", *rules]))


def _alternatives(tools: Iterable[Tool]) -> str:
    return " | ".join(
        f"{_text(json.dumps(tool.name) + CALL_MIDDLE)} {_json(tool.parameters, _style(tool))}"
        for tool in tools
    )


def _style(tool: Tool) -> Mapping[str, object]:
    return dict(COMPACT) | {"lenient": not tool.strict, "coerce_one_of": not tool.strict}


def _json(schema: Mapping[str, Any], style: Mapping[str, object]) -> str:
    return f"%json {json.dumps(dict(schema) | {'x-guidance': dict(style)})}"


def _text(literal: str) -> str:
    return json.dumps(literal)
