"""The model as the gateway needs it: names, bounds, and text to token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.detokenizer import TokenBytes


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
    # Raises engine.errors.TemplateError when the model's template refuses the messages.
    encode_chat: Callable[[Sequence[Mapping[str, str]]], Sequence[int]]
