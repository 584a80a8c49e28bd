"""From a rule that fired to a cause with advice: without what is on already, first what is predicted to help."""

from __future__ import annotations

from ..units import show_bytes
from .effects import Effects, cost
from .findings import Advice, Cause
from .matching import Case, Evidence, look
from .rule import Change, Rule


def cause(entry: Rule, weight: float, evidence: list[Evidence], case: Case, predicted: Effects | None) -> Cause:
    """The cause that `entry` names, with its evidence and the changes that are left, predicted where possible."""
    rows: list[tuple[Advice, Change]] = []
    for change in entry.changes:
        if any(look(clue, case) for clue in change.unless):
            continue
        effect = predicted.of(change) if predicted is not None else None
        if effect is not None and effect.after_bytes > 0.995 * effect.before_bytes:
            continue  # it is known to save nothing here
        rows.append((Advice(change.do, change.code, effect), change))
    if predicted is not None:
        rows.sort(key=_order)
    shown = tuple(e for e in evidence if e.quote and e.weight > 0)
    return Cause(
        entry.name,
        entry.kind,
        entry.cause,
        round(weight, 2),
        shown,
        tuple(advice for advice, _ in rows),
        entry.lesson,
        entry.source,
    )


def _order(row: tuple[Advice, Change]) -> tuple[int, float]:
    """What fits comes first, gentlest before the others; then what saves most; then what is not predicted."""
    advice, change = row
    if advice.effect is None:
        return 2, 0.0
    if advice.effect.fits:
        return 0, cost(change.recipe)
    return 1, advice.effect.after_bytes


def closing(predicted: Effects) -> list[str]:
    """Notes under the causes: the changes that fit together where none does alone, and where to look further."""
    notes = []
    found = predicted.best_together()
    if found is not None:
        fields, effect = found
        notes.append(f"no single change fits; together {', '.join(f'{k}={v}' for k, v in fields)}: {effect}")
    there = ""
    if predicted.card:
        there = f" --card {predicted.card}"
    elif predicted.room:
        there = f" --budget {show_bytes(predicted.room.for_torch).replace(' ', '')}"
    recipe = predicted.recipe
    return [*notes, f"all switches, ranked: labkit plan {recipe.model} --seq {recipe.seq}{there}"]
