"""The table of model families.

A family is added by adding its entry here; the readers and the loader look up and never branch.
"""

from collections.abc import Mapping
from types import MappingProxyType

from engine.errors import ModelLoadError
from engine.model.families.family import Family
from engine.model.families.gemma import GEMMA3
from engine.model.families.llama import LLAMA
from engine.model.families.qwen import QWEN2, QWEN3


def find_architecture(name: str) -> Family:
    """The family of this name; ModelLoadError if it is not supported."""
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"models of architecture {name!r} are not supported; "
            f"supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[name]


# By the name that config.json and GGUF give it, mostly the same.
ARCHITECTURES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": LLAMA,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "gemma3": GEMMA3,
        "gemma3_text": GEMMA3,
    }
)
