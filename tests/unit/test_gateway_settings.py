"""Settings: one table, and a bad value stops the start naming key and value."""

from dataclasses import fields
from pathlib import Path

import pytest

from gateway.settings import Settings, SettingsError, describe


def test_defaults_need_no_environment():
    settings = Settings.from_env({"PATH": "/bin"})

    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert settings.home == Path("headrace-data")
    assert settings.resolved_database_url == "sqlite:///headrace-data/headrace.db"
    assert settings.default_max_tokens == 512


def test_values_are_cast_to_their_types():
    settings = Settings.from_env(
        {
            "HEADRACE_PORT": "0",
            "HEADRACE_HOME": "/srv/x",
            "HEADRACE_DATABASE_URL": "postgresql://db/h",
            "HEADRACE_KV_CACHE_BYTES": "2GiB",
            "HEADRACE_MAX_BODY_BYTES": "512 KiB",
            "HEADRACE_DRAIN_SECONDS": "0.5",
        }
    )

    assert settings.port == 0
    assert settings.home == Path("/srv/x")
    assert settings.resolved_database_url == "postgresql://db/h"
    assert settings.kv_cache_bytes == 2 * 2**30
    assert settings.max_body_bytes == 512 * 1024
    assert settings.drain_seconds == 0.5


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("HEADRACE_PORT", "http", "a whole number"),
        ("HEADRACE_PORT", "70000", "at least 0, at most 65535"),
        ("HEADRACE_MAX_SEQS", "0", "at least 1"),
        ("HEADRACE_MAX_SEQS", "", "a value"),
        ("HEADRACE_KV_CACHE_BYTES", "2 gigs", "a number of bytes"),
        ("HEADRACE_DRAIN_SECONDS", "nan", "a number of seconds"),
        ("HEADRACE_DRAIN_SECONDS", "-1", "at least 0"),
        ("HEADRACE_DTYPE", "fp8", "one of auto, float32, bfloat16"),
        ("HEADRACE_PREFIX_CACHE", "yes", "one of on, off"),
    ],
)
def test_a_bad_value_names_key_value_and_what_was_expected(key, value, expected):
    with pytest.raises(SettingsError) as error:
        Settings.from_env({key: value})

    assert str(error.value).startswith(f"{key}={value!r} is not valid: expected ")
    assert expected in str(error.value)


def test_secrets_are_not_repeated_in_messages():
    with pytest.raises(SettingsError) as error:
        Settings.from_env({"HEADRACE_OPERATOR_TOKEN": ""})

    assert str(error.value).startswith("HEADRACE_OPERATOR_TOKEN=***")


def test_the_table_has_every_field_with_a_help_text():
    table = describe()

    assert [row[0] for row in table] == [f"HEADRACE_{f.name.upper()}" for f in fields(Settings)]
    assert all(len(row[2]) > 10 for row in table)
    assert ("HEADRACE_PORT", "8080", "port to listen on; 0 takes a free one") in table
