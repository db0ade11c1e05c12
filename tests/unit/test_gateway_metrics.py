"""Series from engine events; tenant labels bounded."""

import math
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.config import CacheConfig, EngineConfig
from engine.events import (
    GroupFinished,
    SequenceAdmitted,
    SequenceFinished,
    SequencePreempted,
    StepFinished,
    Timings,
    TokensGenerated,
    Usage,
)
from engine.snapshot import EngineSnapshot, TenantMemory, TenantSnapshot
from gateway.metrics import Metrics

ENGINE = {"model_name": "m", "engine": "0"}
SNAPSHOT = EngineSnapshot(
    policy="drr",
    num_running=3,
    num_waiting=2,
    free_blocks=60,
    cached_blocks=15,
    held_blocks=25,
    tenants=(
        TenantSnapshot(tenant="a", rank=1, num_running=2, num_waiting=1, counter=150.0),
        TenantSnapshot(tenant="b", rank=1, num_running=1, num_waiting=1, counter=100.0),
        # Of another class, whose counters say nothing about those above.
        TenantSnapshot(tenant="a", rank=2, num_running=0, num_waiting=1, counter=9.0),
    ),
)


@pytest.fixture
def metrics():
    config = EngineConfig(cache=CacheConfig(num_blocks=100))
    return Metrics(model_name="m", config=config, max_tenants=2)


def samples(metrics, snapshot=SNAPSHOT):
    families = text_string_to_metric_families(metrics.render(snapshot).decode())
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def value(metrics, name, **labels):
    return samples(metrics).get((name, *sorted(labels.items())))


def finished(request_id="s", tenant="a", reason="stop", first=1.5, index=0):
    return SequenceFinished(
        request_id=request_id,
        tenant=tenant,
        at=3.5,
        reason=reason,
        text="",
        usage=Usage(prompt_tokens=20, cached_tokens=16, output_tokens=5, computed_tokens=4)
        if index == 0
        else Usage(prompt_tokens=0, cached_tokens=0, output_tokens=5),
        timings=Timings(arrived=1.0, admitted=1.25, first_token=first, finished=3.5),
        num_preemptions=0,
        index=index,
    )


def test_a_finished_sequence_fills_the_request_series(metrics):
    metrics.engine.observe([finished()])

    expected = {
        "vllm:prompt_tokens_total": 20,
        "vllm:generation_tokens_total": 5,
        "vllm:prompt_tokens_cached_total": 16,
        "vllm:time_to_first_token_seconds_sum": 0.5,
        "vllm:e2e_request_latency_seconds_sum": 2.5,
        "vllm:request_queue_time_seconds_sum": 0.25,
        "vllm:request_prefill_time_seconds_sum": 0.25,
        "vllm:request_decode_time_seconds_sum": 2.0,
        "vllm:request_inference_time_seconds_sum": 2.25,
        "vllm:request_time_per_output_token_seconds_sum": 0.5,
        "vllm:request_prompt_tokens_sum": 20,
        "vllm:request_generation_tokens_sum": 5,
    }
    assert {name: value(metrics, name, **ENGINE) for name in expected} == expected
    assert value(metrics, "vllm:request_success_total", **ENGINE, finished_reason="stop") == 1
    assert value(metrics, "headrace_tenant_tokens_total", tenant="a", kind="input") == 20
    assert value(metrics, "headrace_tenant_tokens_total", tenant="a", kind="output") == 5
    assert value(metrics, "headrace_tenant_tokens_total", tenant="a", kind="cached") == 16
    assert value(metrics, "headrace_tenant_ttft_seconds_sum", tenant="a") == 0.5


