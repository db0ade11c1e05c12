"""Several choices, the best of several, beams, logprobs and echo, through the whole gateway."""

import asyncio
import json

import pytest

from tenants.policy import Limit
from tests.gateway_kit import MODEL, open_harness, until

TWO = "text:one|text1:three|"


@pytest.fixture
async def harness(sqlite_url):
    async with open_harness(sqlite_url) as harness:
        yield harness


@pytest.fixture
async def http(harness):
    async with harness.client(await harness.tenant("acme")) as client:
        yield client


def completion(prompt, **fields):
    return {"model": MODEL, "prompt": prompt, **fields}


def chat(content, **fields):
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


async def answer(http, request):
    path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
    response = await http.post(path, json=request)
    assert response.status_code == 200, response.text
    if not request.get("stream"):
        return response.json()
    *lines, done, _ = response.text.split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def refused(http, request):
    path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
    response = await http.post(path, json=request)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["code"], error["param"]


# -- n --------------------------------------------------------------------------------------


async def test_several_choices_of_several_prompts(harness, http):
    request = completion([TWO, "text:x|text1:yz|"], n=2)

    body = await answer(http, request)

    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "one", "stop"),
        (1, "three", "stop"),
        (2, "x", "stop"),
        (3, "yz", "stop"),
    ]
    # Each prompt counts once, each sequence's tokens with the one that ends it.
    assert body["usage"]["prompt_tokens"] == len(TWO) + len("text:x|text1:yz|")
    assert body["usage"]["completion_tokens"] == 4 + 6 + 2 + 3
    [row] = await harness.rows()
    assert (row["tokens_in"], row["tokens_out"], row["status"]) == (37, 15, "completed")
    assert await harness.ledger.find_imbalances() == {}


async def test_a_stream_of_several_choices_interleaves_them(http):
    request = chat(TWO, n=2, stream=True, stream_options={"include_usage": True})

    *chunks, last = await answer(http, request)

    said = {0: [], 1: []}
    for chunk in chunks:
        [choice] = chunk["choices"]
        said[choice["index"]].append((choice["delta"], choice["finish_reason"]))
    for index, text in ((0, "one"), (1, "three")):
        assert said[index] == [
            ({"role": "assistant", "content": ""}, None),
            *[({"content": letter}, None) for letter in text],
            ({}, "stop"),
        ]
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order[:4] == [0, 0, 1, 1]  # one step of both, then the next
    assert last["usage"]["completion_tokens"] == 4 + 6


async def test_choices_share_the_blocks_of_their_prompt(harness, http):
    await answer(http, completion("x" * 100, n=4, max_tokens=8))

    text = (await http.get("/metrics")).text
    steps = {
        kind: float(text.split(f'headrace_group_block_steps_total{{kind="{kind}"}} ')[1].split()[0])
        for kind in ("held", "unshared")
    }
    assert 'vllm:generation_tokens_total{engine="0",model_name="bytes"} 32.0' in text
    # 7 blocks of prompt, the last one written by each: 6 shared of 4 x 7.
    assert 0 < steps["held"] < 0.5 * steps["unshared"]
    assert (
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="bytes"} 1.0'
        in (text)
    )


async def test_what_all_choices_may_use_is_reserved(harness):
    limit = Limit(metric="tokens_total", limit=100, window_seconds=366 * 86_400)
    async with harness.client(await harness.tenant("acme", (limit,))) as http:
        response = await http.post("/v1/completions", json=completion("x", n=4, max_tokens=25))
        assert (response.status_code, response.json()["error"]["code"]) == (
            429,
            "request_too_large_for_limit",
        )
        await answer(http, completion(TWO, n=2, max_tokens=30))
        # What was not used is free again: 21 and 10 of 100 are gone.
        body = await answer(http, completion("x", n=2, max_tokens=34))

    assert body["usage"]["completion_tokens"] == 68


