"""Series from engine events; tenant labels bounded."""

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
from engine.snapshot import EngineSnapshot, TenantSnapshot
from gateway.metrics import Metrics

ENGINE = {"model_name": "m", "engine": "0"}
SNAPSHOT = EngineSnapshot(
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
        "vllm:prefix_cache_queries_total": 20,
        "vllm:prefix_cache_hits_total": 16,
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
        "vllm:prefix_cache_queries_total": 20,
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


def test_steps_waits_and_preemptions(metrics):
    metrics.engine.observe(
        [
            SequenceAdmitted(
                request_id="s", tenant="a", at=1.0, num_cached_tokens=0, waited_seconds=0.25
            ),
            SequencePreempted(request_id="s", tenant="a", at=1.0),
            TokensGenerated(request_id="s", tenant="a", at=1.0, token_ids=(1,), text="x"),
            TokensGenerated(request_id="s", tenant="a", at=1.5, token_ids=(1,), text="x"),
            StepFinished(
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
            ),
        ]
    )

    assert value(metrics, "headrace_tenant_queue_seconds_sum", tenant="a") == 0.25
    assert value(metrics, "vllm:num_preemptions_total", **ENGINE) == 1
    assert value(metrics, "headrace_tenant_preemptions_total", tenant="a", role="victim") == 1
    assert value(metrics, "vllm:inter_token_latency_seconds_sum", **ENGINE) == 0.5
    assert value(metrics, "vllm:iteration_tokens_total_sum", **ENGINE) == 32
    assert value(metrics, "headrace_step_tokens_total", kind="prefill") == 30
    assert value(metrics, "headrace_scheduler_step_seconds_sum", phase="plan") == 0.25
    assert value(metrics, "headrace_scheduler_step_seconds_sum", phase="model") == 0.75


def test_gauges_are_those_of_the_snapshot(metrics):
    expected = {
        ("vllm:num_requests_running", *sorted(ENGINE.items())): 3,
        ("vllm:num_requests_waiting", *sorted(ENGINE.items())): 2,
        ("vllm:kv_cache_usage_perc", *sorted(ENGINE.items())): 0.25,
        ("headrace_tenant_running", ("tenant", "a")): 2,
        ("headrace_tenant_queue_depth", ("tenant", "b")): 1,
        ("headrace_tenant_virtual_counter", ("rank", "1"), ("tenant", "a")): 150,
        ("headrace_fairness_max_gap_tokens",): 50,
        ("headrace_scheduler_policy_info", ("policy", "wfq")): 1,
    }
    found = samples(metrics)

    assert {key: found[key] for key in expected} == expected
    info = {"block_size": "16", "num_gpu_blocks": "100", **ENGINE}
    assert value(metrics, "vllm:cache_config_info", **info) == 1


def test_a_tenant_that_left_has_no_gauge(metrics):
    samples(metrics)
    empty = EngineSnapshot(
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
