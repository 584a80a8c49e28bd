"""What a rule of the diagnosis is made of: clues that a text, a log or a configuration can hold, and changes to make.

A rule is data. It fires when all its `needs` are there, none of its `unless`, and the weights of what was found add up
to 1. Patterns are regular expressions over the text in lower case; a space in one stands for any white space, so that
a message that a terminal has wrapped is still found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..units import UserError

KINDS = (
    "memory", "logits", "attention", "optimizer", "fragmentation", "evaluation", "accumulation", "checkpointing",
    "leak", "dtype", "numerics", "quantisation", "compile", "offload", "many cards", "host", "spill", "starved",
    "speed", "measuring", "environment", "data",
)  # fmt: skip


@dataclass(frozen=True)
class Says:
    """A message: ``pattern`` somewhere in the text, in a passage that does not match ``but``."""

    pattern: str
    weight: float = 1.0
    but: str = ""  # on the same line


@dataclass(frozen=True)
class Frame:
    """A function or file in the traceback of the error that ended the run (``file:function:code`` in lower case)."""

    pattern: str
    weight: float = 0.5


@dataclass(frozen=True)
class Number:
    """A number read from the text or made of such numbers: ``name`` compared with ``value`` (see `numbers.py`)."""

    name: str
    op: str  # one of OPERATORS
    value: Any
    weight: float = 0.5
    say: str = ""  # with {value}; sizes and shares are formatted by the name's ending


@dataclass(frozen=True)
class Setting:
    """A field of the configuration, from a file, a report or a command line in the text (see `settings.py`)."""

    name: str
    op: str
    value: Any = None
    weight: float = 0.3


@dataclass(frozen=True)
class Topic:
    """A concept that the text mentions anywhere (see `concepts.py`). Supports other evidence, proves nothing."""

    concept: str
    weight: float = 0.2


@dataclass(frozen=True)
class Told:
    """Concepts that a person names together in one passage, as in a question in a forum; ``without`` those."""

    concepts: tuple[str, ...]
    weight: float = 1.0
    without: tuple[str, ...] = ()


Clue = Says | Frame | Number | Setting | Topic | Told
OPERATORS = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    "in": lambda a, b: a in b,
    "not in": lambda a, b: a not in b,
    "has": lambda a, b: b in str(a),
    "is set": lambda a, b: bool(a),
}


@dataclass(frozen=True)
class Change:
    """What to do: a sentence, and the code or switch. ``recipe`` holds the fields of a `labkit.recipes.Recipe` that do
    it, for a prediction; it is offered only where none of ``unless`` is found."""

    do: str
    code: str = ""
    recipe: tuple[tuple[str, Any], ...] = ()
    unless: tuple[Clue, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A cause: its `name`, its kind, what it is in one sentence, the clues that point to it and the changes that help.

    ``source`` names where the knowledge comes from; ``lesson`` where the course measures it. A cause with a larger
    ``base`` comes first among those with equal evidence: it is the more particular one.
    """

    name: str
    kind: str
    cause: str
    clues: tuple[Clue, ...]
    changes: tuple[Change, ...]
    needs: tuple[Clue, ...] = ()
    unless: tuple[Clue, ...] = ()
    lesson: str = ""
    source: str = ""
    base: float = 0.0


def compiled(pattern: str) -> re.Pattern[str]:
    """`pattern` with every space standing for any white space. Raises `UserError` for one that is no expression."""
    cached = _COMPILED.get(pattern)
    if cached is None:
        try:
            cached = re.compile(_spaced(pattern), re.MULTILINE)
        except re.error as error:
            raise UserError(f"a rule has the pattern {pattern!r}, which cannot be read: {error}") from error
        _COMPILED[pattern] = cached
    return cached


def _spaced(pattern: str) -> str:
    """Spaces made white space: one or more, none or more where ``?`` or ``*`` follows, one in a set or a lookbehind."""
    out, in_set, behind, i = [], False, 0, 0
    while i < len(pattern):
        c = pattern[i]
        if c == "\\":
            out.append(pattern[i : i + 2])
            i += 2
            continue
        if behind:
            behind += (c == "(") - (c == ")")
        elif pattern.startswith(("(?<!", "(?<="), i):
            behind = 1
        if c == " ":
            following = pattern[i + 1 : i + 2]
            if in_set or behind or following == "{":
                c = r"\s"
            elif following in ("?", "*"):
                c, i = r"\s*", i + 1
            else:
                c = r"\s+" if following != "+" else r"\s"
        elif c == "[" and not in_set:
            in_set = True
        elif c == "]" and in_set and pattern[i - 1] != "[":
            in_set = False
        out.append(c)
        i += 1
    return "".join(out)


_COMPILED: dict[str, re.Pattern[str]] = {}


def validate(rules: tuple[Rule, ...], concepts: set[str], settings: set[str], numbers: set[str]) -> None:
    """Refuse a table with a rule that cannot work. Raises `UserError` naming the rule."""
    seen: set[str] = set()
    for rule in rules:
        wrong = _wrong(rule, concepts, settings, numbers)
        if rule.name in seen:
            wrong = "its name stands twice"
        seen.add(rule.name)
        if wrong:
            raise UserError(f"rule {rule.name!r}: {wrong}")


def _wrong(rule: Rule, concepts: set[str], settings: set[str], numbers: set[str]) -> str:
    for name in ("clues", "changes", "needs", "unless"):
        if not isinstance(getattr(rule, name), tuple):
            return f"{name} must be a tuple"
    if rule.kind not in KINDS:
        return f"kind {rule.kind!r} is not one of {', '.join(KINDS)}"
    if not rule.cause or not rule.changes or not (rule.clues or rule.needs):
        return "a cause, a clue and a change are needed"
    reachable = sum(getattr(clue, "weight", 0) for clue in (*rule.clues, *rule.needs))
    if reachable < 1:
        return f"its clues weigh {reachable:.2f} together: it can never fire"
    for clue in (*rule.clues, *rule.needs, *rule.unless, *(c for change in rule.changes for c in change.unless)):
        if isinstance(clue, (Says, Frame)):
            compiled(clue.pattern)
        elif isinstance(clue, (Number, Setting)):
            if clue.op not in OPERATORS:
                return f"{clue.op!r} compares nothing"
            if clue.name not in (numbers if isinstance(clue, Number) else settings):
                return f"nothing is called {clue.name!r}"
        for name in (clue.concept,) if isinstance(clue, Topic) else clue.concepts if isinstance(clue, Told) else ():
            if name not in concepts:
                return f"there is no concept {name!r}"
    return ""
