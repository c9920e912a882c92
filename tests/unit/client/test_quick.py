"""Values that are built quickly are the values that a plain frozen dataclass builds."""

import pickle
from copy import copy
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from holdfast.client.protocol import quick as cheap
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


# Classes that are cheap to define ---------------------------------------------------------------------------


@cheap.dataclass(frozen=True, slots=True)
class Cheap:
    first: int
    last: int = 7

    def __post_init__(self) -> None:
        if self.first > self.last:
            raise ValueError("backwards")


@cheap.dataclass(frozen=True, slots=True, kw_only=True)
class Longer(Cheap):
    kind: str = "x"  # a name that the compiled text might use itself
    secret: bytes = field(default=b"", repr=False)


@cheap.dataclass(frozen=True, slots=True)
class Empty:
    """Nothing to say."""


@cheap.dataclass(frozen=True, slots=True)
class Single:
    items: tuple[int, ...]


def test_a_cheap_class_is_the_plain_one_to_all_who_use_it() -> None:
    assert repr(Cheap(1)) == repr(Plain(1)).replace("Plain", "Cheap")
    assert [(f.name, f.default) for f in fields(Cheap)] == [(f.name, f.default) for f in fields(Plain)]
    assert (Cheap(1) == Cheap(1, last=7), Cheap(1) == Cheap(2), Cheap(1) == Plain(1)) == (True, False, False)  # type: ignore[comparison-overlap]
    assert hash(Cheap(1, 2)) == hash(Plain(1, 2))
    assert replace(Cheap(1), last=9) == Cheap(1, 9)
    assert pickle.loads(pickle.dumps(Cheap(1, 2))) == copy(Cheap(1, 2)) == Cheap(1, 2)
    match Cheap(1, 2):
        case Cheap(first, last):
            assert (first, last) == (1, 2)
    with pytest.raises(ValueError, match="backwards"):
        Cheap(8)


@pytest.mark.parametrize("value", [Cheap(1), Longer(1), Empty(), Single(())])
def test_a_cheap_value_cannot_be_changed(value: object) -> None:
    with pytest.raises(FrozenInstanceError):
        value.first = 2  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        del value.first  # type: ignore[attr-defined]
    assert not hasattr(value, "__dict__")
    assert pickle.loads(pickle.dumps(value)) == value
    assert hash(value) == hash(copy(value))


def test_a_cheap_class_may_inherit_another() -> None:
    value = Longer(1, kind="y", secret=b"hush")
    assert repr(value) == "Longer(first=1, last=7, kind='y')"
    assert value != Longer(1, kind="y") and value != Cheap(1)
    assert replace(value, kind="x", secret=b"") == Longer(1)
    with pytest.raises(ValueError, match="backwards"):
        Longer(9)


def test_cheap_values_of_one_field_and_of_none_compare_by_content() -> None:
    assert Single((1, 2)) == Single((1, 2)) != Single((1,))
    assert Empty() == Empty() and repr(Empty()) == "Empty()"


def test_what_is_not_frozen_with_slots_is_left_to_the_library() -> None:
    with pytest.raises(TypeError):
        cheap.dataclass(frozen=True, slots=False)
