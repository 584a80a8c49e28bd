"""The planner's rates, fitted to measured steps: ``python bench/plan_fit.py`` writes labkit/planner/rates.json.

Rows come from data/reference: training steps of lessons that are recipes, and those of ``bench/plan.py measure`` whose
pair of model and sequence is marked for fitting. The objective is the mean absolute logarithm of predicted over
measured seconds.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from labkit import machine, quiet
from labkit.planner import counting
from labkit.planner.roofline import Estimator, Rates
from labkit.planner.shape import Shape
from labkit.recipes import Recipe
from labkit.units import UserError

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "data" / "reference"
RATES = ROOT / "labkit" / "planner" / "rates.json"
LESSONS = ("lessons-h200.jsonl", "lessons-h200-capstone.jsonl")
PLAN = "plan-h200.jsonl"
# what physics allows: shares of a ceiling, and no more than the compiler can leave
MOST = {"product": 0.95, "product32": 0.95, "attention": 0.95, "bandwidth": 0.95, "optimizer": 0.95, "bus": 0.95,
        "compiled_traffic": 1.0, "compiled_kernels": 1.0, "sharpness": 12.0}  # fmt: skip
BENCH_WEIGHT, ROUGH_WEIGHT = 4.0, 0.5
KEPT = 3.0  # how strongly a rate that no row speaks of stays where it began


def lesson_recipe(row: dict[str, Any]) -> dict[str, Any] | None:
    """The recipe of a lesson's report; None where its step is none."""
    s, name, lesson = row["settings"], row["name"], row["lesson"][:2]
    if lesson == "12" and "model" in s and s.get("layers") is None:
        fields = {k: v for k, v in s.items() if k not in ("lr", "layers", "expandable")}
        fields["loss"] = str(s.get("loss", "full")).replace("in place", "in-place")
        return {**fields, "dropout": 0.0}
    base: dict[str, Any] = {"model": "gpt2", "batch": s.get("batch"), "seq": s.get("seq"), "precision": "fp32"}
    amp = {"bf16": "amp-bf16", "fp16": "amp-fp16", "fp32": "fp32", "16 bits": "amp-bf16"}
    if lesson == "01" and "eager" in name:
        return {**base, "attention": "eager"}
    if lesson == "02" and s.get("precision") in amp and "checkpoint" in s:
        return {**base, "precision": amp[s["precision"]], "checkpoint": s["checkpoint"]}
    if lesson == "03" and s.get("head") == "language model" and s.get("how") in ("all stored", "segments"):
        return {**base, "precision": "amp-bf16" if s["amp"] else "fp32", "checkpoint": s["every"]}
    if lesson == "04" and s.get("optimizer") in ("AdamW", "AdamW8bit"):
        return {**base, "optimizer": {"AdamW": "adamw", "AdamW8bit": "adam8bit"}[s["optimizer"]]}
    if lesson == "05" and {"on_host", "size"} <= s.keys():
        where = {"": "none", "state": "optimizer", "state and gradients": "optimizer+gradients"}[s["on_host"]]
        return {**base, "model": s["size"], "offload": where}
    if lesson == "05" and name in ("activations: on the card", "activations: prefetching"):
        return {**base, "offload": "activations" if "prefetching" in name else "none"}
    if lesson == "06" and s.get("way") in ("eager", "sdpa", "efficient") and s["seq"] <= 1024:
        attention = "eager" if s["way"] == "eager" else "sdpa"
        return {**base, "precision": amp[s["precision"]], "attention": attention}
    if lesson == "07" and s.get("how") in ("eager", "blocks", "whole") and "activation" in s:
        how = {"eager": "none"}.get(s["how"], s["how"])
        return {**base, "batch": 3, "seq": 1024, "precision": "amp-bf16", "activation": s["activation"], "compile": how}
    if lesson == "08" and name.startswith("gpt2, 4 x 1024"):
        loss = {"loss": "chunked", "loss_chunks": s["chunks"]} if s["chunks"] else {}
        return {**base, "precision": "amp-bf16", **loss}
    return None


def rows(files: tuple[str, ...] = LESSONS) -> list[tuple[Recipe, float, str]]:
    """Measured steps: recipe, seconds, where from; ``rough`` where a remark says that the time is."""
    found = []
    for file in files:
        for line in Path(REFERENCE, file).read_text("utf-8").splitlines():
            row = json.loads(line)
            if row.get("kind") != "report" or not row.get("timing"):
                continue
            fields = lesson_recipe(row)
            if fields is None:
                continue
            rough = "rough " if row.get("remark") else ""
            source = f"{rough}{row['lesson'][:2]} {row['name']}"
            try:
                found.append((Recipe.of(**fields), row["timing"]["median_seconds"], source))
            except UserError as error:
                print(f"left out: {row['name']}: {error}")
    if (REFERENCE / PLAN).is_file():
        for line in (REFERENCE / PLAN).read_text("utf-8").splitlines():
            row = json.loads(line)
            if row["status"] == "ok":
                rough = "rough " if row.get("remark") else ""
                found.append((Recipe.of(**row["recipe"]), row["seconds"], f"{rough}{row['pair']}"))
    return list(dict.fromkeys(found))


