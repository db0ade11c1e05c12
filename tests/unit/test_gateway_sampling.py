"""From bodies to the engine's parameters, and bounds that depend on the model."""

import json

import pytest

from engine.sequence import BeamSearch, SamplingParams
from gateway.errors import InvalidRequestError
from gateway.sampling import check_sampling, encode_bad_words, sampling_params
from gateway.schemas.chat import ChatBody
from gateway.schemas.completions import CompletionBody
from gateway.schemas.parsing import parse
from gateway.served_model import ServedModel

WORDS = {"cat": [1], " cat": [2], "hotdog": [3, 4], " hotdog": [5, 4], "x": [6], " x": [0, 6]}
MODEL = ServedModel(
    name="m",
    created=1,
    device="cpu",
    dtype="float32",
    max_model_len=8,
    max_seqs=4,
    vocab_size=9,
    max_token_bytes=1,
    token_bytes=lambda token: bytes([token]),
    encode=list,
    encode_plain=WORDS.__getitem__,
    encode_chat=lambda messages, **_: list(messages),
    compile_grammar=lambda grammar: None,
)


def completion(**fields):
    return parse(CompletionBody, json.dumps({"model": "m", "prompt": "x"} | fields).encode())


def test_every_field_reaches_the_engine():
    body = completion(
        n=3,
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={"5": -100, "3": 2},
        seed=-1,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[8],
        ignore_eos=True,
        logprobs=4,
        prompt_logprobs=6,
    )

    assert sampling_params(body, 11, bad_words=((1, 2),)) == SamplingParams(
        max_tokens=11,
        n=3,
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.05,
        presence_penalty=1.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias=((5, -100), (3, 2)),
        bad_words=((1, 2),),
        seed=2**64 - 1,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=frozenset({8}),
        ignore_eos=True,
        logprobs=4,
        prompt_logprobs=6,
    )


def test_what_is_not_said_is_neutral():
    assert sampling_params(completion(seed=5), 3) == SamplingParams(max_tokens=3, seed=5)
    assert sampling_params(completion(top_k=-1, top_p=0, seed=0), 3) == SamplingParams(
        max_tokens=3, temperature=0
    )


def test_a_seed_is_drawn_where_none_is_given():
    assert sampling_params(completion(), 3).seed != sampling_params(completion(), 3).seed


def test_the_best_of_several_are_found_by_their_logprobs():
    params = sampling_params(completion(n=2, best_of=3), 3)

    assert (params.n, params.logprobs) == (3, 0)
    assert sampling_params(completion(n=2, best_of=3, logprobs=5), 3).logprobs == 5
    assert sampling_params(completion(n=2, best_of=2), 3).logprobs is None


def test_beams():
    body = completion(n=2, best_of=4, use_beam_search=True, length_penalty=0, early_stopping=True)
    params = sampling_params(body, 3)

    assert params.beam == BeamSearch(width=4, length_penalty=0, early_stopping=True)
    assert (params.n, params.num_sequences, params.logprobs) == (1, 4, None)
    assert sampling_params(completion(n=2, use_beam_search=True), 3).beam == BeamSearch(width=2)
    # Fields of beam search alone ask for none.
    assert sampling_params(completion(length_penalty=2.0), 3).beam is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 5}, "n"),
        ({"best_of": 5}, "best_of"),
        ({"n": 5, "use_beam_search": True}, "n"),
        ({"logit_bias": {"9": 1}}, "logit_bias"),
        ({"stop_token_ids": [3, 9]}, "stop_token_ids"),
    ],
)
def test_bounds_of_what_is_served(fields, param):
    with pytest.raises(InvalidRequestError) as error:
        check_sampling(completion(**fields), MODEL)

    assert (error.value.param, error.value.code) == (param, "invalid_value")


def test_what_is_just_within_them():
    check_sampling(completion(best_of=4, logit_bias={"8": 1}, stop_token_ids=[8]), MODEL)


def test_min_tokens_within_the_output():
    assert sampling_params(completion(min_tokens=3), 3).min_tokens == 3
    with pytest.raises(InvalidRequestError) as error:
        sampling_params(completion(min_tokens=4), 3)

    assert error.value.param == "min_tokens"


def test_bad_words_stand_at_the_beginning_and_after_a_space():
    assert encode_bad_words(["cat"], MODEL) == ((1,), (2,))
    assert encode_bad_words([" hotdog", "cat", "cat"], MODEL) == ((3, 4), (5, 4), (1,), (2,))
    # A space of its own says nothing new.
    assert encode_bad_words(["x"], MODEL) == ((6,),)


def test_chat_has_the_same_fields():
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 2, "seed": 1}
    body |= {"logprobs": True, "top_logprobs": 3, "min_p": 0.5}

    assert sampling_params(parse(ChatBody, json.dumps(body).encode()), 9) == SamplingParams(
        max_tokens=9, n=2, seed=1, logprobs=3, min_p=0.5
    )
