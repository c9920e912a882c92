"""The language of `where=`: what it selects, what it refuses and where, and that no text can hurt it."""

import operator
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.client.protocol.errors import BadFilter
from holdfast.client.protocol.limits import U63_MAX
from holdfast.storage import filters
from holdfast.storage.filters import FIELDS, Bounds, parse

Row = dict[str, object]

PAGE = Path(__file__).parents[3] / "docs" / "filters.md"

ROW: Row = {
    "dead_seq": 3,
    "version": 42,
    "attempts": 5,
    "delivery_count": 7,
    "first_delivered_ms": 1_000,
    "last_delivered_ms": 9_000,
    "client_seq": 11,
    "died_ms": 10_000,
    "origin_version": None,
    "payload_bytes": 256,
    "reason": "max_attempts",
    "last_error": "it's a timeout: 100% of C:\\tmp",
    "consumer_id": None,
    "client_id": "svc",
    "key": None,
    "group": "default",
    "origin_queue": None,
    "move_failed": False,
    "headers": {"region": "eu_west", "it's": "odd", "empty": ""},
}

SELECTED = [
    "attempts = 5",
    "attempts != 4",
    "attempts < 6 and attempts <= 5 and attempts > 4 and attempts >= 5",
    "attempts = +5",
    "attempts > -1",
    "attempts=5 and(version=42)or(false)",
    "5 <= attempts",
    "delivery_count > attempts",
    "1 = 1",
    "true",
    "reason = 'max_attempts'",
    "reason >= 'max' and reason < 'may'",
    "last_error = 'it''s a timeout: 100% of C:\\tmp'",
    "last_error like 'it''s%'",
    "last_error like '%timeout%'",
    "last_error like '%time_ut: 100\\% of C:\\\\tmp'",
    "last_error like '%'",
    "last_error not like 'timeout%'",
    "last_error not like '%TIMEOUT%'",
    "header['region'] like 'eu\\_%'",
    "header['region'] = 'eu_west'",
    "header [ 'it''s' ] = 'odd'",
    "header['empty'] = ''",
    "header['none'] is null",
    "header['empty'] is not null",
    "version in (1, 42, -3)",
    "version not in (1, 2)",
    "reason in ('rejected', 'max_attempts')",
    "move_failed in (false)",
    "key is null and key IS NULL",
    "attempts is not null",
    "move_failed = false and move_failed != TRUE",
    "not move_failed",
    "not not not move_failed",
    "NOT (attempts = 4 OR version = 1) AND version = 42",
    "version = 42 or attempts = 1 and attempts = 2",
    "not attempts = 4",
    " \t\r\n attempts\n=\n5 ",
    "key = 'a' or attempts = 5",
    "not (key = 'a' and attempts = 4)",
    f"version < {U63_MAX} and version > -{U63_MAX + 1}",
]

NOT_SELECTED = [
    "attempts = 4",
    "attempts != 5",
    "version = 1 or attempts = 1",
    "(version = 42 or attempts = 1) and attempts = 2",
    "reason = 'MAX_ATTEMPTS'",
    "last_error like 'timeout'",
    "last_error like '%TIMEOUT%'",
    "header['Region'] is not null",
    "move_failed",
    "false",
    "version in (1, 2)",
    # Unknown is not true, and neither is its opposite.
    "key = 'a'",
    "key != 'a'",
    "not (key = 'a')",
    "key = key",
    "key like '%'",
    "key not like 'a'",
    "key in ('a')",
    "key not in ('a')",
    "header['none'] != 'x'",
    "origin_version < 5 or origin_version >= 5",
    "not (key = 'a' or attempts = 4)",
    "key = 'a' and attempts = 5",
]


@pytest.mark.parametrize("text", SELECTED)
def test_an_expression_that_is_true_of_a_row_selects_it(text: str) -> None:
    assert parse(text).matches(ROW)


@pytest.mark.parametrize("text", NOT_SELECTED)
def test_an_expression_that_is_false_or_unknown_selects_nothing(text: str) -> None:
    assert not parse(text).matches(ROW)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_can_be_asked_for_null(name: str) -> None:
    assert parse(f"{name} is null").matches({**ROW, name: None})
    assert parse(f"{name} is not null").matches({**ROW, name: {"int": 1, "str": "a", "bool": True}[FIELDS[name]]})


def test_a_filter_reads_only_the_fields_it_names() -> None:
    assert parse("attempts = 5 and header['a'] = 'b'").matches({"attempts": 5, "headers": {"a": "b"}})


