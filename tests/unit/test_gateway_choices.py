"""What the client sees of the engine's events: text, and logprobs of exactly that text."""

import math

import pytest

from engine.detokenizer import Detokenizer
from engine.events import (
    PromptScored,
    SequenceFinished,
    Timings,
    TokenLogprobs,
    TokensGenerated,
    Usage,
)
from engine.sequence import FinishReason, SamplingParams
from gateway.api.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from gateway.choices import ChoiceReader, Output, Prompt, ShownToken, TokenAligner, best_of

CONTROL = 300
EMOJI = "😀".encode()


def token_bytes(token):
    return b"" if token >= CONTROL else bytes([token])


def generated(data, text, index=0, start=0, logprobs=True):
    """Tokens with logprobs that count down from `start`."""
    scores = tuple(TokenLogprobs(t, -float(start + i)) for i, t in enumerate(data))
    return TokensGenerated(
        request_id="r",
        tenant="t",
        at=1.0,
        token_ids=tuple(data),
        text=text,
        index=index,
        logprobs=scores if logprobs else (),
    )


def finished(reason=FinishReason.STOP, text="", index=0, score=None, num_tokens=0):
    return SequenceFinished(
        request_id="r",
        tenant="t",
        at=1.0,
        reason=reason,
        text=text,
        usage=Usage(prompt_tokens=1, cached_tokens=0, output_tokens=num_tokens),
        timings=Timings(arrived=0, admitted=0, first_token=0, finished=1),
        num_preemptions=0,
        index=index,
        cumulative_logprob=score,
    )


def prompt(data=b"p", n=1, echo=""):
    return Prompt(token_ids=tuple(data), params=SamplingParams(max_tokens=9, n=n), echo=echo)


ONE = prompt()


async def read(*events, prompts=(ONE,), num_logprobs=0):
    async def source():
        for event in events:
            yield event if isinstance(event, tuple) or event is None else (0, event)

    reader = ChoiceReader(prompts, token_bytes, num_logprobs)
    return [output async for output in reader.outputs(source())]


def shown(outputs):
    """(text, shown token ids) of each output."""
    return [(o.text, [token.token_id for token in o.tokens]) for o in outputs]


def through_the_detokenizer(tokens, stop=()):
    """Text after each token, and at the end, as the engine releases it."""
    detokenizer = Detokenizer(token_bytes, stop)
    pieces = [detokenizer.push(token) for token in tokens]
    return pieces, detokenizer.flush(), detokenizer.stopped


async def test_each_token_goes_with_its_text():
    outputs = await read(generated(b"a", "a"), generated(b"b", "b", start=1), finished())

    assert outputs == [
        Output(0, "a", None, (ShownToken(97, 0, 0.0, ()),)),
        Output(0, "b", None, (ShownToken(98, 1, -1.0, ()),)),
        Output(0, "", FinishReason.STOP, ()),
    ]


async def test_without_logprobs_there_are_none():
    outputs = await read(generated(b"a", "a", logprobs=False), finished(), num_logprobs=None)

    assert [output.tokens for output in outputs] == [None, None]


async def test_a_character_of_several_tokens_shows_them_together():
    events = [generated([byte], "😀" if byte == EMOJI[-1] else "") for byte in EMOJI]

    outputs = await read(generated(b"a", "a"), *events, generated(b"b", "b"), finished())

    assert shown(outputs) == [
        ("a", [97]),
        *[("", [])] * 3,
        ("😀", list(EMOJI)),
        ("b", [98]),
        ("", []),
    ]
    assert [token.offset for output in outputs for token in output.tokens] == [0, 1, 1, 1, 1, 2]


async def test_bytes_that_are_no_text_count_as_the_characters_that_replace_them():
    outputs = await read(generated(b"\xff", "\ufffd"), generated(b"a", "a"), finished())

    assert shown(outputs) == [("\ufffd", [255]), ("a", [97]), ("", [])]


@pytest.mark.parametrize(
    ("spoken", "stop", "text"),
    [
        (b"one two", ("two",), "one "),
        (b"one twig", ("two",), "one twig"),
        (b"ab\xf0\x9f\x98\x80cd", ("c",), "ab😀"),
        (b"stop", ("stop",), ""),
        (b"aaab", ("aab",), "a"),
    ],
)
async def test_nothing_of_a_stop_string_is_shown(spoken, stop, text):
    pieces, rest, stopped = through_the_detokenizer(spoken, stop)
    events = [
        generated([t], piece, start=i)
        for i, (t, piece) in enumerate(zip(spoken, pieces, strict=True))
    ]
    reason = FinishReason.STOP if stopped else FinishReason.LENGTH

    outputs = await read(*events, finished(reason, rest))

    assert "".join(output.text for output in outputs) == text
    sent, shown = "", b""
    for output in outputs:
        sent += output.text
        shown += bytes(token.token_id for token in output.tokens)
        assert sent.startswith(shown.decode())  # never a token before all of its text
    assert shown == text.encode()


async def test_a_token_that_is_half_a_stop_string_is_not_shown():
    words = {1: b"hel", 2: b"lo w", 3: b"orld"}
    aligner = TokenAligner(words.__getitem__)
    found = []
    for token, text in ((1, "he"), (2, ""), (3, "")):  # stops at "lo"
        aligner.add(token, -1.0, ())
        found += [t.token_id for t in aligner.sent(text)]

    assert found == []


