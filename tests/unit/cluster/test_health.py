"""Alive and ready: each condition alone turns the answer, and a `no` names every reason."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cluster.events import Role
from holdfast.cluster.health import (
    APPLY_LAG_MAX,
    TURN_AGE_MAX_MS,
    MemberStatus,
    NodeStatus,
    healthz,
    readyz,
    status_page,
)

DOC = (Path(__file__).parents[3] / "docs" / "operating.md").read_text()
MEMBER = MemberStatus(
    name="n2", address="10.0.0.2:7421", client_address="10.0.0.2:7401", role="voter", connected=True, match=88, lag=2
)
HEALTHY = NodeStatus(
    node="n1",
    cluster_id="c1",
    role=Role.LEADER,
    term=3,
    leader="n1",
    leader_address="10.0.0.1:7401",
    applied=90,
    digest="0f" * 32,
    committed=90,
    durable=90,
    last=90,
    time_ms=1_735_787_045_678,
    fsync="always",
    pid=7,
    address="10.0.0.1:7401",
    members=(replace(MEMBER, name="n1", match=90, lag=0), MEMBER),
    skew_ms={"n1": 0, "n2": -12},
    journal_bytes=1000,
    state_bytes=2000,
    started_ms=1_735_787_000_000,
    turn_age_ms=5,
    stopping=False,
    failed=None,
    disk_free_bytes=10_000_000,
    refusing_produce=False,
)


def reasons(verdict: tuple[int, dict[str, Any]]) -> list[str]:
    return [each["reason"] for each in verdict[1]["reasons"]]


def test_a_healthy_node_is_alive_and_ready() -> None:
    facts = {"reasons": [], "node": "n1", "fsync": "always", "refusing_produce": False}
    assert healthz(HEALTHY) == (200, {"alive": True, **facts})
    assert readyz(HEALTHY) == (200, {"ready": True, **facts})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"failed": "it does not add up"}, {"reason": "failed", "error": "it does not add up"}),
        ({"failed": ""}, {"reason": "failed", "error": ""}),
        (
            {"turn_age_ms": TURN_AGE_MAX_MS + 1},
            {"reason": "stalled", "turn_age_ms": TURN_AGE_MAX_MS + 1, "limit_ms": TURN_AGE_MAX_MS},
        ),
    ],
)
def test_a_node_that_failed_or_stalled_is_neither_alive_nor_ready(change: Any, reason: dict[str, object]) -> None:
    status = replace(HEALTHY, **change)
    for question, (code, answer) in (("alive", healthz(status)), ("ready", readyz(status))):
        assert code == 503
        assert (answer[question], answer["reasons"]) == (False, [reason])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cluster_id": ""}, {"reason": "not_formed"}),
        ({"leader": None}, {"reason": "no_leader", "term": 3}),
        (
            {"committed": 91 + APPLY_LAG_MAX},
            {"reason": "applying", "lag": APPLY_LAG_MAX + 1, "limit": APPLY_LAG_MAX},
        ),
        ({"promised": 95}, {"reason": "repaired", "promised": 95, "last": 90}),
        ({"stopping": True}, {"reason": "stopping"}),
    ],
)
def test_a_node_that_cannot_serve_yet_or_any_more_is_alive_but_not_ready(change: Any, reason: object) -> None:
    status = replace(HEALTHY, **change)
    assert healthz(status)[0] == 200
    code, answer = readyz(status)
    assert (code, answer["ready"], answer["reasons"]) == (503, False, [reason])


@pytest.mark.parametrize(
    "change",
    [
        {"turn_age_ms": TURN_AGE_MAX_MS},
        {"committed": 90 + APPLY_LAG_MAX},
        {"role": Role.FOLLOWER, "leader": "n2"},
        {"refusing_produce": True},  # settling still works, and must find its node
        {"members": ()},
        {"fsync": "os"},
    ],
)
def test_what_is_within_bounds_is_ready(change: Any) -> None:
    assert readyz(replace(HEALTHY, **change))[0] == 200


def test_every_reason_is_named_at_once() -> None:
    status = replace(
        HEALTHY, failed="x", turn_age_ms=99_999, cluster_id="", leader=None, committed=9_999, stopping=True, promised=9
    )
    assert reasons(healthz(status)) == ["failed", "stalled"]
    assert reasons(readyz(status)) == [
        "failed",
        "stalled",
        "not_formed",
        "no_leader",
        "applying",
        "repaired",
        "stopping",
    ]


@given(
    failed=st.none() | st.text(),
    turn_age_ms=st.integers(0, 2 * TURN_AGE_MAX_MS),
    leader=st.none() | st.just("n1"),
    committed=st.integers(0, 5_000),
    stopping=st.booleans(),
)
def test_ready_implies_alive_and_the_code_agrees_with_the_answer(**change: Any) -> None:
    status = replace(HEALTHY, **change)
    alive, ready = healthz(status), readyz(status)
    assert alive[0] == 200 or ready[0] == 503
    for code, answer in (alive, ready):
        assert (code == 200) == (answer["reasons"] == [])
        json.dumps(answer)


@pytest.mark.parametrize("change", [{"fsync": "os"}, {"refusing_produce": True}])
def test_weak_durability_and_a_full_disk_are_told_on_every_page(change: Any) -> None:
    [(name, value)] = change.items()
    status = replace(HEALTHY, **change)
    assert [page[name] for page in (healthz(status)[1], readyz(status)[1], status_page(status))] == [value] * 3


def test_the_status_page_tells_every_field_as_json() -> None:
    page = json.loads(json.dumps(status_page(HEALTHY)))
    assert list(page) == [field.name for field in fields(NodeStatus)]
    assert page["role"] == "leader"
    assert page["skew_ms"] == {"n1": 0, "n2": -12}
    assert page["members"][1] == {
        "name": "n2",
        "address": "10.0.0.2:7421",
        "client_address": "10.0.0.2:7401",
        "role": "voter",
        "connected": True,
        "match": 88,
        "lag": 2,
    }


def test_the_document_names_every_field_every_reason_and_every_bound() -> None:
    section = DOC[DOC.index("## Health") : DOC.index("## Metrics")]
    names = [field.name for kind in (NodeStatus, MemberStatus) for field in fields(kind)]
    names += ["failed", "stalled", "not_formed", "no_leader", "applying", "repaired", "stopping"]
    assert [name for name in names if f"`{name}`" not in section] == []
    assert f"within {TURN_AGE_MAX_MS // 1000} s" in section
    assert f"at most {APPLY_LAG_MAX:,} committed entries" in section
