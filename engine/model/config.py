"""The shape of a model, as its file states it."""

from dataclasses import dataclass
from typing import Literal

from engine.errors import ModelLoadError
from engine.model.rope import Rope


@dataclass(frozen=True, slots=True)
class Sliding:
    """Layers whose queries see only the last `window` tokens, their own included."""

    window: int  # tokens
    layers: frozenset[int]
    rope: Rope  # of these layers

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ModelLoadError(f"the model's sliding window is {self.window}, not positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Dimensions and constants of a decoder transformer. Raises ModelLoadError if they disagree."""

    arch: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: Rope
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position: int  # tokens of context that the model was trained for

    # Where families differ; the defaults are llama's.
    activation: Literal["silu", "gelu_tanh"] = "silu"
    has_qkv_bias: bool = False
    has_head_norms: bool = False  # each head of q and k is normalized before it is rotated
    has_branch_norms: bool = False  # what attention and MLP add is normalized once more
    has_shifted_norms: bool = False  # a norm multiplies by 1 + its weight
    has_scaled_embedding: bool = False  # by the square root of hidden_size
    query_scale: float = 1.0  # times 1 / sqrt(head_dim); only beside head norms
    sliding: Sliding | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "max_position",
        ):
            if getattr(self, name) < 1:
                raise ModelLoadError(f"the model's {name} is {getattr(self, name)}, not positive")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"rotary embedding needs an even head_dim, not {self.head_dim}")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or of the values) of one token in one layer."""
        return self.num_kv_heads * self.head_dim
