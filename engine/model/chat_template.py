"""Chat templates: the model's own Jinja, run in a sandbox, with what transformers offers them."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ModelLoadError, TemplateError
from engine.model.tool_format import CALL_OPENS, Tool, tools_as_text


def _local_now() -> datetime:
    return datetime.now().astimezone()


class ChatTemplate:
    """A compiled template. `bos_token` and `eos_token` are what the template may write."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        now: Callable[[], datetime] = _local_now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: now().strftime(format)
        try:
            self._template = environment.from_string(source)
            variables = find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ModelLoadError(
                f"the model's chat template is not valid Jinja: {error}"
            ) from error
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        # Other formats of calls are not for the grammar here: such a template is as good as none.
        self._knows_tools = (
            "tools" in variables and CALL_OPENS in source and "<function=" not in source
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text. Raises TemplateError when the template refuses these messages.

        messages    as OpenAI has them; the arguments of a call are JSON values, not text
        variables   of the template's own, such as enable_thinking
        """
        if not self._knows_tools and (tools or any(m.get("tool_calls") for m in messages)):
            messages, tools = tools_as_text(messages, tools), ()
        try:
            return self._template.render(
                dict(variables or {})
                | self._tokens
                | {
                    "messages": [dict(message) for message in messages],
                    "tools": [tool.as_openai() for tool in tools] or None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        # A template is foreign code: a missing key or a sum of unlike types is its refusal too.
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            IndexError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would reach the model.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
