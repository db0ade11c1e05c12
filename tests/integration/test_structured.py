"""Grammars over vocabularies: what is allowed, when it ends, and what a hostile one can cost."""

import json
import threading
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from engine.errors import GrammarError
from engine.model.loader import load_model
from engine.model.structured import GrammarCompiler, GrammarConstraint, mask_logits
from engine.model.tokenizer import Tokenizer, tokenizer_from_json
from engine.sequence import Grammar
from tests.model_oracle import default_model, save_tiny_llama

EOS, OTHER_EOS = 257, 256


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder)
    return with_eos(folder / "tokenizer.json", EOS, OTHER_EOS)


def with_eos(file: Path, *eos: int) -> Tokenizer:
    return tokenizer_from_json(file.read_text(), bos_token_id=None, eos_token_ids=frozenset(eos))


@pytest.fixture(scope="module")
def compiler(byte_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer, vocab_size=264)


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def allowed(constraint: GrammarConstraint, vocab_size: int = 264) -> set[int]:
    logits = torch.zeros(1, vocab_size)
    mask_logits(logits, [(0, constraint)])
    return set((logits[0] == 0).nonzero().flatten().tolist())


def accepts(constraint: GrammarConstraint, tokenizer: Tokenizer, text: str) -> bool:
    return all(map(constraint.accept, tokenizer.encode(text, add_special_tokens=False)))


def texts(constraint: GrammarConstraint, tokenizer: Tokenizer) -> set[str]:
    """What may come next, as text; "" for the end."""
    return {tokenizer.decode([token]) for token in allowed(constraint)}


def test_the_mask_allows_exactly_what_is_accepted(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer
) -> None:
    """Bytes merge to nothing, so that no spelling is preferred: mask and parser must agree."""
    grammars = [
        schema(
            {"type": "object", "properties": {"a": {"type": "number"}, "é": {"enum": [1, "x"]}}}
        ),
        Grammar("regex", r"(ab|a+c)*\d{2,3}"),
        Grammar("lark", 'start: "(" start ")" | WORD\nWORD: /[a-z]{1,3}/'),
    ]
    num_checked = 0
    for grammar, seed in product(grammars, range(2)):
        generator = torch.Generator().manual_seed(seed)
        constraint = compiler.compile(grammar)
        for _ in range(8):
            may = allowed(constraint)
            assert may == {i for i in range(264) if constraint.fork().accept(i)}
            num_checked += 1
            pick = sorted(may - {EOS, OTHER_EOS})
            if not pick:
                break
            assert constraint.accept(pick[torch.randint(len(pick), (1,), generator=generator)])
            if constraint.is_finished:
                break
    assert num_checked > 15


def test_the_end_is_allowed_exactly_where_the_grammar_may_end(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer
) -> None:
    constraint = compiler.compile(Grammar("regex", "ab*"))
    assert texts(constraint, byte_tokenizer) == {"a"}
    assert constraint.accept(ord("a") - 33)  # byte-level order: printable characters first
    # Each of the model's ends, and no other control token.
    assert allowed(constraint) == {ord("b") - 33, EOS, OTHER_EOS}
    for eos in (EOS, OTHER_EOS):
        ended = constraint.fork()
        assert not ended.is_finished
        assert ended.accept(eos)
        assert ended.is_finished
    assert not constraint.is_finished


def test_nothing_can_follow_without_waiting_for_the_end(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer
) -> None:
    constraint = compiler.compile(schema({"type": "array", "items": {"const": 7}, "maxItems": 2}))
    assert accepts(constraint, byte_tokenizer, "[7, 7")
    assert not constraint.is_finished
    assert texts(constraint, byte_tokenizer) == {"]"}
    assert accepts(constraint, byte_tokenizer, "]")
    assert constraint.is_finished


def test_forks_go_their_own_ways_and_a_refusal_is_final(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer
) -> None:
    first = compiler.compile(Grammar("regex", "x(yes|no)"))
    assert accepts(first, byte_tokenizer, "x")
    second = first.fork()
    assert accepts(first, byte_tokenizer, "yes")
    assert first.is_finished
    assert texts(second, byte_tokenizer) == {"y", "n"}
    assert not accepts(second, byte_tokenizer, "z")
    assert not second.is_finished
    assert not second.accept(EOS)
    assert not accepts(second, byte_tokenizer, "y")


