"""Settings: every HEADRACE_* variable, with its default and its help, in one table."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

PREFIX = "HEADRACE_"

_BYTE_UNITS = {
    "": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


class SettingsError(Exception):
    """A HEADRACE_* variable has a value that cannot be used. Raised before anything starts."""


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _BYTE_UNITS:
        raise ValueError("a number of bytes such as 1048576, 512MiB or 2GiB")
    return int(match[1]) * _BYTE_UNITS[match[2].upper()]


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def _number(expected: str) -> Callable[[str], float]:
    def cast(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(expected)
        return value

    return cast


_seconds = _number("a number of seconds")
_fraction = _number("a fraction such as 0.05")


def _choice(*allowed: str) -> Callable[[str], str]:
    def cast(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return text

    return cast


def _bounded(
    cast: Callable[[str], Any], low: float, high: float = math.inf
) -> Callable[[str], Any]:
    def bounded(text: str) -> Any:
        value = cast(text)
        if not low <= value <= high:
            raise ValueError(
                f"at least {low:g}" + (f", at most {high:g}" if high < math.inf else "")
            )
        return value

    return bounded


def _setting(default: Any, cast: Callable[[str], Any], help_text: str) -> Any:
    return field(default=default, metadata={"cast": cast, "help": help_text})


_count = _bounded(_integer, 1)
_duration = _bounded(_seconds, 0.001)
_HOME = Path("headrace-data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an operator can set; field `max_seqs` is read from HEADRACE_MAX_SEQS."""

    host: str = _setting("127.0.0.1", str, "address to listen on")
    port: int = _setting(
        8080, _bounded(_integer, 0, 65535), "port to listen on; 0 takes a free one"
    )
    home: Path = _setting(  # noqa: RUF009 -- it is dataclasses.field that is called
        _HOME, Path, "folder of the embedded database"
    )
    database_url: str | None = _setting(None, str, "database; default: SQLite in the home folder")
    operator_token: str | None = _setting(
        None, str, "what /metrics and /admin ask for; default: open to whoever can connect"
    )

    model: Path | None = _setting(  # noqa: RUF009 -- as above
        None, Path, "model folder or GGUF file; default: the bundled model"
    )
    device: str = _setting("auto", str, "where the model runs: auto, cpu, cuda, cuda:1")
    dtype: str = _setting(
        "auto", _choice("auto", "float32", "bfloat16"), "precision of weights and KV cache"
    )
    kv_cache_bytes: int = _setting(2**30, _bounded(_bytes, 1), "memory of the KV cache")
    block_size: int = _setting(16, _count, "tokens of one KV block")
    prefix_cache: str = _setting("on", _choice("on", "off"), "reuse KV of equal prompt beginnings")
    public_prompts: Path | None = _setting(  # noqa: RUF009 -- as above
        None,
        Path,
        "folder of *.txt: texts (as prompts, and as system messages) whose KV all tenants share; "
        "default: none",
    )
    host_kv_bytes: int = _setting(
        0, _bounded(_bytes, 0), "host memory for the KV of preempted sequences; 0: recompute them"
    )
    host_kv_bytes_per_tenant: int | None = _setting(
        None, _bounded(_bytes, 0), "how much of it one tenant may hold; default: all"
    )
    preemption: Literal["auto", "swap", "recompute"] = _setting(
        "auto",
        _choice("auto", "swap", "recompute"),
        "how preempted sequences get their KV back: auto, swap or recompute",
    )
    prefill_kv_bytes: int = _setting(
        0, _bounded(_bytes, 0), "a KV cache of its own for prompts; 0: one cache for all"
    )
    policy: str = _setting(
        "wfq", str, "wfq, vtc, drr, drf, priority or fcfs; or your own as package.module:Class"
    )
    class_sharing: Literal["strict", "weighted"] = _setting(
        "strict",
        _choice("strict", "weighted"),
        "between priority classes: strict by rank with a floor, or weighted",
    )
    class_floor: float = _setting(
        0.05,
        _bounded(_fraction, 0, 0.99),
        "part of the service of classes before it that a waiting class is guaranteed",
    )
    max_seqs: int = _setting(32, _count, "sequences that run at once")
    max_step_tokens: int | None = _setting(
        None, _count, "tokens computed in one step; default: 128 on CPU, 2048 elsewhere"
    )
    max_model_len: int | None = _setting(
        None,
        _bounded(_integer, 2),
        "tokens of prompt and output together; default: the model's own",
    )

    forecasts: Literal["off", "on", "refuse"] = _setting(
        "on",
        _choice("off", "on", "refuse"),
        "foresee each request's time to first token (x-headrace-estimated-ttft-ms); refuse: at "
        "once, where it comes after the request's deadline",
    )

    max_body_bytes: int = _setting(4 * 2**20, _bounded(_bytes, 1024), "largest request body")
    default_max_tokens: int = _setting(
        512, _count, "output limit of a chat request that names none (within the context)"
    )
    body_timeout_seconds: float = _setting(30.0, _duration, "time to receive a request body")
    write_timeout_seconds: float = _setting(
        60.0, _duration, "time that a stalled reader may block a stream before it is cut"
    )
    keepalive_seconds: float = _setting(
        10.0, _duration, "silence on a stream after which a keep-alive comment is sent"
    )
    idle_connection_seconds: int = _setting(15, _count, "time an idle connection stays open")

    drain_seconds: float = _setting(
        30.0, _bounded(_seconds, 0), "time that running requests get to finish after SIGTERM"
    )
    lease_seconds: float = _setting(
        60.0, _bounded(_seconds, 1), "age at which a crashed process's reservations are released"
    )
    max_metric_tenants: int = _setting(
        200, _count, "tenants with own metric labels; later ones count as _other"
    )
    log_level: str = _setting(
        "info", _choice("debug", "info", "warning", "error"), "least severe level that is logged"
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Settings":
        """Settings from HEADRACE_* variables. Raises SettingsError naming the key and value."""
        values: dict[str, Any] = {}
        for item in fields(cls):
            key = variable_name(item)
            if key not in environ:
                continue
            text = environ[key]
            try:
                if not text:
                    raise ValueError("a value; unset the variable to take the default")
                values[item.name] = item.metadata["cast"](text)
            except ValueError as error:
                shown = "***" if "token" in item.name or "url" in item.name else repr(text)
                raise SettingsError(f"{key}={shown} is not valid: expected {error}") from None
        return cls(**values)

    @property
    def resolved_database_url(self) -> str:
        """The database to open: the one given, or SQLite in the home folder."""
        return self.database_url or f"sqlite:///{self.home / 'headrace.db'}"


def variable_name(item: "Field[Any]") -> str:
    """Name of the environment variable of one field of Settings."""
    return PREFIX + item.name.upper()


def describe() -> list[tuple[str, str, str]]:
    """The table: (variable, default as text, help), in the order of the fields."""
    return [
        (
            variable_name(item),
            "" if item.default in (None, MISSING) else str(item.default),
            item.metadata["help"],
        )
        for item in fields(Settings)
    ]