def test_a_filter_keeps_its_text() -> None:
    assert parse(" attempts = 5").text == " attempts = 5"


LONG_LIST = "version in (" + ", ".join(["7"] * 256)

# The text, the position of the fault, and words that the message must hold: expected, found, remedy.
REFUSED: list[tuple[str, int, list[str]]] = [
    ("", 0, ["a condition", "the end of the text", "leave where= out"]),
    ("   ", 3, ["a condition", "the end of the text"]),
    ("attempts", 8, ["after attempts", "the end of the text", "attempts >= 5"]),
    ("attempts >=", 11, ["a value after >=", "the end of the text", "without quotes"]),
    ("attempts >= 5 and", 17, ["a condition", "the end of the text"]),
    ("attempts >= 5 version = 1", 14, ["and, or, or the end", "version", "join conditions"]),
    ("1 < attempts < 5", 13, ["and, or, or the end", "<", "two values at a time"]),
    ("atempts = 5", 0, ["the name of a field", "atempts", "did you mean attempts?", "header['name']"]),
    ("Reason = 'a'", 0, ["did you mean reason?"]),
    ("headers['a'] = 'b'", 0, ["did you mean header['name']?"]),
    ("payload = 'b'", 0, ["did you mean payload_bytes?"]),
    ("reason = expired", 9, ["the name of a field", "expired", "single quotes"]),
    ("xyzzy = 1", 0, ["the name of a field", "the fields are dead_seq, version"]),
    ("attempts = '5'", 11, ["a whole number", "attempts", "the string '5'", "without quotes"]),
    ("'5' = attempts", 0, ["a whole number", "attempts", "the string '5'"]),
    ("reason = 5", 9, ["a string", "reason", "the number 5", "single quotes"]),
    ("reason = true", 9, ["a string", "true", "single quotes"]),
    ("move_failed = 1", 14, ["true or false", "the number 1"]),
    ("attempts = reason", 11, ["a whole number", "reason, which is a string", "another field"]),
    ("header['a'] = 5", 14, ["a string", "header['a']", "the number 5"]),
    ("move_failed < true", 12, ["= or !=", "<", "no order"]),
    ("key = null", 6, ["a value after =", "null", "is null"]),
    ("null = key", 0, ["a condition", "null", "is null"]),
    ("key in (null)", 8, ["a value in the list", "null"]),
    ("key is 'a'", 7, ["null or not null", "the string 'a'", "= or !="]),
    ("key is not 'a'", 11, ["expected null", "the string 'a'"]),
    ("key not null", 8, ["like or in", "null", "is not null"]),
    ("key not = 'a'", 8, ["like or in", "=", "put not before key"]),
    ("attempts like '5%'", 0, ["a string before like", "attempts", "a whole number"]),
    ("key like 5", 9, ["a pattern", "the number 5", "single quotes"]),
    ("key like reason", 9, ["a pattern", "reason"]),
    (r"key like 'it''s\'", 15, ["a character after the \\", "its end", r"write \\ for"]),
    ("version in 5", 11, ["( after in", "5", "(…)"]),
    ("version in ()", 12, ["a value in the list", ")"]),
    ("version in (1,)", 14, ["a value in the list", ")"]),
    ("version in (1 2)", 14, [", or )", "the number 2", "commas"]),
    ("version in (1, 'a')", 15, ["a whole number", "the string 'a'"]),
    ("version in (attempts)", 12, ["a value in the list", "attempts", "values only"]),
    ("version in (1", 13, [", or )", "the end of the text"]),
    (LONG_LIST + ", 8)", len(LONG_LIST) + 2, ["at most 256 values", "split the list"]),
    ("(attempts = 5", 13, ["a ) for the ( at position 0", "the end of the text"]),
    ("attempts = 5)", 12, ["and, or, or the end", ")"]),
    ("()", 1, ["a condition", ")"]),
    ("(attempts) = 5", 9, ["after attempts", ")"]),
    ("header = 'a'", 7, ["[ after header", "=", "header['name']"]),
    ("header[a] = 'a'", 7, ["the name of the header", "a", "single quotes"]),
    ("header['a' = 'a'", 11, ["]", "=", "header['name']"]),
    ("attempts between 1 and 5", 9, ["between", "attempts >= low and attempts <= high"]),
    ("attempts == 5", 9, ["found ==", "write ="]),
    ("attempts <> 5", 9, ["found <>", "write !="]),
    ("move_failed && true", 12, ["found &&", "write and"]),
    ("move_failed || true", 12, ["found ||", "write or"]),
    ("!move_failed", 0, ["found !", "write not"]),
    ('reason = "a"', 9, ['found "', "single quotes"]),
    ("reason = 'a", 9, ["without its end", "close the string"]),
    ("reason = 'it's'", 13, ["and, or, or the end", "s"]),
    ("attempts = 1.5", 11, ["1.5", "whole"]),
    ("attempts = 5ms", 11, ["5ms", "whole"]),
    ("attempts = 1_000", 11, ["1_000", "whole"]),
    ("attempts = - 5", 11, ["'-' (U+002D)"]),
    (f"attempts < {U63_MAX + 1}", 11, ["2^63-1"]),
    (f"attempts > -{U63_MAX + 2}", 11, ["-2^63"]),
    ("attempts\u00a0= 5", 8, ["U+00A0"]),
    ("attempts = ٥", 11, ["U+0665"]),
    ("attempts = 5;", 12, ["';' (U+003B)"]),
    # The leftmost fault is the one told, also where a later one cannot even be read.
    ("atempts ; 'a", 0, ["did you mean attempts?"]),
    ("attempts = 'a' ;", 11, ["a whole number"]),
    ("attempts like '5%' ;", 0, ["a string before like"]),
]