def test_only_the_given_rows_are_masked(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer
) -> None:
    logits = torch.arange(4 * 264, dtype=torch.float32).reshape(4, 264)
    before = logits.clone()
    a, b = compiler.compile(Grammar("regex", "a")), compiler.compile(Grammar("regex", "[bc]d"))
    mask_logits(logits, [(2, a), (0, b)])
    mask_logits(logits, [])
    token = {character: ord(character) - 33 for character in "abc"}
    for row, kept in ((0, [token["b"], token["c"]]), (1, None), (2, [token["a"]]), (3, None)):
        expected = torch.full((264,), float("-inf"))
        expected[kept] = before[row, kept]
        assert torch.equal(logits[row], before[row] if kept is None else expected)


def test_a_model_may_have_more_logits_than_tokens_or_no_end(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    tokenizer = with_eos(tmp_path / "tokenizer.json")
    for vocab_size in (258, 300, 4096):
        constraint = GrammarCompiler(tokenizer, vocab_size).compile(Grammar("regex", "a*"))
        assert allowed(constraint, vocab_size) == {ord("a") - 33}
    # Fewer logits than tokens: what cannot be drawn is not waited for.
    constraint = GrammarCompiler(tokenizer, 60).compile(Grammar("regex", "[0-9a-z]"))
    assert allowed(constraint, 60) == {ord(digit) - 33 for digit in "0123456789"}


@pytest.mark.model
def test_control_tokens_written_in_a_grammar_stay_text() -> None:
    """As tokens they would end the sequence in the middle of a string, or open a new turn."""
    model = default_model()
    compiler = GrammarCompiler(model.tokenizer, model.config.vocab_size)
    constraint = compiler.compile(schema({"const": "a<|im_end|>b"}))
    drawn = []
    while not constraint.is_finished:
        (token_id, *_) = sorted(allowed(constraint, model.config.vocab_size))
        assert constraint.accept(token_id)
        drawn.append(token_id)
    assert not model.eos_token_ids & set(drawn)
    assert model.tokenizer.decode(drawn) == '"a<|im_end|>b"'


@pytest.mark.model
def test_forced_text_is_spelled_as_the_model_spells_it() -> None:
    model = default_model()
    compiler = GrammarCompiler(model.tokenizer, model.config.vocab_size)
    text = "The quick brown fox jumps."
    constraint = compiler.compile(Grammar("regex", text.replace(".", r"\.")))
    for token_id in model.tokenizer.encode(text):
        assert allowed(constraint, model.config.vocab_size) == {token_id}
        assert constraint.accept(token_id)
    assert constraint.is_finished


def test_a_tokenizer_that_puts_a_space_in_front() -> None:
    """As Llama 2's does: what it makes of a text is not the text."""
    pieces = ["<unk>", "</s>", "\u2581", "a", "b", "ab", "\u2581ab", "<0xC3>", "<0xA9>"]
    backend = Backend(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("a", "b"), ("\u2581", "ab")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.ByteFallback()
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=frozenset({1}))
    constraint = GrammarCompiler(tokenizer, len(pieces)).compile(Grammar("regex", "ab é"))
    drawn: list[int] = []
    while not constraint.is_finished:
        (token_id,) = allowed(constraint, len(pieces))
        assert constraint.accept(token_id)
        drawn.append(token_id)
    assert [pieces[token_id] for token_id in drawn] == ["ab", "\u2581", "<0xC3>", "<0xA9>"]


def test_json_is_compact(compiler: GrammarCompiler, byte_tokenizer: Tokenizer) -> None:
    grammar = schema({"type": "object", "x-guidance": {"whitespace_flexible": True}})
    for text in ('{"a":1,"b":[]}', '{"a": 1, "b": []}'):
        constraint = compiler.compile(grammar)
        assert accepts(constraint, byte_tokenizer, text), text
        assert constraint.is_finished
    for text in ('{"a":  1', '{ "a', "\n{", '{"a":1 }', '{"a":1,\n"b"'):
        assert not accepts(compiler.compile(grammar), byte_tokenizer, text), text


def test_a_regular_expression_cannot_become_a_grammar(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer
) -> None:
    """llguidance writes it between slashes."""
    constraint = compiler.compile(Grammar("regex", "a/\nB: ~/b"))
    assert accepts(constraint, byte_tokenizer, "a/\nB: ~/b")
    assert constraint.is_finished


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


REFUSED = {
    "not JSON": (Grammar("json_schema", "{"), "JSON schema cannot be used"),
    "no object": (schema([]), "must be a JSON object"),
    "true": (schema(True), "must be a JSON object"),
    "infinite": (Grammar("json_schema", '{"minimum": Infinity}'), "Infinity is not JSON"),
    "too long": (Grammar("lark", "start: x // " + "é" * 33_000), "longer than 65536 bytes"),
    "too deep": (Grammar("json_schema", nested(65)), "nested deeper than 64"),
    "far too deep": (Grammar("json_schema", nested(5000)), "JSON schema cannot be used"),
    "remote": (schema({"$ref": "http://127.0.0.1:1/x.json"}), "not present in a registry"),
    "file": (schema({"$ref": "file:///etc/passwd"}), "not present in a registry"),
    "dangling": (schema({"$ref": "#/$defs/none"}), "does not exist"),
    "circular": (
        schema(
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
        ),
        "no text can match",
    ),
    "unknown type": (schema({"type": "bool"}), "Invalid type: bool"),
    "unsatisfiable": (schema({"type": "integer", "minimum": 3, "maximum": 2}), "greater than"),
    "not enforced": (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "lenient": (
        schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}),
        "uniqueItems",
    ),
    "bad pattern": (schema({"type": "string", "pattern": "("}), "unclosed group"),
    "bad regex": (Grammar("regex", "a("), "unclosed group"),
    "look-ahead": (Grammar("regex", "(?=a)b"), "look-around"),
    "bad lark": (Grammar("lark", "start: foo"), 'unknown name: "foo"'),
    "other form": (Grammar("lark", '{"grammars": [{"json_schema": {}}]}'), 'at "{"'),
    "no start": (Grammar("lark", "begin: /x/"), "start"),
    "control token": (Grammar("lark", "start: <|im_start|>"), "beyond what can be compiled"),
    "surrogate": (Grammar("regex", "\ud800"), "cannot be used"),
    "intersection": (
        Grammar("lark", "start: A\nA: /.*a.{20}/ & /.*b.{20}/ & /.*c.{20}/ & /.*d.{20}/"),
        "fuel exhausted",
    ),
    "conjunction": (
        schema({"type": "string", "allOf": [{"pattern": f"a{{{i}}}.*b"} for i in range(60)]}),
        "too much time or memory",
    ),
    "automaton": (schema({"type": "integer", "multipleOf": 99_999_989}), "too much time or memory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused(name: str, compiler: GrammarCompiler) -> None:
    grammar, reason = REFUSED[name]
    started = time.thread_time()
    with pytest.raises(GrammarError) as caught:
        compiler.compile(grammar)
    assert time.thread_time() - started < 1.0  # of this thread's CPU; a process of its own has more
    message = str(caught.value)
    assert reason in message
    assert "backtrace" not in message
    assert len(message) < 500


def test_a_conjunction_cannot_hide_in_references(compiler: GrammarCompiler) -> None:
    """A chain of references with a pattern at each link is the same conjunction."""
    links = {f"d{i}": {"pattern": f"a{{{i}}}.*b", "$ref": f"#/$defs/d{i + 1}"} for i in range(60)}
    chain = {"$defs": links | {"d60": {"type": "string"}}, "$ref": "#/$defs/d0"}
    with pytest.raises(GrammarError, match="too much time or memory"):
        compiler.compile(schema(chain))


LEGAL = {
    "repetition": Grammar("regex", "(a{1000}){1000}"),
    "nested repetition": Grammar("regex", "(((a{30}){30}){30}){30}"),
    "repeated terminal": Grammar("lark", 'start: A\nA: (("a"{1000}){1000}){1000}'),
    "repeated rule": Grammar("lark", 'start: (("a"{1000}){1000}){1000}'),
    "many states": Grammar("regex", r"(.|\n)*a(.|\n){200}"),
    "more states": Grammar("regex", "(.*a.{20}|.*b.{21}|.*c.{22})+"),
    "nested stars": Grammar("regex", "((a*)*)*b"),
    "long words": Grammar("regex", r"(\w{1,100000}\s)*"),
    "ambiguous": Grammar("lark", 'start: s\ns: s s | "a" | "b"'),
    "more ambiguous": Grammar("lark", 'start: x x x x x x\nx: ("a"|"b"|y)*\ny: ("a"|"b")* y?'),
    "lexemes": Grammar(
        "lark",
        f"start: ({'|'.join(f'T{i}' for i in range(300))})*\n"
        + "\n".join(f"T{i}: /.*{chr(97 + i % 26)}.{{{i % 40}}}/" for i in range(300)),
    ),
    "choices": schema({"enum": [f"value {i}" for i in range(3000)]}),
    "properties": schema(
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(450)}}
    ),
    "long string": schema({"type": "string", "minLength": 10**6, "maxLength": 10**9}),
    "long array": schema({"type": "array", "minItems": 10**6, "items": {"type": "integer"}}),
    "doubling": schema(
        {
            "$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(20)}
            | {"a20": {"type": "integer"}},
            "$ref": "#/$defs/a0",
        }
    ),
}


