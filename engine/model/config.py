"""The shape of a model, as its file states it."""

from dataclasses import dataclass

from engine.errors import ModelLoadError


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
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position: int  # tokens of context that the model was trained for

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