@pytest.mark.parametrize(("text", "position", "words"), REFUSED)
def test_a_bad_expression_is_refused_at_its_fault(text: str, position: int, words: list[str]) -> None:
    with pytest.raises(BadFilter) as caught:
        parse(text)
    assert caught.value.position == position
    message = str(caught.value)
    assert message.startswith(f"at position {position}: expected ")
    assert "found" in message
    assert ";" in message
    for word in words:
        assert word in message


def test_a_message_shows_long_or_strange_text_short_and_printable() -> None:
    with pytest.raises(BadFilter) as caught:
        parse("attempts = '" + "\n\u2028é" * 1000 + "'")
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


# Limits


def test_the_limits_themselves_are_allowed() -> None:
    assert parse("attempts = 5".ljust(4096)).matches(ROW)
    assert parse("(" * 32 + "attempts = 5" + ")" * 32).matches(ROW)
    assert parse("not " * 32 + "attempts = 5").matches(ROW)
    assert parse(" or ".join(["true"] * 128)).matches(ROW)
    assert parse("not " + " or ".join(["false"] * 128)).matches(ROW)
    assert parse(LONG_LIST + ")").matches({"version": 7})


@pytest.mark.parametrize(
    ("text", "position", "word"),
    [
        ("attempts = 5".ljust(4097), 4096, "4096 characters"),
        ("(" * 33 + "true" + ")" * 33, 32, "32 levels"),
        ("not " * 33 + "true", 32 * 4, "32 levels"),
        ("not (" * 17 + "true" + ")" * 17, 16 * 5, "32 levels"),
        (" or ".join(["true"] * 129), 128 * 8, "256 tests"),
        ("not not " + " and ".join(["true"] * 128), 8 + 127 * 9, "256 tests"),
    ],
)
def test_one_more_than_a_limit_is_refused(text: str, position: int, word: str) -> None:
    with pytest.raises(BadFilter, match=word) as caught:
        parse(text)
    assert caught.value.position == position


@pytest.mark.parametrize(
    "text",
    [
        "(" * 1_000_000,
        "not " * 1_000_000,
        "(" * 4096,
        "'" * 4095,
        "reason = '" + "''" * 2000,
        "attempts = " + "9" * 4000,
        "x" * 4096,
        "header[" * 585,
        "true or " * 512,
    ],
)
def test_hostile_text_is_refused_quickly(text: str) -> None:
    def refused() -> None:
        with pytest.raises(BadFilter):
            parse(text)

    assert seconds(refused) < 1


# like


def regex_of(pattern: str) -> re.Pattern[str]:
    """The same pattern as a regular expression; fine for short ones."""
    translated = re.sub(
        r"\\(.)|(%)|(_)|(.)",
        lambda m: ".*" if m[2] else "." if m[3] else re.escape(m[1] or m[4]),
        pattern,
        flags=re.DOTALL,
    )
    return re.compile(translated, re.DOTALL)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


