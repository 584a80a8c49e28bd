"""The table of ``bench/plan.py table``: under each budget the planner's pick against the measured best."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import plan_fit

from labkit import machine, quiet
from labkit.planner import roofline, search
from labkit.planner.roofline import estimate, provenance
from labkit.planner.room import Room, need
from labkit.recipes import Recipe

BUDGETS = (6, 8, 10, 12, 16, 20, 24, 40)  # GiB: sizes that cards are sold with
LEAST, FEW = 2, 6  # recipes of a pair: with one there is nothing to choose, with less than `FEW` little
NEAR = 0.10  # of the best measured time a token: what the plan's pick is held to


@dataclass(frozen=True)
class Case:
    """One (model, sequence, budget): how many recipes were measured and fit, what the plan picks, what is best."""

    pair: str
    split: str
    budget: int
    measured: int
    fitting: int
    pick: dict[str, Any] | None
    best: dict[str, Any] | None
    blind: dict[str, Any] | None  # what the plan picks with rates that saw no row of the pair

    @property
    def fits(self) -> bool | None:
        """Whether the pick's measured reserved peak is within the budget; None without a pick."""
        return None if self.pick is None else reserved(self.pick) <= self.budget * 2**30

    @property
    def slower(self) -> float | None:
        """How much more time a token takes than with the best; None where nothing was picked or nothing fits."""
        if self.pick is None or self.best is None:
            return None
        return per_token(self.pick) / per_token(self.best) - 1


def reserved(row: dict[str, Any]) -> int:
    """The largest reserved peak of a row."""
    return max(row["first"]["reserved_bytes"], row["steady"]["reserved_bytes"])


def per_token(row: dict[str, Any]) -> float:
    """Measured seconds for each token."""
    return float(row["seconds"]) / Recipe.of(**row["recipe"]).tokens


def cases(rows: list[dict[str, Any]]) -> list[Case]:
    """All cases; the planner sees the recipes and none of their measurements."""
    card, found = machine.preset("h200"), []
    unseen = plan_fit.without(list(dict.fromkeys(row["pair"] for row in rows)))
    for pair in dict.fromkeys(row["pair"] for row in rows):
        own = [row for row in rows if row["pair"] == pair and row["status"] == "ok"]
        if len(own) < LEAST:
            continue
        by_recipe = {Recipe.of(**row["recipe"]): row for row in own}
        for budget in BUDGETS:
            room = Room(card, budget * 2**30)
            picks = search.among(by_recipe, card, room)
            with rates(unseen[pair]):
                others = search.among(by_recipe, card, room)
            fitting = [row for row in own if reserved(row) <= budget * 2**30]
            best = min(fitting, key=per_token, default=None)
            pick = by_recipe[picks[0].recipe] if picks else None
            blind = by_recipe[others[0].recipe] if others else None
            found.append(Case(pair, own[0]["split"], budget, len(own), len(fitting), pick, best, blind))
    return found


@contextmanager
def rates(used: roofline.Rates) -> Iterator[None]:
    """Times by these rates."""
    committed = roofline.measured_rates
    roofline.measured_rates = lambda: used  # type: ignore[assignment]
    try:
        yield
    finally:
        roofline.measured_rates = committed


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """Make the table and print its summary."""
    quiet.transformers()
    found = cases(rows)
    lines = ["# The planner against a measured search", "", *_intro(rows), "", *_summary(found), "", *_table(found), "",
             *_errors(rows)]  # fmt: skip
    out.write_text("\n".join(lines) + "\n", "utf-8")
    print("\n".join(_summary(found)))
    print("\n".join(_errors(rows)))


