"""`docs/protocol.md` agrees with the code: every tag with its fields, every error with its facts."""

import json
from pathlib import Path
from typing import get_args

import msgpack
import pytest

from holdfast.client.protocol import codec, errors, limits, messages, tags
from holdfast.client.protocol.commands import AckBatch
from holdfast.client.protocol.replies import Answer, Settled
from holdfast.client.protocol.values import (
    GROUP_SETTINGS,
    QUEUE_SETTINGS,
    GroupSettings,
    Place,
    QueueId,
    QueueSettings,
    SessionId,
)

DOC = (Path(__file__).parents[4] / "docs" / "protocol.md").read_text()
ROWS = [line for line in DOC.splitlines() if line.startswith("| ")]


def fields_of(form: tags.Form) -> str:
    return ", ".join(f"`{name}` {kind.name}" for name, kind in form.fields.items()) or "–"


def tag_row(tag: int, form: tags.Form) -> str:
    return f"| {tag} | `{form.type.__name__}` | {fields_of(form)} |"


def error_row(kind: type[errors.HoldfastError]) -> str:
    facts = []
    for name, annotation in kind.__annotations__.items():
        parts = get_args(annotation) or (annotation,)
        words = {str: "str", int: "int", bool: "bool", type(None): "nil"}
        facts.append(f"`{name}` {' or '.join(words[part] for part in parts)}")
    family = kind.__bases__[0].__name__
    return f"| {kind.code} | `{kind.__name__}` | {family} | {kind.happened} | {', '.join(facts) or '–'} |"


def setting_row(name: str) -> str:
    rule = QUEUE_SETTINGS[name]
    values = {
        "number": f"{rule.low} … {rule.high}" if rule.high else "",
        "word": ", ".join(f'"{word}"' for word in rule.words),
        "flag": "bool",
        "queue": "a queue's name",
        "backoff": "a backoff",
    }[rule.kind]
    default = getattr(QueueSettings(), name)
    shown = {None: "nil", True: "true", False: "false"}.get(default, default) if not _is_backoff(name) else "none"
    of_group = "yes" if name in GROUP_SETTINGS else "–"
    return f"| `{name}` | {values}{' or nil' if rule.optional else ''} | {shown} | {of_group} |"


def _is_backoff(name: str) -> bool:
    return QUEUE_SETTINGS[name].kind == "backoff"


FORMS = {**tags.COMMANDS, **tags.QUERIES, **tags.REPLIES}


@pytest.mark.parametrize("tag", FORMS)
def test_a_tag_is_documented_with_its_fields(tag: int) -> None:
    assert tag_row(tag, FORMS[tag]) in ROWS


@pytest.mark.parametrize("title", tags.ROWS)
def test_a_row_is_documented_with_its_fields(title: str) -> None:
    assert f"| `{title}` | {fields_of(tags.ROWS[title])} |" in ROWS


@pytest.mark.parametrize("column", tags.COLUMN_FIELDS)
def test_a_column_is_documented_with_its_kind(column: str) -> None:
    head = f"| `{column}` | {tags.COLUMN_FIELDS[column].name} |"
    assert len([row for row in ROWS if row.startswith(head)]) == 1


@pytest.mark.parametrize("number", tags.FRAMES)
def test_a_frame_is_documented_with_its_fields(number: int) -> None:
    rows = [row for row in ROWS if row.startswith(tag_row(number, tags.FRAMES[number])[:-1])]
    assert len(rows) == 1


@pytest.mark.parametrize("kind", errors.BY_CODE.values(), ids=lambda kind: kind.__name__)
def test_an_error_is_documented_with_its_facts(kind: type[errors.HoldfastError]) -> None:
    assert error_row(kind) in ROWS


@pytest.mark.parametrize("name", QUEUE_SETTINGS)
def test_a_setting_is_documented_with_its_default(name: str) -> None:
    assert setting_row(name) in ROWS
    assert getattr(GroupSettings(), name, None) is None


def test_nothing_is_documented_that_is_not_there() -> None:
    numbers = [int(row.split("|")[1]) for row in ROWS if row.split("|")[1].strip().isdigit()]
    frames = range(tags.HELLO, tags.WITHDRAW + 1)
    assert sorted(numbers) == sorted([*FORMS, *errors.BY_CODE, *frames])


@pytest.mark.parametrize(
    "name",
    ["FRAME_HEADER_BYTES", "FRAME_BODY_BYTES", "DEPTH_MAX", "ELEMENTS_MAX", "REPLY_ELEMENTS_MAX", "SETTLE_RANGES"],
)
def test_a_limit_is_documented_with_its_value(name: str) -> None:
    assert f"| `{name}` | {getattr(limits, name):,} |" in "\n".join(ROWS)


def test_the_examples_are_what_is_sent() -> None:
    hello = messages.Hello((1, 1), "my-client/0.1")
    unsupported = messages.Declined(0, errors.VersionUnsupported(version=2, low=1, high=1))
    ack = AckBatch(queue_id=QueueId((1 << 48) | 7), group="default", ranges=((1, 2, 2),))
    session = SessionId(bytes(16))
    request = messages.Request(request_id=900, command=ack, session=session, request_seq=5, done_below=3)
    settled = messages.Answered(900, Answer(Place(90_210, 0, 1_700_000_000_123), Settled(count=1)))
    sent: list[messages.FromClient | messages.FromNode] = [hello, unsupported, request, settled]
    for message in sent:
        assert shown(msgpack.unpackb(codec.encode_message(message)[0])) in DOC


def shown(tree: object) -> str:
    match tree:
        case list():
            return f"[{', '.join(map(shown, tree))}]"
        case bytes():
            return f"<{len(tree)} bytes>"
        case None:
            return "nil"
        case _:
            return json.dumps(tree)


def test_the_version_is_documented() -> None:
    assert f"This is version {messages.PROTOCOL_VERSION} of the protocol." in DOC
