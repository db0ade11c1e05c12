"""Text to token ids and back, over the `tokenizers` library.

Two spellings of a vocabulary are known: byte-level (GPT-2, Llama 3, Qwen, SmolLM), where each
character of a token stands for one byte, and SentencePiece with byte fallback (Llama 2, Gemma),
where U+2581 stands for a space and <0xAB> for a byte.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend

from engine.errors import ModelLoadError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token types of GGUF

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class _Split:
    """How a vocabulary's text was cut into words before its merges were learned."""

    pattern: str | None = None  # None: GPT-2's own
    single_digits: bool = False  # each digit a word, cut before anything else
    ignore_merges: bool = False  # a word that is a token is taken whole


_SPLITS: Mapping[str, _Split] = MappingProxyType(
    {
        "gpt2": _Split(),
        "gpt-2": _Split(),
        "smollm": _Split(single_digits=True),
        "starcoder": _Split(single_digits=True),
        "llama3": _Split(_LLAMA3_SPLIT, ignore_merges=True),
        "llama-v3": _Split(_LLAMA3_SPLIT, ignore_merges=True),
        "llama-bpe": _Split(_LLAMA3_SPLIT, ignore_merges=True),
        "qwen2": _Split(_QWEN2_SPLIT),
        "deepseek-r1-qwen": _Split(_QWEN2_SPLIT),
    }
)


class Tokenizer:
    """A model's tokenizer. Thread-safe: nothing changes after construction."""

    def __init__(
        self, backend: Backend, *, bos_token_id: int | None, eos_token_ids: frozenset[int]
    ) -> None:
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self._bytes = _bytes_of_tokens(backend)

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised.

        What the model asks for around a text (a beginning-of-sequence token) is added, unless
        `add_special_tokens` is off: a chat template writes its own.
        """
        # encode_batch gives other threads their turn; encode holds the interpreter for seconds.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that the token adds to the text; empty for control and unknown tokens."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of these tokens; bytes that form no character become U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")


def tokenizer_from_json(
    text: str, *, bos_token_id: int | None, eos_token_ids: frozenset[int]
) -> Tokenizer:
    """A tokenizer as tokenizer.json describes it. Raises ModelLoadError if it is damaged."""
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(
            f"tokenizer.json cannot be read ({error}): fetch the model again"
        ) from error
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, bos_token_id=bos_token_id, eos_token_ids=eos_token_ids)


def byte_level_tokenizer(
    tokens: Sequence[str],
    merges: Sequence[str],
    token_types: Sequence[int],
    *,
    split: str,
    add_bos: bool,
    bos_token_id: int | None,
    eos_token_ids: frozenset[int],
) -> Tokenizer:
    """A byte-level BPE tokenizer from a GGUF's vocabulary and the name of its pre-tokenizer."""
    if split not in _SPLITS:
        raise ModelLoadError(
            f"the GGUF names the pre-tokenizer {split!r}, which is not known here "
            f"(known: {', '.join(sorted(_SPLITS))}); use a model with one of these, or a "
            "Hugging Face folder with tokenizer.json"
        )
    rule = _SPLITS[split]
    try:
        backend = Backend(
            models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                merges=[_pair(merge) for merge in merges],
                ignore_merges=rule.ignore_merges,
            )
        )
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(
            f"the GGUF's vocabulary and merges do not fit together ({error}): fetch it again"
        ) from error
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.single_digits else []
    if rule.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    _add_whole_tokens(backend, tokens, token_types)
    if add_bos and bos_token_id is not None:
        _begin_with(backend, tokens[bos_token_id], bos_token_id)
    return Tokenizer(backend, bos_token_id=bos_token_id, eos_token_ids=eos_token_ids)


def sentencepiece_tokenizer(
    tokens: Sequence[str],
    scores: Sequence[float],
    token_types: Sequence[int],
    *,
    add_space_prefix: bool,
    add_bos: bool,
    bos_token_id: int | None,
    unknown_token_id: int | None,
    eos_token_ids: frozenset[int],
) -> Tokenizer:
    """A SentencePiece BPE tokenizer with byte fallback from a GGUF's vocabulary and its scores."""
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        backend = Backend(
            models.BPE(
                vocab=vocab,
                merges=_merges_of_scores(tokens, scores, token_types),
                unk_token=None if unknown_token_id is None else tokens[unknown_token_id],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(
            f"the GGUF's vocabulary makes no tokenizer ({error}): fetch it again"
        ) from error
    spaces = normalizers.Replace(" ", "\u2581")
    # As llama.cpp: at the beginning, and after each token that is taken whole.
    prefix = [normalizers.Prepend("\u2581")] if add_space_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, spaces])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _add_whole_tokens(backend, tokens, token_types)
    if add_bos and bos_token_id is not None:
        _begin_with(backend, tokens[bos_token_id], bos_token_id)
    return Tokenizer(backend, bos_token_id=bos_token_id, eos_token_ids=eos_token_ids)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _merges_of_scores(
    tokens: Sequence[str], scores: Sequence[float], token_types: Sequence[int]
) -> list[tuple[str, str]]:
    """All pairs that make a token, the best token's first: what SentencePiece does by scores."""
    ranked = sorted(
        (
            (score, token)
            for token, score, kind in zip(tokens, scores, token_types, strict=True)
            if kind == NORMAL
        ),
        key=lambda entry: -entry[0],
    )
    known = {token for _, token in ranked}
    return [
        (token[:cut], token[cut:])
        for _, token in ranked
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def _add_whole_tokens(backend: Backend, tokens: Sequence[str], token_types: Sequence[int]) -> None:
    """Tokens that are found in a text before it is cut into words, and never split."""
    added = [
        AddedToken(token, normalized=False, special=kind != USER_DEFINED)
        for token, kind in zip(tokens, token_types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _begin_with(backend: Backend, bos: str, bos_token_id: int) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, bos_token_id)]
    )


def _bytes_of_tokens(backend: Backend) -> tuple[bytes, ...]:
    """The bytes of each token id, by how the tokenizer's decoder spells them."""
    added = backend.get_added_tokens_decoder()
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    is_byte_level = _is_byte_level(json.loads(backend.to_str()))
    spelled = _byte_level if is_byte_level else _sentencepiece
    # Gemma's runs of spaces are added tokens, spelled like the others.
    spelled_added = str.encode if is_byte_level else _sentencepiece
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        if token_id not in added:
            table[token_id] = spelled(token)
        elif not added[token_id].special:
            table[token_id] = spelled_added(token)
    return tuple(table)


def _is_byte_level(description: Mapping[str, Any]) -> bool:
    decoder = description.get("decoder") or {}
    kinds = {step["type"] for step in decoder.get("decoders", [decoder]) if "type" in step}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise ModelLoadError(
        f"the tokenizer's decoder ({', '.join(sorted(kinds)) or 'none'}) is neither byte-level "
        "nor SentencePiece with byte fallback: choose a model with one of these"
    )


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 upward."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_ALPHABET: Mapping[str, int] = MappingProxyType(_byte_of_character())


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:  # a token added outside the alphabet stands for its own text
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode()