def _intro(rows: list[dict[str, Any]]) -> list[str]:
    one, remarked = rows[0], sum("remark" in row for row in rows)
    counts = Counter(row["pair"] for row in rows).values()
    versions = ", ".join(f"{k} {v}" for k, v in one["versions"].items() if v)
    return [
        f"{len(rows)} recipes of {len({r['pair'] for r in rows})} pairs of model and sequence, measured once without a "
        f"cap on one {one['card']} (driver {one['driver']}; {versions}). Under a budget those fit whose reserved peak "
        "is within it. The planner chooses among the same recipes by prediction alone, with its margin. Its rates of "
        f"time were fitted to these rows and to lessons' steps ({provenance()['made_by']}): so there is a line with "
        "rates that saw no row of the pair. Memory is not fitted; its margins were set with the rows at hand. A time "
        "is the median of two or four steps after two; the best of several such medians is itself lucky. "
        f"Of a pair {min(counts)} to {max(counts)} recipes were measured, most of them chosen because plans choose "
        "them: fewer than a search needs that could surprise the planner (bench/plan-candidates.jsonl has 30 each). "
        f"{remarked} rows were measured before the rows of logits of loss=in-place were aligned, which made it faster.",
    ]


def _summary(found: list[Case]) -> list[str]:
    lines = ["| pairs | cases where one fits | plan made | plan fits | within 10 % of the best | median | worst |",
             "| --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    blind = [replace(c, pick=c.blind) for c in found]
    many = f"of {FEW} recipes and more"
    for name, some in (
        ("all", found),
        ("all, rates fitted without the pair", blind),
        (many, [c for c in found if c.measured >= FEW]),
        (f"{many}, without the pair", [c for c in blind if c.measured >= FEW]),
    ):
        possible = [c for c in some if c.best is not None]
        made = [c for c in possible if c.pick is not None]
        fit = [c for c in made if c.fits]
        slower = sorted(c.slower for c in fit if c.slower is not None)
        near = sum(s <= NEAR for s in slower)
        if slower:
            lines.append(
                f"| {name} | {len(possible)} of {len(some)} | {len(made)} | {len(fit)} | {near} of {len(possible)} "
                f"({near / len(possible):.0%}) | {statistics.median(slower):.1%} | {slower[-1]:.1%} |"
            )
    return lines


def _table(found: list[Case]) -> list[str]:
    lines = ["| pair | budget | fit | plan's pick | fits | its time | best | slower |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for c in found:
        pick, best = (_said(row) for row in (c.pick, c.best))
        time = f"{per_token(c.pick) * 1e6:.2f} µs a token" if c.pick else ""
        slower = "" if c.slower is None else f"{c.slower:.1%}"
        fits = {True: "yes", False: "NO", None: ""}[c.fits]
        same = "the same" if c.pick is not None and c.pick is c.best else best
        lines.append(
            f"| {c.pair} | {c.budget} GiB | {c.fitting} of {c.measured} | {pick} | {fits} | {time} "
            f"| {same} | {slower} |"
        )
    return lines


def _said(row: dict[str, Any] | None) -> str:
    if row is None:
        return "none"
    recipe = Recipe.of(**row["recipe"])
    return (
        str(recipe)
        .removeprefix(recipe.model)
        .removeprefix(f" {recipe.batch}x{recipe.seq}")
        .strip()
        .join((f"{recipe.batch}: ", ""))
    )


def _errors(rows: list[dict[str, Any]]) -> list[str]:
    card = machine.preset("h200")
    lines = ["| rows | what | rows | median | 9 of 10 | worst |", "| --- | --- | --- | --- | --- | --- |"]
    for name, old in (("loss in place as it was", True), ("all others", False)):
        own = [r for r in rows if ("remark" in r) == old and r["status"] == "ok"]
        times = sorted(abs(estimate(Recipe.of(**r["recipe"]), card).seconds / r["seconds"] - 1) for r in own)
        peaks = sorted(abs(need(Recipe.of(**r["recipe"]), card).reserved_bytes / reserved(r) - 1) for r in own)
        for what, errors in (("time of a step", times), ("reserved peak", peaks)):
            if errors:
                nine = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
                middle = statistics.median(errors)
                lines.append(f"| {name} | {what} | {len(errors)} | {middle:.1%} | {nine:.1%} | {errors[-1]:.1%} |")
    return lines


if __name__ == "__main__":
    source = Path(sys.argv[1])
    write([json.loads(line) for line in source.read_text("utf-8").splitlines()], Path(sys.argv[2]))
