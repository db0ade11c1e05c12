"""Structured output and tool calls through the API, as the `openai` client takes them."""

import json
from contextlib import asynccontextmanager

import openai
import pytest
from jsonschema import validate
from pydantic import BaseModel

from tests.gateway_kit import MODEL, open_harness
from tests.model_gateway import real_model, tiny_chat_model
from tests.model_oracle import default_model

USER = [{"role": "user", "content": "x"}]


def tool(name, **properties):
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
TOOLS = [
    tool("get_weather", city={"enum": ["Paris", "Rome"]}, days=DAYS),
    tool("get_time", zone={"type": "string", "maxLength": 5}),
]
NOT_STRICT = tool("f")
NOT_STRICT["function"]["parameters"]["propertyNames"] = {"pattern": "a"}
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in TOOLS}


@asynccontextmanager
async def serving(harness, **options):
    secret = await harness.tenant("acme")
    async with (
        harness.listening() as url,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=secret, max_retries=0, **options
        ) as client,
    ):
        yield client


@pytest.fixture
async def tiny(sqlite_url):
    """A random model behind the API: only the grammar can make sense of it."""
    async with open_harness(sqlite_url, real=real_model(tiny_chat_model())) as harness:
        model = harness.gateway.model.name
        async with serving(harness) as client:
            yield harness, client, model


@pytest.fixture
async def scripted(sqlite_url):
    async with open_harness(sqlite_url) as harness, serving(harness) as client:
        yield client


def check_calls(calls):
    assert calls
    for call in calls:
        assert call.id.startswith("call_")
        assert call.type == "function"
        validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in calls}) == len(calls)


async def streamed(client, **request):
    """The chunks, and the message that the client's own accumulator makes of them."""
    async with client.chat.completions.stream(**request) as stream:
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
        completion = await stream.get_final_completion()
    return chunks, completion.choices


# ----------------------------------------------------------------------- a model that knows nothing


async def test_required_tools_are_called_whole_and_streamed(tiny):
    _, client, model = tiny
    request = {"model": model, "messages": USER, "tools": TOOLS, "seed": 4, "max_tokens": 1000}
    for choice in ("required", {"type": "function", "function": {"name": "get_time"}}):
        request |= {"tool_choice": choice, "parallel_tool_calls": choice != "required"}

        (whole,) = (await client.chat.completions.create(**request)).choices
        chunks, (told,) = await streamed(client, **request)

        check_calls(whole.message.tool_calls)
        assert whole.message.content is None
        # As OpenAI: a named function's call ends like a plain answer.
        reason = "tool_calls" if choice == "required" else "stop"
        assert whole.finish_reason == told.finish_reason == reason
        assert len(whole.message.tool_calls) == 1
        (a,), (b,) = whole.message.tool_calls, told.message.tool_calls
        assert (a.function.name, a.function.arguments) == (b.function.name, b.function.arguments)
        if choice != "required":
            assert a.function.name == "get_time"
        first, *others = [
            chunk.choices[0].delta.tool_calls[0]
            for chunk in chunks
            if chunk.choices[0].delta.tool_calls
        ]
        assert (first.index, first.type, first.function.arguments) == (0, "function", "")
        assert len(others) > 3
        assert all((one.id, one.function.name) == (None, None) for one in others)
        assert not any(chunk.choices[0].delta.content for chunk in chunks)


async def test_parallel_calls_and_several_choices(tiny):
    _, client, model = tiny
    answer = await client.chat.completions.create(
        model=model,
        messages=USER,
        tools=TOOLS,
        tool_choice="required",
        n=4,
        seed=1,
        max_tokens=1000,
    )
    for choice in answer.choices:
        check_calls(choice.message.tool_calls)
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    assert max(len(choice.message.tool_calls) for choice in answer.choices) > 1