def test_a_request_for_several_sequences_is_one_request(metrics):
    def tokens(index, at):
        return TokensGenerated(
            request_id="s", tenant="a", at=at, token_ids=(1,), text="x", index=index
        )

    metrics.engine.observe([tokens(0, 1.0), tokens(1, 1.0), tokens(0, 1.5), tokens(1, 2.0)])
    metrics.engine.observe([finished(index=1), finished(index=0)])
    group = GroupFinished(
        request_id="s",
        tenant="a",
        at=3.5,
        num_sequences=2,
        block_steps=30,
        unshared_block_steps=50,
    )
    metrics.engine.observe([group])

    expected = {
        "vllm:prompt_tokens_total": 20,
        "vllm:generation_tokens_total": 10,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1,
        "vllm:request_prompt_tokens_count": 1,
        "vllm:request_generation_tokens_count": 2,
        # Between tokens of one sequence, never between two sequences.
        "vllm:inter_token_latency_seconds_count": 2,
        "vllm:inter_token_latency_seconds_sum": 1.5,
    }
    assert {name: value(metrics, name, **ENGINE) for name in expected} == expected
    assert value(metrics, "vllm:request_success_total", **ENGINE, finished_reason="stop") == 1
    assert value(metrics, "headrace_tenant_ttft_seconds_count", tenant="a") == 1
    assert value(metrics, "headrace_tenant_tokens_total", tenant="a", kind="input") == 20
    assert value(metrics, "headrace_tenant_tokens_total", tenant="a", kind="output") == 10
    assert value(metrics, "headrace_group_block_steps_total", kind="held") == 30
    assert value(metrics, "headrace_group_block_steps_total", kind="unshared") == 50


def test_beams_are_one_generation(metrics):
    other = finished(index=1)
    nothing = Usage(prompt_tokens=0, cached_tokens=0, output_tokens=0)
    metrics.engine.observe([finished(), replace(other, usage=nothing)])

    assert value(metrics, "vllm:request_generation_tokens_count", **ENGINE) == 1
    assert value(metrics, "vllm:request_decode_time_seconds_count", **ENGINE) == 1


STEP = StepFinished(
    step=1,
    started=1.0,
    scheduled=1.25,
    executed=2.0,
    num_prefill_tokens=30,
    num_decode_tokens=2,
    num_running=3,
    num_waiting=0,
    num_preempted=1,
    free_blocks=1,
    cached_blocks=1,
    held_blocks=1,
)


def test_steps_waits_and_preemptions(metrics):
    metrics.engine.observe(
        [
            SequenceAdmitted(
                request_id="s", tenant="a", at=1.0, num_cached_tokens=0, waited_seconds=0.25
            ),
            SequencePreempted(request_id="s", tenant="a", at=1.0),
            SequencePreempted(request_id="t", tenant="a", at=1.0, swapped=True),
            SequencePreempted(request_id="u", tenant="a", at=1.0, swapped=True),
            TokensGenerated(request_id="s", tenant="a", at=1.0, token_ids=(1,), text="x"),
            TokensGenerated(request_id="s", tenant="a", at=1.5, token_ids=(1,), text="x"),
            STEP,
        ]
    )

    assert value(metrics, "headrace_tenant_queue_seconds_sum", tenant="a") == 0.25
    assert value(metrics, "vllm:num_preemptions_total", **ENGINE) == 3
    preemptions = "headrace_tenant_preemptions_total"
    assert value(metrics, preemptions, tenant="a", role="victim", how="recompute") == 1
    assert value(metrics, preemptions, tenant="a", role="victim", how="swap") == 2
    assert value(metrics, "vllm:inter_token_latency_seconds_sum", **ENGINE) == 0.5
    assert value(metrics, "vllm:iteration_tokens_total_sum", **ENGINE) == 32
    assert value(metrics, "headrace_step_tokens_total", kind="prefill") == 30
    assert value(metrics, "headrace_scheduler_step_seconds_sum", phase="plan") == 0.25
    assert value(metrics, "headrace_scheduler_step_seconds_sum", phase="model") == 0.75


def test_two_stages_have_a_batch_each_and_one_queue(metrics):
    def admitted(stage, waited):
        return SequenceAdmitted(
            request_id="s",
            tenant="a",
            at=1.0,
            num_cached_tokens=0,
            waited_seconds=waited,
            stage=stage,
        )

    decode = replace(STEP, stage="decode", started=2.0, scheduled=2.5, executed=4.0)
    metrics.engine.observe(
        [
            admitted("prefill", 0.25),
            replace(STEP, stage="prefill", num_decode_tokens=0),
            admitted("decode", 8.0),
            replace(decode, num_prefill_tokens=0, num_received_blocks=3),
        ]
    )

    assert value(metrics, "headrace_tenant_queue_seconds_count", tenant="a") == 1
    assert value(metrics, "headrace_tenant_queue_seconds_sum", tenant="a") == 0.25
    assert value(metrics, "vllm:iteration_tokens_total_count", **ENGINE) == 2
    assert value(metrics, "vllm:iteration_tokens_total_sum", **ENGINE) == 32
    assert value(metrics, "headrace_step_tokens_total", kind="prefill") == 30
    assert value(metrics, "headrace_step_tokens_total", kind="decode") == 2
    # One after the other: the parts of all batches add up to the time from 1.0 to 4.0.
    assert value(metrics, "headrace_scheduler_step_seconds_sum", phase="plan") == 0.75
    assert value(metrics, "headrace_scheduler_step_seconds_sum", phase="model") == 2.25
    assert value(metrics, "headrace_copied_blocks_total", kind="received") == 3


