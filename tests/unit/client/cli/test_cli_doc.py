"""`docs/cli.md` agrees with the code: every command with its flags, every setting, and examples that run."""

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from holdfast.client.cli import arguments
from holdfast.client.cli.main import parser
from holdfast.client.protocol.values import GROUP_SETTINGS, QUEUE_SETTINGS
from tests.support.documents import DOCS, agree, blocks, commands
from tests.unit.client.cli.conftest import Cli

DOC = (DOCS / "cli.md").read_text()
CELLS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in DOC.splitlines() if line.startswith("| ")]
COMMON = {"--connect", "--timeout", "--json"}
SETTINGS = {f"--{name.removesuffix('_ms').replace('_', '-')}" for name in QUEUE_SETTINGS}


def leaves(parent: argparse.ArgumentParser, words: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that talks to a cluster, with its parser."""
    below = [action for action in parent._actions if isinstance(action, argparse._SubParsersAction)]
    for action in below:
        for name, child in action.choices.items():
            yield from leaves(child, f"{words} {name}".strip())
    if not below and flags_of(parent) >= COMMON:
        yield words, parent


def flags_of(of: argparse.ArgumentParser) -> set[str]:
    return {flag for action in of._actions for flag in action.option_strings if not flag.startswith("--no-")}


# What operators do to nodes has a page of its own.
COMMANDS = {words: child for words, child in leaves(parser()) if words.split()[0] != "node"}


def documented(section: str) -> dict[str, list[str]]:
    """The rows of a section's tables by command, without its arguments."""
    part = DOC.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines() if line.startswith("| `")
    ]
    return {re.sub(r" [\[A-Z].*", "", row[0].strip("`")): row for row in rows}


def test_the_commands_are_those_of_the_contract() -> None:
    nouns = {words.split()[0] for words in COMMANDS}
    assert nouns >= {
        *("status", "queue", "group", "produce", "consume", "dead", "explain", "stats", "peek", "read", "history"),
        *("cancel", "reschedule", "producer", "txn", "top"),
    }


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_is_documented_with_its_flags(words: str) -> None:
    row = documented("Commands")[words]
    flags = flags_of(COMMANDS[words]) - COMMON - {"-h", "--help"}
    told = set(re.findall(r"`(--[a-z-]+)`", row[1]))
    if "settings" in row[1]:
        told |= {flag for flag in flags if flag in SETTINGS}
        assert len(flags & SETTINGS) == len(GROUP_SETTINGS if words.startswith("group") else QUEUE_SETTINGS)
    assert told == flags


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_is_documented_with_its_object(words: str) -> None:
    assert documented("Objects")[words][1]


def test_nothing_is_documented_that_is_not_there() -> None:
    consuming = {"--ack", "--nack", "--keep"}
    assert set(documented("Commands")) - consuming == set(COMMANDS)
    assert set(documented("Objects")) == set(COMMANDS)


@pytest.mark.parametrize("name", QUEUE_SETTINGS)
def test_a_setting_is_documented_with_its_flag(name: str) -> None:
    setting = QUEUE_SETTINGS[name]
    values = "–" if setting.kind == "flag" else arguments._reader(name, setting)[1].replace("|", " or ")
    if setting.optional:
        values += " or none"
    flag = f"`--{name.removesuffix('_ms').replace('_', '-')}`"
    assert [flag, values, "yes" if name in GROUP_SETTINGS else "–"] in CELLS


def test_the_examples_print_what_they_show(cli: Cli) -> None:
    """One behind the other; what stands behind a pipe is another program's matter, so its lines are looked for."""
    consoles = [block for block in blocks(DOC) if block.language == "console"]
    assert len(consoles) > 1
    for block in consoles:
        for line, expected in commands(block):
            command, pipe, _ = line.partition(" | ")
            done = cli.ok(*shlex.split(command)[1:])
            if pipe:
                assert all(f'"{each}"' in done.out for each in expected.splitlines())
            else:
                assert agree(expected, done.out), done.out
