"""Values that are built quickly are the values that a plain frozen dataclass builds."""

import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from holdfast.client.protocol.quick import quick


@dataclass(frozen=True, slots=True)
class Plain:
    first: int
    last: int = 7

    def __post_init__(self) -> None:
        if self.first > self.last:
            raise ValueError("backwards")


@quick
@dataclass(frozen=True, slots=True)
class Quick:
    first: int
    last: int = 7

    def __post_init__(self) -> None:
        if self.first > self.last:
            raise ValueError("backwards")


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    first: int
    last: int = 7


def test_a_quick_value_has_the_fields_defaults_and_text_of_a_plain_one() -> None:
    assert repr(Quick(1)) == repr(Plain(1)).replace("Plain", "Quick")
    assert (Quick(1, last=3).first, Quick(1, last=3).last) == (1, 3)
    assert Named(first=1) == Named(first=1, last=7)
    assert hash(Quick(1, 2)) == hash(Plain(1, 2))


def test_a_quick_value_is_of_its_own_class_and_frozen() -> None:
    value = Quick(1)
    assert type(value) is Quick
    with pytest.raises(FrozenInstanceError):
        value.first = 2  # type: ignore[misc]


def test_a_quick_value_checks_itself_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="backwards"):
        Quick(8)


def test_a_quick_value_refuses_the_arguments_that_a_plain_one_refuses() -> None:
    with pytest.raises(TypeError):
        Quick()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Named(1)  # type: ignore[call-arg]


def test_a_quick_value_can_be_replaced_and_pickled() -> None:
    assert replace(Quick(1), last=9) == Quick(1, 9)
    assert pickle.loads(pickle.dumps(Quick(1, 2))) == Quick(1, 2)


def test_a_field_that_is_made_anew_for_each_value_is_refused() -> None:
    with pytest.raises(TypeError, match="no plain field"):

        @quick
        @dataclass(frozen=True, slots=True)
        class Made:
            items: list[int] = field(default_factory=list)
