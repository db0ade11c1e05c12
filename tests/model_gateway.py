"""A gateway with a real model behind it, for tests."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner
from engine.model.structured import GrammarCompiler
from gateway.build import served_model
from tests.gateway_kit import RealModel
from tests.model_oracle import save_tiny_llama

# All that a conversation needs, in few tokens; it knows nothing of tools.
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def tiny_chat_model() -> LoadedModel:
    """Random, of bytes, with nearly flat logits: what it says, a grammar has to decide."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny_llama(folder, max_position_embeddings=4096, initializer_range=0.05)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        return load_model(folder, device="cpu", dtype="float32")


def real_model(model: LoadedModel) -> RealModel:
    grammars = GrammarCompiler(model.tokenizer, model.config.vocab_size)
    return RealModel(
        runner=lambda cache: ModelRunner(model, cache),
        token_bytes=model.tokenizer.token_bytes,
        eos_token_ids=model.eos_token_ids,
        grammars=grammars,
        served=lambda config: served_model(model, config, grammars),
    )
