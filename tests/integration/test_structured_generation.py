"""Structured output through the whole engine: what is generated parses and validates."""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.events import SequenceFinished, SequencePreempted, TokensGenerated
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner
from engine.model.structured import GrammarCompiler
from engine.sequence import FinishReason, Grammar, SamplingParams, TenantShare
from engine.simulated_runner import VirtualClock
from tests.json_schemas import random_schema
from tests.model_oracle import default_model, save_tiny_llama

NUM_SCHEMAS = 200
BATCH = 16


@dataclass
class Outcome:
    texts: dict[str, str] = field(default_factory=dict)
    ends: dict[str, SequenceFinished] = field(default_factory=dict)
    num_preemptions: int = 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("tiny")
    # Its logits are nearly flat: what it draws, the grammar has to decide.
    save_tiny_llama(folder, max_position_embeddings=4096, initializer_range=0.05)
    return load_model(folder, device="cpu", dtype="float32")


def run(
    model: LoadedModel,
    requests: Sequence[tuple[Sequence[int], SamplingParams]],
    *,
    num_blocks: int,
    compiler: GrammarCompiler | None = None,
) -> Outcome:
    """All requests through one core to their ends."""
    compiler = compiler or GrammarCompiler(model.tokenizer, model.config.vocab_size)
    config = EngineConfig(
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_seqs=BATCH, max_model_len=2048),
        check_invariants=True,
    )
    core = EngineCore(
        config,
        ModelRunner(model, config.cache),
        clock=VirtualClock(),
        token_bytes=model.tokenizer.token_bytes,
        eos_token_ids=model.eos_token_ids,
    )
    outcome = Outcome()
    for number, (prompt, params) in enumerate(requests):
        assert params.grammar is not None
        core.add(
            str(number),
            tuple(prompt),
            params,
            share=TenantShare(tenant=f"t{number % 3}"),
            namespace="t",
            constraint=compiler.compile(params.grammar),
        )
    while core.has_work:
        for event in core.step():
            if isinstance(event, TokensGenerated):
                key = f"{event.request_id}/{event.index}"
                outcome.texts[key] = outcome.texts.get(key, "") + event.text
            elif isinstance(event, SequenceFinished):
                key = f"{event.request_id}/{event.index}"
                outcome.ends[key] = event
                outcome.texts[key] = outcome.texts.get(key, "") + event.text
            elif isinstance(event, SequencePreempted):
                outcome.num_preemptions += 1
    return outcome


def check(schema: dict[str, Any], text: str) -> Any:
    value = json.loads(text)
    Draft202012Validator(schema, format_checker=FormatChecker(["ipv4", "uuid"])).validate(value)
    return value


def as_grammar(schema: object) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def test_every_completion_of_200_random_schemas_validates(tiny: LoadedModel) -> None:
    """Greedy and sampled, in batches of 16 whose pool is too small: state outlives preemption."""
    rng = random.Random(3)
    schemas = [random_schema(rng) for _ in range(NUM_SCHEMAS)]
    requests = [
        (
            tiny.tokenizer.encode(f"{number}:"),
            SamplingParams(
                max_tokens=600,
                temperature=float(number % 2),
                seed=number,
                grammar=as_grammar(schema),
            ),
        )
        for number, schema in enumerate(schemas)
    ]
    compiler = GrammarCompiler(tiny.tokenizer, tiny.config.vocab_size, max_cached=NUM_SCHEMAS)

    outcome = run(tiny, requests, num_blocks=40, compiler=compiler)

    # By the grammar, not by the output limit.
    assert [end.reason for end in outcome.ends.values()] == [FinishReason.STOP] * NUM_SCHEMAS
    values = [check(schema, outcome.texts[f"{i}/0"]) for i, schema in enumerate(schemas)]
    assert outcome.num_preemptions > 20
    # Alone and with room, each says the same.
    for number in random.Random(0).sample(range(NUM_SCHEMAS), 12):
        alone = run(tiny, [requests[number]], num_blocks=200, compiler=compiler)
        assert alone.texts["0/0"] == outcome.texts[f"{number}/0"]
    # They are not all trivial.
    assert sum(isinstance(value, dict) and len(value) > 1 for value in values) > 40
    assert max(map(len, outcome.texts.values())) > 150


