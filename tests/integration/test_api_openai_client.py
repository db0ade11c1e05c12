"""The `openai` client, unchanged, over a real socket: answers, streams, typed exceptions."""

import openai
import pytest

from tenants.policy import Limit
from tests.gateway_kit import MODEL, open_harness

MESSAGES = [{"role": "user", "content": "text:hello"}]


@pytest.fixture
async def harness(sqlite_url):
    async with open_harness(sqlite_url) as harness:
        yield harness


@pytest.fixture
async def url(harness):
    async with harness.listening() as url:
        yield url


def openai_client(url, secret, **options):
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0, **options)


async def test_answers_and_streams(harness, url):
    async with openai_client(url, await harness.tenant("acme")) as client:
        chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert chat.choices[0].message.content == "hello"
        assert chat.choices[0].finish_reason == "stop"
        assert chat.usage.prompt_tokens_details.cached_tokens == 0
        assert chat._request_id.startswith("req_")

        text = await client.completions.create(model=MODEL, prompt=["text:a", "text:b"])
        assert [choice.text for choice in text.choices] == ["a", "b"]

        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(pieces) == "hello"
        assert chunks[-1].usage.completion_tokens == 6
        assert chunks[-2].choices[0].finish_reason == "stop"

        stream = await client.completions.create(model=MODEL, prompt="text:abc", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "abc"

        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_the_tier_that_served_is_read(harness, url):
    ask = {"model": MODEL, "messages": MESSAGES}
    async with openai_client(url, await harness.tenant("acme")) as client:
        for asked, served in (("flex", "flex"), ("priority", "default"), ("auto", "default")):
            chat = await client.chat.completions.create(**ask, service_tier=asked)
            assert chat.service_tier == served
            stream = await client.chat.completions.create(**ask, service_tier=asked, stream=True)
            assert {chunk.service_tier async for chunk in stream} == {served}
        assert (await client.chat.completions.create(**ask)).service_tier is None


async def test_400_names_the_field(harness, url):
    async with openai_client(url, await harness.tenant("acme")) as client:
        with pytest.raises(openai.BadRequestError) as error:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=9)

    assert (error.value.code, error.value.param) == ("invalid_value", "n")


async def test_401_of_a_wrong_key(url):
    async with openai_client(url, "hr_wrong") as client:
        with pytest.raises(openai.AuthenticationError) as error:
            await client.models.list()

    assert error.value.code == "invalid_api_key"


async def test_404_of_a_model_that_is_not_served(harness, url):
    async with openai_client(url, await harness.tenant("acme")) as client:
        with pytest.raises(openai.NotFoundError) as error:
            await client.chat.completions.create(model="gpt-4", messages=MESSAGES)

    assert error.value.code == "model_not_found"


async def test_429_with_headers_to_retry_by(harness, url):
    limit = Limit(metric="requests", limit=1, window_seconds=3600 * 24 * 366)
    async with openai_client(url, await harness.tenant("acme", (limit,))) as client:
        raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES)
        assert raw.headers["x-ratelimit-limit-requests"] == "1"
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as error:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)

    headers = error.value.response.headers
    assert (error.value.type, error.value.code) == ("requests", "rate_limit_exceeded")
    assert int(headers["retry-after"]) > 60
    assert int(headers["retry-after-ms"]) >= 1000 * (int(headers["retry-after"]) - 1)
    assert headers["x-should-retry"] == "false"
    assert headers["x-ratelimit-remaining-requests"] == "0"


async def test_the_client_retries_by_itself_when_a_limit_opens_soon(harness, url):
    limit = Limit(metric="requests", limit=2, window_seconds=1)
    secret = await harness.tenant("acme", (limit,))
    async with openai_client(url, secret) as client:
        patient = client.with_options(max_retries=3)
        for _ in range(5):
            answer = await patient.completions.create(model=MODEL, prompt="text:a")
            assert answer.choices[0].text == "a"


async def test_an_error_in_a_stream_is_raised(harness, url):
    async with openai_client(url, await harness.tenant("acme")) as client:
        stream = await client.completions.create(model=MODEL, prompt="fail:3", stream=True)
        with pytest.raises(openai.APIError) as error:
            async for _ in stream:
                pass

    assert error.value.code == "engine_error"


async def test_choices_and_logprobs_are_typed_objects(harness, url):
    talk = [{"role": "user", "content": "text:ab|text1:é|"}]
    async with openai_client(url, await harness.tenant("acme")) as client:
        chat = await client.chat.completions.create(
            model=MODEL, messages=talk, n=2, logprobs=True, top_logprobs=2, seed=7
        )
        assert [choice.message.content for choice in chat.choices] == ["ab", "é"]
        first, second = (choice.logprobs.content for choice in chat.choices)
        assert [(token.token, token.logprob) for token in first] == [("a", -0.25), ("b", -0.25)]
        assert [(top.token, top.logprob) for top in first[0].top_logprobs] == [
            ("a", -0.25),
            ("`", -1.25),
        ]
        assert bytes(byte for token in second for byte in token.bytes).decode() == "é"

        stream = await client.chat.completions.create(
            model=MODEL, messages=talk, n=2, logprobs=True, stream=True
        )
        said = {0: "", 1: ""}
        spelled = {0: b"", 1: b""}
        async for chunk in stream:
            [choice] = chunk.choices
            said[choice.index] += choice.delta.content or ""
            for token in choice.logprobs.content if choice.logprobs else ():
                spelled[choice.index] += bytes(token.bytes)
            assert said[choice.index].encode() == spelled[choice.index]
        assert said == {0: "ab", 1: "é"}

        text = await client.completions.create(
            model=MODEL, prompt="text:ab", echo=True, logprobs=1, max_tokens=0
        )
        [choice] = text.choices
        assert choice.logprobs.tokens == list("text:ab")
        assert choice.logprobs.token_logprobs[:2] == [None, -0.125]
        assert choice.logprobs.top_logprobs[1] == {"e": -0.125}
        assert choice.logprobs.text_offset == list(range(7))

        best = await client.completions.create(
            model=MODEL, prompt="worth:10|text:a|text1:b|", best_of=2, logit_bias={"5": -100}
        )
        assert [choice.text for choice in best.choices] == ["b"]
        beams = await client.completions.create(
            model=MODEL, prompt="x", n=2, max_tokens=1, extra_body={"use_beam_search": True}
        )
        assert len(beams.choices) == 2
