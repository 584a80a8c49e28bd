"""In which order should one switch things on? Three orders of the same switches, on a card.

python bench/capstone_orders.py --out rows.jsonl
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from capstone import BUDGET, ROOT, write

GAIN = 1.02  # a switch must be this much faster to be worth a line


class Bench:
    """Measures each set of switches once."""

    def __init__(self, out: str, limit_s: float):
        self.out, self.end, self.known = out, time.time() + limit_s, {}  # type: ignore[var-annotated]

    def of(self, names: frozenset[str]) -> Any:
        """The report of these switches, without a limit; None once the time is up."""
        import labkit as lab
        from labkit import capstone

        if names not in self.known:
            if time.time() > self.end:
                return None
            title, switches = capstone.switched(names)
            report = lab.measure(
                capstone.training, name=title, repeats=3, trace=False, nearest=False, record=False, **switches
            )
            if report.source == "measured":
                write(self.out, "report", **report.to_dict())
            rate = f", {report.tokens_per_second:,.0f} tokens/s" if report.timing else ""
            print(f"{title}: {lab.show_bytes(report.steady.reserved_bytes)} reserved{rate}", flush=True)
            self.known[names] = report
        return self.known[names]


def greedy(bench: Bench) -> list[str] | None:
    """While it does not fit: the switch with the smallest product of peak and time. Then: the fastest that still fits,
    as long as one is faster by `GAIN`. None when the time was up before everything was measured."""
    from labkit import capstone

    taken: list[str] = []
    while True:
        now = bench.of(frozenset(taken))
        left = {name: bench.of(frozenset([*taken, name])) for name in capstone.SWITCHES if name not in taken}
        if now is None or None in left.values():
            return None  # not all was measured: the best of what was would be no greedy choice
        if not left:
            return taken
        if not now.fits(BUDGET):
            best = min(left, key=lambda name: left[name].peak_bytes * seconds(left[name]))
        else:
            left = {name: report for name, report in left.items() if report.fits(BUDGET)}
            best = min(left, key=lambda name: seconds(left[name]), default="")
            if not best or seconds(left[best]) * GAIN > seconds(now):
                return taken
        taken.append(best)


def seconds(report: Any) -> float:
    """The time of a step; 1 where none was measured, so that the peak alone decides."""
    return report.timing.median_seconds if report.timing else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(ROOT / "runs" / "capstone.jsonl"))
    parser.add_argument("--limit-s", type=float, default=3600)
    arguments = parser.parse_args()
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    from labkit import capstone

    bench = Bench(arguments.out, arguments.limit_s)
    orders = {name: list(order) for name, order in capstone.ORDERS.items()}
    for order in orders.values():
        for count in range(len(order) + 1):
            bench.of(frozenset(order[:count]))
    found = greedy(bench)
    if found is None:
        raise SystemExit("greedy: the time is up before every switch was measured; give it more with --limit-s")
    orders["greedy"] = found
    for name, order in orders.items():
        print(f"{name}: {' -> '.join(order)}")
        write(arguments.out, "fact", name="order", what=name, value=", ".join(order), task=capstone.TASK, budget=BUDGET)


if __name__ == "__main__":
    main()
