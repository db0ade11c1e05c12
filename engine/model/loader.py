"""From a path to a model that can run."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import ModelLoadError
from engine.model.chat_template import ChatTemplate
from engine.model.config import ModelConfig
from engine.model.default_model import DEFAULT_MODEL_FILE, DEFAULT_MODEL_NAME
from engine.model.gguf import read_gguf
from engine.model.safetensors import read_folder
from engine.model.tokenizer import Tokenizer
from engine.model.transformer import Transformer

_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, with all that its use needs."""

    name: str  # public model id
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    network: Transformer
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: frozenset[int]


def load_model(path: Path, *, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """Load a GGUF file or a Hugging Face folder.

    device  "auto" takes CUDA if there is one; else a torch device, such as "cpu" or "cuda:1"
    dtype   "float32", "bfloat16" or "auto": float32 on CPU, bfloat16 elsewhere

    Raises ModelLoadError saying what is wrong and what to do about it.
    """
    target = _choose_device(device)
    kind = _choose_dtype(dtype, target)
    if path.is_dir():
        checkpoint = read_folder(path, device=target, dtype=kind)
    elif path.is_file():
        checkpoint = read_gguf(path, device=target, dtype=kind)
    else:
        raise ModelLoadError(f"{path} does not exist: give a GGUF file or a Hugging Face folder")
    network = Transformer(checkpoint.config, checkpoint.weights)
    checkpoint.weights.check_all_used()
    file_name = path.resolve().name
    is_default = file_name == DEFAULT_MODEL_FILE
    return LoadedModel(
        name=DEFAULT_MODEL_NAME if is_default else file_name.removesuffix(".gguf"),
        config=checkpoint.config,
        tokenizer=checkpoint.tokenizer,
        chat_template=checkpoint.chat_template,
        network=network,
        device=target,
        dtype=kind,
        eos_token_ids=checkpoint.tokenizer.eos_token_ids,
    )


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # torch raises AssertionError where it was built without CUDA
    except (RuntimeError, AssertionError) as error:
        raise ModelLoadError(f"device {name!r} cannot be used ({error}): try 'cpu'") from error
    return device


def _choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in _DTYPES:
        raise ModelLoadError(f"dtype {name!r} is not one of auto, {', '.join(_DTYPES)}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
