"""`headrace bench serve` against a small server whose answers are known."""

import asyncio
import json
import threading
from contextlib import contextmanager

import pytest
import uvicorn
from click.testing import CliRunner
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from gateway.cli import main

TOKENS = 5
TOKEN_SECONDS = 0.02


def event(value):
    return f"data: {json.dumps(value)}\n\n"


async def tokens(chat):
    if chat:
        role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        yield event({"choices": [role]})
    for n in range(TOKENS):
        await asyncio.sleep(TOKEN_SECONDS)
        text = {"delta": {"content": "x"}} if chat else {"text": "x"}
        reason = "length" if n == TOKENS - 1 else None
        yield event({"choices": [{**text, "finish_reason": reason}], "usage": None})
    usage = {"prompt_tokens": 11, "completion_tokens": TOKENS, "total_tokens": 11 + TOKENS}
    yield event({"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


async def cut_short():
    yield event({"choices": [{"text": "x", "finish_reason": None}]})


async def broken():
    yield event({"error": {"message": "boom", "code": "engine_failed"}})
    yield "data: [DONE]\n\n"


@contextmanager
def serving(seen):
    """A server that records request bodies in `seen` and answers by the model's name."""

    async def answer(request):
        body = await request.json()
        seen.append((request.headers.get("authorization"), body))
        if body["model"] == "refused" or (body["model"] == "flaky" and len(seen) % 2):
            error = {"message": "no", "type": "tokens", "param": None, "code": "slow_down"}
            return JSONResponse({"error": error}, status_code=429)
        streams = {"short": cut_short, "broken": broken}
        chat = request.url.path.endswith("chat/completions")
        stream = streams[body["model"]]() if body["model"] in streams else tokens(chat)
        return StreamingResponse(stream, media_type="text/event-stream")

    app = Starlette(
        routes=[
            Route("/v1/completions", answer, methods=["POST"]),
            Route("/v1/chat/completions", answer, methods=["POST"]),
        ]
    )
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def bench(arguments):
    return CliRunner().invoke(main, ["bench", "serve", *arguments.split()])


def test_a_closed_loop_measures_what_the_server_does():
    seen = []
    with serving(seen) as url:
        result = bench(
            f"--base-url {url}/v1 --model m --api-key hr_k --concurrency 1,3 --requests 2"
            " --output-tokens 5 --prompt-words 4 --seed 1 --goodput ttft:5000 --json"
        )

    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    one, three = report["levels"]
    assert (one["load"], one["num_requests"], one["num_errors"]) == ("concurrency 1", 2, 0)
    assert (three["load"], three["num_requests"]) == ("concurrency 3", 6)
    assert (one["prompt_tokens"], one["output_tokens"]) == (2 * 11, 2 * TOKENS)
    assert three["output_tokens"] == 6 * TOKENS
    assert one["output_tokens_per_second"] < TOKENS / (TOKENS * TOKEN_SECONDS)
    assert three["output_tokens_per_second"] > 2 * one["output_tokens_per_second"]
    assert 1000 * TOKEN_SECONDS <= one["tpot_ms"]["p50"] < 3000 * TOKEN_SECONDS
    assert one["ttft_ms"]["p50"] >= 1000 * TOKEN_SECONDS
    assert one["attainment"] == 1.0
    # Warm-up (1 and 3 requests) was sent, and is not measured.
    assert len(seen) == (1 + 2) + (3 + 6)
    assert {key for key, _ in seen} == {"Bearer hr_k"}
    assert len({body["prompt"] for _, body in seen}) == len(seen)
    _, body = seen[-1]
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] == 5


def test_an_open_loop_sends_at_its_rate_whatever_the_server_does():
    seen = []
    with serving(seen) as url:
        result = bench(
            f"--base-url {url} --model m --rate 40 --seconds 0.5 --warmup 0 --seed 4 --json",
        )

    assert result.exit_code == 0, result.stderr
    (level,) = json.loads(result.stdout)["levels"]
    assert level["load"] == "40 req/s"
    assert level["num_requests"] == len(seen) > 8
    # One after the other they would have taken longer than this.
    assert level["seconds"] < len(seen) * TOKENS * TOKEN_SECONDS


def test_a_chat_stream_starts_with_its_first_text_not_its_role():
    seen = []
    with serving(seen) as url:
        result = bench(
            f"--base-url {url} --model m --endpoint chat --concurrency 1 --requests 1 --json",
        )

    (level,) = json.loads(result.stdout)["levels"]
    assert level["output_tokens"] == TOKENS
    assert level["ttft_ms"]["p50"] >= 1000 * TOKEN_SECONDS
    assert seen[0][1]["messages"][0]["role"] == "user"


def test_errors_are_counted_by_kind_and_shown():
    with serving([]) as url:
        result = bench(f"--base-url {url} --model flaky --concurrency 1 --requests 4 --warmup 0")

    assert result.exit_code == 0
    assert "2 failed: 429 slow_down" in result.stdout
    assert "TTFT p99 ms" in result.stdout


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("refused", "429 slow_down"),
        ("short", "stream ended without a finish_reason"),
        ("broken", "in the stream: engine_failed"),
    ],
)
def test_a_level_of_failures_fails_the_command(model, why):
    with serving([]) as url:
        result = bench(f"--base-url {url} --model {model} --concurrency 1 --requests 1 --json")

    assert result.exit_code == 1
    assert why in json.loads(result.stderr)["error"]["why"]
    assert json.loads(result.stdout)["levels"][0]["num_errors"] == 1


def test_no_server_has_its_own_exit_code():
    result = bench("--base-url http://127.0.0.1:1 --model m --concurrency 1")

    assert result.exit_code == 5
    assert result.stderr.splitlines()[0].startswith("Error: all 4 requests of concurrency 1 failed")
    assert "next: headrace up" in result.stderr


def test_wrong_levels_are_wrong_usage():
    for value in ("0", "x", "1,,2", "1.5"):
        assert bench(f"--base-url x --model m --concurrency {value}").exit_code == 2
