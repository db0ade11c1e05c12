"""POST /v1/chat/completions."""

import secrets
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from engine.events import Usage
from engine.sequence import FinishReason
from gateway.api.completions import usage_object
from gateway.api.logprobs import chat_logprobs, prompt_logprobs
from gateway.choices import Choice, Output, ShownToken
from gateway.schemas.chat import ChatBody
from gateway.schemas.tools import ToolChoice
from gateway.served_model import ServedModel
from gateway.settings import Settings
from gateway.tool_calls import ToolCallParser, wire_delta, wire_message


class ChatShape:
    """`chat.completion` objects and their chunks.

    tool_choice  None where the answer is plain text, whatever it looks like
    """

    def __init__(
        self,
        response_id: str,
        model: ServedModel,
        created: int,
        *,
        usage_key: bool = False,
        tier: str | None = None,
        tool_choice: ToolChoice | None = None,
    ) -> None:
        self._id = response_id
        self._model = model.name
        self._created = created
        self._usage_key = usage_key
        self._tier = {} if tier is None else {"service_tier": tier}
        self._token_bytes = model.token_bytes
        self._tool_choice = tool_choice
        self._parsers: defaultdict[int, ToolCallParser] = defaultdict(_parser)  # by choice

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def deltas(self, output: Output) -> list[dict[str, Any]]:
        if self._tool_choice is None:
            deltas = [{"content": output.text}]
        else:
            deltas = list(map(wire_delta, self._parsers[output.index].push(output.text)))
        if not deltas and output.tokens:  # of a tag, which is not shown
            deltas = [{}]
        return [
            self._chunk(output.index, delta, None, None if number else output.tokens)
            for number, delta in enumerate(deltas)
        ]

    def closing(self, index: int, finish_reason: str) -> list[dict[str, Any]]:
        rest = [] if self._tool_choice is None else self._parsers[index].finish()
        chunks = [self._chunk(index, wire_delta(piece), None) for piece in rest]
        return [*chunks, self._chunk(index, {}, self._reason(index, finish_reason))]

    def _reason(self, index: int, finish_reason: str) -> str:
        """What ends a choice: its calls, unless it was cut short."""
        choice, parser = self._tool_choice, self._parsers[index]
        if choice is None or choice.is_named or parser.is_inside or not parser.num_calls:
            return finish_reason
        return "tool_calls" if finish_reason == FinishReason.STOP else finish_reason

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._head("chat.completion.chunk") | {"choices": [], "usage": usage_object(usage)}

    def complete(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        written = [
            {
                "index": index,
                "message": {"role": "assistant", "refusal": None} | self._message(index, choice),
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": self._reason(index, choice.finish_reason),
            }
            for index, choice in enumerate(choices)
        ]
        answer = self._head("chat.completion") | {"choices": written, "usage": usage_object(usage)}
        prompt = choices[0].prompt
        if prompt is not None:
            answer["prompt_logprobs"] = prompt_logprobs(prompt, self._token_bytes)
        return answer

    def _message(self, index: int, choice: Choice) -> dict[str, Any]:
        if self._tool_choice is None:
            return {"content": choice.text}
        parser = self._parsers[index]
        return wire_message(parser.push(choice.text) + parser.finish())

    def _logprobs(self, tokens: Sequence[ShownToken] | None) -> dict[str, Any] | None:
        return None if tokens is None else chat_logprobs(tokens, self._token_bytes)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            **self._tier,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None,
        tokens: Sequence[ShownToken] | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish_reason,
        }
        chunk = self._head("chat.completion.chunk") | {"choices": [choice]}
        return chunk | {"usage": None} if self._usage_key else chunk


class ChatCompletions:
    """The resource of conversations, written out by the model's own template."""

    schema = ChatBody
    prompt_param = "messages"

    def text_bytes(self, body: ChatBody) -> int:
        called = [call.function.arguments for m in body.messages for call in m.tool_calls or ()]
        texts = [*(message.content or "" for message in body.messages), *called]
        return sum(len(text.encode()) for text in texts)

    def encoders(self, body: ChatBody, model: ServedModel) -> list[Callable[[], Sequence[int]]]:
        messages = [message.as_message() for message in body.messages]
        return [
            partial(
                model.encode_chat,
                messages,
                tools=body.offered_tools(),
                variables=body.chat_template_kwargs or {},
            )
        ]

    def echo(
        self, body: ChatBody, number: int, token_ids: Sequence[int], model: ServedModel
    ) -> str:
        return ""

    def default_tokens(self, settings: Settings) -> int:
        return settings.default_max_tokens

    def shape(
        self, body: ChatBody, response_id: str, model: ServedModel, created: int, tier: str | None
    ) -> ChatShape:
        return ChatShape(
            f"chatcmpl-{response_id}",
            model,
            created,
            usage_key=body.include_usage,
            tier=tier,
            tool_choice=body.tool_choice if body.calls_tools else None,
        )


def _parser() -> ToolCallParser:
    return ToolCallParser(lambda: f"call_{secrets.token_hex(12)}")
