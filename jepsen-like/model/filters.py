"""The small language that selects dead letters (D3), as `docs/filters.md` tells it: text in, a question to a row out.

A test answers true, false or, of a null, `None` for unknown; a row is selected where the answer is true.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from holdfast.client.protocol.errors import BadFilter
from holdfast.client.protocol.replies import DeadRow

Test = Callable[[DeadRow], bool | None]

CHARACTERS, DEPTH, NODES, VALUES = 4_096, 32, 256, 256

_KEYWORDS = ("and", "or", "not", "like", "in", "is", "null", "true", "false")
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[+-]?[0-9]+(?![A-Za-z0-9_]))|(?P<string>'(?:[^']|'')*')|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<sign>!=|<=|>=|[=<>(),\[\]]))"
)
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda left, right: bool(left == right),
    "!=": lambda left, right: bool(left != right),
    "<": lambda left, right: bool(left < right),
    "<=": lambda left, right: bool(left <= right),
    ">": lambda left, right: bool(left > right),
    ">=": lambda left, right: bool(left >= right),
}


def _header(name: str) -> Callable[[DeadRow], str | None]:
    return lambda row: dict(row.headers).get(name)


def _origin_version(row: DeadRow) -> int | None:
    text = dict(row.headers).get("holdfast-origin-version")
    return None if text is None else int(text)


FIELDS: dict[str, tuple[type, Callable[[DeadRow], Any]]] = {
    "dead_seq": (int, lambda row: row.dead_seq),
    "version": (int, lambda row: row.version),
    "attempts": (int, lambda row: row.attempts),
    "delivery_count": (int, lambda row: row.delivery_count),
    "first_delivered_ms": (int, lambda row: row.first_delivered_ms),
    "last_delivered_ms": (int, lambda row: row.last_delivered_ms),
    "died_ms": (int, lambda row: row.died_ms),
    "payload_bytes": (int, lambda row: len(row.payload)),
    "reason": (str, lambda row: row.reason),
    "last_error": (str, lambda row: row.last_error),
    "consumer_id": (str, lambda row: row.consumer_id),
    "client_id": (str, lambda row: row.client_id),
    "client_seq": (int, lambda row: row.client_seq),
    "key": (str, lambda row: row.key),
    "group": (str, lambda row: row.group),
    "origin_queue": (str, _header("holdfast-origin-queue")),
    "origin_version": (int, _origin_version),
    "move_failed": (bool, lambda row: row.move_failed),
}


@dataclass(frozen=True)
class Token:
    kind: str  # number, string, name, sign, keyword or end
    text: str
    position: int


@dataclass(frozen=True)
class Operand:
    kind: type
    read: Callable[[DeadRow], Any]
    position: int


def parse(text: str) -> Callable[[DeadRow], bool]:
    """Raises BadFilter for what is not in the language. Without a text every row is selected."""
    if not text.strip():
        return lambda row: True
    if len(text) > CHARACTERS:
        _refuse(CHARACTERS, "the filter is too long")
    parser = _Parser(_tokens(text))
    test = parser.expression(0)
    parser.expect("end", "")
    return lambda row: test(row) is True


def _refuse(position: int, problem: str) -> NoReturn:
    raise BadFilter(f"at position {position}: {problem}", position=position)


def _tokens(text: str) -> list[Token]:
    tokens, at = [], 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None:
            _refuse(len(text) - len(text[at:].lstrip()), "this is no word, number, string or sign")
        kind = str(match.lastgroup)
        word = match.group(kind)
        if kind == "name" and word.lower() in _KEYWORDS:
            kind, word = "keyword", word.lower()
        tokens.append(Token(kind, word, match.start(str(match.lastgroup))))
        at = match.end()
    return [*tokens, Token("end", "", len(text))]


class _Parser:
    """Recursive descent, one method for each line of the grammar."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._nodes = 0

    @property
    def _next(self) -> Token:
        return self._tokens[0]

    def _take(self, kind: str, *texts: str) -> Token | None:
        """The next token, if it is one of these."""
        if self._next.kind == kind and (not texts or self._next.text in texts):
            return self._tokens.pop(0)
        return None

    def expect(self, kind: str, *texts: str) -> Token:
        token = self._next
        return self._take(kind, *texts) or _refuse(token.position, f"expected {' or '.join(texts) or kind}")

    def _node(self, token: Token) -> None:
        self._nodes += 1
        if self._nodes > NODES:
            _refuse(token.position, f"there are more than {NODES} tests")

    def expression(self, depth: int) -> Test:
        test = self._conjunction(depth)
        while token := self._take("keyword", "or"):
            self._node(token)
            test = _or(test, self._conjunction(depth))
        return test

    def _conjunction(self, depth: int) -> Test:
        test = self._negation(depth)
        while token := self._take("keyword", "and"):
            self._node(token)
            test = _and(test, self._negation(depth))
        return test

    def _negation(self, depth: int) -> Test:
        token = self._next
        if token.text in ("not", "(") and token.kind in ("keyword", "sign") and depth == DEPTH:
            _refuse(token.position, f"more than {DEPTH} are within each other")
        if self._take("keyword", "not"):
            self._node(token)
            return _not(self._negation(depth + 1))
        if self._take("sign", "("):
            test = self.expression(depth + 1)
            self.expect("sign", ")")
            return test
        return self._test()

    def _test(self) -> Test:
        left = self._operand()
        token = self._next
        self._node(token)
        if sign := self._take("sign", *_COMPARISONS):
            return self._comparison(left, sign)
        if self._take("keyword", "is"):
            negated = self._take("keyword", "not") is not None
            self.expect("keyword", "null")
            return lambda row: (left.read(row) is None) is not negated
        negated = self._take("keyword", "not") is not None
        if self._take("keyword", "like"):
            test = self._like(left)
        elif self._take("keyword", "in"):
            test = self._in(left)
        elif negated:
            _refuse(self._next.position, "expected like or in")
        elif left.kind is not bool:
            _refuse(token.position, "expected a comparison")
        else:
            return _known(left, lambda value: bool(value))
        return _not(test) if negated else test

    def _comparison(self, left: Operand, sign: Token) -> Test:
        right = self._operand()
        if left.kind is not right.kind:
            _refuse(right.position, "both sides of a comparison must have one type")
        if left.kind is bool and sign.text not in ("=", "!="):
            _refuse(sign.position, "bools are compared by = and !=")
        compare = _COMPARISONS[sign.text]

        def test(row: DeadRow) -> bool | None:
            one, other = left.read(row), right.read(row)
            return None if one is None or other is None else compare(one, other)

        return test

    def _like(self, left: Operand) -> Test:
        if left.kind is not str:
            _refuse(left.position, "like is for texts")
        pattern = self.expect("string")
        wanted = re.compile(_like_pattern(pattern), re.DOTALL)
        return _known(left, lambda value: wanted.fullmatch(value) is not None)

    def _in(self, left: Operand) -> Test:
        self.expect("sign", "(")
        values: list[Operand] = []
        while True:
            token = self._next
            value = self._value()
            if value is None:
                _refuse(token.position, "expected a value")
            if value.kind is not left.kind:
                _refuse(token.position, "the values must have the type of the field")
            if len(values) == VALUES:
                _refuse(token.position, f"there are more than {VALUES} values")
            values.append(value)
            if not self._take("sign", ","):
                break
        self.expect("sign", ")")
        return _known(left, lambda value: any(one.read(_NO_ROW) == value for one in values))

    def _operand(self) -> Operand:
        token = self._next
        value = self._value()
        if value is not None:
            return value
        name = self.expect("name")
        if name.text == "header":
            self.expect("sign", "[")
            header = self.expect("string")
            self.expect("sign", "]")
            return Operand(str, _header(_unquoted(header)), token.position)
        if name.text not in FIELDS:
            _refuse(token.position, f"{name.text} is no field")
        kind, read = FIELDS[name.text]
        return Operand(kind, read, token.position)

    def _value(self) -> Operand | None:
        token = self._next
        value: Any
        if self._take("string"):
            value = _unquoted(token)
        elif self._take("number"):
            value = int(token.text)
            if not -(2**63) <= value < 2**63:
                _refuse(token.position, "the number is too large")
        elif self._take("keyword", "true", "false"):
            value = token.text == "true"
        else:
            return None
        return Operand(type(value), lambda row: value, token.position)


