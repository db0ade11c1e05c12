"""Logprobs on the wire, in the three forms that clients know."""

from collections.abc import Iterable
from typing import Any

from engine.detokenizer import TokenBytes
from gateway.choices import ShownToken

# JSON has no infinity: this stands for a token that cannot come.
IMPOSSIBLE = -9999.0


def completion_logprobs(tokens: Iterable[ShownToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """Of a text completion: parallel lists."""
    tokens = list(tokens)
    return {
        "tokens": [_text(token_bytes(token.token_id)) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_by_text(token, token_bytes) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Iterable[ShownToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """Of a chat message: one object for each token."""
    content = [
        _chat_token(token.token_id, token.logprob, token_bytes)
        | {"top_logprobs": [_chat_token(*top, token_bytes) for top in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokens: Iterable[ShownToken], token_bytes: TokenBytes
) -> list[dict[str, Any] | None]:
    """Of a prompt, as vLLM gives them: by token id, the prompt's own token and the likeliest."""
    return [_by_id(token, token_bytes) if token.logprob is not None else None for token in tokens]


def _by_text(token: ShownToken, token_bytes: TokenBytes) -> dict[str, float | None] | None:
    """The likeliest tokens and the one that is there. Of two with one text, the likelier counts."""
    if token.logprob is None:
        return None
    found: dict[str, float | None] = {}
    for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
        found.setdefault(_text(token_bytes(token_id)), _finite(logprob))
    return found


def _by_id(token: ShownToken, token_bytes: TokenBytes) -> dict[str, Any]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(token.top, 1)}
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": ranks.get(token_id),  # unknown beyond the likeliest
            "decoded_token": token_bytes(token_id).decode("utf-8", errors="replace"),
        }
        for token_id, logprob in ((token.token_id, token.logprob), *token.top)
    }


def _chat_token(token_id: int, logprob: float | None, token_bytes: TokenBytes) -> dict[str, Any]:
    data = token_bytes(token_id)
    return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(data)}


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:  # a part of a character
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, IMPOSSIBLE)