def test_copied_blocks_by_kind(metrics):
    only_copies = replace(
        STEP,
        num_prefill_tokens=0,
        num_decode_tokens=0,
        num_swapped_out_blocks=4,
        num_swapped_in_blocks=3,
        num_copied_blocks=2,
        num_received_blocks=1,
    )
    metrics.engine.observe([only_copies, only_copies])

    kinds = ("swapped_out", "swapped_in", "copied", "received")
    copied = [value(metrics, "headrace_copied_blocks_total", kind=kind) for kind in kinds]
    assert copied == [8, 6, 4, 2]
    # No batch of no tokens.
    assert value(metrics, "vllm:iteration_tokens_total_count", **ENGINE) == 0


def memory(tenant, *, blocks=(0, 0, 0), queried=0, hit=0, evicted=0, block_seconds=0.0):
    held, cached, host = blocks
    return TenantMemory(
        tenant=tenant,
        held_blocks=held,
        cached_blocks=cached,
        host_blocks=host,
        queried_tokens=queried,
        hit_tokens=hit,
        evicted_blocks=evicted,
        kv_block_seconds=block_seconds,
    )


def cache_counters(metrics, *rows):
    """By tenant, "" for all together: tokens queried, tokens hit, blocks evicted."""
    found = samples(metrics, replace(SNAPSHOT, memory=rows))
    facts = ("queried_tokens", "hit_tokens", "evicted_blocks")
    tenants = {dict(key[1:])["tenant"] for key in found if key[0].startswith("headrace_prefix")}
    counters = {
        tenant: tuple(
            found[f"headrace_prefix_cache_{fact}_total", ("tenant", tenant)] for fact in facts
        )
        for tenant in tenants
    }
    engine = sorted(ENGINE.items())
    counters[""] = tuple(
        found[f"vllm:prefix_cache_{n}_total", *engine] for n in ("queries", "hits")
    )
    return counters


def test_blocks_by_tenant_and_state(metrics):
    def blocks(*rows):
        found = samples(metrics, replace(SNAPSHOT, memory=rows))
        return {
            (labels["tenant"], labels["state"]): number
            for (name, *pairs), number in found.items()
            if name == "headrace_kv_blocks" and (labels := dict(pairs))
        }

    rows = [memory(name, blocks=(5, 4, 3)) for name in ("a", "b", "c", "d")]
    expected = {
        (tenant, state): number * times
        for tenant, times in (("a", 1), ("b", 1), ("_other", 2))
        for state, number in (("held", 5), ("cached", 4), ("host", 3))
    }
    assert blocks(*rows) == blocks(*rows) == expected
    assert blocks(memory("b", blocks=(1, 0, 0))) == {
        ("b", "held"): 1,
        ("b", "cached"): 0,
        ("b", "host"): 0,
    }


def test_cache_counters_are_the_totals_of_the_engine(metrics):
    assert cache_counters(metrics) == {"": (0, 0)}

    first = [memory("a", queried=100, hit=40, evicted=2), memory("b", queried=10)]
    expected = {"": (110, 40), "a": (100, 40, 2), "b": (10, 0, 0)}
    assert cache_counters(metrics, *first) == expected
    assert cache_counters(metrics, *first) == expected

    more = [memory("a", queried=150, hit=60, evicted=3), memory("b", queried=10)]
    assert cache_counters(metrics, *more) == {"": (160, 60), "a": (150, 60, 3), "b": (10, 0, 0)}


