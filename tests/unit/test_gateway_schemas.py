"""Bounds and refusals of request bodies: each names the field and the OpenAI code."""

import json

import pytest

from gateway.errors import InvalidRequestError, UnsupportedParameterError
from gateway.schemas.chat import ChatBody
from gateway.schemas.completions import CompletionBody
from gateway.schemas.parsing import parse

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"model": "m", "prompt": "hi"}


def chat(**fields):
    return parse(ChatBody, json.dumps(CHAT | fields).encode())


def completion(**fields):
    return parse(CompletionBody, json.dumps(PROMPT | fields).encode())


INVALID = [
    ({"model": ""}, "model"),
    ({"model": 7}, "model"),
    ({"model": "m" * 257}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 0, "n": 2}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "16"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**31 + 1}, "max_tokens"),
    ({"max_tokens": 10**4000}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a"] * 500}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": "2"}, "n"),
    ({"n": True}, "n"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"presence_penalty": "high"}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 10.1}, "repetition_penalty"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"bad_words": "x"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words.0"),
    ({"bad_words": ["x" * 257]}, "bad_words.0"),
    ({"bad_words": ["x"] * 129}, "bad_words"),
    ({"logprobs": "x"}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"use_beam_search": 1}, "use_beam_search"),
    ({"length_penalty": 11}, "length_penalty"),
    ({"early_stopping": "never"}, "early_stopping"),
    ({"use_prefix_cache": "no"}, "use_prefix_cache"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
]


@pytest.mark.parametrize(("fields", "param"), INVALID)
@pytest.mark.parametrize("make", [chat, completion])
def test_a_field_out_of_bounds_is_named(make, fields, param):
    with pytest.raises(InvalidRequestError) as error:
        make(**fields)

    assert (error.value.param, error.value.code) == (param, "invalid_value")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages.0"),
        ([{"content": "hi"}], "messages.0.role"),
        ([{"role": "robot", "content": "hi"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": ["hi"]}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages.0.content"),
        ([{"role": "user", "content": "x"}] * 4097, "messages"),
    ],
)
def test_malformed_messages_are_named(messages, param):
    with pytest.raises(InvalidRequestError) as error:
        chat(messages=messages)

    assert (error.value.param, error.value.code) == (param, "invalid_value")


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        [],
        [[]],
        [[], [1]],
        5,
        ["a", 1],
        [1, "a"],
        [1.5],
        [True],
        [["a"]],
        {"a": 1},
        ["a"] * 65,
    ],
)
def test_malformed_prompts_are_named(prompt):
    with pytest.raises(InvalidRequestError) as error:
        completion(prompt=prompt)

    assert (error.value.param, error.value.code) == ("prompt", "invalid_value")


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("hi", ("hi",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (list(range(100)), (tuple(range(100)),)),
    ],
)
def test_the_four_forms_of_a_prompt(prompt, parsed):
    assert completion(prompt=prompt).prompt == parsed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 65}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["x"] * 3, "n": 43}, "n"),
        ({"prompt": ["x"] * 3, "best_of": 43}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "use_beam_search": True}, "max_tokens"),
    ],
)
def test_bounds_of_completions_alone(fields, param):
    with pytest.raises(InvalidRequestError) as error:
        completion(**fields)

    assert (error.value.param, error.value.code) == (param, "invalid_value")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 0}, "top_logprobs"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ],
)
def test_bounds_of_chat_alone(fields, param):
    with pytest.raises(InvalidRequestError) as error:
        chat(**fields)

    assert (error.value.param, error.value.code) == (param, "invalid_value")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", True),
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("presence_penalty", 1),
        ("frequency_penalty", -1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("bad_words", ["x"]),
        ("min_tokens", 3),
        ("stop", ["x"]),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_beams_go_with_nothing_that_shapes_a_draw(make, name, value):
    with pytest.raises(InvalidRequestError) as error:
        make(use_beam_search=True, n=4, **{name: value})

    assert error.value.param == name
    make(n=4, **{name: value} if name != "stream" else {})


def test_beams_have_no_logprobs():
    for make, value in ((chat, True), (completion, 0)):
        with pytest.raises(InvalidRequestError) as error:
            make(use_beam_search=True, logprobs=value)

        assert error.value.param == "logprobs"


def test_beams_take_what_changes_nothing():
    body = completion(
        use_beam_search=True,
        n=2,
        best_of=4,
        temperature=0,
        top_p=1,
        min_p=0,
        stop_token_ids=[5],
        ignore_eos=True,
        prompt_logprobs=1,
    )

    assert (body.num_choices, body.num_sequences) == (2, 4)


def test_how_many_choices_and_sequences():
    assert (completion().num_choices, completion().num_sequences) == (1, 1)
    assert (completion(n=3).num_choices, completion(n=3).num_sequences) == (3, 3)
    assert completion(n=2, best_of=5).num_sequences == 5
    assert completion(prompt=["x"] * 64, n=2).num_sequences == 2
    assert chat(n=64).num_sequences == 64


def test_of_how_many_tokens_logprobs_are_asked():
    def asked(body):
        return body.num_logprobs, body.num_prompt_logprobs

    assert asked(completion()) == (None, None)
    assert asked(completion(logprobs=0)) == (0, None)
    assert asked(completion(logprobs=3, echo=True)) == (3, 3)
    assert asked(completion(logprobs=3, echo=True, prompt_logprobs=5)) == (3, 5)
    assert asked(completion(echo=True)) == (None, None)
    assert asked(chat()) == (None, None)
    assert asked(chat(logprobs=True)) == (0, None)
    assert asked(chat(logprobs=True, top_logprobs=20, prompt_logprobs=0)) == (20, 0)


def test_no_output_is_needed_where_the_prompt_is_scored():
    assert completion(max_tokens=0, echo=True).requested_tokens == 0
    assert completion(max_tokens=0, prompt_logprobs=0).requested_tokens == 0


def test_biases_are_by_token_id():
    assert chat(logit_bias={"50256": -100, "7": 1.5}).logit_bias == {50256: -100, 7: 1.5}


UNSUPPORTED = {
    "suffix": ["x"],
    "allowed_token_ids": [[1]],
    "truncate_prompt_tokens": [5],
    "functions": [[{"name": "f"}]],
    "modalities": [["text", "audio"]],
    "chat_template": ["{{ messages }}"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in UNSUPPORTED.items() for value in values]
)
@pytest.mark.parametrize("make", [chat, completion])
def test_a_known_field_that_would_change_the_answer_is_refused_by_name(make, name, value):
    with pytest.raises(UnsupportedParameterError) as error:
        make(**{name: value})

    assert (error.value.param, error.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (chat, "best_of", 2),
        (chat, "echo", True),
        (completion, "top_logprobs", 0),
        (completion, "tools", [{"type": "function", "function": {"name": "f"}}]),
        (completion, "tool_choice", "required"),
        (completion, "chat_template_kwargs", {"a": 1}),
    ],
)
def test_a_field_of_the_other_resource_is_refused_by_name(make, name, value):
    with pytest.raises(UnsupportedParameterError) as error:
        make(**{name: value})

    assert error.value.param == name


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages.0.function_call"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages.0.content",
        ),
    ],
)
def test_message_parts_that_cannot_be_honoured_are_refused(message, param):
    with pytest.raises(UnsupportedParameterError) as error:
        chat(messages=[message])

    assert error.value.param == param


