"""The model as the gateway needs it: names, bounds, and text to token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is served under one public name. `encode` and `encode_chat` are slow: call off-loop."""

    name: str
    created: int  # epoch seconds
    device: str  # that it runs on
    dtype: str  # of weights and KV cache
    max_model_len: int  # tokens of prompt and output together
    vocab_size: int
    max_token_bytes: int  # the longest token's
    encode: Callable[[str], Sequence[int]]
    # Raises engine.errors.TemplateError when the model's template refuses the messages.
    encode_chat: Callable[[Sequence[Mapping[str, str]]], Sequence[int]]
