"""What a reader of model files hands to the loader."""

from dataclasses import dataclass

from engine.model.chat_template import ChatTemplate
from engine.model.config import ModelConfig
from engine.model.tokenizer import Tokenizer
from engine.model.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model's files, understood but not yet in memory."""

    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
