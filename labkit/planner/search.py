"""The search: of all candidates those that fit, the fastest first, without predicting more of them than needed.

A candidate's time is cheap to estimate, its memory less so, and an exact prediction of memory is dear. So candidates
wait in one line, ordered by the best speed that they could still have: first the speed if memory were free, then that
of the largest size whose memory is estimated to fit. Whoever comes to the front and does not surely fit is predicted
exactly, and gives way to its next smaller size if that says no. What comes to the front and fits is the fastest.
"""

from __future__ import annotations

import heapq
import itertools
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
FURTHER = 1  # structures that are still looked at for the second and third, once the first is found
ALIKE = 0.03  # predicted speeds closer than this count as equal: the gentler recipe comes first
CONFIRMED = 96  # transformer blocks followed in exact predictions, as long as something else surely fits
FEW = 2  # candidates that are predicted to name the nearest miss
BEYOND = 1.15  # of the room: a size that takes more by a line through a smaller one is not looked at
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
    kin: int  # the same for structures that differ in micro-batches only


def fastest(
    structures: Iterable[tuple[str, Recipe]], card: Card, room: Room, *, batch: int | None, shown: int = SHOWN
) -> list[Choice]:
    """The plans that fit, fastest first; empty when nothing does. `batch` fixes the sequences of a step."""
    found = _Line(_by_speed(structures, card, room, batch), card, room, batch).first(shown)
    return [_simpler(c, card, room) for c in ranked(found)[:shown]]


def among(recipes: Iterable[Recipe], card: Card, room: Room) -> list[Choice]:
    """The fastest of given recipes, each at its own size, with time for any number of exact predictions."""
    ones = [
        _Structure("", number, (r,), r.tokens / estimate(r, card).seconds, number) for number, r in enumerate(recipes)
    ]
    return _Line(ones, card, room, 1, blocks=10**9, alike=0.0).first(1)  # their batches are fixed


class _Line:
    """Structures and choices by the best speed that they could still have."""

    def __init__(
        self, structures: list[_Structure], card: Card, room: Room, batch: int | None, *,
        blocks: int = CONFIRMED, alike: float = ALIKE,
    ):  # fmt: skip
        self.card, self.room, self.batch, self.blocks, self.alike = card, room, batch, blocks, alike
        self._number = itertools.count()
        self._waiting: list[tuple[float, int, _Structure, Choice | None]] = []
        self._found: list[tuple[_Structure, Choice]] = []
        self._doubtful: list[tuple[_Structure, Choice]] = []  # were not confirmed for want of time
        for structure in structures:
            self._join(structure.speed, structure, None)

    def first(self, shown: int) -> list[Choice]:
        """Up to `shown` choices that fit, and gentler ones that are about as fast as the first."""
        further = 0
        while self._waiting and not self._over(shown):
            _, _, structure, choice = heapq.heappop(self._waiting)
            if any(structure.kin == one.kin for one, _ in self._found) or (choice is None and further >= FURTHER):
                continue
            if choice is None:
                further += bool(self._found)
                self._sized(structure, len(structure.sizes))
            elif self.room.fits(choice.need):
                self._found.append((structure, choice))
            else:
                self._doubted(structure, choice)
        if not self._found:
            self._last_resort()
        return [choice for _, choice in self._found]

    def _join(self, speed: float, structure: _Structure, choice: Choice | None) -> None:
        heapq.heappush(self._waiting, (-speed, next(self._number), structure, choice))

    def _over(self, shown: int) -> bool:
        if not self._found:
            return False
        best = self._found[0][1]
        if -self._waiting[0][0] >= (1 - self.alike) * best.tokens_per_second and self.alike:
            return False  # it may be about as fast, and gentler
        return len(self._found) >= shown

    def _sized(self, structure: _Structure, upto: int) -> None:
        """Let a structure wait at its best size below `upto`: one that may fit, or surely once a first is found."""
        fits = self.room.fits if self._found else self.room.may_fit
        sized = _best_size(replace(structure, sizes=structure.sizes[:upto]), self.card, fits, self.room, self.batch)
        if sized is not None:
            self._join(sized.tokens_per_second, structure, sized)

    def _doubted(self, structure: _Structure, choice: Choice) -> None:
        """Ask for an exact prediction of what the estimate does not tell, or go on with a smaller size."""
        layers = Shape.of(choice.recipe).layers
        if not self._found and self.blocks >= layers:
            self.blocks -= layers
            exact = replace(choice, need=exact_need(choice.recipe, self.card))
            if self.room.fits(exact.need):
                self._found.append((structure, exact))
                return
        else:
            self._doubtful.append((structure, choice))
            sure = _best_size(structure, self.card, self.room.fits, self.room, self.batch)
            if sure is not None:
                self._join(sure.tokens_per_second, structure, sure)
            return
        self._sized(structure, _place(structure, choice))

    def _last_resort(self) -> None:
        """Nothing surely fits: what was left in doubt is predicted after all, the fastest first."""
        waiting = [*self._doubtful]
        while waiting and not self._found:
            structure, choice = waiting.pop(0)
            exact = replace(choice, need=exact_need(choice.recipe, self.card))
            if self.room.fits(exact.need):
                self._found.append((structure, exact))
                return
            smaller = replace(structure, sizes=structure.sizes[: _place(structure, choice)])
            next_one = _best_size(smaller, self.card, self.room.may_fit, self.room, self.batch)
            if next_one is not None:
                waiting.append((structure, next_one))
                waiting.sort(key=lambda one: -one[1].tokens_per_second)


def _place(structure: _Structure, choice: Choice) -> int:
    """Where the choice's size stands among those of its structure."""
    return next(n for n, size in enumerate(structure.sizes) if size.batch == choice.recipe.batch)