_NO_ROW: Any = None  # a literal reads nothing of its row


def _unquoted(token: Token) -> str:
    return token.text[1:-1].replace("''", "'")


def _like_pattern(token: Token) -> str:
    out, characters = "", iter(_unquoted(token))
    for character in characters:
        if character == "\\":
            taken = next(characters, None)
            if taken is None:
                _refuse(token.position, "a pattern may not end with a backslash")
            out += re.escape(taken)
        else:
            out += {"%": ".*", "_": "."}.get(character) or re.escape(character)
    return out


def _known(operand: Operand, test: Callable[[Any], bool]) -> Test:
    """Unknown of a null."""

    def answer(row: DeadRow) -> bool | None:
        value = operand.read(row)
        return None if value is None else test(value)

    return answer


def _not(test: Test) -> Test:
    def answer(row: DeadRow) -> bool | None:
        value = test(row)
        return None if value is None else not value

    return answer


def _and(left: Test, right: Test) -> Test:
    def answer(row: DeadRow) -> bool | None:
        values = (left(row), right(row))
        return False if False in values else None if None in values else True

    return answer


def _or(left: Test, right: Test) -> Test:
    def answer(row: DeadRow) -> bool | None:
        values = (left(row), right(row))
        return True if True in values else None if None in values else False

    return answer
