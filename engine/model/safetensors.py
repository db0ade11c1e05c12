"""Reading a model from a Hugging Face folder: config.json, tokenizer.json and *.safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelLoadError
from engine.model.architectures import find_architecture
from engine.model.chat_template import ChatTemplate
from engine.model.checkpoint import Checkpoint
from engine.model.families.family import Family
from engine.model.tokenizer import Tokenizer, tokenizer_from_json
from engine.model.weights import Weights

_INDEX = "model.safetensors.index.json"


def read_folder(folder: Path, *, device: torch.device, dtype: torch.dtype) -> Checkpoint:
    """The model in this folder. Raises ModelLoadError if it is damaged or not supported."""
    config = _read_json(folder / "config.json")
    architecture = find_architecture(str(config.get("model_type")))
    return Checkpoint(
        config=architecture.config_from_hf(config),
        weights=_weights(folder, architecture, device=device, dtype=dtype),
        tokenizer=_tokenizer(folder, config),
        chat_template=_chat_template(folder),
    )


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read ({error}): fetch the model again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds no JSON object: fetch the model again")
    return content


def _weights(
    folder: Path, architecture: Family, *, device: torch.device, dtype: torch.dtype
) -> Weights:
    files = _files_of_tensors(folder)
    stored = {name: file_name for file_name in files if (name := architecture.hf_tensor(file_name))}

    def read(name: str) -> torch.Tensor:
        path, stored_name = files[stored[name]], stored[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(stored_name)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(
                f"tensor {stored_name} of {path} cannot be read ({error}): fetch the model again"
            ) from error
        return tensor

    return Weights(stored, read, device=device, dtype=dtype)


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """Where each tensor lies: by what the files say, not by what the index promises."""
    if (folder / _INDEX).is_file():
        shards = _read_json(folder / _INDEX).get("weight_map", {}).values()
        names = sorted(set(map(str, shards)))
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise ModelLoadError(
            f"{folder} holds no *.safetensors files: fetch the model with its weights "
            "(PyTorch .bin files are not read)"
        )
    files: dict[str, Path] = {}
    for name in names:
        # The index comes with the model: it must not point out of the folder.
        if Path(name).name != name:
            raise ModelLoadError(f"{_INDEX} names the file {name!r} outside of {folder}")
        try:
            with safe_open(folder / name, framework="pt") as file:
                files |= dict.fromkeys(file.keys(), folder / name)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(
                f"{folder / name} is not a readable safetensors file ({error}): fetch it again"
            ) from error
    return files


def _tokenizer(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(
            f"{path} cannot be read ({error}): fetch the model with its tokenizer.json"
        ) from error
    # generation_config.json lists every token that ends a turn; config.json often only one.
    generation = _read_json(folder / "generation_config.json", optional=True)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    stops = eos if isinstance(eos, list) else [eos]
    bos = config.get("bos_token_id")
    return tokenizer_from_json(
        text,
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=frozenset(i for i in stops if isinstance(i, int)),
    )


def _chat_template(folder: Path) -> ChatTemplate | None:
    config = _read_json(folder / "tokenizer_config.json", optional=True)
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not isinstance(source, str):
        return None
    return ChatTemplate(
        source,
        bos_token=_token_text(config.get("bos_token")),
        eos_token=_token_text(config.get("eos_token")),
    )


def _token_text(token: Any) -> str:
    """A special token is written as text, or as an object with its properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