def test_cache_counters_of_other_tenants_add_up_and_never_fall(metrics):
    names = ("a", "b", "c", "d")
    rows = [memory(name, queried=10, hit=5, evicted=1) for name in names]
    assert cache_counters(metrics, *rows)["_other"] == (20, 10, 2)

    # One is not in the snapshot, and comes back.
    seen = cache_counters(metrics, *rows[:3])
    assert seen["_other"] == (20, 10, 2)
    assert seen[""] == (40, 20)
    rows[3] = memory("d", queried=12, hit=6, evicted=1)
    assert cache_counters(metrics, *rows)["_other"] == (22, 11, 2)

    # The engine counts from 0 again.
    again = cache_counters(metrics, *[memory(name, queried=4, hit=2) for name in names])
    assert again == {
        "": (58, 29),
        "a": (14, 7, 1),
        "b": (14, 7, 1),
        "_other": (30, 15, 2),
    }


def test_block_seconds_are_the_total_of_the_engine_up_to_rounding(metrics):
    def seconds(total):
        rows = (memory("a", block_seconds=total),)
        found = samples(metrics, replace(SNAPSHOT, memory=rows))
        return found["headrace_kv_block_seconds_total", ("tenant", "a")]

    assert [seconds(total) for total in (0.5, 2.25, 2.25)] == [0.5, 2.25, 2.25]
    assert seconds(math.nextafter(2.25, 0)) == 2.25  # summed in another order: nothing began again
    assert seconds(2.5) == pytest.approx(2.5)
    assert seconds(0.25) == pytest.approx(2.75)  # begun again from 0


def test_gauges_are_those_of_the_snapshot(metrics):
    expected = {
        ("vllm:num_requests_running", *sorted(ENGINE.items())): 3,
        ("vllm:num_requests_waiting", *sorted(ENGINE.items())): 2,
        ("vllm:kv_cache_usage_perc", *sorted(ENGINE.items())): 0.25,
        ("headrace_tenant_running", ("tenant", "a")): 2,
        ("headrace_tenant_queue_depth", ("tenant", "b")): 1,
        ("headrace_tenant_virtual_counter", ("rank", "1"), ("tenant", "a")): 150,
        ("headrace_fairness_max_gap_tokens",): 50,
        ("headrace_scheduler_policy_info", ("policy", "drr")): 1,
    }
    found = samples(metrics)

    assert {key: found[key] for key in expected} == expected
    info = {"block_size": "16", "num_gpu_blocks": "100", **ENGINE}
    assert value(metrics, "vllm:cache_config_info", **info) == 1


def test_the_cache_of_two_stages_has_the_blocks_of_both():
    """`vllm:kv_cache_usage_perc` is a part of both."""
    config = EngineConfig(
        cache=CacheConfig(num_blocks=100), prefill_cache=CacheConfig(num_blocks=60)
    )
    metrics = Metrics(model_name="m", config=config, max_tenants=2)

    info = {"block_size": "16", "num_gpu_blocks": "160", **ENGINE}
    assert value(metrics, "vllm:cache_config_info", **info) == 1


def test_a_tenant_that_left_has_no_gauge(metrics):
    samples(metrics)
    empty = EngineSnapshot(
        policy="vtc",
        num_running=0,
        num_waiting=0,
        free_blocks=100,
        cached_blocks=0,
        held_blocks=0,
        tenants=(),
    )

    after = samples(metrics, empty)

    assert not [key for key in after if key[0].startswith("headrace_tenant_running")]
    assert after[("headrace_fairness_max_gap_tokens",)] == 0
    policies = [key for key in after if key[0] == "headrace_scheduler_policy_info"]
    assert policies == [("headrace_scheduler_policy_info", ("policy", "vtc"))]


def test_tenants_beyond_the_bound_share_one_label(metrics):
    for tenant in ("a", "b", "c", "d"):
        metrics.tenants.request_ended(tenant, "completed")
        metrics.engine.observe([finished(tenant=tenant)])

    labels = {dict(key[1:])["tenant"] for key in samples(metrics) if "tenant" in dict(key[1:])}
    assert labels == {"a", "b", "_other"}
    assert (
        value(metrics, "headrace_tenant_requests_total", tenant="_other", outcome="completed") == 2
    )
    assert value(metrics, "headrace_tenant_tokens_total", tenant="_other", kind="output") == 10


def test_nothing_is_remembered_of_finished_sequences(metrics):
    metrics.engine.observe(
        [
            TokensGenerated(request_id="s", tenant="a", at=1.0, token_ids=(1,), text="x"),
            finished(request_id="s"),
            TokensGenerated(request_id="s", tenant="a", at=9.0, token_ids=(1,), text="x"),
        ]
    )

    assert value(metrics, "vllm:inter_token_latency_seconds_count", **ENGINE) == 0
