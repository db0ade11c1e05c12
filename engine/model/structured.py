"""Structured output: grammars compiled for a vocabulary, and masks of the tokens they allow.

llguidance does the parsing (a lexer of regex derivatives under an Earley parser). What it is given
comes from clients, so everything is bounded here: the size of a source, its depth, the work of a
compilation and of a step. Its own limits miss one thing: whether a conjunction of regexes matches
anything takes time exponential in their number. Sources in which one could arise are compiled in a
process first, which is killed when it takes too long.
"""

import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from torch import Tensor

from engine.errors import GrammarError
from engine.model.json_style import COMPACT
from engine.model.tokenizer import Tokenizer
from engine.sequence import Constraint, Grammar

MAX_SOURCE_BYTES = 64 * 1024
MAX_JSON_DEPTH = 64
MAX_CHECK_SECONDS = 1  # of CPU, in the process that goes first
_MAX_CHECK_BYTES = 1 << 30
_MAX_WALL_SECONDS = 10.0  # the same on a busy machine
_MAX_REASON_CHARACTERS = 300

_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_items_in_row": 2_000,  # four for each property that may be left out
    "max_lexer_states": 100_000,  # 350 bytes each
    "verbose_errors": False,
}
# Each of these, or any two of those, makes one constraint out of several.
_CONJUNCTIVE = frozenset({"allOf", "multipleOf", "patternProperties"})
_CONJOINED = frozenset({"pattern", "format", "anyOf", "oneOf", "$ref", "$dynamicRef"})
_LARK_OPERATORS = re.compile(r"[&~%]")  # and, not; %json and its kin

