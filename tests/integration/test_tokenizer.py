"""Tokens and prompts: the same as transformers', on texts of every kind."""

import json
import random
import re
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.errors import ModelLoadError, TemplateError
from engine.model.chat_template import ChatTemplate
from engine.model.default_model import find_default_model
from engine.model.gguf import read_gguf
from engine.model.tokenizer import (
    Tokenizer,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    tokenizer_from_json,
)
from engine.model.tool_format import Tool

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "   leading and trailing   ",
    "tabs\tand\nnew\n\n\nlines\r\n  \t mixed",
    "It's we'll they'd I'M 'S don't",
    "1234567890 3.14159 1,000,000 2024-01-31  7 ½ ² ٣",
    "def f(x):\n    return {k: v**2 for k, v in x.items() if k != '_'}  # comment\n",
    '<html><body class="a">&nbsp;</body></html>',
    "Grüße aus Köln, où êtes-vous? ¿Qué tal?",
    "これは日本語です。水は流れる。",
    "한국어 텍스트와 العربية و עברית",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\u200d\ufeff",
    "\x00\x01\x7f\x80\xa0\xad\u2028\U0010ffff",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_start|>",
    "<|im_start |> < |im_end|> <repo_name><file_sep>x",
)


@pytest.fixture(scope="module")
def oracle() -> Any:
    """transformers' tokenizer of the same file, its words cut as the model was trained.

    From a GGUF it builds GPT-2's splitting, which keeps the digits of a number in one word. The
    published tokenizer of SmolLM2 takes single digits first, as does llama.cpp for "smollm".
    """
    path = find_default_model()
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


@pytest.fixture(scope="module")
def text_side() -> tuple[Tokenizer, ChatTemplate]:
    checkpoint = read_gguf(find_default_model(), device=torch.device("cpu"), dtype=torch.float32)
    assert checkpoint.chat_template is not None
    return checkpoint.tokenizer, checkpoint.chat_template


@pytest.fixture(scope="module")
def tokenizer(text_side: tuple[Tokenizer, ChatTemplate]) -> Tokenizer:
    return text_side[0]


def random_texts(num_texts: int) -> list[str]:
    rng = random.Random(11)
    characters = [chr(i) for i in range(0x3000) if unicodedata.category(chr(i))[0] != "C"]
    pieces = [*characters, *"   \n\t0123456789", "<|im_end|>", "🙂", "ing", " the", "'s"]
    return ["".join(rng.choices(pieces, k=rng.randrange(1, 60))) for _ in range(num_texts)]


@pytest.mark.model
def test_encode_equals_transformers(tokenizer: Tokenizer, oracle: Any) -> None:
    for text in [*TEXTS, *random_texts(400)]:
        assert tokenizer.encode(text) == oracle(text)["input_ids"], text


@pytest.mark.model
def test_decode_equals_transformers(tokenizer: Tokenizer, oracle: Any) -> None:
    rng = random.Random(3)
    cases = [oracle(text)["input_ids"] for text in [*TEXTS, *random_texts(100)]]
    cases += [[rng.randrange(49152) for _ in range(30)] for _ in range(100)]
    for ids in cases:
        expected = oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids) == expected


@pytest.mark.model
def test_the_bytes_of_the_tokens_are_the_text(tokenizer: Tokenizer) -> None:
    for text in [t for t in TEXTS if "<" not in t]:
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@pytest.mark.model
def test_control_tokens_are_recognised_and_add_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>x<|im_end|>") == [1, 104, 2]
    assert [tokenizer.token_bytes(i) for i in (0, 1, 2, 16, -1, 49152)] == [b""] * 6
    assert tokenizer.token_bytes(104) == b"x"
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (49152, 1)
    assert tokenizer.eos_token_ids == {2}


CONVERSATIONS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>&</b>"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\n"},
        {"role": "user", "content": "<|im_end|>"},
    ],
)


@pytest.mark.model
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_prompts_equal_transformers(
    text_side: tuple[Tokenizer, ChatTemplate], oracle: Any, add_generation_prompt: bool
) -> None:
    tokenizer, template = text_side
    for messages in CONVERSATIONS:
        text = template.render(messages, add_generation_prompt=add_generation_prompt)
        ids = tokenizer.encode(text, add_special_tokens=False)

        assert text == oracle.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        assert (
            ids
            == oracle.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, return_dict=True
            )["input_ids"]
        )


# ------------------------------------------------------------------ other vocabularies, small