def test_neutral_values_and_unknown_fields_pass():
    body = chat(
        n=1,
        logprobs=False,
        logit_bias={},
        presence_penalty=0,
        frequency_penalty=0.0,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        stop=None,
        stream=None,
        stream_options=None,
        temperature=None,
        user="somebody",
        cache_salt="other-tenant",
        reasoning_effort="low",
        x_unheard_of={"a": [1]},
    )

    assert body.stop == ()


def test_text_parts_are_joined_and_every_role_is_known():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    roles = ["developer", "system", "user", "tool", "function"]
    messages = [{"role": role, "content": parts} for role in roles]

    body = chat(messages=[*messages, {"role": "assistant", "content": None}])

    assert [m.content for m in body.messages] == ["a\nb"] * 5 + [None]


def test_the_smaller_of_the_two_output_limits_counts():
    assert chat(max_tokens=5, max_completion_tokens=9).requested_tokens == 5
    assert chat(max_tokens=9, max_completion_tokens=5).requested_tokens == 5
    assert chat(max_completion_tokens=7).requested_tokens == 7
    assert chat().requested_tokens is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"model": "m",}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
    ],
)
def test_what_is_not_json_has_no_code(raw):
    with pytest.raises(InvalidRequestError) as error:
        parse(ChatBody, raw)

    assert (error.value.param, error.value.code) == (None, None)
    assert "not valid JSON" in str(error.value)


@pytest.mark.parametrize("raw", [b"[]", b"5", b'"text"', b"null"])
def test_json_that_is_no_object_is_invalid(raw):
    with pytest.raises(InvalidRequestError) as error:
        parse(ChatBody, raw)

    assert error.value.param is None


def test_a_number_without_a_fraction_is_whole():
    body = chat(max_tokens=256.0, max_completion_tokens=300.0, top_k=5.0, seed=-7.0)

    assert (body.max_tokens, body.max_completion_tokens) == (256, 300)
    assert (body.top_k, body.seed) == (5, -7)


def test_both_names_of_the_output_limit_are_bounded():
    with pytest.raises(InvalidRequestError) as error:
        chat(max_completion_tokens=2**31 + 1)

    assert error.value.param == "max_completion_tokens"
