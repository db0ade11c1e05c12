"""POST /v1/chat/completions."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from engine.events import Usage
from gateway.api.completions import usage_object
from gateway.api.logprobs import chat_logprobs, prompt_logprobs
from gateway.choices import Choice, Output, ShownToken
from gateway.schemas.chat import ChatBody
from gateway.served_model import ServedModel
from gateway.settings import Settings

# Models know the older, or the newer, name of these roles.
_ROLES: Mapping[str, str] = {"developer": "system", "function": "tool"}


class ChatShape:
    """`chat.completion` objects and their chunks."""

    def __init__(self, response_id: str, model: ServedModel, created: int, usage_key: bool) -> None:
        self._id = response_id
        self._model = model.name
        self._created = created
        self._usage_key = usage_key
        self._token_bytes = model.token_bytes

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def delta(self, output: Output) -> dict[str, Any]:
        return self._chunk(output.index, {"content": output.text}, None, output.tokens)

    def closing(self, index: int, finish_reason: str) -> dict[str, Any]:
        return self._chunk(index, {}, finish_reason)

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._head("chat.completion.chunk") | {"choices": [], "usage": usage_object(usage)}

    def complete(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        written = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(choices)
        ]
        answer = self._head("chat.completion") | {"choices": written, "usage": usage_object(usage)}
        prompt = choices[0].prompt
        if prompt is not None:
            answer["prompt_logprobs"] = prompt_logprobs(prompt, self._token_bytes)
        return answer

    def _logprobs(self, tokens: Sequence[ShownToken] | None) -> dict[str, Any] | None:
        return None if tokens is None else chat_logprobs(tokens, self._token_bytes)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def _chunk(
        self,
        index: int,
        delta: dict[str, str],
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
        return sum(len((message.content or "").encode()) for message in body.messages)

    def encoders(self, body: ChatBody, model: ServedModel) -> list[Callable[[], Sequence[int]]]:
        messages = [
            {
                "role": _ROLES.get(message.role, message.role),
                "content": message.content or "",
            }
            for message in body.messages
        ]
        return [partial(model.encode_chat, messages)]

    def echo(
        self, body: ChatBody, number: int, token_ids: Sequence[int], model: ServedModel
    ) -> str:
        return ""

    def default_tokens(self, settings: Settings) -> int:
        return settings.default_max_tokens

    def shape(
        self, body: ChatBody, response_id: str, model: ServedModel, created: int
    ) -> ChatShape:
        return ChatShape(f"chatcmpl-{response_id}", model, created, body.include_usage)