_CHECK = """
import json, resource, sys
seconds, memory = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
limits = LLParserLimits(**json.loads(sys.argv[3]))
LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0, limits=limits)
"""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What all constraints of one model share."""

    tokenizer: LLTokenizer
    executor: LLExecutor  # fills masks in parallel
    num_words: int  # int32 words of one mask


class GrammarConstraint:
    """A Constraint. Any token of the model's that ends a sequence counts as its end."""

    __slots__ = ("_matcher", "_vocabulary")

    def __init__(self, matcher: LLMatcher, vocabulary: _Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def accept(self, token_id: int) -> bool:
        """Advance by the token that was drawn; False if the grammar does not allow it, or if its
        limits are met. A constraint that refused once is of no use any more."""
        # In its error state the matcher would take the end of the sequence.
        return not self._matcher.is_error() and self._matcher.consume_token(token_id)

    @property
    def is_finished(self) -> bool:
        """Nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def fork(self) -> "GrammarConstraint":
        """An independent copy at the same point; it shares what was learned of the grammar."""
        return GrammarConstraint(self._matcher.deep_copy(), self._vocabulary)


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Thread-safe; the interpreter is free meanwhile.

    vocab_size   of the model's logits, which may be more than the tokenizer's
    max_cached   grammars kept compiled, the most recently used
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, max_cached: int = 32) -> None:
        self._vocabulary = _vocabulary(tokenizer, vocab_size)
        self._limits = LLParserLimits(**_LIMITS)
        self._max_cached = max_cached
        self._cache: OrderedDict[Grammar, GrammarConstraint] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> GrammarConstraint:
        """A constraint at the grammar's start. Raises GrammarError."""
        with self._lock:
            compiled = self._cache.get(grammar)
            if compiled is not None:
                self._cache.move_to_end(grammar)
        # Forks share the states of a lexer, which are bounded: once they are spent, begin anew.
        if compiled is not None and _problem(compiled) is None:
            return compiled.fork()
        compiled = self._compile(grammar)
        with self._lock:
            self._cache[grammar] = compiled
            self._cache.move_to_end(grammar)
            if len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
        return compiled.fork()

    def _compile(self, grammar: Grammar) -> GrammarConstraint:
        source, is_conjunctive = _source(grammar)
        if is_conjunctive:
            _check_apart(grammar, source)
        matcher = LLMatcher(self._vocabulary.tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        compiled = GrammarConstraint(matcher, self._vocabulary)
        if (reason := _problem(compiled)) is not None:
            raise _refusal(grammar, reason)
        return compiled


def _problem(constraint: GrammarConstraint) -> str | None:
    """Why no sequence can begin, if so. Most of a lexer is built with its first mask and token."""
    probe = constraint.fork()._matcher
    mask = int.from_bytes(probe.compute_bitmask(), "little")
    lowest = mask & -mask
    if mask and not probe.is_error():
        probe.consume_token(lowest.bit_length() - 1)
    error = probe.get_error()
    return "no text can match it" if not mask or "NoExtension" in error else error or None


def mask_logits(logits: Tensor, constraints: Sequence[tuple[int, Constraint]]) -> None:
    """Set what the grammars do not allow to -inf, in place.

    logits        [num_rows, vocab_size]
    constraints   (row, constraint), each constraint once and not finished

    A constraint that has met its limits allows nothing.
    """
    if not constraints:
        return
    compiled = [_of_grammar(constraint) for _, constraint in constraints]
    vocabulary = compiled[0]._vocabulary
    words = torch.empty((len(compiled), vocabulary.num_words), dtype=torch.int32)
    vocabulary.executor.unsafe_compute_mask_ptr(
        [(constraint._matcher, row) for row, constraint in enumerate(compiled)],
        words.data_ptr(),
        4 * vocabulary.num_words,
        len(compiled),
    )
    # The library lets a failed one end, as if its text were whole.
    for row, constraint in enumerate(compiled):
        if constraint._matcher.is_error():
            words[row] = 0
    words = words.to(logits.device)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words.unsqueeze(-1) >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    rows = torch.tensor([row for row, _ in constraints], device=logits.device)
    barred = torch.ones((len(compiled), logits.shape[1]), dtype=torch.bool, device=logits.device)
    barred[:, : allowed.shape[1]] = ~allowed
    logits[rows] = logits[rows].masked_fill_(barred, float("-inf"))


def _of_grammar(constraint: Constraint) -> GrammarConstraint:
    assert isinstance(constraint, GrammarConstraint)
    return constraint


class _TokenTable:
    """The tokenizer as llguidance wants it: each token's bytes, and a call from text to tokens,
    which it asks for where a grammar forces the text, so that the model sees its usual spelling.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        # Control tokens add nothing to the text: no grammar may draw them.
        self.special_token_ids = [i for i, token in enumerate(self.tokens) if not token]
        self.bos_token_id = None
        self.eos_token_ids = sorted(i for i in tokenizer.eos_token_ids if i < vocab_size)
        if not self.eos_token_ids:  # the library needs one: it gets one that no logit has
            self.eos_token_ids = [vocab_size]
            self.special_token_ids.append(vocab_size)
            self.tokens.append(b"")
        self.eos_token_id = self.eos_token_ids[0]
        self._ids = {token: i for i, token in enumerate(self.tokens) if token}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        data = text.encode()
        # A control token written out in the text is one to the tokenizer, but must stay text here;
        # and some tokenizers put a space in front.
        if max(ids, default=0) < len(self.tokens) and data == b"".join(
            self.tokens[token_id] for token_id in ids
        ):
            return ids
        return list(self._longest_first(data))

    def _longest_first(self, data: bytes) -> Iterator[int]:
        """Tokens that spell the data, as far as there are any."""
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                if (token_id := self._ids.get(data[start:end])) is not None:
                    yield token_id
                    start = end
                    break
            else:
                return


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> _Vocabulary:
    table = _TokenTable(tokenizer, vocab_size)
    ll_tokenizer = LLTokenizer(TokenizerWrapper(table), eos_token=table.eos_token_ids)
    return _Vocabulary(ll_tokenizer, LLExecutor(), -(-ll_tokenizer.vocab_size // 32))


def _source(grammar: Grammar) -> tuple[str, bool]:
    """The grammar as llguidance takes it, and whether its conjunctions have to be checked apart.

    Raises GrammarError.
    """
    try:
        num_bytes = len(grammar.source.encode())
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise _refusal(grammar, str(error)) from None
    if num_bytes > MAX_SOURCE_BYTES:
        raise _refusal(grammar, f"it is longer than {MAX_SOURCE_BYTES} bytes")
    match grammar.kind:
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source), False
        case "lark":
            # Bare, a text that begins with a brace would be taken for the library's own JSON.
            source = json.dumps({"grammars": [{"lark_grammar": grammar.source}]})
            return source, _LARK_OPERATORS.search(grammar.source) is not None
        case "json_schema":
            schema = _read_schema(grammar)
            source = json.dumps(
                {"grammars": [{"json_schema": schema | {"x-guidance": dict(COMPACT)}}]}
            )
            return source, _is_conjunctive(schema)


def _read_schema(grammar: Grammar) -> dict[str, Any]:
    try:
        schema = json.loads(grammar.source, parse_constant=_no_constant)
        depth = _depth(schema)
    except (ValueError, RecursionError) as error:
        raise _refusal(grammar, str(error)) from error
    if not isinstance(schema, dict):
        raise _refusal(grammar, "it must be a JSON object")
    if depth > MAX_JSON_DEPTH:
        raise _refusal(grammar, f"it is nested deeper than {MAX_JSON_DEPTH} levels")
    return schema


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _depth(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(_depth, children), default=0)


def _is_conjunctive(value: Any) -> bool:
    if isinstance(value, dict):
        keys = value.keys()
        if not _CONJUNCTIVE.isdisjoint(keys) or len(_CONJOINED & keys) > 1:
            return True
        return any(map(_is_conjunctive, value.values()))
    return isinstance(value, list) and any(map(_is_conjunctive, value))


def _check_apart(grammar: Grammar, source: str) -> None:
    """Compile in a process that can be stopped. Raises GrammarError if it had to be."""
    command = [sys.executable, "-I", "-c", _CHECK]
    command += [str(MAX_CHECK_SECONDS), str(_MAX_CHECK_BYTES), json.dumps(_LIMITS)]
    try:
        done = subprocess.run(  # noqa: S603 - constants only; the source goes through a pipe
            command,
            input=source.encode(),
            capture_output=True,
            timeout=_MAX_WALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _refusal(grammar, "it takes too long to compile") from None
    if done.returncode != 0:
        raise _refusal(grammar, "it takes too much time or memory to compile")


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}


def _refusal(grammar: Grammar, reason: str) -> GrammarError:
    # After its own words the library may add a backtrace or a marker.
    # or quote the grammar into which the source was put.
    said = re.split(r"<backtrace>|<non-verbose/>|\n\s*\d* ?\|", reason)[0].strip()
    if said.startswith("panic"):
        said = "it is beyond what can be compiled"
    return GrammarError(
        f"the {_NAMES[grammar.kind]} cannot be used: {said[:_MAX_REASON_CHARACTERS]}; "
        "correct or simplify it"
    )
