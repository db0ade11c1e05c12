"""What the generating endpoints answer, over the real store, scheduler and engine thread."""

import asyncio
import json

import httpx
import pytest

from tests.gateway_kit import MODEL, open_harness

ZERO = {"cached_tokens": 0}


@pytest.fixture
async def harness(sqlite_url):
    async with open_harness(sqlite_url) as harness:
        yield harness


@pytest.fixture
async def http(harness):
    async with harness.client(await harness.tenant("acme")) as client:
        yield client


def chat(content, **fields):
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def completion(prompt, **fields):
    return {"model": MODEL, "prompt": prompt, **fields}


def events(response):
    """The JSON of each event; checks the framing on the way."""
    assert response.headers["content-type"] == "text/event-stream"
    *lines, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_chat_completion(http):
    response = await http.post("/v1/chat/completions", json=chat("text:héllo"))

    body = response.json()
    number = response.headers["x-request-id"].removeprefix("req_")
    assert response.status_code == 200
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "héllo", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 17,
            "completion_tokens": 7,
            "total_tokens": 24,
            "prompt_tokens_details": ZERO,
        },
    }


async def test_a_chat_stream_says_the_same_piece_by_piece(http):
    response = await http.post("/v1/chat/completions", json=chat("text:héllo", stream=True))

    chunks = events(response)
    assert {(c["id"], c["object"], c["model"]) for c in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", MODEL)
    }
    assert all("usage" not in chunk for chunk in chunks)
    assert [(c["choices"][0]["delta"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "h"}, None),
        ({"content": "é"}, None),  # two tokens: half a character is never sent
        ({"content": "l"}, None),
        ({"content": "l"}, None),
        ({"content": "o"}, None),
        ({}, "stop"),
    ]


async def test_usage_is_the_last_chunk_when_asked_for(http):
    request = chat("text:ab", stream=True, stream_options={"include_usage": True})

    *chunks, last = events(await http.post("/v1/chat/completions", json=request))

    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


async def test_a_text_completion(http):
    response = await http.post("/v1/completions", json=completion("text:ab"))

    body = response.json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"text": "ab", "index": 0, "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": ZERO,
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (["text:one", "text:two"], ["one", "two"]),
        (list(b"text:ids"), ["ids"]),
        ([list(b"text:a"), list(b"text:b"), list(b"text:c")], ["a", "b", "c"]),
    ],
)
async def test_every_form_of_prompt_gives_its_choices(http, prompt, texts):
    whole = (await http.post("/v1/completions", json=completion(prompt))).json()
    chunks = events(await http.post("/v1/completions", json=completion(prompt, stream=True)))

    assert [(c["index"], c["text"]) for c in whole["choices"]] == list(enumerate(texts))
    streamed = [""] * len(texts)
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts
    ends = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == list(range(len(texts)))


async def test_output_limits_and_their_defaults(http):
    async def num_tokens(path, request):
        body = (await http.post(path, json=request)).json()
        assert body["choices"][0]["finish_reason"] == "length"
        return body["usage"]["completion_tokens"]

    assert await num_tokens("/v1/completions", completion("x")) == 16
    assert await num_tokens("/v1/completions", completion("x", max_tokens=3)) == 3
    assert await num_tokens("/v1/chat/completions", chat("x")) == 512
    assert await num_tokens("/v1/chat/completions", chat("x", max_completion_tokens=2)) == 2
    # What is left of the context, when that is less than the default.
    assert await num_tokens("/v1/completions", completion("x" * 2038)) == 10


async def test_a_stop_string_ends_the_text_before_itself(http):
    for stream in (False, True):
        request = completion("text:one two three", stop=["two"], stream=stream)
        response = await http.post("/v1/completions", json=request)
        choices = (
            [c["choices"][0] for c in events(response)] if stream else response.json()["choices"]
        )
        assert "".join(c["text"] for c in choices) == "one "
        assert choices[-1]["finish_reason"] == "stop"


async def test_roles_and_parts_reach_the_template(http):
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "text:"}]},
        {"role": "assistant"},
        {"role": "function", "content": "f", "name": "g"},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]

    response = await http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": messages, "max_tokens": 50}
    )

    # The script of the test's model runs to the end of the prompt.
    assert response.json()["choices"][0]["message"]["content"] == "<assistant><tool>f<tool>t"