async def test_a_choice_that_fails_fails_its_request(harness, http):
    response = await http.post("/v1/completions", json=completion("fail1:3", n=2, max_tokens=50))
    stream = await http.post(
        "/v1/completions", json=completion("fail1:3", n=2, max_tokens=50, stream=True)
    )

    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_error")
    assert '"code":"engine_error"}}\n\ndata: [DONE]\n\n' in stream.text
    await harness.until_idle()
    rows = await harness.rows()
    assert [(row["status"], row["tokens_in"]) for row in rows] == [("failed", 7)] * 2
    assert all(4 <= row["tokens_out"] < 20 for row in rows)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_all_its_choices(sqlite_url, stream):
    async with (
        open_harness(sqlite_url, step_seconds=0.01) as harness,
        harness.listening() as url,
        harness.client(await harness.tenant("acme")) as http,
    ):
        body = json.dumps(completion("x", n=4, max_tokens=1000, stream=stream)).encode()
        _, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"authorization: %s\r\ncontent-length: %d\r\n\r\n%s"
            % (http.headers["authorization"].encode(), len(body), body)
        )
        await until(lambda: harness.gateway.engine.snapshot().num_running == 4)
        await until(lambda: harness.runner.num_steps > 5)
        writer.close()
        await harness.until_idle()

        [row] = await harness.rows()
        assert (row["status"], row["tokens_in"]) == ("aborted", 1)
        assert row["tokens_out"] == 4 * harness.runner.num_steps


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (completion("x", n=9), "n"),
        (completion("x", best_of=9), "best_of"),
        (completion(["x"] * 20, n=7), "n"),
        (chat("x", n=9), "n"),
        (completion("x", logit_bias={"257": 1}), "logit_bias"),
        (completion("x", min_tokens=17), "min_tokens"),
        (completion("x", max_tokens=0), "max_tokens"),
        (completion("x", n=2, use_beam_search=True, stop="x"), "stop"),
        (completion(["x" * 1000] * 13, prompt_logprobs=20), "prompt_logprobs"),
        (completion("x" * 2000, n=7, echo=True, logprobs=20), "logprobs"),
        (completion("x" * 2000, n=7, echo=True, logprobs=20, stream=True), "logprobs"),
        (chat("x", n=8, max_tokens=2000, logprobs=True, top_logprobs=20), "logprobs"),
    ],
)
async def test_a_bound_is_refused_before_any_work(harness, http, request_, param):
    assert await refused(http, request_) == ("invalid_value", param)

    assert harness.runner.num_steps == 0
    assert await harness.num_reserved() == 0


async def test_the_generated_tokens_of_a_stream_come_one_by_one(http):
    script = "".join(f"text{index or ''}:a|" for index in range(8))
    request = chat(script, n=8, max_tokens=1900, logprobs=True, top_logprobs=20, stream=True)

    assert len(await answer(http, request)) == 8 * 3  # and are not counted before
    assert await refused(http, request | {"stream": False}) == ("invalid_value", "logprobs")


async def test_bad_words_and_the_cache_opt_out_reach_the_engine(harness, http, monkeypatch):
    seen = []
    real = harness.gateway.engine.submit

    async def submit(request):
        seen.append(request)
        return await real(request)

    monkeypatch.setattr(harness.gateway.engine, "submit", submit)
    await answer(http, chat("text:a", bad_words=["no"], use_prefix_cache=False))
    await answer(http, chat("text:a", use_prefix_cache=True))

    assert [one.params.bad_words for one in seen] == [(tuple(b"no"),), ()]
    assert [one.use_prefix_cache for one in seen] == [False, True]


async def test_a_request_can_leave_the_prefix_cache_alone(http):
    async def cached(**fields):
        body = await answer(
            http, completion("shared prefix of forty characters, text:ok", **fields)
        )
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert await cached(use_prefix_cache=False) == 0
    assert await cached() == 0  # nothing was published
    assert await cached() == 32
    assert await cached(use_prefix_cache=False) == 0


# -- best_of and beams ------------------------------------------------------------------------


async def test_the_best_of_several_are_returned_and_all_are_counted(harness, http):
    prompt = "worth:2013|text:aa|text1:bbb|text2:c|text3:d|"

    body = await answer(http, completion(prompt, n=2, best_of=4))

    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "bbb"), (1, "c")]
    assert body["usage"]["completion_tokens"] == 3 + 4 + 2 + 2
    assert all(choice["logprobs"] is None for choice in body["choices"])
    [row] = await harness.rows()
    assert row["tokens_out"] == 11


async def test_the_best_carry_their_logprobs_when_asked(http):
    prompt = "worth:20|text:aa|text1:bbb|"

    body = await answer(http, completion(prompt, best_of=2, logprobs=1))

    [choice] = body["choices"]
    assert choice["logprobs"]["tokens"] == ["b", "b", "b"]
    assert choice["logprobs"]["token_logprobs"] == [-0.25] * 3


async def test_beams_come_best_first(http):
    prompt = "worth:00|x"

    both = await answer(http, completion(prompt, n=2, use_beam_search=True, max_tokens=1))
    best = await answer(http, chat(prompt, n=1, use_beam_search=True, max_tokens=3))
    one = await answer(http, completion(prompt, best_of=2, use_beam_search=True, max_tokens=2))

    # The second likeliest of the test's model is the first with its lowest bit turned.
    assert [choice["text"] for choice in both["choices"]] == ["a", "`"]
    assert both["usage"]["completion_tokens"] == 2
    assert both["usage"]["prompt_tokens"] == len(prompt)
    assert [choice["message"]["content"] for choice in best["choices"]] == ["abc"]
    assert [choice["text"] for choice in one["choices"]] == ["ab"]


# -- logprobs and echo ------------------------------------------------------------------------


async def test_logprobs_of_a_completion(http):
    body = await answer(http, completion("text:aé~", logprobs=2, max_tokens=4))

    assert body["choices"][0]["text"] == "aé~"
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "~"],
        "token_logprobs": [-0.25, -0.25, -0.25, -9999.0],
        "top_logprobs": [
            {"a": -0.25, "`": -1.25},
            {"bytes:\\xc3": -0.25, "bytes:\\xc2": -1.25},
            {"bytes:\\xa9": -0.25, "bytes:\\xa8": -1.25},
            {"~": -9999.0, "\x7f": -9999.0},
        ],
        "text_offset": [0, 1, 1, 2],
    }