async def test_the_token_that_ends_a_text_is_not_shown():
    for last in (CONTROL, ord("!")):
        outputs = await read(generated(b"a", "a"), generated([last], ""), finished())
        assert shown(outputs) == [("a", [97]), ("", []), ("", [])]


async def test_half_a_character_before_the_end_is_shown_and_the_end_is_not():
    outputs = await read(
        generated(EMOJI[:1], ""), generated([CONTROL], ""), finished(text="\ufffd")
    )

    assert shown(outputs) == [("", []), ("", []), ("\ufffd", [EMOJI[0]])]


async def test_a_control_token_within_a_text_goes_with_what_follows():
    outputs = await read(
        generated([CONTROL], ""), generated(b"a", "a"), finished(FinishReason.LENGTH)
    )
    last = await read(generated([CONTROL], ""), finished(FinishReason.LENGTH))

    assert shown(outputs) == [("", []), ("a", [CONTROL, 97]), ("", [])]
    assert shown(last) == [("", []), ("", [CONTROL])]


async def test_text_cut_by_length_shows_every_token():
    outputs = await read(generated(EMOJI[:2], ""), finished(FinishReason.LENGTH, "\ufffd"))

    assert shown(outputs)[-1] == ("\ufffd", list(EMOJI[:2]))


async def test_choices_are_numbered_by_prompt_and_sequence():
    outputs = await read(
        (1, generated(b"a", "a", index=1)),
        None,
        (0, generated(b"b", "b", index=1)),
        (1, finished(index=0)),
        prompts=[prompt(n=2), prompt(n=2)],
    )

    assert [None if o is None else o.index for o in outputs] == [3, None, 1, 2]


async def test_an_echo_stands_before_each_choice_with_the_prompts_scores():
    scores = (TokenLogprobs(98, -0.5, ((7, -0.25), (98, -0.5))),)
    outputs = await read(
        PromptScored(request_id="r", tenant="t", at=1.0, logprobs=scores),
        generated(b"x", "x", index=1),
        finished(FinishReason.LENGTH, index=0),
        prompts=[prompt(b"ab", n=2, echo="ab")],
        num_logprobs=1,
    )

    echoed = (ShownToken(97, 0, None, ()), ShownToken(98, 1, -0.5, ((7, -0.25),)))
    assert outputs == [
        Output(1, "abx", None, (*echoed, ShownToken(120, 2, 0.0, ()))),
        Output(0, "ab", FinishReason.LENGTH, echoed),
    ]


async def test_an_echo_without_logprobs_is_text_alone():
    outputs = await read(
        generated(b"x", "x", logprobs=False),
        finished(),
        prompts=[prompt(b"ab", echo="ab")],
        num_logprobs=None,
    )

    assert outputs == [Output(0, "abx"), Output(0, "", FinishReason.STOP)]


def test_the_best_have_the_highest_logprob_per_token():
    ends = [
        finished(score=-6.0, num_tokens=2),
        finished(score=-8.0, num_tokens=4),
        finished(score=-1.0, num_tokens=1),
        finished(score=0.0, num_tokens=0),
        finished(score=-math.inf, num_tokens=1),
    ]

    assert best_of(ends, 3) == [3, 2, 1]


TOKENS = (
    ShownToken(0x61, 0, None, ()),
    ShownToken(0xE2, 1, -math.inf, ((0x62, -0.5), (0xE2, -math.inf))),
    ShownToken(0x63, 1, -1.0, ((0x62, -0.5),)),
)


def test_logprobs_of_a_text_completion():
    assert completion_logprobs(TOKENS, token_bytes) == {
        "tokens": ["a", "bytes:\\xe2", "c"],
        "token_logprobs": [None, -9999.0, -1.0],
        "top_logprobs": [None, {"b": -0.5, "bytes:\\xe2": -9999.0}, {"b": -0.5, "c": -1.0}],
        "text_offset": [0, 1, 1],
    }


def test_of_tokens_with_one_text_the_likelier_is_shown():
    token = ShownToken(CONTROL, 0, -3.0, ((CONTROL + 1, -1.0), (CONTROL, -3.0)))

    assert completion_logprobs([token], token_bytes)["top_logprobs"] == [{"": -1.0}]


def test_logprobs_of_a_chat_message():
    b = {"token": "b", "logprob": -0.5, "bytes": [0x62]}
    e2 = {"token": "bytes:\\xe2", "logprob": -9999.0, "bytes": [0xE2]}

    assert chat_logprobs(TOKENS[1:], token_bytes) == {
        "content": [
            e2 | {"top_logprobs": [b, e2]},
            {"token": "c", "logprob": -1.0, "bytes": [0x63], "top_logprobs": [b]},
        ],
        "refusal": None,
    }


def test_logprobs_of_a_prompt():
    assert prompt_logprobs(TOKENS, token_bytes) == [
        None,
        {
            "226": {"logprob": -9999.0, "rank": 2, "decoded_token": "\ufffd"},
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        },
        {
            "99": {"logprob": -1.0, "rank": None, "decoded_token": "c"},
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
        },
    ]
