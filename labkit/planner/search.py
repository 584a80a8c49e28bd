"""The search: of all candidates those that fit, the fastest first, without predicting more of them than needed.

A candidate's time is cheap to estimate and its memory is not. So candidates are taken in the order of the best speed
that they could reach if memory were free, and the search ends when no candidate left could be faster than what fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..recipes import Recipe, conflict
from . import candidates as trying
from .roofline import Times, estimate
from .room import Need, Room, exact_need, least_bytes, need, rough_bytes
from .shape import Shape

if TYPE_CHECKING:
    from ..machine import Card

SHOWN = 3  # plans of an answer
ALIKE = 0.03  # predicted speeds closer than this count as equal: the gentler recipe comes first
CONFIRMED = 36  # blocks at most in exact predictions, where an estimate does not tell and something surely fits
WORTH = 0.1  # what such a prediction must promise to gain
FEW = 2  # candidates that are predicted to name the nearest miss
ROUGH = 0.68  # of a rough guess: no candidate needs less
ENOUGH = 0.98  # of the best speed of a structure: the smallest batch that reaches it is taken


@dataclass(frozen=True)
class Choice:
    """A recipe that was looked at: what it needs, how long its step takes; ``gentleness`` 0 changes the least."""

    family: str
    gentleness: int
    recipe: Recipe
    need: Need
    times: Times

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens of one card in a second."""
        return self.recipe.tokens / self.times.seconds


@dataclass(frozen=True)
class _Structure:
    family: str
    gentleness: int
    sizes: tuple[Recipe, ...]  # the same switches at every size to try, the smallest first
    speed: float  # tokens in a second, if memory were free


def fastest(
    structures: Iterable[tuple[str, Recipe]], card: Card, room: Room, *, batch: int | None, shown: int = SHOWN
) -> list[Choice]:
    """The plans that fit, fastest first; empty when nothing does. `batch` fixes the sequences of a step."""
    sure: list[Choice] = []
    likely: list[Choice] = []  # fits by the middle of the estimate, not by its upper end
    for structure in _by_speed(structures, card, room, batch):
        if len(sure) >= shown and structure.speed <= (1 + ALIKE) * max(c.tokens_per_second for c in sure):
            break  # what is left could be as fast at most
        found = _best_size(structure, card, room.fits, batch)
        if found is not None:
            sure.append(found)
        larger = _best_size(structure, card, room.may_fit, batch)
        if larger is not None and larger != found:
            likely.append(larger)
    return [_simpler(c, card, room) for c in ranked(sure, confirmed(likely, sure, card, room))[:shown]]


def _simpler(choice: Choice, card: Card, room: Room) -> Choice:
    """The same without expandable segments, where it surely fits without them."""
    without = choice.recipe.changed(expandable_segments=False)
    found = need(without, card)
    return replace(choice, recipe=without, need=found) if room.fits(found) else choice


def confirmed(
    likely: list[Choice], sure: list[Choice], card: Card, room: Room, blocks: int = CONFIRMED
) -> list[Choice]:
    """Of choices whose estimate does not tell, the fastest that fits by an exact prediction, if it is worth it. Where
    something surely fits, no more than `blocks` transformer blocks are followed for it."""
    best = max((c.tokens_per_second for c in sure), default=0.0)
    followed = 0
    for choice in sorted(likely, key=lambda c: -c.tokens_per_second):
        followed += Shape.of(choice.recipe).layers
        if choice.tokens_per_second <= (1 + WORTH) * best or (sure and followed > blocks):
            break
        found = exact_need(choice.recipe, card)
        if room.fits(found):
            return [replace(choice, need=found)]
    return []


def among(recipes: Iterable[Recipe], card: Card, room: Room) -> list[Choice]:
    """The same choice among given recipes, each at its own size, with time for exact predictions."""
    ones = [
        Choice("", number, recipe, need(recipe, card), estimate(recipe, card)) for number, recipe in enumerate(recipes)
    ]
    sure = [c for c in ones if room.fits(c.need)]
    likely = [c for c in ones if c not in sure and room.may_fit(c.need)]
    return ranked(sure, confirmed(likely, sure, card, room, blocks=8 * CONFIRMED))


def largest_batch(structures: Iterable[tuple[str, Recipe]], card: Card, room: Room) -> list[Choice]:
    """Plans by the largest micro-batch that fits, the faster of equals first."""
    found = []
    for structure in _by_speed(structures, card, room, None):
        fitting = _fitting(structure.sizes, card, room.fits)
        if fitting is not None:
            found.append(_choice(structure, fitting, card))
    return sorted(found, key=lambda c: (-c.recipe.batch, -c.tokens_per_second))[:SHOWN]