def test_regular_expressions_and_grammars_of_lark(tiny: LoadedModel) -> None:
    pattern = r"[A-Z]{3}-\d{2,4}(\.é)?"
    lark = """
        start: pair ("; " pair){1,3}
        pair: KEY "=" (NUM | "none")
        KEY: /[a-f]{2}/
        NUM: /[1-9][0-9]?/
    """
    grammars = [Grammar("regex", pattern)] * 6 + [Grammar("lark", lark)] * 6
    requests = [
        ([1, 2, 3], SamplingParams(max_tokens=100, seed=seed, grammar=grammar))
        for seed, grammar in enumerate(grammars)
    ]
    outcome = run(tiny, requests, num_blocks=200)
    assert {end.reason for end in outcome.ends.values()} == {FinishReason.STOP}
    for number in range(12):
        expected = pattern if number < 6 else r"[a-f]{2}=(\d\d?|none)(; [a-f]{2}=(\d\d?|none)){1,3}"
        assert re.fullmatch(expected, outcome.texts[f"{number}/0"])
    assert len(set(outcome.texts.values())) > 8


def test_sequences_of_one_request_have_grammars_of_their_own(tiny: LoadedModel) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 8}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    params = SamplingParams(max_tokens=200, n=6, seed=1, grammar=as_grammar(schema))
    outcome = run(tiny, [(tiny.tokenizer.encode("x" * 40), params)], num_blocks=200)
    assert len(outcome.ends) == 6
    for text in outcome.texts.values():
        check(schema, text)
    assert len(set(outcome.texts.values())) == 6


def test_a_grammar_at_its_limits_ends_its_sequence_and_no_other(tiny: LoadedModel) -> None:
    # After each letter, wherever it stood, so many characters: soon too many states.
    choices = "|".join(f".*{chr(97 + i % 26)}.{{{i}}}" for i in range(200))
    states = Grammar("regex", f"({choices})+")
    grammars = [states, Grammar("regex", "[a-z]{200}")]
    bias = tuple((tiny.tokenizer.encode(letter)[0], 9.0) for letter in "abc")
    requests = [
        ([1, 2], SamplingParams(max_tokens=400, seed=5, logit_bias=bias, grammar=g))
        for g in grammars
    ]
    outcome = run(tiny, requests, num_blocks=200)
    assert outcome.ends["0/0"].reason == FinishReason.ERROR
    assert "grammar" in str(outcome.ends["0/0"].error)
    assert outcome.ends["1/0"].reason == FinishReason.STOP
    assert len(outcome.texts["1/0"]) == 200


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "languages": {"type": "array", "items": {"enum": ["English", "French"]}, "maxItems": 2},
        "address": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 30},
                "zip": {"type": ["string", "null"], "maxLength": 8},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "languages", "address"],
    "additionalProperties": False,
}


@pytest.mark.model
def test_the_default_model_fills_schemas_in() -> None:
    model = default_model()
    assert model.chat_template is not None
    questions: list[tuple[str, Grammar]] = [
        ("Describe Marie Curie in JSON.", as_grammar(PERSON)),
        ("Is Paris in France?", as_grammar({"enum": ["yes", "no"]})),
        ("What is the capital of France?", as_grammar({"enum": ["London", "Paris", "Rome"]})),
        ("A date of 1999?", Grammar("regex", r"1999-\d\d-\d\d")),
    ]
    requests = [
        (
            model.tokenizer.encode(
                model.chat_template.render([{"role": "user", "content": question}]),
                add_special_tokens=False,
            ),
            SamplingParams(max_tokens=200, temperature=0, grammar=grammar),
        )
        for question, grammar in questions
    ]
    outcome = run(model, requests, num_blocks=100)
    assert [outcome.ends[f"{i}/0"].reason for i in range(4)] == [FinishReason.STOP] * 4
    assert check(PERSON, outcome.texts["0/0"])["name"]
    assert check({}, outcome.texts["1/0"]) in ("yes", "no")
    assert check({}, outcome.texts["2/0"]) in ("London", "Paris", "Rome")
    assert outcome.texts["3/0"].startswith("1999-")