pattern_parts = st.sampled_from(["a", "b", "ab", "%", "_", "\\%", "\\_", "\\\\", "\\a", "'", "\n", "é", "%%"])
patterns = st.lists(pattern_parts, max_size=8).map("".join)
like_values = st.text(alphabet="ab%_\\'\né", max_size=12)


@given(patterns, like_values)
@example("a%a", "a")
@example("%ab%ab", "aab")
@example("%aba%ba%", "aba")
@example("%_", "")
@example("", "")
@example("_%b%_", "bb")
def test_like_agrees_with_a_regular_expression(pattern: str, value: str) -> None:
    selected = parse(f"key like {quoted(pattern)}").matches({"key": value})
    assert selected == (regex_of(pattern).fullmatch(value) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        "%a" * 1500 + "b",
        "%a_" * 1000 + "%b",
        "a_" * 1500 + "b",
        "%" + "a_" * 1500 + "b%",
        "%" * 3000 + "b",
        "%_" * 1500 + "b",
    ],
)
def test_like_takes_no_longer_for_a_hostile_pattern(pattern: str) -> None:
    chosen = parse(f"last_error like '{pattern}'")
    row = {"last_error": "a" * 20_000}
    assert seconds(lambda: chosen.matches(row)) < 1
    assert not chosen.matches(row)


# Bounds


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("attempts = 5", Bounds()),
        ("reason = 'expired'", Bounds(reason="expired")),
        ("'expired' = reason", Bounds(reason="expired")),
        ("reason in ('expired')", Bounds(reason="expired")),
        ("reason in ('expired', 'rejected')", Bounds()),
        ("reason != 'expired'", Bounds()),
        ("reason >= 'expired'", Bounds()),
        ("key = 'expired'", Bounds()),
        ("reason = key", Bounds()),
        ("version = 7", Bounds(version_min=7, version_max=7)),
        ("version > 7 and version < 10", Bounds(version_min=8, version_max=9)),
        ("7 < version and 10 > version", Bounds(version_min=8, version_max=9)),
        ("version >= 7 and version <= 10 and version >= 8", Bounds(version_min=8, version_max=10)),
        ("version in (9, 3, 5)", Bounds(version_min=3, version_max=9)),
        ("version != 7", Bounds()),
        ("version not in (7)", Bounds()),
        ("not version = 7", Bounds()),
        ("version = 7 or reason = 'expired'", Bounds()),
        ("died_ms >= 5 and (died_ms < 9 and reason = 'a')", Bounds(reason="a", died_min_ms=5, died_max_ms=8)),
        ("died_ms >= 5 and (died_ms < 9 or reason = 'a')", Bounds(died_min_ms=5)),
        ("version > 9 and version < 3", Bounds(version_min=10, version_max=2)),
        ("version > -5 and version < -3", Bounds(version_min=0, version_max=0)),
        (f"version > {U63_MAX}", Bounds(version_min=U63_MAX)),
        ("reason = 'a' and reason = 'b'", Bounds(reason="a")),
    ],
)
def test_bounds_come_from_what_must_be_true(text: str, bounds: Bounds) -> None:
    assert parse(text).bounds() == bounds


# Against a second evaluator, written plainly. A tree is a condition with its text; the text is all the parser
# sees, the condition all that the second evaluator does. Truth is 1, unknown 0, falsehood -1, so that `and`
# is the least of its parts, `or` the greatest, and `not` a change of sign.


@dataclass(frozen=True)
class Tree:
    text: str
    truth: Callable[[Row], int]


@dataclass(frozen=True)
class Term:
    text: str
    value: Callable[[Row], object]


small_ints = st.integers(-2, 3)
small_texts = st.text(alphabet="ab'%_é", max_size=3)
blanks = st.sampled_from([" ", "  ", "\n", "\t"])
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def cased(word: str) -> st.SearchStrategy[str]:
    return st.sampled_from([word, word.upper(), word.title()])


def field_term(name: str) -> Term:
    return Term(name, lambda row: row[name])


def header_term(name: str) -> Term:
    return Term(f"header[{quoted(name)}]", lambda row: row["headers"].get(name))  # type: ignore[attr-defined]


def constant_term(text: str, value: object) -> Term:
    return Term(text, lambda row: value)


def names(kind: str) -> list[str]:
    return [name for name, its in FIELDS.items() if its == kind]


