"""POST /v1/completions."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from engine.events import Usage
from gateway.api.logprobs import completion_logprobs, prompt_logprobs
from gateway.choices import Choice, Output, ShownToken
from gateway.schemas.completions import CompletionBody
from gateway.served_model import ServedModel
from gateway.settings import Settings

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionShape:
    """`text_completion` objects; chunks and the whole answer have the same form."""

    def __init__(
        self,
        response_id: str,
        model: ServedModel,
        created: int,
        *,
        usage_key: bool = False,
        tier: str | None = None,
    ) -> None:
        self._head: dict[str, Any] = {
            "id": response_id,
            "object": "text_completion",
            "created": created,
            "model": model.name,
        } | ({} if tier is None else {"service_tier": tier})
        self._usage_key = usage_key
        self._token_bytes = model.token_bytes

    def opening(self, index: int) -> None:
        return None

    def deltas(self, output: Output) -> list[dict[str, Any]]:
        return [self._chunk([self._choice(output.index, output.text, output.tokens, None)])]

    def closing(self, index: int, finish_reason: str) -> list[dict[str, Any]]:
        return [self._chunk([self._choice(index, "", None, finish_reason)])]

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._head | {"choices": [], "usage": usage_object(usage)}

    def complete(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        written = [self._whole(index, choice) for index, choice in enumerate(choices)]
        return self._head | {"choices": written, "usage": usage_object(usage)}

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        written = self._choice(index, choice.text, choice.tokens, choice.finish_reason)
        if choice.prompt is not None:
            written["prompt_logprobs"] = prompt_logprobs(choice.prompt, self._token_bytes)
        return written

    def _choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[ShownToken] | None,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        logprobs = None if tokens is None else completion_logprobs(tokens, self._token_bytes)
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"choices": choices} | ({"usage": None} if self._usage_key else {})


class Completions:
    """The resource of plain prompts: text or token ids, one choice per prompt."""

    schema = CompletionBody
    prompt_param = "prompt"

    def text_bytes(self, body: CompletionBody) -> int:
        return max(len(text.encode()) if isinstance(text, str) else 0 for text in body.prompt)

    def encoders(
        self, body: CompletionBody, model: ServedModel
    ) -> list[Callable[[], Sequence[int]]]:
        return [partial(_encode, prompt, model) for prompt in body.prompt]

    def echo(
        self, body: CompletionBody, number: int, token_ids: Sequence[int], model: ServedModel
    ) -> str:
        prompt = body.prompt[number]
        if not body.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        return b"".join(map(model.token_bytes, token_ids)).decode("utf-8", errors="replace")

    def default_tokens(self, settings: Settings) -> int:
        return DEFAULT_MAX_TOKENS

    def shape(
        self,
        body: CompletionBody,
        response_id: str,
        model: ServedModel,
        created: int,
        tier: str | None,
    ) -> CompletionShape:
        return CompletionShape(
            f"cmpl-{response_id}", model, created, usage_key=body.include_usage, tier=tier
        )


def _encode(prompt: str | tuple[int, ...], model: ServedModel) -> Sequence[int]:
    return model.encode(prompt) if isinstance(prompt, str) else prompt


def usage_object(usage: Usage) -> dict[str, Any]:
    """Tokens as OpenAI counts them: cached ones are part of the prompt."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
