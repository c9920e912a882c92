"""The small language of `where=`, which selects dead letters.

A filter is text from a user, so nothing here trusts it: it is parsed by hand, typed before it sees a row,
bounded in length, depth and nodes, and costs time in proportion to the row, whatever it says. It is
evaluated by the leader on rows, never inside the fold: what enters the log are the versions it chose.

Logic is that of SQL: a test of a null is unknown (here `None`), and a row is selected only where the
whole expression is true.
"""

import difflib
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NoReturn, Protocol, TypeAlias, assert_never, cast

from holdfast.client.protocol.errors import BadFilter
from holdfast.client.protocol.limits import U63_MAX

EXPRESSION_MAX_CHARS: Final = 4096  # a screenful or two; a longer list of versions belongs in several calls
EXPRESSION_MAX_DEPTH: Final = 32  # parentheses and `not` in each other; keeps recursion far from the stack
EXPRESSION_MAX_NODES: Final = 256  # tests and connectives; bounds the time one row can take
IN_LIST_MAX: Final = 256  # the same for one list, whose values are looked up and not walked

Kind: TypeAlias = Literal["int", "str", "bool"]
Scalar: TypeAlias = int | str  # a bool is an int to Python; the kind beside it tells them apart

FIELDS: Final[Mapping[str, Kind]] = {
    "dead_seq": "int",
    "version": "int",
    "attempts": "int",
    "delivery_count": "int",
    "first_delivered_ms": "int",
    "last_delivered_ms": "int",
    "client_seq": "int",
    "died_ms": "int",
    "origin_version": "int",
    "payload_bytes": "int",
    "reason": "str",
    "last_error": "str",
    "consumer_id": "str",
    "client_id": "str",
    "key": "str",
    "group": "str",
    "origin_queue": "str",
    "move_failed": "bool",
}


class Row(Protocol):
    """A dead letter by field name, and `headers`, a mapping of str to str; a dict, or a lazy decoder."""

    def __getitem__(self, name: str, /) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What every selected row is known to satisfy, for an index to start from; None where nothing is known.

    Minimum and maximum are both included and lie within 0 and `U63_MAX`, so they can be packed as they are.
    A minimum above its maximum means that no row can match.
    """

    reason: str | None = None
    died_min_ms: int | None = None
    died_max_ms: int | None = None
    version_min: int | None = None
    version_max: int | None = None


@dataclass(frozen=True, slots=True)
class Filter:
    """A checked expression. Immutable, so one may serve every page of a query."""

    text: str
    root: "Node"

    def matches(self, row: Row) -> bool:
        """Whether the expression is true of this row; unknown is not true."""
        return _truth(self.root, row) is True

    def bounds(self) -> Bounds:
        """Bounds that hold for every row that matches; rows within them may still not match."""
        return _bounds(self.root)


def parse(text: str) -> Filter:
    """Check an expression whole, types included; raises BadFilter with the position of the first fault."""
    if len(text) > EXPRESSION_MAX_CHARS:
        _refuse(
            f"expected at most {EXPRESSION_MAX_CHARS} characters, found {len(text)}; "
            "split the filter and ask once for each part",
            EXPRESSION_MAX_CHARS,
        )
    return Filter(text, _Parser(text).expression())


# The tree. Kinds have been checked when a node is built, so evaluation does not look at them.


@dataclass(frozen=True, slots=True)
class Field:
    name: str


@dataclass(frozen=True, slots=True)
class Header:
    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    value: Scalar


Operand: TypeAlias = Field | Header | Constant


@dataclass(frozen=True, slots=True)
class Compare:
    left: Operand
    symbol: str
    right: Operand


@dataclass(frozen=True, slots=True)
class Like:
    operand: Operand
    matcher: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class In:
    operand: Operand
    values: frozenset[Scalar]


@dataclass(frozen=True, slots=True)
class IsNull:
    operand: Operand


@dataclass(frozen=True, slots=True)
class Holds:
    """A bool that stands alone, as in `not move_failed`."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Not:
    part: "Node"


@dataclass(frozen=True, slots=True)
class And:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Or:
    parts: "tuple[Node, ...]"


Node: TypeAlias = Compare | Like | In | IsNull | Holds | Not | And | Or