async def test_logprobs_of_a_chat_message(http):
    request = chat("text:ab", logprobs=True, top_logprobs=1)

    body = await answer(http, request)
    bare = await answer(http, chat("text:ab", logprobs=True))

    def token(text):
        return {"token": text, "logprob": -0.25, "bytes": list(text.encode())}

    assert body["choices"][0]["logprobs"] == {
        "content": [token(t) | {"top_logprobs": [token(t)]} for t in "ab"],
        "refusal": None,
    }
    assert [t["top_logprobs"] for t in bare["choices"][0]["logprobs"]["content"]] == [[], []]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "text:a😀b stop here", "stop": ["stop"]},
        {"prompt": "text:a😀b stop here", "stop": ["b st", "here"]},
        {"prompt": "text:a😀b", "max_tokens": 3},  # ends within a character
        {"prompt": TWO, "n": 2},
        {"prompt": ["text:ab", "text:ba"], "stop_token_ids": [ord("b")]},
        {"prompt": ["text:ab", "text:é"], "echo": True},
        {"prompt": "text:ab", "echo": True, "n": 2, "max_tokens": 0},
    ],
)
async def test_a_stream_carries_the_logprobs_of_its_text(http, fields):
    request = completion(**fields, logprobs=3)

    whole = await answer(http, request)
    chunks = await answer(http, request | {"stream": True})

    for expected in whole["choices"]:
        text = ""
        joined = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for chunk in chunks:
            [choice] = chunk["choices"]
            if choice["index"] != expected["index"]:
                continue
            text += choice["text"]
            if choice["logprobs"] is None:
                assert choice["finish_reason"]
                continue
            for key, values in choice["logprobs"].items():
                joined[key] += values
            # A chunk's tokens are those that spell it.
            spelled = b"".join(spell(token) for token in choice["logprobs"]["tokens"])
            assert spelled.decode(errors="replace") == choice["text"]
        assert (text, joined) == (expected["text"], expected["logprobs"])
        assert expected["text"] or fields["prompt"] == ["text:ab", "text:ba"]


def spell(token):
    if token.startswith("bytes:"):
        return bytes(int(part, 16) for part in token.removeprefix("bytes:").split("\\x")[1:])
    return token.encode()


async def test_an_echo_stands_before_the_text(http):
    plain = await answer(http, completion(["text:ab", "text:c"], echo=True))
    ids = await answer(http, completion(list("text:é".encode()), echo=True))
    streamed = await answer(http, completion("text:ab", echo=True, stream=True))

    assert [c["text"] for c in plain["choices"]] == ["text:abab", "text:cc"]
    assert all(c["logprobs"] is None for c in plain["choices"])
    assert [c["choices"][0]["text"] for c in streamed] == ["text:aba", "b", ""]
    assert plain["usage"]["completion_tokens"] == 3 + 2
    assert ids["choices"][0]["text"] == "text:éé"


async def test_an_echo_is_scored_with_its_text(http):
    for _ in range(2):  # cold, and with the prompt cached
        body = await answer(http, completion("text:" + "ab" * 10, echo=True, logprobs=1))
        logprobs = body["choices"][0]["logprobs"]
        assert body["choices"][0]["text"] == "text:" + "ab" * 10 + "ababababababababab"[:16]
        assert logprobs["tokens"] == list(body["choices"][0]["text"])
        assert logprobs["token_logprobs"] == [None] + [-i / 8 for i in range(1, 25)] + [-0.25] * 16
        assert logprobs["top_logprobs"][:2] == [None, {"e": -0.125}]
        assert logprobs["text_offset"] == list(range(41))


async def test_a_prompt_is_scored_without_any_output(harness, http):
    request = completion("x" * 300, echo=True, logprobs=0, max_tokens=0)  # two chunks

    body = await answer(http, request)

    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("x" * 300, "length")
    assert choice["logprobs"]["token_logprobs"] == [None] + [-i / 8 for i in range(1, 300)]
    assert choice["logprobs"]["top_logprobs"][1] == {"x": -0.125}
    assert body["usage"]["completion_tokens"] == 0
    [row] = await harness.rows()
    assert (row["tokens_in"], row["tokens_out"], row["status"]) == (300, 0, "completed")


async def test_prompt_logprobs_as_vllm_gives_them(http):
    text = await answer(http, completion(["ab", "b"], prompt_logprobs=1, max_tokens=1))
    talk = await answer(http, chat("x", prompt_logprobs=0, max_tokens=1))

    assert [choice["prompt_logprobs"] for choice in text["choices"]] == [
        [None, {"98": {"logprob": -0.125, "rank": 1, "decoded_token": "b"}}],
        [None],
    ]
    assert talk["prompt_logprobs"][:2] == [
        None,
        {"117": {"logprob": -0.125, "rank": None, "decoded_token": "u"}},
    ]
    assert len(talk["prompt_logprobs"]) == len("<user>x")
    assert "prompt_logprobs" not in talk["choices"][0]
