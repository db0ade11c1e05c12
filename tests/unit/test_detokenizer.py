"""Streamed text: whole characters only, and nothing of a stop string."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer


def stream(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    """What each token emitted, then what the flush did; and whether a stop string was met."""
    detokenizer = Detokenizer(lambda token_id: pieces[token_id], stop)
    emitted = [detokenizer.push(i) for i in range(len(pieces)) if not detokenizer.stopped]
    return [*emitted, detokenizer.flush()], detokenizer.stopped


def single_bytes(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


@pytest.mark.parametrize("text", ["héllo", "水は流れる", "👩‍👩‍👧‍👦🏳️‍🌈", "e\u0301\u200b", "a\x00b"])
def test_a_character_is_emitted_when_its_last_byte_arrives(text: str) -> None:
    emitted, stopped = stream(single_bytes(text))

    assert [piece for piece in emitted if piece] == list(text)
    assert not stopped


def test_an_unfinished_character_is_held_and_flushed_as_a_replacement() -> None:
    assert stream([b"a", "é".encode()[:1]]) == (["a", "", "\ufffd"], False)


def test_a_broken_byte_becomes_a_replacement_once_the_next_one_shows_it() -> None:
    assert stream([b"\xe6\xb0", b"a"]) == (["", "\ufffda", ""], False)


def test_control_tokens_add_nothing() -> None:
    assert stream([b"a", b"", b"b"]) == (["a", "", "b", ""], False)


def test_a_stop_string_over_three_tokens_leaks_no_character() -> None:
    emitted, stopped = stream([b"one S", b"TO", b"P two"], ["STOP"])

    assert (emitted, stopped) == (["one ", "", "", ""], True)


def test_held_text_is_released_when_it_turns_out_not_to_stop() -> None:
    assert stream([b"a EN", b"D", b"ING"], ["ENDS"]) == (["a ", "", "ENDING", ""], False)


def test_held_text_is_flushed_at_the_end() -> None:
    assert stream([b"a EN"], ["END"]) == (["a ", "EN"], False)


def test_the_earliest_of_several_stop_strings_cuts() -> None:
    assert stream([b"a, b; c"], [";", ","]) == (["a", ""], True)


def test_a_stop_string_may_hold_an_overlap_of_itself() -> None:
    assert stream([b"xa", b"ab", b"aab", b"y"], ["aabaab"])[0][0] == "x"
    assert stream([b"xaa", b"aab", b"c"], ["aab"]) == (["x", "aa", ""], True)


def test_a_stop_string_may_end_in_the_middle_of_a_token_with_split_characters() -> None:
    pieces = [*single_bytes("fin。"), b"rest"]

    assert "".join(stream(pieces, ["。"])[0]) == "fin"


def test_nothing_comes_after_the_stop() -> None:
    detokenizer = Detokenizer(lambda _: b"x.", ["."])

    assert [detokenizer.push(0), detokenizer.push(0), detokenizer.flush()] == ["x", "", ""]


@given(st.text(max_size=60), st.integers(0, 1 << 32))
def test_the_stream_is_the_text_however_its_bytes_are_cut(text: str, seed: int) -> None:
    assert "".join(stream(_cut(text, seed))[0]) == text


@given(
    st.text(alphabet="ab.é", max_size=40),
    st.text(alphabet="ab.é", min_size=1, max_size=4),
    st.integers(0, 1 << 32),
)
def test_a_stop_string_cuts_where_it_first_occurs(text: str, stop: str, seed: int) -> None:
    emitted, stopped = stream(_cut(text, seed), [stop])

    assert stopped == (stop in text)
    assert "".join(emitted) == text.partition(stop)[0]


@given(
    st.text(alphabet="ab.é", max_size=40),
    st.lists(st.text(alphabet="ab.é", min_size=1, max_size=4), max_size=3),
    st.integers(0, 1 << 32),
)
def test_no_stop_string_is_ever_emitted(text: str, stop: list[str], seed: int) -> None:
    emitted, stopped = stream(_cut(text, seed), stop)

    assert stopped == any(s in text for s in stop)
    assert text.startswith("".join(emitted))
    assert not any(s in "".join(emitted) for s in stop)


def _cut(text: str, seed: int) -> list[bytes]:
    """The text's bytes in pieces of random lengths, as tokens."""
    rng = random.Random(seed)
    data, pieces = text.encode(), []
    while data:
        length = rng.randint(1, 5)
        pieces.append(data[:length])
        data = data[length:]
    return pieces
