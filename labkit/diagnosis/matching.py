"""Which rules fire on what was read, with the evidence for each."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..units import show_bytes
from .errors import Raised
from .numbers import Numbers
from .outofmemory import OutOfMemory
from .prose import Passage, found_in
from .reading import Reading
from .rule import OPERATORS, Clue, Frame, Number, Rule, Says, Setting, Told, Topic, compiled
from .settings import Settings

_MENTIONS = 200_000  # characters in which concepts are looked for


@dataclass(frozen=True)
class Evidence:
    """What points to a cause: the kind of clue, the words or the number, and the line (0: not from a text)."""

    clue: str
    quote: str
    line: int = 0
    weight: float = 0.0


@dataclass
class Case:
    """Everything that is known of what is to be diagnosed."""

    reading: Reading | None = None
    errors: list[Raised] = field(default_factory=list)
    error: Raised | None = None
    oom: OutOfMemory | None = None
    settings: Settings = field(default_factory=Settings)
    numbers: Numbers = field(default_factory=Numbers)
    passages: list[Passage] = field(default_factory=list)
    topics: dict[str, tuple[int, str]] | None = None

    def mentions(self) -> dict[str, tuple[int, str]]:
        """Concepts anywhere in the text, looked for once."""
        if self.topics is None and self.reading is None:
            self.topics = {}
        elif self.topics is None and self.reading is not None:
            found = found_in(self.reading.lower[:_MENTIONS])
            self.topics = {name: (self.reading.at(at)[0], words) for name, (at, words) in found.items()}
        assert self.topics is not None
        return self.topics


def fire(rules: tuple[Rule, ...], case: Case) -> list[tuple[Rule, float, list[Evidence]]]:
    """The rules that fire, most evidence first: each with its weight and what it found."""
    found = []
    for rule in rules:
        if any(look(clue, case) for clue in rule.unless):
            continue
        needed = [look(clue, case) for clue in rule.needs]
        if not all(needed):
            continue
        evidence = [e for e in (*needed, *(look(clue, case) for clue in rule.clues)) if e is not None]
        told = max((e.weight for e in evidence if e.clue == "said"), default=0.0)  # one description, not several
        weight = told + sum(e.weight for e in evidence if e.clue != "said")
        if weight >= 0.999:
            found.append((rule, weight, sorted(evidence, key=lambda e: -e.weight)))
    return sorted(found, key=lambda item: -(item[1] + item[0].base))


def look(clue: Clue, case: Case) -> Evidence | None:
    """What `clue` finds, or None."""
    if isinstance(clue, Says):
        return _says(clue, case)
    if isinstance(clue, Frame):
        return _frame(clue, case)
    if isinstance(clue, Number):
        return _number(clue, case)
    if isinstance(clue, Setting):
        return _setting(clue, case)
    if isinstance(clue, Topic):
        at = case.mentions().get(clue.concept)
        return Evidence("mentioned", at[1], at[0], clue.weight) if at else None
    return _told(clue, case)


def _says(clue: Says, case: Case) -> Evidence | None:
    if case.reading is None:
        return None
    for match in compiled(clue.pattern).finditer(case.reading.lower):
        line, quote = case.reading.at(match.start())
        if clue.but and compiled(clue.but).search(quote.lower()):
            continue
        if any(e.handled and e.line <= line <= e.line + 12 for e in case.errors):
            continue
        return Evidence("message", _cut(quote), line, clue.weight)
    return None


def _frame(clue: Frame, case: Case) -> Evidence | None:
    error = case.error
    if error is None:
        return None
    for frame in reversed(error.frames):
        if compiled(clue.pattern).search(frame):
            return Evidence("traceback", _cut(frame), error.line, clue.weight)
    return None


def _number(clue: Number, case: Case) -> Evidence | None:
    if clue.name not in case.numbers:
        return None
    value = case.numbers[clue.name]
    if value is None or not OPERATORS[clue.op](value, clue.value):
        return None
    line, words = case.numbers.said.get(clue.name, (0, ""))
    said = clue.say.replace("{value}", shown(clue.name, value)) if clue.say else words
    return Evidence("number", _cut(said), line, clue.weight)


def shown(name: str, value: object) -> str:
    """A value as people read it."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if name.endswith("_bytes"):
        return show_bytes(value)
    if name.endswith("share"):
        return f"{100 * value:.0f} %"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}"


def _setting(clue: Setting, case: Case) -> Evidence | None:
    if clue.name not in case.settings:
        return None
    value = case.settings[clue.name]
    try:
        right = OPERATORS[clue.op](value, clue.value)
    except TypeError:  # a word where a number is compared
        return None
    if not right:
        return None
    line, words = case.settings.said.get(clue.name, (0, f"{clue.name} = {value}"))
    return Evidence("setting", _cut(words), line, clue.weight)


def _told(clue: Told, case: Case) -> Evidence | None:
    for passage in case.passages:
        if all(c in passage.concepts for c in clue.concepts) and not any(c in passage.concepts for c in clue.without):
            places = sorted(passage.concepts[c] for c in clue.concepts)
            start, end = places[0][0], places[-1][0] + len(places[-1][1])
            quote = passage.text[max(0, start - 20) : end + 20] if end - start < 240 else passage.text[:260]
            return Evidence("said", _cut(quote), passage.line, clue.weight)
    return None


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 260 else f"{text[:257]}..."
