"""From Settings to the real parts: policy store, ledger, model and engine."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import TemplateError
from engine.model.default_model import find_default_model
from engine.model.loader import LoadedModel, load_model
from engine.model.runner import ModelRunner, blocks_for_memory
from engine.model.structured import GrammarCompiler
from engine.model.tool_format import Tool
from engine.scheduling.policies import POLICIES
from engine.service import AsyncEngine
from gateway.app import Gateway, assemble
from gateway.metrics import Metrics
from gateway.served_model import ServedModel
from gateway.settings import Settings, SettingsError
from tenants.ledger import Ledger
from tenants.store import Store


def build_gateway(settings: Settings) -> tuple[Gateway, AsyncEngine]:
    """The real gateway, and its engine, not started yet. Needs no event loop.

    The database's schema must be there, or requests get 503 until it is. Raises SettingsError,
    ConfigError or ModelLoadError.
    """
    if settings.policy not in POLICIES and ":" not in settings.policy:
        raise SettingsError(
            f"HEADRACE_POLICY={settings.policy!r} is not one of {', '.join(sorted(POLICIES))}, nor "
            "a class of your own as package.module:Class"
        )
    if settings.forecasts == "refuse" and (settings.prefill_kv_bytes or ":" in settings.policy):
        raise SettingsError(
            "HEADRACE_FORECASTS=refuse does not go with HEADRACE_PREFILL_KV_BYTES, nor with a "
            "policy of your own: nothing is foreseen there. Set it to on or off"
        )
    _make_home(settings.home)
    model = load_model(
        settings.model or find_default_model(), device=settings.device, dtype=settings.dtype
    )
    config = engine_config(settings, model)
    prefill = ModelRunner(model, config.prefill_cache) if config.prefill_cache else None
    metrics = Metrics(model_name=model.name, config=config, max_tenants=settings.max_metric_tenants)
    core = EngineCore(
        config,
        ModelRunner(model, config.cache, prefill=prefill),
        prefill_runner=prefill,
        clock=time.monotonic,
        token_bytes=model.tokenizer.token_bytes,
        eos_token_ids=model.eos_token_ids,
    )
    grammars = GrammarCompiler(model.tokenizer, model.config.vocab_size)
    engine = AsyncEngine(
        core,
        observers=[metrics.engine.observe],
        grammars=grammars,
        foresees=settings.forecasts != "off",
    )
    store = Store.open(settings.resolved_database_url)
    ledger = Ledger(
        store.database,
        instance_id=f"gw_{secrets.token_hex(8)}",
        lease_seconds=settings.lease_seconds,
    )
    gateway = assemble(
        settings=settings,
        model=served_model(model, config, grammars),
        engine=engine,
        config=config,
        store=store,
        ledger=ledger,
        metrics=metrics,
    )
    return gateway, engine


def _make_home(home: Path) -> None:
    """The folder is needed whatever the database: the server leaves its note there."""
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"HEADRACE_HOME={home} cannot be made: {error.strerror or error}"
        ) from error


def engine_config(settings: Settings, model: LoadedModel) -> EngineConfig:
    """The engine's configuration. Raises SettingsError if the settings contradict the model."""
    if settings.preemption == "swap" and not settings.host_kv_bytes:
        raise SettingsError(
            "HEADRACE_PREEMPTION=swap needs host memory to swap to: set HEADRACE_HOST_KV_BYTES"
        )
    cache = _cache_config(settings, model, settings.kv_cache_bytes)
    smallest = cache
    prefill = None
    if settings.prefill_kv_bytes:
        prefill = replace(
            _cache_config(settings, model, settings.prefill_kv_bytes), num_host_blocks=0
        )
        smallest = min(cache, prefill, key=lambda one: one.num_blocks)
    most = min(model.config.max_position, smallest.num_tokens)
    max_model_len = settings.max_model_len or most
    if max_model_len > most:
        raise SettingsError(
            f"HEADRACE_MAX_MODEL_LEN={max_model_len} is more than the {most} tokens that the model "
            f"(trained for {model.config.max_position}) and the KV cache (HEADRACE_KV_CACHE_BYTES, "
            f"HEADRACE_PREFILL_KV_BYTES: room for {smallest.num_tokens}) allow"
        )
    return EngineConfig(
        cache=cache,
        scheduler=SchedulerConfig(
            policy=settings.policy,
            max_seqs=settings.max_seqs,
            max_step_tokens=settings.max_step_tokens or default_step_tokens(model, settings),
            max_model_len=max_model_len,
            preemption=settings.preemption,
            class_sharing=settings.class_sharing,
            class_floor=settings.class_floor,
        ),
        prefill_cache=prefill,
    )


def _cache_config(settings: Settings, model: LoadedModel, cache_bytes: int) -> CacheConfig:
    def blocks(num_bytes: int) -> int:
        return blocks_for_memory(model, num_bytes, settings.block_size) if num_bytes else 0

    budget = settings.host_kv_bytes_per_tenant
    return CacheConfig(
        num_blocks=blocks(cache_bytes),
        block_size=settings.block_size,
        enable_prefix_cache=settings.prefix_cache == "on",
        num_host_blocks=blocks(settings.host_kv_bytes),
        max_host_blocks_per_tenant=None if budget is None else blocks(budget),
        public_prompts=_public_prompts(settings, model),
    )


def _public_prompts(settings: Settings, model: LoadedModel) -> tuple[tuple[int, ...], ...]:
    """Token ids of each text, alone and as the system message of a conversation."""
    if settings.public_prompts is None:
        return ()
    tokenizer, template = model.tokenizer, model.chat_template
    found: list[tuple[int, ...]] = []
    try:
        texts = [
            path.read_text("utf-8").removesuffix("\n")
            for path in sorted(settings.public_prompts.glob("*.txt"))
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"HEADRACE_PUBLIC_PROMPTS cannot be read: {error}") from error
    if not texts:
        raise SettingsError(
            f"HEADRACE_PUBLIC_PROMPTS={settings.public_prompts} is no folder with *.txt files"
        )
    for text in texts:
        found.append(tuple(tokenizer.encode(text)))
        if template is not None:
            system = template.render(
                [{"role": "system", "content": text}], add_generation_prompt=False
            )
            found.append(tuple(tokenizer.encode(system, add_special_tokens=False)))
    return tuple(found)


def default_step_tokens(model: LoadedModel, settings: Settings) -> int:
    """Decodes wait for the chunk beside them. A CPU gains nothing by larger chunks; a GPU does."""
    return max(128 if model.device.type == "cpu" else 2048, settings.max_seqs)


def served_model(
    model: LoadedModel, config: EngineConfig, grammars: GrammarCompiler
) -> ServedModel:
    """The loaded model as the gateway sees it."""
    tokenizer, template = model.tokenizer, model.chat_template

    def encode_chat(
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool],
        variables: Mapping[str, Any],
    ) -> Sequence[int]:
        if template is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        text = template.render(messages, tools=tools, variables=variables)
        return tokenizer.encode(text, add_special_tokens=False)

    return ServedModel(
        name=model.name,
        created=int(time.time()),
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=config.scheduler.max_model_len,
        max_seqs=config.scheduler.max_seqs,
        vocab_size=model.config.vocab_size,
        max_token_bytes=max(
            len(tokenizer.token_bytes(token)) for token in range(model.config.vocab_size)
        ),
        token_bytes=tokenizer.token_bytes,
        encode=tokenizer.encode,
        encode_plain=partial(tokenizer.encode, add_special_tokens=False),
        encode_chat=encode_chat,
        compile_grammar=grammars.compile,
    )
