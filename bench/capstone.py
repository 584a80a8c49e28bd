"""Lesson 12's ablation of GPT-2 XL, and what stands beside it, on a card; each configuration in a fresh process.

    python bench/capstone.py measure --out rows.jsonl

Trainings against fp32 AdamW are in capstone_training.py, the case study in capstone_case.py, the orders in
capstone_orders.py. Rows are those of the lesson's own ledger (kinds ``report`` and ``fact``), so that it finds them in
data/reference/.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import apart

LESSON = "12_capstone"
ROOT = Path(__file__).resolve().parents[1]
BUDGET = "8GiB"


# ------------------------------------------------------------------------------------------------ the ablation


def configurations() -> list[dict[str, Any]]:
    """Every configuration of the ablation and of what stands beside it, the most important first."""
    from labkit import capstone

    rungs = [{"name": f"ladder: {name}", **capstone.rung(name)} for name in capstone.LADDER]
    best, host = capstone.rung(list(capstone.LADDER)[-1]), capstone.rung("the head's gradient summed in place")
    plain = {**host, "clip": None}
    inputs = {**best, "offload": "states+activations", "batch": 16, "loss_chunks": 64}
    beside = [
        {"name": "recommended, 4 micro-batches", **best, "accumulation": 4},
        {"name": "recommended, blocks' inputs on the host too, batch 16", **inputs, "expandable": True},
        {"name": "step in backward", **plain, "gradients": "in backward"},
        {"name": "step in backward, block by block", **plain, "gradients": "in backward", "flat": True},
        {"name": "4-bit states, gradients on the card", **host, "optimizer": "adamw4bit", "gradients": "card"},
        {"name": "step in backward, two passes", **host, "gradients": "two backward passes"},
        {"name": "step in backward, each clipped", **host, "gradients": "in backward, each clipped"},
        {"name": "torchao, optimizer and gradients on the host", **plain, **HOST, "offload": "optimizer+gradients"},
        {"name": "torchao, optimizer on the host", **plain, **HOST, "offload": "optimizer"},
        {"name": "torchao, optimizer and gradients on the host, batch 16", **plain, **HOST, "batch": 16,
         "offload": "optimizer+gradients"},
        {"name": "gradients on the host, 4 micro-batches", **host, "accumulation": 4},
        {"name": "gradients on the host, batch 8", **host, "batch": 8, "loss_chunks": 32, "expandable": True},
    ]  # fmt: skip
    return [rungs[-1], *beside[:3], rungs[-2], *beside[3:], *rungs[:-2]]


EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
HOST = {"gradients": "card", "optimizer": "adamw", "stochastic_rounding": False}


def measure(arguments: argparse.Namespace) -> None:
    """Fresh processes, a few of them starting while one measures; one line for each configuration."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("measure needs a card: without one lesson 12 predicts the peaks")
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    chosen = [c for c in configurations() if not arguments.only or arguments.only in c["name"]]
    chosen = [c for c in chosen if c["name"] not in arguments.without.split(";")]
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder, "lock")
        lock.touch()

        done = apart.run(
            chosen,
            lambda row: ["one", "--out", str(out), "--lock", str(lock), "--repeats", str(arguments.repeats), "--row",
                         json.dumps(row)],
            jobs=arguments.jobs, seconds=arguments.limit_s, name=lambda row: str(row["name"]),
            environment=lambda row: EXPANDABLE if row.get("expandable") else {},
        )  # fmt: skip
    raise SystemExit(not done)


def measure_one(arguments: argparse.Namespace) -> None:
    """One configuration: under the budget, and without one when it does not fit."""
    import labkit as lab
    from labkit import capstone, quiet

    row = json.loads(arguments.row)
    name = row.pop("name")
    row.pop("expandable", None)
    losses: list[Any] = []

    @functools.wraps(capstone.training)
    def experiment(device: Any, **switches: Any) -> Any:
        losses.clear()
        step = capstone.training(device, **switches)

        def noted() -> Any:
            loss = step()
            if len(losses) < 4:
                losses.append(loss)
            return loss

        noted.tokens = step.tokens  # type: ignore[attr-defined]
        return noted

    quiet.transformers()
    options = {"repeats": arguments.repeats, "trace": False, "nearest": False, "record": False, **row}
    with open(arguments.lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = [lab.measure(experiment, name=name, budget=BUDGET, **options)]
        write(arguments.out, "report", **found[0].to_dict())
        if not found[0].ok:
            found.append(lab.measure(experiment, name=f"{name}, without a limit", **options))
            write(arguments.out, "report", **found[1].to_dict())
    found_losses = [float(loss) for loss in losses]
    for place, value in enumerate(found_losses, start=1):
        write(arguments.out, "fact", name="loss of a first step", what=f"{name}, {place}", value=value, unit="nats")
    print("\n".join(told(report) for report in found), " losses", " ".join(f"{x:.4f}" for x in found_losses))


def told(report: Any) -> str:
    """A report as one line."""
    import labkit as lab

    if not report.ok:
        return f"{report.name}: out of memory; {report.failure.message[:150]}"
    peaks = report.steady
    numbers = (peaks.allocated_bytes, peaks.reserved_bytes, peaks.device_bytes or 0)
    rate = f"{report.tokens_per_second:,.0f} tokens/s" if report.timing else ""
    first = f"first step {report.first.allocated_bytes / 2**30:.2f}"
    return f"{report.name}: {' / '.join(lab.show_bytes(n) for n in numbers)}, {first}, {rate}"


def write(out: str, kind: str, **fields: Any) -> None:
    """A row as the lesson's own ledger has it."""
    import labkit as lab
    from labkit import lesson, machine
    from labkit.results import METHOD

    here = machine.here()
    row = {
        "kind": kind, "lesson": LESSON, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "card": here.card or "processor", "source": "measured" if here.card else "cpu", "method": METHOD,
        "versions": lesson.versions(), "capability": here.sm,
        "command": f"bench/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:2])}",
    }  # fmt: skip
    lab.Ledger(out).append({**row, **fields})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "one"))
    parser.add_argument("--out", default=str(ROOT / "runs" / "capstone.jsonl"))
    parser.add_argument("--only", help="of `measure`: only configurations with this in their name")
    parser.add_argument("--without", default="", help="of `measure`: names of configurations to leave out, with ;")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=3600)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    {"measure": measure, "one": measure_one}[arguments.what](arguments)


if __name__ == "__main__":
    main()