async def test_a_prompt_is_cached_within_a_tenant_and_never_across(harness):
    prompt = completion("shared prefix of some forty characters, text:ok")

    async def cached(client, **extra):
        body = (await client.post("/v1/completions", json=prompt | extra)).json()
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    secrets = [await harness.tenant(slug) for slug in ("acme", "zeta")]
    async with harness.client(secrets[0]) as acme, harness.client(secrets[1]) as zeta:
        assert await cached(acme) == 0
        assert await cached(acme) == 32
        # No field of a request chooses whose cache is read.
        spoof = {"user": "acme", "prompt_cache_key": "acme", "namespace": "acme"}
        assert await cached(zeta, **spoof) == 0
        assert await cached(zeta) == 32

    rows = await harness.rows()
    assert [row["tokens_cached"] for row in rows] == [0, 32, 0, 32]
    assert [row["tokens_in"] for row in rows] == [47] * 4


async def test_a_salt_narrows_the_cache_of_its_tenant_and_opens_no_other(harness):
    async def cached(client, **extra):
        request = completion("shared prefix of some forty characters, text:ok", **extra)
        body = (await client.post("/v1/completions", json=request)).json()
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    secrets = [await harness.tenant(slug) for slug in ("acme", "zeta")]
    async with harness.client(secrets[0]) as acme, harness.client(secrets[1]) as zeta:
        found = [
            await cached(acme, cache_salt="s"),
            await cached(acme),
            await cached(acme, cache_salt="t"),
            await cached(zeta, cache_salt="s"),
            await cached(acme, cache_salt="s"),
            await cached(zeta, cache_salt="s"),
        ]

    assert found == [0, 0, 0, 0, 32, 32]


async def test_a_stream_and_its_whole_answer_leave_the_same_ledger_row(harness, http):
    for fields in ({"max_tokens": 9}, {"stop": "c"}, {}):
        for stream in (False, True):
            request = completion(["x" * 30, "text:abcd"], stream=stream, **fields)
            assert (await http.post("/v1/completions", json=request)).status_code == 200

    rows = await harness.rows()
    varies = {"request_id", "kv_block_seconds"}
    compared = [
        {key: row[key] for key in row if not key.endswith("_at") and key not in varies}
        for row in rows
    ]
    # A later request may find more in the cache, so pairs are compared from the second on.
    assert len(rows) == 6
    assert all(row["kv_block_seconds"] > 0 for row in rows)
    for row in compared:
        assert (row["tokens_in"], row["status"]) == (39, "completed")
    for whole, streamed in zip(compared[2::2], compared[3::2], strict=True):
        assert whole == streamed
    assert compared[0]["tokens_out"] == compared[1]["tokens_out"] == 9 + 5
    for row in rows:
        times = [row[k] for k in ("arrived_at", "admitted_at", "first_token_at", "finished_at")]
        assert times == sorted(times)
    assert await harness.ledger.find_imbalances() == {}


async def test_who_has_read_the_end_of_a_stream_finds_its_row(harness, monkeypatch):
    real = harness.ledger.settle

    async def slow(request_id, settlement, *, now):
        await asyncio.sleep(0.1)
        return await real(request_id, settlement, now=now)

    monkeypatch.setattr(harness.ledger, "settle", slow)
    secret = await harness.tenant("acme")
    async with harness.listening() as url, httpx.AsyncClient(base_url=url) as http:
        headers = {"authorization": f"Bearer {secret}"}
        request = completion("text:ab", stream=True)
        post = http.stream("POST", "/v1/completions", json=request, headers=headers)
        async with post as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    [row] = await harness.rows()

    assert row["request_id"] == response.headers["x-request-id"]
    assert (row["tokens_in"], row["tokens_out"]) == (7, 3)


async def test_the_served_model_is_listed(http):
    listed = (await http.get("/v1/models")).json()

    one = (await http.get(f"/v1/models/{MODEL}")).json()
    assert listed == {"object": "list", "data": [one]}
    assert one == {
        "id": MODEL,
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "headrace",
        "max_model_len": 2048,
    }


async def test_metrics_name_tenants_by_slug(harness, http):
    await http.post("/v1/completions", json=completion("text:ab", user="mallory"))

    text = (await http.get("/metrics")).text

    assert 'headrace_tenant_tokens_total{kind="output",tenant="acme"} 3.0' in text
    assert 'headrace_tenant_requests_total{outcome="completed",tenant="acme"} 1.0' in text
    assert (
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="bytes"}' in text
    )
    assert "mallory" not in text


async def test_metrics_can_be_behind_a_token(sqlite_url):
    environ = {"HEADRACE_OPERATOR_TOKEN": "t0ken"}
    async with open_harness(sqlite_url, environ=environ) as harness, harness.client() as http:
        assert (await http.get("/metrics")).status_code == 401
        right = {"authorization": "Bearer t0ken"}
        assert (await http.get("/metrics", headers=right)).status_code == 200
