"""Server-sent events byte for byte."""

import asyncio

import pytest

from engine.events import Usage
from gateway.api.chat import ChatShape
from gateway.api.completions import CompletionShape
from gateway.choices import Output, ShownToken
from gateway.errors import (
    ClientGoneError,
    GenerationAbortedError,
    GenerationFailedError,
    SlowReaderError,
)
from gateway.served_model import ServedModel
from gateway.streaming import EventStream, event, stream_outputs

MODEL = ServedModel(
    name="m",
    created=1,
    device="cpu",
    dtype="float32",
    max_model_len=8,
    max_seqs=4,
    vocab_size=256,
    max_token_bytes=1,
    token_bytes=lambda token: bytes([token]),
    encode=list,
    encode_plain=list,
    encode_chat=lambda messages, **_: list(messages),
    compile_grammar=lambda grammar: None,
)
CHAT = ChatShape("chatcmpl-1", MODEL, 5, usage_key=False)
HEAD = b'"id":"chatcmpl-1","object":"chat.completion.chunk","created":5,"model":"m"'


def chunk(delta: bytes, reason: bytes = b"null", index: bytes = b"0") -> bytes:
    return (
        b"data: {%s,"
        b'"choices":[{"index":%s,"delta":%s,"logprobs":null,"finish_reason":%s}]}\n\n'
        % (HEAD, index, delta, reason)
    )


ROLE = chunk(b'{"role":"assistant","content":""}')


class Wire:
    """Records what is sent; one entry per body message."""

    def __init__(self):
        self.head = None
        self.bodies = []
        self.complete = False

    async def send(self, message):
        if message["type"] == "http.response.start":
            assert self.head is None
            self.head = message
        else:
            assert not self.complete
            self.bodies.append(message.get("body", b""))
            self.complete = not message.get("more_body", False)


async def outputs(*items):
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


async def streamed(*items, shape=CHAT):
    wire = Wire()
    stream = EventStream(wire.send, lambda: {"x-extra": "1"}, write_timeout_seconds=1)
    done = await stream_outputs(stream, outputs(*items), shape)
    return wire, done


async def test_a_chat_stream():
    wire, done = await streamed(Output(0, "Hé"), Output(0, ""), Output(0, "!", "stop"))

    assert done
    assert wire.head["status"] == 200
    assert dict(wire.head["headers"]) == {
        b"content-type": b"text/event-stream",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
        b"x-extra": b"1",
    }
    assert wire.bodies == [
        ROLE + chunk(b'{"content":"H\\u00e9"}'),
        chunk(b'{"content":"!"}') + chunk(b"{}", b'"stop"'),
    ]


async def test_logprobs_are_those_of_the_chunks_tokens():
    token = ShownToken(72, 0, -0.5, ((72, -0.5),))
    items = Output(0, "H", None, (token,)), Output(0, "", "length", (token,))

    chat, _ = await streamed(*items)
    text, _ = await streamed(*items, shape=CompletionShape("cmpl-1", MODEL, 5, usage_key=False))

    written = (
        b'"logprobs":{"content":[{"token":"H","logprob":-0.5,"bytes":[72],'
        b'"top_logprobs":[{"token":"H","logprob":-0.5,"bytes":[72]}]}],"refusal":null}'
    )
    assert chat.bodies[0].count(written) == 1
    # Tokens without text of their own have a chunk too, and the last chunk has none.
    assert chat.bodies[1] == (
        chunk(b'{"content":""}').replace(b'"logprobs":null', written) + chunk(b"{}", b'"length"')
    )
    assert text.bodies[0].endswith(
        b'"choices":[{"text":"H","index":0,"logprobs":{"tokens":["H"],"token_logprobs":[-0.5],'
        b'"top_logprobs":[{"H":-0.5}],"text_offset":[0]},"finish_reason":null}]}\n\n'
    )


async def test_a_choice_that_says_nothing_still_opens_and_closes():
    wire, _ = await streamed(Output(0, "", "length"))

    assert wire.bodies == [ROLE + chunk(b"{}", b'"length"')]


async def test_silence_is_a_comment_that_no_client_takes_for_an_end():
    wire, _ = await streamed(None, None, Output(0, "a", "stop"))

    assert wire.bodies[:2] == [b": keep-alive\n\n"] * 2
    assert wire.bodies[2].startswith(ROLE)


async def test_an_error_before_the_first_byte_is_raised_for_a_real_status():
    for error in (GenerationFailedError(), GenerationAbortedError(), ClientGoneError()):
        with pytest.raises(type(error)):
            await streamed(error)


async def test_a_later_error_is_an_event_then_done():
    wire, done = await streamed(Output(0, "a"), GenerationFailedError())

    assert not done
    assert wire.bodies[1] == (
        b'data: {"error":{"message":"The engine failed on this request.","type":"server_error",'
        b'"param":null,"code":"engine_error"}}\n\ndata: [DONE]\n\n'
    )
    assert wire.complete


async def test_nothing_is_written_to_a_client_that_left():
    wire, done = await streamed(Output(0, "a"), ClientGoneError())

    assert not done
    assert len(wire.bodies) == 1
    assert not wire.complete


async def test_a_reader_that_stalls_is_cut():
    async def stalled(message):
        await asyncio.sleep(60)

    stream = EventStream(stalled, dict, write_timeout_seconds=0.01)

    with pytest.raises(SlowReaderError):
        await stream_outputs(stream, outputs(Output(0, "a")), CHAT)


async def test_completions_interleave_choices_without_an_opening():
    shape = CompletionShape("cmpl-1", MODEL, 5, usage_key=True)

    wire, _ = await streamed(Output(1, "b"), Output(0, "a", "stop"), shape=shape)

    head = b'data: {"id":"cmpl-1","object":"text_completion","created":5,"model":"m","choices":['
    tail = b',"logprobs":null,"finish_reason":%s}],"usage":null}\n\n'
    assert wire.bodies == [
        head + b'{"text":"b","index":1' + tail % b"null",
        head
        + b'{"text":"a","index":0'
        + tail % b"null"
        + head
        + b'{"text":"","index":0'
        + tail % b'"stop"',
    ]


def test_usage_comes_with_empty_choices():
    shape = ChatShape("chatcmpl-1", MODEL, 5, usage_key=True)

    usage = Usage(prompt_tokens=20, cached_tokens=16, output_tokens=3)

    assert shape.opening(0)["usage"] is None
    assert event(shape.usage_chunk(usage)) == (
        b"data: {%s," % HEAD + b'"choices":[],"usage":{"prompt_tokens":20,"completion_tokens":3,'
        b'"total_tokens":23,"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
    )


def test_an_event_is_one_line_of_ascii():
    data = event({"text": "a\nb\r\u2028\x85é"})

    assert data == b'data: {"text":"a\\nb\\r\\u2028\\u0085\\u00e9"}\n\n'
