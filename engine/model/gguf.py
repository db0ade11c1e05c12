"""Reading a model from one GGUF file: configuration, vocabulary and weights, dequantized."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from engine.errors import ModelLoadError
from engine.model.architectures import find_architecture
from engine.model.chat_template import ChatTemplate
from engine.model.checkpoint import Checkpoint
from engine.model.config import ModelConfig
from engine.model.families.family import Family, GgufTensors
from engine.model.tokenizer import Tokenizer, byte_level_tokenizer, sentencepiece_tokenizer
from engine.model.weights import Weights

# Part of the configuration, although GGUF stores it as a tensor.
_ROPE_DIVISORS = "rope_freqs.weight"
_LAYER_NUMBER = re.compile(r"(?<=^blk\.)\d+(?=\.)")


class _Reader(GGUFReader):
    """With the file as a plain array: numpy.memmap runs Python code for each slice, which is most
    of the time that reading a vocabulary takes."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = np.asarray(mapped)


def read_gguf(path: Path, *, device: torch.device, dtype: torch.dtype) -> Checkpoint:
    """The model in this file. Raises ModelLoadError if it is damaged or not supported."""
    try:
        reader = _Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    # The reader checks little: a damaged file surfaces as whatever its arithmetic runs into.
    except (OSError, ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
        raise ModelLoadError(
            f"{path} is not a readable GGUF file ({error}): fetch it again"
        ) from error
    architecture = find_architecture(str(metadata.get("general.architecture")))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    divisors = tensors.pop(_ROPE_DIVISORS, None)
    config = architecture.config_from_gguf(
        metadata,
        GgufTensors(
            names=frozenset(tensors),
            rope_divisors=None if divisors is None else tuple(_values(divisors).flatten().tolist()),
        ),
    )
    return Checkpoint(
        config=config,
        weights=_weights(architecture, config, tensors, device=device, dtype=dtype),
        tokenizer=_tokenizer(metadata),
        chat_template=_chat_template(metadata),
    )


def _weights(
    architecture: Family,
    config: ModelConfig,
    tensors: Mapping[str, ReaderTensor],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Weights:
    published = {_published_name(architecture, name): name for name in tensors}

    def read(name: str) -> torch.Tensor:
        tensor = tensors[published[name]]
        return architecture.restore_gguf(tensor.name, _values(tensor), config)

    return Weights(published, read, device=device, dtype=dtype)


def _values(tensor: ReaderTensor) -> torch.Tensor:
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise ModelLoadError(
            f"tensor {tensor.name} is stored as {tensor.tensor_type.name}, which cannot be "
            f"read ({error}); choose another quantization of this model"
        ) from error
    # Some tensors are views of the mapped file, which must not be written to: copy.
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _published_name(architecture: Family, name: str) -> str:
    """The tensor's Hugging Face name, or its own where the family knows no such tensor."""
    number = _LAYER_NUMBER.search(name)
    if number is None:
        return architecture.gguf_tensors.get(name, name)
    pattern = _LAYER_NUMBER.sub("{}", name)
    return architecture.gguf_tensors.get(pattern, name).replace("{}", number[0])


def _chat_template(metadata: Mapping[str, Any]) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        return None
    tokens = metadata["tokenizer.ggml.tokens"]
    bos, eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    return ChatTemplate(
        source,
        bos_token="" if bos is None else tokens[bos],
        eos_token="" if eos is None else tokens[eos],
    )


def _tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """By the kind of vocabulary: byte-level BPE goes under "gpt2", SentencePiece under "llama"."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelLoadError(
            f"the GGUF's tokenizer is of kind {kind!r}, and only byte-level BPE ('gpt2') and "
            "SentencePiece BPE ('llama') are read from GGUF; use the model's Hugging Face folder "
            "with tokenizer.json"
        )
    bos, unknown, *stops = (
        metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "unknown", "eos", "eot")
    )
    eos_token_ids = frozenset(stop for stop in stops if stop is not None)
    # llama.cpp's defaults for a file that does not say.
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", kind == "llama"))
    try:
        tokens = metadata["tokenizer.ggml.tokens"]
        types = metadata["tokenizer.ggml.token_type"]
        if kind == "llama":
            return sentencepiece_tokenizer(
                tokens,
                metadata["tokenizer.ggml.scores"],
                types,
                add_space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
                add_bos=add_bos,
                bos_token_id=bos,
                unknown_token_id=unknown,
                eos_token_ids=eos_token_ids,
            )
        return byte_level_tokenizer(
            tokens,
            metadata["tokenizer.ggml.merges"],
            types,
            split=str(metadata.get("tokenizer.ggml.pre")),
            add_bos=add_bos,
            bos_token_id=bos,
            eos_token_ids=eos_token_ids,
        )
    except KeyError as error:
        raise ModelLoadError(f"the GGUF has no {error}: it is incomplete; fetch it again") from None