def alphabet_vocabulary() -> list[str]:
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġ1", "12", "123", "1234", "<s>", "<x>"]


def small(split: str, *, add_bos: bool = False) -> Tokenizer:
    tokens = alphabet_vocabulary()
    return byte_level_tokenizer(
        tokens,
        ["1 2", "12 3", "123 4", "Ġ 1"],
        [1] * (len(tokens) - 2) + [3, 4],
        split=split,
        add_bos=add_bos,
        bos_token_id=len(tokens) - 2,
        eos_token_ids=frozenset(),
    )


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("gpt2", ["Ġ", "1234"]),
        ("smollm", ["Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", ["Ġ", "123", "4"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4"]),
    ],
)
def test_numbers_are_cut_as_each_family_cuts_them(split: str, expected: list[str]) -> None:
    tokens = alphabet_vocabulary()

    assert [tokens[i] for i in small(split).encode(" 1234")] == expected


def test_an_unknown_pre_tokenizer_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="pre-tokenizer 'abacus', which is not known here"):
        small("abacus")


def test_bos_is_added_where_the_model_asks_and_never_to_a_chat_prompt() -> None:
    tokenizer = small("gpt2", add_bos=True)

    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id
    assert tokenizer.encode("a", add_special_tokens=False) == small("gpt2").encode("a")


def test_user_defined_tokens_are_whole_and_add_their_text() -> None:
    tokenizer = small("gpt2")
    (token_id,) = tokenizer.encode("<x>")

    assert tokenizer.token_bytes(token_id) == b"<x>"
    assert tokenizer.token_bytes(*tokenizer.encode("<s>")) == b""


def sentencepiece(tmp_path: Path) -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma: U+2581 for a space, bytes for what the vocabulary lacks."""
    words = ["<unk>", "<s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", "h", "i", "hi"]
    words += ["\u2581hi", "\u2581\u2581"]
    merges = [("h", "i"), ("\u2581", "hi"), ("\u2581", "\u2581")]
    backend = Backend(
        models.BPE(
            vocab={w: i for i, w in enumerate(words)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", "<s>"])
    backend.add_tokens([AddedToken("\u2581\u2581\u2581", normalized=True)])  # as Gemma's runs
    backend.save(str(tmp_path / "tokenizer.json"))
    return PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))


def test_byte_fallback_equals_transformers(tmp_path: Path) -> None:
    oracle = sentencepiece(tmp_path)
    tokenizer = tokenizer_from_json(
        (tmp_path / "tokenizer.json").read_text(), bos_token_id=1, eos_token_ids=frozenset()
    )
    for text in ("hi hi", "  hi", "é 🙂 \u2581", "<s>hi", "\n", "hi   hi"):
        ids = tokenizer.encode(text)

        assert ids == oracle(text)["input_ids"]
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert tokenizer.token_bytes(2 + 0xE9) == b"\xe9"


# ------------------------------------------------------- SentencePiece vocabularies inside GGUF


def trained_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types as SentencePiece gives them: merges in order, then characters."""
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False)
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split("\u2581", behavior="merged_with_next")
    backend.train_from_iterator([Path(__file__).read_text()], trainer)
    description = json.loads(backend.to_str())["model"]
    merged = ["".join(pair) for pair in description["merges"]]
    characters = [token for token in description["vocab"] if len(token) == 1]
    whole = [*(" " * n for n in range(2, 9)), "\n\n", "<turn>"]  # user-defined
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *whole]
    types = [2, 3, 3, *[6] * 256, *[4] * len(whole)]
    scores = [0.0] * len(tokens) + [-float(i) for i in range(len(merged) + len(characters))]
    tokens += [*merged, *characters]
    return tokens, scores, types + [1] * (len(tokens) - len(types))


def from_scores(*, add_space_prefix: bool, add_bos: bool = True) -> Tokenizer:
    return sentencepiece_tokenizer(
        *trained_vocabulary(),
        add_space_prefix=add_space_prefix,
        add_bos=add_bos,
        bos_token_id=1,
        unknown_token_id=0,
        eos_token_ids=frozenset({2}),
    )