class Fit:
    """Predictions for all rows under given rates, with what does not depend on rates computed once."""

    def __init__(self, measured: list[tuple[Recipe, float, str]], card: machine.Card):
        self.measured, self.card = measured, card
        # the bench's rows are what plans choose among: sizes at which the card, not the host, sets the pace
        self.weights = np.array(
            [
                ROUGH_WEIGHT if source.startswith("rough") else BENCH_WEIGHT if source.startswith("gpt2") else 1.0
                for _, _, source in measured
            ]
        )
        self.parts = [(counting.work(r, card.name).at(r.batch), Shape.of(r)) for r, _, _ in measured]

    def errors(self, rates: Rates) -> list[float]:
        """Of each row, the logarithm of predicted over measured."""
        return [
            math.log(Estimator(recipe, self.card, rates, shape).times(kernels).seconds / seconds)
            for (recipe, seconds, _), (kernels, shape) in zip(self.measured, self.parts, strict=True)
        ]

    def cost(self, rates: Rates) -> float:
        """What the search makes small."""
        return float(np.average(np.abs(self.errors(rates)), weights=self.weights))

    def search(self, start: Rates, rounds: int = 40) -> Rates:
        """The best rates found from `start`: Gauss-Newton in the logarithms of rates, each row weighted so that the sum
        of squares becomes one of magnitudes, with steps that are damped until they help."""
        names = list(asdict(start))
        best, cost, damping = start, self.cost(start), 0.1
        prior = np.log([getattr(start, name) for name in names])
        for _ in range(rounds):
            errors = np.array(self.errors(best))
            slopes = np.empty((len(errors), len(names)))
            for column, name in enumerate(names):
                moved = self.errors(replace(best, **{name: getattr(best, name) * math.exp(0.02)}))
                slopes[:, column] = (np.array(moved) - errors) / 0.02
            weights = self.weights / np.maximum(np.abs(errors), 0.02)
            here = np.log([getattr(best, name) for name in names])
            normal = slopes.T @ (weights[:, None] * slopes) + KEPT * np.eye(len(names))
            pull = slopes.T @ (weights * errors) + KEPT * (here - prior)
            for _ in range(6):
                step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -pull)
                tried = _bounded(dict(zip(names, np.exp(here + np.clip(step, -0.5, 0.5)), strict=True)))
                found = self.cost(tried)
                if found < cost:
                    best, cost, damping = tried, found, damping / 3
                    break
                damping *= 4
            else:
                break
        return best


def without(pairs: list[str], rounds: int = 12) -> dict[str, Rates]:
    """For each pair of model and sequence the rates that are found without any row of it."""
    whole = Fit(rows(), machine.preset("h200"))
    found = {}
    for pair in pairs:
        model, seq = pair.rsplit(" ", 1)
        kept = [n for n, (r, _, _) in enumerate(whole.measured) if (r.model, str(r.seq)) != (model, seq)]
        one = copy.copy(whole)
        one.measured, one.parts = [whole.measured[n] for n in kept], [whole.parts[n] for n in kept]
        one.weights = whole.weights[kept]
        found[pair] = one.search(Rates(), rounds)
    return found


def _bounded(values: dict[str, float]) -> Rates:
    return Rates(**{name: min(float(value), MOST.get(name, math.inf)) for name, value in values.items()})


def main() -> None:
    quiet.transformers()
    card = machine.preset("h200")
    extra = tuple(a for a in sys.argv[1:] if not a.startswith("--"))  # further files of a lesson's rows
    measured = rows((*LESSONS, *extra))
    fit = Fit(measured, card)
    rates = fit.search(Rates())
    errors = fit.errors(rates)
    for (recipe, seconds, source), error in sorted(zip(measured, errors, strict=True), key=lambda p: abs(p[1])):
        print(f"{math.expm1(error):+7.1%}  {1e3 * seconds:8.1f} ms  {source}: {recipe}")
    off = sorted(abs(math.expm1(e)) for e in errors)
    summary = {"rows": len(off), "median": statistics.median(off), "p90": off[int(0.9 * len(off))], "worst": off[-1]}
    print(json.dumps(summary), json.dumps({k: float(f"{v:.4g}") for k, v in asdict(rates).items()}, indent=1))
    if "--write" in sys.argv:
        document = {
            "card": "h200", "date": time.strftime("%Y-%m-%d"), "made_by": "bench/plan_fit.py",
            "from": [f"data/reference/{f}" for f in (*LESSONS, PLAN) if (REFERENCE / f).is_file()],
            "error": {k: round(v, 4) for k, v in summary.items()},
            "rates": {k: float(f"{v:.4g}") for k, v in asdict(rates).items()},
        }  # fmt: skip
        RATES.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