async def test_tools_that_may_be_called_leave_the_text_free(tiny):
    """Random text, cut by its limit; with an answer's form beside the tools, one of the two."""
    _, client, model = tiny
    request = {"model": model, "messages": USER, "tools": TOOLS, "max_tokens": 30}
    answer = await client.chat.completions.create(**request)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content

    seen = set()
    for seed in range(12):
        (choice,) = (
            await client.chat.completions.create(
                **request | {"max_tokens": 800},
                seed=seed,
                parallel_tool_calls=False,
                response_format=json_format({"type": "integer", "minimum": 1, "maximum": 5}),
            )
        ).choices
        if choice.message.tool_calls:
            check_calls(choice.message.tool_calls)
        else:
            assert json.loads(choice.message.content) in range(1, 6)
        seen.add(choice.finish_reason)
    assert seen == {"stop", "tool_calls"}


async def test_a_call_that_is_cut_off_shows_what_there_is(tiny):
    _, client, model = tiny
    request = {
        "model": model,
        "messages": USER,
        "tools": [tool("long", text={"type": "string"})],
        "tool_choice": "required",
        "max_tokens": 80,
        "seed": 2,
        "logit_bias": {"1": -100},  # no quotation mark: the string goes on
    }
    (whole,) = (await client.chat.completions.create(**request)).choices
    stream = await client.chat.completions.create(**request, stream=True)
    chunks = [chunk async for chunk in stream]

    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "length"
    (call,) = whole.message.tool_calls
    assert call.function.name == "long"
    assert call.function.arguments.startswith('{"text":')
    deltas = [one for c in chunks for one in c.choices[0].delta.tool_calls or ()]
    assert "".join(one.function.arguments for one in deltas) == call.function.arguments


def json_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


class City(BaseModel):
    class Mayor(BaseModel):
        party: str | None

    rank: int
    mayors: list[Mayor]


async def test_answers_in_json(tiny):
    _, client, model = tiny
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "é"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for seed in range(4):
        request = {"model": model, "seed": seed, "response_format": json_format(schema)}
        chat = await client.chat.completions.create(messages=USER, max_tokens=100, **request)
        validate(json.loads(chat.choices[0].message.content), schema)
        assert chat.choices[0].finish_reason == "stop"
        stream = await client.chat.completions.create(
            messages=USER, max_tokens=100, stream=True, **request
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == chat.choices[0].message.content

        completion = await client.completions.create(
            model=model,
            prompt=["a", "b"],
            max_tokens=100,
            seed=seed,
            extra_body={"response_format": json_format(schema)},
        )
        for choice in completion.choices:
            validate(json.loads(choice.text), schema)

    # OpenAI's strict schemas, as its client derives them from classes.
    parsed = await client.chat.completions.parse(
        model=model,
        messages=USER,
        seed=3,
        max_tokens=1000,
        logit_bias={"92": 3},  # brackets close sooner
        response_format=City,
    )
    assert isinstance(parsed.choices[0].message.parsed, City)


async def test_other_forms(tiny):
    _, client, model = tiny

    async def say(**body):
        request = {"model": model, "messages": USER, "max_tokens": 200, "seed": 1}
        answer = await client.chat.completions.create(**request, extra_body=body)
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content

    assert await say(structured_outputs={"choice": ["ja", "nein"]}) in ("ja", "nein")
    assert await say(guided_choice=["ja", "nein"]) in ("ja", "nein")
    assert len(await say(structured_outputs={"regex": "[a-z]{12}"})) == 12
    assert await say(structured_outputs={"grammar": 'start: "a" b\nb: "b" | "c"'}) in ("ab", "ac")
    assert json.loads(await say(structured_outputs={"json": {"const": [1]}})) == [1]


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("body", "param", "code", "said"),
    [
        (
            {"response_format": json_format({"type": "sting"})},
            "response_format",
            "invalid_grammar",
            "Invalid type: sting",
        ),
        (
            {"response_format": json_format({"$ref": "http://127.0.0.1:9/x"})},
            "response_format",
            "invalid_grammar",
            "registry",
        ),
        (
            {"structured_outputs": {"regex": "("}},
            "structured_outputs",
            "invalid_grammar",
            "unclosed group",
        ),
        (
            {"structured_outputs": {"grammar": "start: nothing"}},
            "structured_outputs",
            "invalid_grammar",
            "unknown name",
        ),
        (
            {"tools": [tool("f", a={"type": "string", "pattern": "("})]},
            "tools",
            "invalid_function_parameters",
            "unclosed group",
        ),
        (
            {"tools": [{**NOT_STRICT, "function": NOT_STRICT["function"] | {"strict": True}}]},
            "tools",
            "invalid_function_parameters",
            "propertyNames",
        ),
    ],
)
async def test_what_cannot_compile_is_refused_before_anything_is_reserved(
    tiny, body, param, code, said
):
    harness, client, model = tiny
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=model, messages=USER, extra_body=body)

    assert caught.value.body["type"] == "invalid_request_error"
    assert (caught.value.body["param"], caught.value.body["code"]) == (param, code)
    assert said in caught.value.body["message"]
    assert await harness.rows() == []