CONSTANTS: dict[str, st.SearchStrategy[Term]] = {
    "int": small_ints.map(lambda n: constant_term(str(n), n)),
    "str": small_texts.map(lambda s: constant_term(quoted(s), s)),
    "bool": st.booleans().map(lambda b: constant_term(str(b).lower(), b)),
}
TERMS: dict[str, st.SearchStrategy[Term]] = {
    "int": CONSTANTS["int"] | st.sampled_from(names("int")).map(field_term),
    "str": CONSTANTS["str"] | st.sampled_from(names("str")).map(field_term) | small_texts.map(header_term),
    "bool": CONSTANTS["bool"] | st.sampled_from(names("bool")).map(field_term),
}


def sign(known: bool) -> int:
    return 1 if known else -1


@st.composite
def single_tests(draw: st.DrawFn) -> Tree:
    kind = draw(st.sampled_from(["int", "str", "bool"]))
    term = draw(TERMS[kind])
    shape = draw(st.sampled_from(["compare", "in", "null", "like" if kind == "str" else "compare"]))
    gap = draw(blanks)
    if shape == "null":
        negated = draw(st.booleans())
        words = draw(cased("is not null" if negated else "is null"))
        return Tree(f"{term.text}{gap}{words}", lambda row: sign((term.value(row) is None) != negated))
    if shape == "compare":
        other = draw(TERMS[kind])
        symbol = draw(st.sampled_from(["=", "!="] if kind == "bool" else sorted(COMPARISONS)))

        def compared(row: Row) -> int:
            first, second = term.value(row), other.value(row)
            return 0 if first is None or second is None else sign(COMPARISONS[symbol](first, second))

        return Tree(f"{term.text}{gap}{symbol}{gap}{other.text}", compared)
    negated = draw(st.booleans())
    verb = draw(cased("not " + shape if negated else shape))
    if shape == "in":
        options = draw(st.lists(CONSTANTS[kind], min_size=1, max_size=4))
        found: Callable[[object], bool] = lambda value: any(value == option.value({}) for option in options)  # noqa: E731
        target = "(" + ", ".join(option.text for option in options) + ")"
    else:
        pattern = draw(patterns)
        found = lambda value: regex_of(pattern).fullmatch(str(value)) is not None  # noqa: E731
        target = quoted(pattern)

    def tested(row: Row) -> int:
        value = term.value(row)
        return 0 if value is None else sign(found(value) != negated)

    return Tree(f"{term.text}{gap}{verb}{gap}{target}", tested)


def bare(draw: st.DrawFn) -> Tree:
    term = draw(TERMS["bool"])

    def held(row: Row) -> int:
        value = term.value(row)
        return 0 if value is None else sign(value is True)

    return Tree(term.text, held)


@st.composite
def joined(draw: st.DrawFn, inner: st.SearchStrategy[Tree]) -> Tree:
    word = draw(st.sampled_from(["and", "or", "not"]))
    if word == "not":
        only = draw(inner)
        return Tree(f"{draw(cased(word))} ({only.text})", lambda row: -only.truth(row))
    parts = draw(st.lists(inner, min_size=2, max_size=3))
    joint = f"{draw(blanks)}{draw(cased(word))}{draw(blanks)}"
    choose = min if word == "and" else max
    return Tree(joint.join(f"({part.text})" for part in parts), lambda row: choose(p.truth(row) for p in parts))


@st.composite
def flat(draw: st.DrawFn) -> Tree:
    """Tests joined without a parenthesis: `not` binds first, then `and`, then `or`."""
    alternatives: list[list[Tree]] = []
    for _ in range(draw(st.integers(1, 3))):
        alternatives.append([draw(maybe_not(tests)) for _ in range(draw(st.integers(1, 3)))])
    text = " or ".join(" and ".join(tree.text for tree in parts) for parts in alternatives)
    return Tree(text, lambda row: max(min(tree.truth(row) for tree in parts) for parts in alternatives))


