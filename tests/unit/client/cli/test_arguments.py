"""What people write for durations, sizes, times and addresses, and what is no such thing."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.client.cli import arguments
from holdfast.client.cli.main import NOUNS, parser
from holdfast.client.protocol.values import GROUP_SETTINGS, QUEUE_SETTINGS


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("0", 0),
        ("0s", 0),
        ("1ms", 1),
        ("30s", 30_000),
        ("5m", 300_000),
        ("12h", 43_200_000),
        ("7d", 604_800_000),
        ("1h30m", 5_400_000),
        ("1.5s", 1_500),
        ("0.001s", 1),
        ("2m0.5s", 120_500),
    ],
)
def test_a_duration_is_whole_milliseconds(text: str, ms: int) -> None:
    assert arguments.duration_ms(text) == ms


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("4096", 4096), ("64k", 65_536), ("16M", 16_777_216), ("2g", 2_147_483_648)]
)
def test_a_size_is_bytes_in_powers_of_1024(text: str, size: int) -> None:
    assert arguments.size_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1700000000123", 1_700_000_000_123),
        ("1970-01-01T00:00:01Z", 1_000),
        ("2023-11-14T22:13:20.123+00:00", 1_700_000_000_123),
        ("2023-11-14T23:13:20+01:00", 1_700_000_000_000),
        ("2030-01-01T00:00:00.999Z", 1_893_456_000_999),
    ],
)
def test_a_time_is_milliseconds_since_1970(text: str, ms: int) -> None:
    assert arguments.time_ms(text) == ms


@pytest.mark.parametrize(
    ("text", "backoff"),
    [
        ("none", {"kind": "none"}),
        ("fixed:5s", {"kind": "fixed", "base_ms": 5_000, "cap_ms": 5_000}),
        ("exponential:1s:10m", {"kind": "exponential", "base_ms": 1_000, "cap_ms": 600_000}),
    ],
)
def test_a_backoff_is_a_word_and_its_durations(text: str, backoff: dict[str, Any]) -> None:
    assert arguments.backoff(text) == backoff


@pytest.mark.parametrize("text", ["n1:7401", "127.0.0.1:7401,127.0.0.1:7402", "[::1]:7401", "a:1, b:65535,"])
def test_addresses_are_taken_as_they_are(text: str) -> None:
    assert arguments.addresses(text) == text


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((arguments.duration_ms, text) for text in ("", "5", "5 s", "s", "-1s", "1w", "1.0005s", "1s!", "٣s", "1e3s")),
        *((arguments.size_bytes, text) for text in ("", "-1", "1t", "1.5k", "k")),
        *((arguments.time_ms, text) for text in ("", "tomorrow", "2030-13-01", "-5", "99999-01-01T00:00:00Z")),
        *((arguments.count, text) for text in ("", "0", "-1", "1.0", "x", str(2**63))),
        *((arguments.place, text) for text in ("", "first", "0")),
        *((arguments.header, text) for text in ("", "name", "=value")),
        *((arguments.backoff, text) for text in ("", "fixed", "exponential:1s", "linear:1s", "fixed:5")),
        *((arguments.addresses, text) for text in ("", ",", "localhost", ":7401", "a:b", "a:0", "a:65536", "::1:7401")),
    ],
)
def test_what_is_no_such_value_is_refused(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)


@pytest.mark.parametrize(
    ("noun", "settings"), [("queue", QUEUE_SETTINGS), ("group", GROUP_SETTINGS)], ids=["queue", "group"]
)
@pytest.mark.parametrize("verb", ["create", "update"])
def test_every_setting_has_a_flag(noun: str, verb: str, settings: dict[str, Any]) -> None:
    names = ["q"] if noun == "queue" else ["q", "g"]
    args = parser().parse_args([noun, verb, *names])
    assert arguments.chosen_settings(args, settings) == {}
    for name, setting in settings.items():
        flag = f"--{name.removesuffix('_ms').replace('_', '-')}"
        value = {"word": "|".join(setting.words[:1]), "queue": "dlq", "backoff": "none"}.get(setting.kind, "7")
        if name.endswith("_ms"):
            value = "7ms"
        given = [flag] if setting.kind == "flag" else [flag, value]
        args = parser().parse_args([noun, verb, *names, *given])
        assert list(arguments.chosen_settings(args, settings)) == [name]


def test_a_setting_can_be_taken_away_where_that_means_something() -> None:
    args = parser().parse_args(["queue", "update", "q", "--max-in-flight", "none", "--replay", "none", "--no-history"])
    assert arguments.chosen_settings(args, QUEUE_SETTINGS) == {
        "max_in_flight": None,
        "replay_ms": None,
        "history": False,
    }
    args = parser().parse_args(["group", "update", "q", "g", "--backoff", "inherit", "--visibility-timeout", "inherit"])
    assert arguments.chosen_settings(args, GROUP_SETTINGS) == {"backoff": None, "visibility_timeout_ms": None}
    with pytest.raises(arguments.WrongUsage):
        parser().parse_args(["queue", "update", "q", "--visibility-timeout", "none"])


def test_every_noun_of_the_table_is_on_the_command_line() -> None:
    told = {line.split()[0] for line in parser().format_help().splitlines() if line.strip()}
    assert set(NOUNS) <= told