def ranked(sure: list[Choice], exact: Iterable[Choice] = ()) -> list[Choice]:
    """Fastest first; among those about as fast as the first, the one that changes the least. One structure comes
    once."""
    others = [c for c in sure if c.gentleness not in {e.gentleness for e in exact}]
    order = sorted([*exact, *others], key=lambda c: -c.tokens_per_second)
    if order:
        alike = [c for c in order if c.tokens_per_second >= (1 - ALIKE) * order[0].tokens_per_second]
        first = min(alike, key=lambda c: (c.gentleness, -c.tokens_per_second))
        order.remove(first)
        order.insert(0, first)
    return order


def smallest(structures: Iterable[tuple[str, Recipe]], card: Card, room: Room, *, batch: int | None) -> Choice | None:
    """What needs the least memory at the smallest size: the nearest miss when nothing fits. `None`: no candidate."""
    ones = [_structure(number, family, recipe, batch) for number, (family, recipe) in enumerate(structures)]
    shape = Shape.of(ones[0].sizes[0]) if ones else None
    if shape is None:
        return None
    small = sorted(ones, key=lambda s: _frugal(s.sizes[0], shape))[:FEW]
    on_host = [s for s in small if room.hosts(need(s.sizes[0], card))]
    best = min(on_host or small, key=lambda s: need(s.sizes[0], card).worst_bytes)
    return _choice(best, best.sizes[0], card)


def _frugal(recipe: Recipe, shape: Shape) -> tuple[int, bool, bool, bool]:
    """What comes first needs the least, as far as shapes tell."""
    return least_bytes(recipe, shape), not recipe.checkpoint, recipe.loss == "full", recipe.compile != "none"


def _by_speed(structures: Iterable[tuple[str, Recipe]], card: Card, room: Room, batch: int | None) -> list[_Structure]:
    """Structures whose weights alone leave room, the one that could be fastest first."""
    found = []
    for number, (family, recipe) in enumerate(structures):
        one = _structure(number, family, recipe, batch)
        shape = Shape.of(one.sizes[0])
        if least_bytes(one.sizes[0], shape) > room.limit_bytes:
            continue
        hopeful = tuple(r for r in one.sizes if ROUGH * rough_bytes(r, shape) <= room.limit_bytes)
        if hopeful:
            speed = hopeful[-1].tokens / estimate(hopeful[-1], card, shape=shape).seconds
            found.append(_Structure(family, number, hopeful, speed))
    return sorted(found, key=lambda s: -s.speed)


def _structure(number: int, family: str, recipe: Recipe, batch: int | None) -> _Structure:
    if batch is None:
        most = max(1, trying.MOST_TOKENS // recipe.seq)
        sizes = [recipe.changed(batch=b) for b in trying.BATCHES if b <= most]
    else:
        ways = [{"batch": size, "accumulation": times} for size, times in reversed(trying.splits(batch))]
        sizes = [recipe.changed(**way) for way in ways if conflict({**recipe.to_dict(), **way}) is None]
    return _Structure(family, number, tuple(sizes), 0.0)


def _best_size(structure: _Structure, card: Card, fits: Callable[[Need], bool], batch: int | None) -> Choice | None:
    largest = _fitting(structure.sizes, card, fits)
    if largest is None:
        return None
    if batch is not None:
        return _choice(structure, largest, card)
    upto = structure.sizes[: structure.sizes.index(largest) + 1]
    speeds = [r.tokens / estimate(r, card).seconds for r in upto]
    first = next(n for n, speed in enumerate(speeds) if speed >= ENOUGH * max(speeds))
    return _choice(structure, upto[first], card)


def _fitting(sizes: tuple[Recipe, ...], card: Card, fits: Callable[[Need], bool]) -> Recipe | None:
    """The largest size that fits; None when not even the smallest does."""
    last = _last(lambda n: fits(need(sizes[n], card)), len(sizes))
    return None if last < 0 else sizes[last]


def _last(holds: Callable[[int], bool], count: int) -> int:
    """The last of `count` places at which `holds`, given that it holds up to somewhere and not beyond; -1: nowhere."""
    low, high = -1, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _choice(structure: _Structure, recipe: Recipe, card: Card) -> Choice:
    return Choice(structure.family, structure.gentleness, recipe, need(recipe, card), estimate(recipe, card))