async def test_keywords_that_cannot_be_enforced_pass_where_the_client_is_not_strict(tiny):
    _, client, model = tiny
    answer = await client.chat.completions.create(
        model=model, messages=USER, tools=[NOT_STRICT], tool_choice="required", max_tokens=900
    )
    assert answer.choices[0].message.tool_calls[0].function.arguments == "{}"


# ----------------------------------------------------------------- a model that says what it should

CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>'


async def test_text_and_calls_of_one_answer(scripted):
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"text:Let me see.\n{CALL}\n{CALL}"}],
        "tools": TOOLS,
        "max_tokens": 400,
    }
    (whole,) = (await scripted.chat.completions.create(**request)).choices
    chunks, (told,) = await streamed(scripted, **request)

    for choice in (whole, told):
        assert choice.message.content == "Let me see."
        check_calls(choice.message.tool_calls)
        assert [c.function.arguments for c in choice.message.tool_calls] == ['{"zone": "CET"}'] * 2
        assert choice.finish_reason == "tool_calls"
    assert [c.choices[0].delta.role for c in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    shown = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert shown == "Let me see."
    indices = [one.index for c in chunks for one in c.choices[0].delta.tool_calls or ()]
    assert indices == sorted(indices)
    assert set(indices) == {0, 1}


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_a_tag_is_text(scripted, fields):
    messages = [{"role": "user", "content": f"text:{CALL}"}]
    answer = await scripted.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=400, **fields
    )
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


async def test_a_conversation_goes_on_with_the_results(scripted):
    first = await scripted.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"text:{CALL}"}],
        tools=TOOLS,
        max_tokens=400,
    )
    message = first.choices[0].message
    answer = await scripted.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "What time is it?"},
            message,
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "text:noon"},
        ],
        tools=TOOLS,
    )
    assert answer.choices[0].message.content == "noon"


async def test_logprobs_of_tokens_that_are_not_shown_as_text(scripted):
    request = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"text:Hm {CALL}"}],
        "tools": TOOLS,
        "max_tokens": 400,
        "logprobs": True,
    }
    whole = (await scripted.chat.completions.create(**request)).choices[0].logprobs.content
    stream = await scripted.chat.completions.create(**request, stream=True)
    told = [
        token
        async for chunk in stream
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert "".join(token.token for token in whole) == f"Hm {CALL}"
    assert told == whole


# -------------------------------------------------------------------------------- the default model


@pytest.mark.model
async def test_the_default_model_calls_a_tool(sqlite_url):
    model = default_model()
    async with (
        open_harness(sqlite_url, num_blocks=128, real=real_model(model)) as harness,
        serving(harness) as client,
    ):
        request = {
            "model": model.name,
            "messages": [{"role": "user", "content": "What is the weather in Rome tomorrow?"}],
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_tokens": 100,
        }
        (whole,) = (await client.chat.completions.create(**request)).choices
        _, (told,) = await streamed(client, **request)

    check_calls(whole.message.tool_calls)
    assert whole.finish_reason == told.finish_reason == "tool_calls"
    (call,), (again,) = whole.message.tool_calls, told.message.tool_calls
    assert (call.function.name, call.function.arguments) == (
        again.function.name,
        again.function.arguments,
    )