@pytest.mark.model
def test_a_hostile_grammar_costs_little_or_is_refused() -> None:
    """On a real vocabulary: compiling, and any step of a sequence that draws at random."""
    model = default_model()
    compiler = GrammarCompiler(model.tokenizer, model.config.vocab_size)
    worst: dict[str, tuple[float, float]] = {}
    refused = []
    for name, grammar in LEGAL.items():
        started = time.thread_time()
        try:
            constraint = compiler.compile(grammar)
        except GrammarError:
            refused.append(name)
            assert time.thread_time() - started < 1.0, name
            continue
        compiled = time.thread_time() - started
        generator = torch.Generator().manual_seed(0)
        slowest = 0.0
        for _ in range(60):
            logits = torch.rand((1, model.config.vocab_size), generator=generator)
            started = time.thread_time()
            mask_logits(logits, [(0, constraint)])
            logits[0, sorted(model.eos_token_ids)] -= 2  # goes on if it can
            token_id = int(logits.argmax())
            going = constraint.accept(token_id) and not constraint.is_finished
            slowest = max(slowest, time.thread_time() - started)
            if not going:
                break
        worst[name] = (compiled, slowest)
    assert max(compiled for compiled, _ in worst.values()) < 1.0
    assert max(slowest for _, slowest in worst.values()) < 0.5
    assert refused == ["repetition", "nested repetition", "repeated terminal", "repeated rule"]


