"""One deliberate defect: a text of one file, and what stands there instead."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`rule` is what it breaks: a number, or the word for what has none. `tests` are those that must notice."""

    name: str
    rule: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