_COMPARE: Final[Mapping[str, Callable[[Scalar, Scalar], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_FLIPPED: Final = {"=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}


def _truth(node: Node, row: Row) -> bool | None:
    match node:
        case Compare(left, symbol, right):
            first, second = _value(left, row), _value(right, row)
            return None if first is None or second is None else _COMPARE[symbol](first, second)
        case Like(operand, matcher):
            value = _value(operand, row)
            return None if value is None else matcher(str(value))
        case In(operand, values):
            value = _value(operand, row)
            return None if value is None else value in values
        case IsNull(operand):
            return _value(operand, row) is None
        case Holds(operand):
            value = _value(operand, row)
            return None if value is None else bool(value)
        case Not(part):
            truth = _truth(part, row)
            return None if truth is None else not truth
        case And(parts):
            return _all(parts, row)
        case Or(parts):
            return _any(parts, row)
        case unknown:
            assert_never(unknown)


def _all(parts: tuple[Node, ...], row: Row) -> bool | None:
    result: bool | None = True
    for part in parts:
        truth = _truth(part, row)
        if truth is False:
            return False
        if truth is None:
            result = None
    return result


def _any(parts: tuple[Node, ...], row: Row) -> bool | None:
    result: bool | None = False
    for part in parts:
        truth = _truth(part, row)
        if truth is True:
            return True
        if truth is None:
            result = None
    return result


def _value(operand: Operand, row: Row) -> Scalar | None:
    match operand:
        case Field(name):
            return cast(Scalar | None, row[name])
        case Header(name):
            return cast(Mapping[str, str], row["headers"]).get(name)
        case Constant(value):
            return value
        case unknown:
            assert_never(unknown)


def _bounds(root: Node) -> Bounds:
    reason: str | None = None
    low: dict[str, int] = {}
    high: dict[str, int] = {}
    for name, symbol, value in _conjuncts(root):
        if isinstance(value, str):
            if name == "reason" and symbol == "=" and reason is None:
                reason = value  # where two are asked for no row matches, and either is a sound bound
            continue
        if symbol in ("=", ">", ">="):
            least = value + (symbol == ">")
            low[name] = max(low.get(name, 0), min(least, U63_MAX))
        if symbol in ("=", "<", "<="):
            most = value - (symbol == "<")
            high[name] = min(high.get(name, U63_MAX), max(most, 0))
    return Bounds(
        reason=reason,
        died_min_ms=low.get("died_ms"),
        died_max_ms=high.get("died_ms"),
        version_min=low.get("version"),
        version_max=high.get("version"),
    )


def _conjuncts(node: Node) -> list[tuple[str, str, Scalar]]:
    """Comparisons of a field with a constant that must all be true where `node` is."""
    match node:
        case And(parts):
            return [found for part in parts for found in _conjuncts(part)]
        case Compare(Field(name), symbol, Constant(value)):
            return [(name, symbol, value)]
        case Compare(Constant(value), symbol, Field(name)):
            return [(name, _FLIPPED[symbol], value)]
        case In(Field(name), values) if len(values) == 1:
            return [(name, "=", value) for value in values]
        case In(Field(name), values):
            numbers = [value for value in values if isinstance(value, int)]
            return [(name, ">=", min(numbers)), (name, "<=", max(numbers))] if numbers else []
        case _:
            return []


# `like`. Neither matcher goes back over a value, so many `%` and `_` cost no more than a few.


def _like(pattern: str) -> Callable[[str], bool]:
    """A matcher for a pattern that does not end inside an escape."""
    pieces: list[list[str | None]] = [[]]  # between the `%`; None stands for `_`
    characters = iter(pattern)
    for character in characters:
        if character == "%":
            pieces.append([])
        elif character == "_":
            pieces[-1].append(None)
        else:
            pieces[-1].append(next(characters) if character == "\\" else character)
    if any(item is None for piece in pieces for item in piece):
        return _like_by_bits(pieces)
    texts = ["".join(item for item in piece if item is not None) for piece in pieces]
    if len(texts) == 1:
        return partial(operator.eq, texts[0])
    return partial(_like_by_pieces, texts[0], tuple(filter(None, texts[1:-1])), texts[-1])


def _like_by_pieces(head: str, middle: tuple[str, ...], tail: str, value: str) -> bool:
    """Without `_`, the leftmost place of each piece is the best one."""
    if len(value) < len(head) + len(tail) or not value.startswith(head) or not value.endswith(tail):
        return False
    at, end = len(head), len(value) - len(tail)
    for piece in middle:
        at = value.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True


def _like_by_bits(pieces: list[list[str | None]]) -> Callable[[str], bool]:
    """With `_`, run every way to match at once: bit n is set while the first n items may be used up."""
    items = [item for piece in pieces for item in piece]
    stays = 0  # bit n: a `%` stands before item n
    place = 0
    for piece in pieces[:-1]:
        place += len(piece)
        stays |= 1 << place
    wild = sum(1 << n for n, item in enumerate(items) if item is None)
    moves: dict[str, int] = {}  # by character, bit n: item n accepts it
    for n, item in enumerate(items):
        if item is not None:
            moves[item] = moves.get(item, wild) | 1 << n
    done = 1 << len(items)

    def matcher(value: str) -> bool:
        state = 1
        for character in value:
            state = (state & moves.get(character, wild)) << 1 | state & stays
            if not state:
                return False
            if state & stays & done:
                return True
        return bool(state & done)

    return matcher


# Text to tokens. A bad token is kept until the parser meets it, so that the leftmost fault is the one told.

_KEYWORDS: Final = frozenset(("and", "or", "not", "like", "in", "is", "null", "true", "false"))
_LITERALS: Final = ("string", "number", "true", "false")
_TOKEN: Final = re.compile(
    r"(?P<word>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<string>'[^']*(?:''[^']*)*')"
    r"|(?P<number>[+-]?[0-9]+(?P<rest>[A-Za-z0-9_.]*))"
    r"|(?P<foreign>==|<>|&&?|\|\|?|!(?!=)|[\"'])"
    r"|(?P<symbol><=|>=|!=|[=<>()\[\],])"
)
_BLANK: Final = re.compile(r"[ \t\r\n]*")
_FOREIGN: Final = {
    "==": "write = to compare",
    "<>": "write !=",
    "&": "write and",
    "&&": "write and",
    "|": "write or",
    "||": "write or",
    "!": "write not",
    '"': "write strings in single quotes",
    "'": "close the string with a single quote, and double a quote inside it",
}


@dataclass(frozen=True, slots=True)
class _Token:
    """`kind` is a symbol or keyword itself, or word, string, number, end, bad."""

    kind: str
    text: str
    start: int
    value: Scalar = ""
    fault: str = ""

    def __str__(self) -> str:
        match self.kind:
            case "end":
                return "the end of the text"
            case "string" | "number":
                return f"the {self.kind} {_short(self.text)}"
            case _:
                return _short(self.text)


def _scan(text: str, at: int) -> _Token:
    """The next token at or after `at`."""
    blank = _BLANK.match(text, at)
    start = at if blank is None else blank.end()
    if start == len(text):
        return _Token("end", "", start)
    found = _TOKEN.match(text, start)
    if found is None:
        odd = text[start]
        fault = f"found the character {odd!a} (U+{ord(odd):04X}); only 'strings' may hold it"
        return _Token("bad", odd, start, fault=fault)
    lexeme = found.group()
    match found.lastgroup:
        case "word":
            folded = lexeme.lower()
            return _Token(folded if folded in _KEYWORDS else "word", lexeme, start)
        case "string":
            return _Token("string", lexeme, start, lexeme[1:-1].replace("''", "'"))
        case "foreign" if lexeme == "'":
            return _Token("bad", lexeme, start, fault=f"found a string without its end; {_FOREIGN[lexeme]}")
        case "foreign":
            return _Token("bad", lexeme, start, fault=f"found {lexeme}; {_FOREIGN[lexeme]}")
        case "number":
            return _number(lexeme, found.group("rest"), start)
        case _:
            return _Token(lexeme, lexeme, start)


def _number(lexeme: str, rest: str, start: int) -> _Token:
    if rest:
        fault = f"found {_short(lexeme)}; numbers are whole and plain, as 1500 or -3"
        return _Token("bad", lexeme, start, fault=fault)
    value = int(lexeme)
    if not -U63_MAX - 1 <= value <= U63_MAX:
        fault = f"found {_short(lexeme)}; numbers lie between -2^63 and 2^63-1"
        return _Token("bad", lexeme, start, fault=fault)
    return _Token("number", lexeme, start, value)


def _short(text: str) -> str:
    """Foreign text as a message may show it: printable and not long."""
    shown = text if len(text) <= 40 else text[:37] + "..."
    return shown if shown.isprintable() and shown.isascii() else ascii(shown)


# Tokens to the tree, by recursive descent: or, and, not, then one test.

_NAMED: Final[Mapping[Kind, str]] = {"int": "a whole number", "str": "a string", "bool": "true or false"}
_WRITE: Final[Mapping[Kind, str]] = {
    "int": "write a number without quotes, as 5",
    "str": "write a string in single quotes, as 'text'",
    "bool": "write true or false without quotes",
}
_HEADER: Final = "header['name']"


@dataclass(frozen=True, slots=True)
class _Typed:
    """An operand with what messages need to know of it."""

    operand: Operand
    kind: Kind
    shown: str
    start: int

    def __str__(self) -> str:
        return self.shown


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._token = _scan(text, 0)
        self._nodes = 0

    def expression(self) -> Node:
        if self._token.kind == "end":
            self._expected("a condition", "write one, as attempts >= 5, or leave where= out to select all")
        node = self._disjunction(0)
        if self._token.kind != "end":
            self._expected("and, or, or the end of the text", self._remedy_after_test())
        return node

    def _disjunction(self, depth: int) -> Node:
        parts = [self._conjunction(depth)]
        while self._token.kind == "or":
            self._count()
            self._next()
            parts.append(self._conjunction(depth))
        return parts[0] if len(parts) == 1 else Or(tuple(parts))

    def _conjunction(self, depth: int) -> Node:
        parts = [self._negation(depth)]
        while self._token.kind == "and":
            self._count()
            self._next()
            parts.append(self._negation(depth))
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def _negation(self, depth: int) -> Node:
        if self._token.kind not in ("not", "("):
            return self._test()
        if depth == EXPRESSION_MAX_DEPTH:
            self._expected(f"at most {EXPRESSION_MAX_DEPTH} levels of parentheses and not", "flatten the expression")
        if self._token.kind == "not":
            self._count()
            self._next()
            return Not(self._negation(depth + 1))
        opened = self._next()
        node = self._disjunction(depth + 1)
        if self._token.kind != ")":
            expected = f"and, or, or a ) for the ( at position {opened.start}"
            self._expected(expected, self._remedy_after_test())
        self._next()
        return node

    def _test(self) -> Node:
        self._count()
        left = self._operand("a condition", f"begin with a field ({_listed()}), not or (")
        match self._token.kind:
            case symbol if symbol in _COMPARE:
                return self._comparison(left)
            case "like":
                return self._like(left)
            case "in":
                return self._in(left)
            case "is":
                return self._is(left)
            case "not":
                self._next()
                return Not(self._negated(left))
            case _ if left.kind == "bool":
                return Holds(left.operand)
            case _:
                self._expected(
                    f"=, !=, <, <=, >, >=, like, in, not or is after {left}", self._remedy_for_operator(left)
                )

    def _negated(self, left: _Typed) -> Node:
        match self._token.kind:
            case "like":
                return self._like(left)
            case "in":
                return self._in(left)
            case _:
                remedy = f"write {left} is not null, or put not before {left}"
                self._expected("like or in after not", remedy)

    def _comparison(self, left: _Typed) -> Node:
        symbol = self._token
        if left.kind == "bool" and symbol.kind not in ("=", "!="):
            self._expected(f"= or != after {left}", "true and false have no order")
        self._next()
        right = self._operand(f"a value after {symbol.kind}", _WRITE[left.kind])
        if left.kind != right.kind:
            constant_first = isinstance(left.operand, Constant) and not isinstance(right.operand, Constant)
            wrong, known = (left, right) if constant_first else (right, left)
            found, remedy = str(wrong), _WRITE[known.kind]
            if not isinstance(wrong.operand, Constant):
                found = f"{wrong}, which is {_NAMED[wrong.kind]}"
                remedy = f"compare {known} with another field of its type, or {remedy}"
            expected = f"{_NAMED[known.kind]} to compare with {known}"
            _refuse(f"expected {expected}, found {found}; {remedy}", wrong.start)
        return Compare(left.operand, symbol.kind, right.operand)

    def _like(self, left: _Typed) -> Node:
        if left.kind != "str":
            _refuse(
                f"expected a string before like, found {left}, which is {_NAMED[left.kind]}; write =",
                left.start,
            )
        self._next()
        token = self._token
        if token.kind != "string":
            self._expected("a pattern after like", "write it in single quotes, as 'time%'")
        pattern = str(token.value)
        if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
            _refuse(
                "expected a character after the \\ in the pattern, found its end; write \\\\ for a backslash",
                token.start + len(token.text) - 2,
            )
        self._next()
        return Like(left.operand, _like(pattern))

    def _in(self, left: _Typed) -> Node:
        self._next()
        self._take("(", "( after in", f"write a list, as {left} in (…)")
        values: set[Scalar] = set()
        for count in range(1, IN_LIST_MAX + 2):
            token = self._token
            if token.kind not in _LITERALS:
                self._expected("a value in the list", f"lists hold values only; {_WRITE[left.kind]}")
            if count > IN_LIST_MAX:
                self._expected(f"at most {IN_LIST_MAX} values in a list", "split the list and ask once for each part")
            value, kind = _constant(token)
            if kind != left.kind:
                self._expected(f"{_NAMED[left.kind]} in a list for {left}", _WRITE[left.kind])
            values.add(value)
            self._next()
            if self._token.kind != ",":
                break
            self._next()
        self._take(")", ", or ) in the list", "part values with commas and close the list")
        return In(left.operand, frozenset(values))

    def _is(self, left: _Typed) -> Node:
        self._next()
        negated = self._token.kind == "not"
        if negated:
            self._next()
        self._take(
            "null",
            "null" if negated else "null or not null",
            f"to compare {left} with a value, write = or !=",
        )
        return Not(IsNull(left.operand)) if negated else IsNull(left.operand)

    def _operand(self, expected: str, remedy: str) -> _Typed:
        token = self._token
        if token.kind in _LITERALS:
            value, kind = _constant(token)
            self._next()
            return _Typed(Constant(value), kind, str(token), token.start)
        if token.kind == "null":
            self._expected(expected, "a null equals nothing; write is null or is not null")
        if token.kind != "word":
            self._expected(expected, remedy)
        if token.text == "header":
            return self._header(token.start)
        if token.text not in FIELDS:
            self._expected("the name of a field", _remedy_for_name(token.text))
        self._next()
        return _Typed(Field(token.text), FIELDS[token.text], token.text, token.start)

    def _header(self, start: int) -> _Typed:
        self._next()
        self._take("[", "[ after header", f"write {_HEADER}")
        name = self._take("string", "the name of the header", f"write it in single quotes, as {_HEADER}")
        self._take("]", "] after the name of the header", f"write {_HEADER}")
        return _Typed(Header(str(name.value)), "str", _short(f"header[{name.text}]"), start)

    def _count(self) -> None:
        self._nodes += 1
        if self._nodes > EXPRESSION_MAX_NODES:
            self._expected(
                f"at most {EXPRESSION_MAX_NODES} tests, and, or and not together",
                "use in (…) for alternatives, or split the filter",
            )

    def _take(self, kind: str, expected: str, remedy: str) -> _Token:
        if self._token.kind != kind:
            self._expected(expected, remedy)
        return self._next()

    def _next(self) -> _Token:
        taken = self._token
        self._token = _scan(self._text, taken.start + len(taken.text))
        return taken

    def _expected(self, expected: str, remedy: str) -> NoReturn:
        """Refuse the present token; a bad one knows better than the parser what is wrong with it."""
        token = self._token
        _refuse(f"expected {expected}, {token.fault or f'found {token}; {remedy}'}", token.start)

    def _remedy_after_test(self) -> str:
        if self._token.kind in _COMPARE:
            return "compare two values at a time and join with and, as attempts > 1 and attempts < 5"
        return "join conditions with and or or"

    def _remedy_for_operator(self, left: _Typed) -> str:
        if self._token.text.lower() == "between":
            return f"write {left} >= low and {left} <= high"
        return "for example attempts >= 5 or key is null"


def _refuse(message: str, position: int) -> NoReturn:
    raise BadFilter(f"at position {position}: {message}", position=position)


def _constant(token: _Token) -> tuple[Scalar, Kind]:
    match token.kind:
        case "string":
            return token.value, "str"
        case "number":
            return token.value, "int"
        case _:
            return token.kind == "true", "bool"


def _listed() -> str:
    return ", ".join((*FIELDS, _HEADER))


def _remedy_for_name(name: str) -> str:
    near = difflib.get_close_matches(name.lower()[:40], (*FIELDS, "header"), n=1)
    guess = "".join(f"did you mean {_HEADER if found == 'header' else found}? " for found in near)
    return f"{guess}the fields are {_listed()}; a string stands in single quotes"
