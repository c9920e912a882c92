"""Frozen values at the price of plain ones: cheap to define, cheap to build.

The library's `dataclass` compiles six methods for each class, which was most of the time in which the client was
imported; and its frozen `__init__` sets each field by a call of `object.__setattr__`, which is most of the time in
which a small value is built. Here methods are shared, and an `__init__` is compiled when the first value is built.
"""

import dataclasses
from dataclasses import MISSING, FrozenInstanceError, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

_SET_CLASS = object.__dict__["__class__"].__set__
_set_field = object.__setattr__

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(*, frozen: bool, slots: bool, kw_only: bool = False):
        """As the library's, for frozen classes with slots: the same fields, text, equality, hash and pickles."""
        if not frozen or not slots:
            raise TypeError("this is for frozen classes with slots; take the library's for others")

        def define(kind):
            if kind.__doc__ is None:
                kind.__doc__ = kind.__name__  # else the library works out a signature
            kind = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(kind)
            _share_methods(kind)

            def __init__(self, *positional, **named):  # noqa: N807
                _compile_init(kind)
                kind.__init__(self, *positional, **named)

            kind.__init__ = __init__
            return kind

        return define


def quick(kind: type[T]) -> type[T]:
    """Give a frozen dataclass of the library, with slots, an `__init__` that does the same in half the time."""
    _compile_init(kind)
    return kind


def _share_methods(kind: Any) -> None:
    names = [field.name for field in fields(kind)]
    shown = [field.name for field in fields(kind) if field.repr]
    content: Any = lambda value: tuple(getattr(value, name) for name in names)  # noqa: E731
    if len(names) > 1:
        content = attrgetter(*names)

    def equal(self: Any, other: Any) -> Any:
        return content(self) == content(other) if other.__class__ is self.__class__ else NotImplemented

    def hashed(self: Any) -> int:
        return hash(content(self))

    def shows(self: Any) -> str:
        return f"{self.__class__.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def get_state(self: Any) -> Any:
        return [getattr(self, name) for name in names]

    def set_state(self: Any, state: Any) -> None:
        for name, value in zip(names, state, strict=True):
            _set_field(self, name, value)

    kind.__eq__, kind.__hash__, kind.__repr__ = equal, hashed, kind.__dict__.get("__repr__", shows)
    kind.__getstate__, kind.__setstate__ = get_state, set_state
    kind.__setattr__, kind.__delattr__ = _refuse_to_set, _refuse_to_delete


def _refuse_to_set(self: Any, name: str, value: Any) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _compile_init(kind: Any) -> None:
    """While its fields are set, the value is of a twin class with the same slots that is not frozen; nobody else has
    seen it then. `__post_init__` meets it frozen. A class that inherits fields has no twin: its layout is its own.
    """
    positional = ["self"]
    named: list[str] = []
    names: list[str] = []
    known: dict[str, Any] = {"_set_class": _SET_CLASS, "_set_field": _set_field, "_kind": kind}  # no field is named so
    for field in fields(kind):
        if not field.init or field.default_factory is not MISSING:
            raise TypeError(f"{kind.__name__}.{field.name} is no plain field")
        parameter = field.name
        if field.default is not MISSING:
            parameter += f"=default_{field.name}"
            known[f"default_{field.name}"] = field.default
        (named if field.kw_only else positional).append(parameter)
        names.append(field.name)
    lines = [f"def __init__({', '.join([*positional, *(['*', *named] if named else [])])}):"]
    if tuple(names) == kind.__slots__:
        known["_twin"] = type(kind.__name__, (), {"__slots__": tuple(names)})
        lines.append("    _set_class(self, _twin)")
        lines += [f"    self.{name} = {name}" for name in names]
        lines.append("    self.__class__ = _kind")
    else:
        lines += [f"    _set_field(self, {name!r}, {name})" for name in names]
    if hasattr(kind, "__post_init__"):
        lines.append("    self.__post_init__()")
    exec(compile("\n".join(lines), f"<quick {kind.__name__}>", "exec"), known)
    known["__init__"].__annotations__ = {field.name: field.type for field in fields(kind)} | {"return": None}
    known["__init__"].__qualname__ = f"{kind.__qualname__}.__init__"
    kind.__init__ = known["__init__"]