def test_the_interpreter_is_free_while_a_grammar_compiles(compiler: GrammarCompiler) -> None:
    enum = schema(
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(450)}}
    )
    done = threading.Event()

    def compile_it() -> None:
        compiler.compile(enum)
        done.set()

    longest = 0.0
    thread = threading.Thread(target=compile_it)
    thread.start()
    last = time.perf_counter()
    while not done.is_set():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    thread.join()
    assert longest < 0.1


def test_compiled_grammars_are_kept_and_dropped(byte_tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(byte_tokenizer, 258, max_cached=2)
    grammars = [Grammar("regex", text) for text in "abc"]

    def cached() -> list[str]:
        return [grammar.source for grammar in compiler._cache]

    for grammar in grammars[:2]:
        compiler.compile(grammar)
    kept = compiler._cache[grammars[0]]
    constraint = compiler.compile(grammars[0])
    assert cached() == ["b", "a"]
    assert compiler._cache[grammars[0]] is kept
    compiler.compile(grammars[2])
    assert cached() == ["a", "c"]
    with pytest.raises(GrammarError):
        compiler.compile(Grammar("regex", "("))
    assert cached() == ["a", "c"]
    # What is handed out is a copy: the next one starts at the start.
    assert accepts(constraint, byte_tokenizer, "a")
    assert texts(compiler.compile(grammars[0]), byte_tokenizer) == {"a"}


def test_a_grammar_whose_states_are_spent_is_compiled_anew(byte_tokenizer: Tokenizer) -> None:
    """Forks share the states of one lexer, which are bounded: each character here takes some."""
    compiler = GrammarCompiler(byte_tokenizer, 258)
    grammar = schema({"type": "string", "maxLength": 200_000})
    constraint = compiler.compile(grammar)
    spent = compiler._cache[grammar]
    assert accepts(constraint, byte_tokenizer, '"')
    token = ord("x") - 33
    while constraint.accept(token):
        pass
    assert not constraint.is_finished  # it failed
    assert allowed(constraint) == set()
    assert not constraint.accept(EOS)
    assert accepts(compiler.compile(grammar), byte_tokenizer, '"x')
    assert compiler._cache[grammar] is not spent


def test_many_threads_compile_and_draw_at_once(
    compiler: GrammarCompiler, byte_tokenizer: Tokenizer
) -> None:
    grammar = schema({"type": "array", "items": {"type": "integer"}, "maxItems": 3})
    failures: list[object] = []

    def work() -> None:
        try:
            for _ in range(20):
                constraint = compiler.compile(grammar)
                assert accepts(constraint, byte_tokenizer, "[1,2,3]")
                assert constraint.is_finished
        except BaseException as error:  # a thread's failure is the test's
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_the_tiny_model_has_the_byte_vocabulary(tmp_path: Path) -> None:
    """The oracle's tokens are what the tests above take them for."""
    save_tiny_llama(tmp_path)
    tokenizer = load_model(tmp_path, device="cpu", dtype="float32").tokenizer
    assert tokenizer.encode("a") == [ord("a") - 33]