PLAIN_TEXTS = [t for t in TEXTS if t and "<" not in t]


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_scores_decide_as_sentencepiece_defines(add_space_prefix: bool) -> None:
    tokens, scores, types = trained_vocabulary()
    ids = {token: i for i, token in enumerate(tokens)}
    normal = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind == 1}
    tokenizer = from_scores(add_space_prefix=add_space_prefix, add_bos=False)
    lengths = set()
    for text in [Path(__file__).read_text()[:1500], *PLAIN_TEXTS]:
        for word in filter(None, text.replace("\n", " ").split("  ")):
            pieces = list((" " * add_space_prefix + word).replace(" ", "\u2581"))
            while True:  # the best pair of neighbours, the leftmost of equals
                pairs = [a + b for a, b in pairwise(pieces)]
                known = [i for i, pair in enumerate(pairs) if pair in normal]
                if not known:
                    break
                best = max(known, key=lambda i: (normal[pairs[i]], -i))
                pieces[best : best + 2] = [pairs[best]]
            expected: list[int] = []
            for piece in pieces:
                spelled = [f"<0x{byte:02X}>" for byte in piece.encode()]
                expected += [ids[piece]] if piece in normal else [ids[b] for b in spelled]
            assert tokenizer.encode(word) == expected
            lengths |= {len(piece) for piece in pieces}
    assert max(lengths) > 8  # merges of merges were made


@pytest.mark.parametrize(("arch", "add_space_prefix"), [("llama", True), ("gemma3", False)])
def test_a_sentencepiece_gguf_equals_transformers(
    arch: str, add_space_prefix: bool, tmp_path: Path
) -> None:
    tokens, scores, types = trained_vocabulary()
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", arch)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(add_space_prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    oracle = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file="vocabulary.gguf")
    tokenizer = from_scores(add_space_prefix=add_space_prefix)

    texts = [text for text in PLAIN_TEXTS if arch == "gemma3" or not re.search("^ |  |\n\n", text)]
    assert len(texts) > 5  # for llama, transformers puts no space before a space or after a token
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == oracle(text)["input_ids"], text
        assert tokenizer.decode(ids) == " " * add_space_prefix + text


def test_whole_tokens_of_a_sentencepiece_vocabulary() -> None:
    tokens = trained_vocabulary()[0]
    plain, prefixed = (from_scores(add_space_prefix=prefix) for prefix in (False, True))

    assert [tokens[i] for i in plain.encode("e   e<turn>e\n\n</s>")] == [
        *("<s>", "e", "   ", "e", "<turn>", "e", "\n\n", "</s>")
    ]
    assert [tokens[i] for i in prefixed.encode("</s>e")] == ["<s>", "</s>", "\u2581e"]
    assert plain.decode(plain.encode("e   e<turn>e\n\n</s>")) == "e   e<turn>e\n\n"
    assert [plain.token_bytes(i) for i in (0, 1, 2, 3)] == [b"", b"", b"", b"\x00"]


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    words = Backend(models.WordLevel(vocab={"a": 0}, unk_token="a"))

    with pytest.raises(ModelLoadError, match="neither byte-level nor SentencePiece"):
        tokenizer_from_json(words.to_str(), bos_token_id=None, eos_token_ids=frozenset())
    with pytest.raises(ModelLoadError, match="cannot be read"):
        tokenizer_from_json("{", bos_token_id=None, eos_token_ids=frozenset())


# ------------------------------------------------------------------------------ chat templates


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|undefined"),
        ("{{ messages.append(1) }}", "not safely callable|not callable|unsafe"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
    ],
)
def test_a_template_that_refuses_or_strays_is_an_error(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_a_template_that_is_not_jinja_is_refused_at_load() -> None:
    with pytest.raises(ModelLoadError, match="not valid Jinja"):
        ChatTemplate("{% for %}")


def test_a_template_renders_as_transformers_renders_it(oracle: Any) -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'tool' %}{% continue %}{% endif %}\n"
        "{{ m | tojson }} {{ m.content | trim }}{{ '<a>' | tojson(indent=2) }}\n"
        "{% endfor %}{{ strftime_now('%Y') | length }}{{ eos_token }}"
    )
    messages = [{"role": "user", "content": " é<&> "}, {"role": "tool", "content": "x"}]

    got = ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>").render(messages)

    assert got == oracle.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True
    )


def test_tools_are_written_as_transformers_writes_them(oracle: Any) -> None:
    source = (
        "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
        "{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls %}<tool_call>{{ call.function.name }}"
        "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}{{ thinking }}"
    )
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = Tool(name="f", description="é", parameters=parameters, strict=True)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "y"},
    ]

    got = ChatTemplate(source).render(messages, tools=[tool], variables={"thinking": False})

    assert got == oracle.apply_chat_template(
        messages, tools=[tool.as_openai()], chat_template=source, tokenize=False, thinking=False
    )
    assert '<tool_call>f{"a": 1}</tool_call>' in got
