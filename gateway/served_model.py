"""The model as the gateway needs it: names, bounds, and text to token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.detokenizer import TokenBytes
from engine.model.tool_format import Tool
from engine.sequence import Grammar


class EncodeChat(Protocol):
    """Token ids of a conversation, as the model's template writes it.

    Raises engine.errors.TemplateError when the template refuses the messages.
    """

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool],
        variables: Mapping[str, Any],
    ) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is served under one public name. What encodes is slow: call off-loop."""

    name: str
    created: int  # epoch seconds
    device: str  # that it runs on
    dtype: str  # of weights and KV cache
    max_model_len: int  # tokens of prompt and output together
    max_seqs: int  # sequences that run at once
    vocab_size: int
    max_token_bytes: int  # the longest token's
    token_bytes: TokenBytes
    encode: Callable[[str], Sequence[int]]
    # Without what the model asks for around a text.
    encode_plain: Callable[[str], Sequence[int]]
    encode_chat: EncodeChat
    # Raises engine.errors.GrammarError. Slow, unless it was compiled before.
    compile_grammar: Callable[[Grammar], object]