def _simpler(choice: Choice, card: Card, room: Room) -> Choice:
    """The same without expandable segments, where it surely fits without them."""
    without = choice.recipe.changed(expandable_segments=False)
    found = need(without, card)
    return replace(choice, recipe=without, need=found) if room.fits(found) else choice


def largest_batch(structures: Iterable[tuple[str, Recipe]], card: Card, room: Room) -> list[Choice]:
    """Plans by the largest micro-batch that fits, the faster of equals first."""
    found = []
    for structure in _by_speed(structures, card, room, None, steps=False):
        fitting = _fitting(structure.sizes, card, room.fits, room)
        if fitting is not None:
            found.append(_choice(structure, fitting, card))
    return sorted(found, key=lambda c: (-c.recipe.batch, -c.tokens_per_second))[:SHOWN]


def ranked(found: list[Choice]) -> list[Choice]:
    """Fastest first; among those about as fast as the first, the one that changes the least."""
    order = sorted(found, key=lambda c: -c.tokens_per_second)
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


def _by_speed(
    structures: Iterable[tuple[str, Recipe]], card: Card, room: Room, batch: int | None, *, steps: bool = True
) -> list[_Structure]:
    """Structures whose weights alone leave room, the one that could be fastest first. With a free batch each comes with
    one micro-batch in a step, and (`steps`) with several."""
    found = []
    for number, (family, recipe) in enumerate(structures):
        one = _structure(number, family, recipe, batch)
        shape = Shape.of(one.sizes[0])
        if least_bytes(one.sizes[0], shape) > room.limit_bytes:
            continue
        hopeful = tuple(r for r in one.sizes if ROUGH * rough_bytes(r, shape) <= room.limit_bytes)
        several = tuple(trying.several(s) or s for s in hopeful) if batch is None and steps else hopeful
        # with gradients in a place of their own more micro-batches take no more memory
        own_place = recipe.gradients == "host" or recipe.in_place
        for sizes in (several,) if own_place or several == hopeful else (hopeful, several):
            if sizes:
                speed = sizes[-1].tokens / estimate(sizes[-1], card, shape=shape).seconds
                found.append(_Structure(family, 2 * number + (sizes is not hopeful), sizes, speed, number))
    compiled: dict[Recipe | None, float] = {s.sizes[0]: s.speed for s in found if s.sizes[0].compile != "none"}
    worth = [s for s in found if s.speed * (1 + ALIKE) >= compiled.get(_compiled(s.sizes[0]), 0.0)]
    return sorted(worth, key=lambda s: -s.speed)


def _compiled(recipe: Recipe) -> Recipe | None:
    """The same with compiled blocks: if it is faster, the uncompiled one takes more memory and is not looked at."""
    fields = {**recipe.to_dict(), "compile": "blocks"}
    return Recipe.of(**fields) if recipe.compile == "none" and conflict(fields) is None else None


def _structure(number: int, family: str, recipe: Recipe, batch: int | None) -> _Structure:
    if batch is None:
        most = max(1, trying.MOST_TOKENS // recipe.seq)
        sizes = [recipe.changed(batch=b) for b in trying.BATCHES if b <= most]
    else:
        ways = [{"batch": size, "accumulation": times} for size, times in reversed(trying.splits(batch))]
        sizes = [recipe.changed(**way) for way in ways if conflict({**recipe.to_dict(), **way}) is None]
    return _Structure(family, 2 * number, tuple(sizes), 0.0, number)


def _best_size(
    structure: _Structure, card: Card, fits: Callable[[Need], bool], room: Room, batch: int | None
) -> Choice | None:
    largest = _fitting(structure.sizes, card, fits, room)
    if largest is None:
        return None
    if batch is not None:
        return _choice(structure, largest, card)
    upto = structure.sizes[: structure.sizes.index(largest) + 1]
    speeds = [r.tokens / estimate(r, card).seconds for r in upto]
    first = next(n for n, speed in enumerate(speeds) if speed >= ENOUGH * max(speeds))
    return _choice(structure, _fewer(upto[first], card), card)


def _fewer(recipe: Recipe, card: Card) -> Recipe:
    """The same micro-batch no more often than what `ENOUGH` of the speed takes."""
    best = ENOUGH * recipe.tokens / estimate(recipe, card).seconds
    for times in range(1, recipe.accumulation):
        fewer = recipe.changed(accumulation=times)
        if fewer.tokens / estimate(fewer, card).seconds >= best:
            return fewer
    return recipe


def _fitting(sizes: tuple[Recipe, ...], card: Card, fits: Callable[[Need], bool], room: Room) -> Recipe | None:
    """The largest size that fits; None when not even the smallest does. Each place that is looked at tells, by the line
    from what cannot be avoided, where the next look is worth it."""
    if not sizes:
        return None
    shape, limit = Shape.of(sizes[0]), room.limit_bytes
    least = least_bytes(sizes[0], shape)
    low, high = -1, len(sizes)
    place = max(sum(rough_bytes(r, shape) <= limit for r in sizes) - 1, 0)
    while high - low > 1:
        wanted = need(sizes[place], card)
        low, high = (place, high) if fits(wanted) else (low, place)
        each = max(wanted.hope_bytes - least, 1) / sizes[place].batch
        if low == place and low + 1 < len(sizes) and least + each * sizes[low + 1].batch > BEYOND * limit:
            break
        likely = sum(least + each * size.batch <= limit for size in sizes) - 1
        place = min(max(likely, low + 1), high - 1)
    return None if low < 0 else sizes[low]


def _choice(structure: _Structure, recipe: Recipe, card: Card) -> Choice:
    return Choice(structure.family, structure.gentleness, recipe, need(recipe, card), estimate(recipe, card))
