"""The numbers that `headrace bench` prints, and the load it makes."""

from itertools import islice

import pytest

from gateway.cli.latency import (
    Percentiles,
    RequestRecord,
    meets,
    parse_objectives,
    percentile,
    summarize,
)
from gateway.cli.load import make_work, poisson_arrivals, sse_data


def record(arrived=0.0, text_times=(), finished=None, **fields):
    finished = finished if finished is not None else (text_times or [arrived])[-1]
    return RequestRecord(arrived=arrived, text_times=tuple(text_times), finished=finished, **fields)


def test_ttft_runs_from_arrival_and_tpot_leaves_the_first_token_out():
    one = record(arrived=1.0, text_times=[3.0, 4.0, 6.0], output_tokens=5)

    assert one.ttft_seconds == 2.0
    assert one.e2el_seconds == 5.0
    assert one.tpot_seconds == (5.0 - 2.0) / (5 - 1)
    assert one.itl_seconds == [1.0, 2.0]


def test_a_single_token_has_no_pace():
    one = record(text_times=[0.5], output_tokens=1)

    assert one.tpot_seconds is None
    assert one.itl_seconds == []


def test_a_request_without_text_has_no_latency():
    assert record().ttft_seconds is None
    assert record().e2el_seconds is None


def test_percentiles_are_linear_between_neighbours():
    assert percentile([10.0], 99) == 10.0
    assert percentile([0.0, 10.0], 50) == 5.0
    assert percentile([float(n) for n in range(1, 11)], 90) == pytest.approx(9.1)
    assert percentile([float(n) for n in range(101)], 99) == 99.0


def test_percentiles_pass_over_what_was_not_measured():
    assert Percentiles.of_seconds([None, 0.25, None]) == Percentiles(250.0, 250.0, 250.0)
    assert Percentiles.of_seconds([None]) == Percentiles(None, None, None)


def test_a_level_is_summed_over_its_successes_and_lasts_to_its_last_completion():
    records = [
        record(0.0, [1.0, 2.0], prompt_tokens=10, cached_tokens=4, output_tokens=2),
        record(1.0, [3.0, 5.0], prompt_tokens=20, output_tokens=6),
        record(1.0, [9.0], finished=10.0, prompt_tokens=99, output_tokens=1, error="500"),
    ]

    level = summarize(records)

    assert (level.num_requests, level.num_errors, level.errors) == (3, 1, {"500": 1})
    assert level.seconds == 10.0
    assert (level.prompt_tokens, level.cached_tokens, level.output_tokens) == (30, 4, 8)
    assert level.output_tokens_per_second == 0.8
    assert level.total_tokens_per_second == 3.8
    assert level.requests_per_second == 0.2
    assert level.ttft_ms.p50 == 1500.0
    assert level.itl_ms.p50 == 1500.0
    assert level.tpot_ms == Percentiles(700.0, pytest.approx(940.0), pytest.approx(994.0))
    assert level.goodput_per_second is None


def test_goodput_counts_requests_that_meet_every_objective_and_errors_never_do():
    records = [
        record(0.0, [0.4, 1.0], output_tokens=7),  # TTFT 400 ms, TPOT 100 ms
        record(0.0, [0.6, 1.0], output_tokens=7),  # TTFT too late
        record(0.0, [0.4, 2.0], output_tokens=7),  # TPOT too slow
        record(0.0, [0.1, 0.2], finished=4.0, output_tokens=7, error="500"),
    ]

    level = summarize(records, parse_objectives("ttft:500,tpot:100"))

    assert level.goodput_per_second == 0.25
    assert level.attainment == 0.25


def test_one_token_within_its_ttft_meets_any_tpot():
    assert meets(record(text_times=[0.1], output_tokens=1), {"ttft": 0.5, "tpot": 0.01})


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "itl:5", "ttft:5,"])
def test_an_objective_that_means_nothing_is_refused(text):
    with pytest.raises(ValueError):
        parse_objectives(text)


def test_no_records_are_no_level():
    with pytest.raises(ValueError, match="no request"):
        summarize([])


def test_work_repeats_with_its_seed_and_prompts_differ_from_the_first_word():
    first = list(islice(make_work(7, 90, 128), 100))

    assert first == list(islice(make_work(7, 90, 128), 100))
    assert len({work.prompt.split()[0] for work in first}) == 100
    assert {len(work.prompt.split()) for work in first} == {90}
    assert {work.output_tokens for work in first} == {128}
    assert first[0] != next(make_work(8, 90, 128))


def test_poisson_arrivals_ascend_within_the_time_at_about_the_rate():
    times = poisson_arrivals(3, rate=10.0, seconds=1000.0)

    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 1000.0
    # 10,000 expected, standard deviation 100.
    assert 9_600 < len(times) < 10_400
    assert times == poisson_arrivals(3, rate=10.0, seconds=1000.0)


async def test_events_survive_any_cut_and_comments_and_line_separators_in_text():
    text = 'data: {"text":"a\u2028é"}\n\n: keep-alive\n\ndata: [DONE]\r\n\r\n'.encode()

    async def cut(size):
        for at in range(0, len(text), size):
            yield text[at : at + size]

    for size in (1, 2, 3, len(text)):
        events = [data async for data in sse_data(cut(size))]
        assert events == ['{"text":"a\u2028é"}'.encode(), b"[DONE]"]
