"""The error tree: every leaf has its family, its own code, a text, and survives wire and pickle."""

import pickle
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.client.protocol import codec, errors
from holdfast.client.protocol.errors import (
    BY_CODE,
    BadFilter,
    BadValue,
    HoldfastError,
    Indeterminate,
    InvariantBroken,
    LeaseExpired,
    Misuse,
    ProtocolViolated,
    Refused,
    Unavailable,
)
from holdfast.client.protocol.replies import Answer, Failed
from holdfast.client.protocol.values import Place
from tests import strategies

FAMILIES: dict[int, type[HoldfastError]] = {
    1: Misuse,
    2: Refused,
    3: Unavailable,
    4: Indeterminate,
    5: ProtocolViolated,
    6: InvariantBroken,
}
leaves = pytest.mark.parametrize("leaf", BY_CODE.values(), ids=lambda leaf: leaf.__name__)


def test_every_leaf_of_the_module_has_a_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HoldfastError)]
    assert {kind for kind in kinds if kind not in (HoldfastError, *FAMILIES.values())} == set(BY_CODE.values())


@leaves
def test_a_leaf_belongs_to_the_family_of_its_code(leaf: type[HoldfastError]) -> None:
    assert leaf.__bases__ == (FAMILIES[leaf.code // 100],)
    assert BY_CODE[leaf.code] is leaf


@leaves
def test_a_text_names_facts_and_nothing_else(leaf: type[HoldfastError]) -> None:
    named = {name for _, name, _, _ in string.Formatter().parse(leaf.text) if name is not None}
    assert named <= set(leaf.fact_names)


@leaves
@settings(max_examples=10)
@given(data=st.data())
def test_a_leaf_survives_the_wire_and_a_pickle(leaf: type[HoldfastError], data: st.DataObject) -> None:
    error = data.draw(strategies.failures(leaf))
    for copy in (pickle.loads(pickle.dumps(error)), wired(error)):
        assert type(copy) is leaf
        assert copy == error
        assert copy.facts == error.facts
        assert str(copy) == copy.message == error.message


def wired(error: HoldfastError) -> HoldfastError:
    reply = codec.decode_answer(*codec.encode_answer(Answer(Place(1, 0, 1), Failed(error)))).reply
    assert isinstance(reply, Failed)
    return reply.error


@pytest.mark.parametrize(
    ("family", "happened"),
    [
        (Misuse, "no"),
        (Refused, "no"),
        (Unavailable, "no"),
        (Indeterminate, "maybe"),
        (ProtocolViolated, "no"),
        (InvariantBroken, "maybe"),
    ],
)
def test_a_family_says_whether_it_happened(family: type[HoldfastError], happened: str) -> None:
    assert {leaf.happened for leaf in BY_CODE.values() if issubclass(leaf, family)} == {happened}


def test_a_leaf_has_exactly_its_facts() -> None:
    wrong: list[dict[str, Any]] = [{}, {"lease": 5}, {"lease_id": 5, "group": "g"}]
    for facts in wrong:
        with pytest.raises(TypeError):
            LeaseExpired(**facts)
    assert LeaseExpired(lease_id=5).facts == {"lease_id": 5}


def test_errors_are_equal_by_kind_and_facts() -> None:
    assert LeaseExpired(lease_id=5) == LeaseExpired("in other words", lease_id=5)
    assert LeaseExpired(lease_id=5) != LeaseExpired(lease_id=6)
    assert len({LeaseExpired(lease_id=5), LeaseExpired(lease_id=5)}) == 1


def test_a_text_of_its_own_replaces_that_of_the_facts() -> None:
    assert str(BadFilter(position=3)) == "the filter is wrong at position 3"
    assert str(BadFilter("at position 3: what is this?", position=3)) == "at position 3: what is this?"


def test_a_code_is_given_once() -> None:
    with pytest.raises(TypeError):
        type("Again", (Misuse,), {"code": BadValue.code})
    assert BY_CODE[BadValue.code] is BadValue