def maybe_not(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return inner | inner.map(lambda tree: Tree(f"not {tree.text}", lambda row: -tree.truth(row)))


tests = single_tests() | st.composite(bare)()
trees = st.recursive(tests | flat(), joined, max_leaves=8)
rows: st.SearchStrategy[Row] = st.fixed_dictionaries(
    {
        **{name: st.none() | small_ints for name in names("int")},
        **{name: st.none() | small_texts for name in names("str")},
        **{name: st.none() | st.booleans() for name in names("bool")},
        "headers": st.dictionaries(small_texts, small_texts, max_size=3),
    }
)


@pytest.mark.fuzz
@given(trees, st.lists(rows, min_size=1, max_size=5))
def test_any_expression_means_what_a_plain_evaluator_says(tree: Tree, some: list[Row]) -> None:
    chosen = parse(tree.text)
    assert [chosen.matches(row) for row in some] == [tree.truth(row) == 1 for row in some]


@pytest.mark.fuzz
@given(trees, rows)
def test_bounds_never_leave_out_a_selected_row(tree: Tree, row: Row) -> None:
    row = {**row, "version": abs_or(row["version"]), "died_ms": abs_or(row["died_ms"])}
    chosen = parse(tree.text)
    if chosen.matches(row):
        assert within(chosen.bounds(), row)


@pytest.mark.fuzz
@given(
    st.lists(
        st.tuples(st.sampled_from(["version", "died_ms"]), st.sampled_from(sorted(COMPARISONS)), st.integers(-2, 6)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_bounds_of_conjuncts_never_leave_out_a_selected_row(
    conjuncts: list[tuple[str, str, int]], version: int, died_ms: int
) -> None:
    row: Row = {"version": version, "died_ms": died_ms, "reason": "a"}
    chosen = parse(" and ".join(f"{name} {symbol} {number}" for name, symbol, number in conjuncts))
    if chosen.matches(row):
        assert within(chosen.bounds(), row)


def abs_or(value: object) -> int:
    return abs(value) if isinstance(value, int) else 0


def within(bounds: Bounds, row: Row) -> bool:
    version, died_ms = row["version"], row["died_ms"]
    assert isinstance(version, int)
    assert isinstance(died_ms, int)
    return (
        bounds.reason in (None, row["reason"])
        and (bounds.version_min is None or bounds.version_min <= version)
        and (bounds.version_max is None or version <= bounds.version_max)
        and (bounds.died_min_ms is None or bounds.died_min_ms <= died_ms)
        and (bounds.died_max_ms is None or died_ms <= bounds.died_max_ms)
    )


SCRAPS = [
    *FIELDS,
    *("and", "or", "not", "like", "in", "is", "null", "true", "false", "header", "between"),
    *("=", "!=", "<", "<=", ">", ">=", "(", ")", "[", "]", ",", "==", "<>", "!", "-", "+", "5", "-3"),
    *("'a'", "'b%'", "'", "''", '"', "\\", "%", "_", ";", "\n", "\x00", "é", "٥"),
]


def only_bad_filter(text: str) -> None:
    try:
        chosen = parse(text)
    except BadFilter as error:
        assert 0 <= error.position <= len(text)
    else:
        assert chosen.matches(ROW) in (True, False)
        chosen.bounds()


@pytest.mark.fuzz
@given(st.text(st.characters(exclude_categories=())))
def test_random_text_is_refused_or_means_something(text: str) -> None:
    only_bad_filter(text)


@pytest.mark.fuzz
@given(st.lists(st.sampled_from(SCRAPS), max_size=14), st.sampled_from(["", " "]))
def test_scraps_of_the_language_are_refused_or_mean_something(scraps: list[str], gap: str) -> None:
    only_bad_filter(gap.join(scraps))


@pytest.mark.fuzz
@given(trees, st.data())
def test_a_damaged_expression_is_refused_or_means_something(tree: Tree, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tree.text)))
    end = data.draw(st.integers(at, len(tree.text)))
    only_bad_filter(tree.text[:at] + data.draw(st.sampled_from(["", *SCRAPS])) + tree.text[end:])


# The page for users


def test_every_example_of_the_page_is_a_filter() -> None:
    blocks = re.findall(r"```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert len(lines) >= 10
    for line in lines:
        parse(line)


def test_the_page_lists_every_field_with_its_type() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (int|str|bool)\b", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(listed) == FIELDS


def test_the_page_shows_a_refusal_as_it_is() -> None:
    with pytest.raises(BadFilter) as caught:
        parse("attempts = '5'")
    assert f"```\n{caught.value}\n```" in PAGE.read_text(encoding="utf-8")


def test_the_page_names_every_limit() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for limit in (
        filters.EXPRESSION_MAX_CHARS,
        filters.EXPRESSION_MAX_DEPTH,
        filters.EXPRESSION_MAX_NODES,
        filters.IN_LIST_MAX,
    ):
        assert f"{limit:,}" in text


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes on this machine; compared with a bound a hundred times above the usual."""
    began = time.process_time()
    work()
    return time.process_time() - began
