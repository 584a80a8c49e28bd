"""How far predictions are from the truth: errors by field, what each correction is worth, and a peer on the same grid.

    python bench/memory.py [--truth data/reference/memory-h200.jsonl] [--split test] [--limit N] [--out bench/results]

Reads measured rows, predicts each (no GPU needed) and writes ``memory.md`` and ``memory.png``. Constants were fitted on
the rows of split ``fit`` only. ``--ablation N`` repeats N rows with one correction left out at a time, ``--peer N``
runs PyTorch's own ``MemTracker`` under fake tensors on N rows. Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from labkit import quiet  # noqa: E402
from labkit.recipes import Recipe  # noqa: E402
from labkit.units import GiB, show_bytes  # noqa: E402

QUANTITIES = [(step, name) for step in ("steady", "first") for name in ("allocated", "requested", "reserved")]
# median, 95th percentile and worst relative error that a release must keep, in per cent
BOUNDS = {"allocated": (0.2, 1.0, 2.0), "requested": (1.0, 1.0, 1.0), "reserved": (3.0, 8.0, 8.0)}
CORRECTIONS = {
    "autocast": "CUDA's autocast lists",
    "dropout": "dropout with CUDA's bool mask",
    "attention": "the attention kernel of the card",
    "sums": "gradients summed in place",
    "kernels": "blocks inside kernels",
    "workspace": "cuBLAS workspaces",
    "allocator": "blocks and segments replayed (off: allocated and reserved taken as requested)",
}


def predict(recipe: Recipe, without: str = "") -> dict[str, dict[str, int]]:
    """Peaks of the first and the steady step in bytes, with one correction left out if asked."""
    from labkit import machine
    from labkit.memory.kernels import chip
    from labkit.memory.prediction import Run, report
    from labkit.memory.workspaces import workspaces

    preset = machine.preset("h200")
    run = Run(chip(preset.name, preset.capability), stateless=True, without=frozenset({without}))
    run.play(recipe.experiment())
    found = report(run, preset, trace=False)
    peaks = {
        step: {n: getattr(getattr(found, step), f"{n}_bytes") for _, n in QUANTITIES} for step in ("steady", "first")
    }
    for values in peaks.values():
        if without == "allocator":
            values["allocated"] = values["reserved"] = values["requested"]
        if without == "workspace":
            for name in values:
                values[name] -= sum(workspaces(preset.capability))
    return peaks


def peer(recipe: Recipe) -> dict[str, dict[str, int]]:
    """The steady peak by PyTorch's ``MemTracker`` under fake tensors, used as its documentation shows."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        step = recipe.experiment()(torch.device("cpu"))
        tracker = MemTracker()
        from labkit.memory.whereabouts import found_in

        tracker.track_external(*(o for _, o in found_in(step, (torch.nn.Module, torch.optim.Optimizer))))
        with tracker:
            for i in range(2):
                step()
                if i == 0:
                    tracker.reset_mod_stats()
        peak = max(values["Total"] for values in tracker.get_tracker_snapshot("peak").values())
    return {"steady": {"allocated": peak}}


def errors(rows: Iterable[dict], how: Callable[[Recipe], dict]) -> list[dict[str, Any]]:
    """One entry a row: relative errors in per cent by quantity, seconds, or why there is none."""
    entries = []
    for row in rows:
        recipe, start, processor = Recipe.of(**row["recipe"]), time.perf_counter(), time.process_time()
        entry: dict[str, Any] = {"recipe": recipe, "row": row}
        try:
            found = how(recipe)
        except Exception as error:  # the peer cannot run every recipe; each failure is counted and named
            entry["failure"] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
            entries.append(entry)
            continue
        entry["seconds"], entry["processor"] = time.perf_counter() - start, time.process_time() - processor
        entry["found"] = found
        entry["error"] = {
            (step, name): 100 * (found[step][name] / row[step][f"{name}_bytes"] - 1)
            for step, name in QUANTITIES
            if name in found.get(step, {})
        }
        entries.append(entry)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return entries


def summary(values: list[float]) -> tuple[float, float, float]:
    """Median, 95th percentile and worst of the absolute values."""
    ranked = sorted(abs(v) for v in values)
    return statistics.median(ranked), ranked[min(len(ranked) - 1, int(0.95 * len(ranked)))], ranked[-1]


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows]) + "\n"


def text(entries: list[dict], ablation: dict[str, list[dict]], peers: list[dict], missed: list[str], title: str) -> str:
    """The whole result as Markdown."""
    done = [e for e in entries if "error" in e]
    show = "{:.3f} %".format
    parts = [f"# Predicted against measured memory\n\n{title}\n"]
    lines = []
    for key in QUANTITIES:
        values = [e["error"][key] for e in done]
        exact = sum(abs(v) < 1e-4 for v in values)
        lines.append([f"{key[0]} {key[1]}", *map(show, summary(values)), f"{exact} of {len(values)}"])
    parts.append(table(["peak", "median", "95th percentile", "worst", "within 0.0001 %"], lines))
    parts.append("Bounds missed: " + ("; ".join(missed) if missed else "none") + ".\n")
    parts.append("## Steady allocated peak by field\n")
    lines = []
    for field in (
        "model",
        "precision",
        "attention",
        "checkpoint",
        "optimizer",
        "loss",
        "activation",
        "accumulation",
        "dropout",
    ):
        for value in sorted({getattr(e["recipe"], field) for e in done}, key=str):
            group = [e for e in done if getattr(e["recipe"], field) == value]
            lines.append(
                [
                    field,
                    str(value),
                    str(len(group)),
                    *map(show, summary([e["error"]["steady", "allocated"] for e in group])),
                ]
            )
    parts.append(table(["field", "value", "cells", "median", "95th percentile", "worst"], lines))
    parts.append("## Time of one prediction (imports not counted; other work ran on the same two cores)\n")
    lines = []
    for model in sorted({e["recipe"].model for e in done}):
        group = [e for e in done if e["recipe"].model == model]
        wall, own = ([e[key] for e in group] for key in ("seconds", "processor"))
        lines.append(
            [model, str(len(group)), *(f"{f(t):.2f} s" for t in (own, wall) for f in (statistics.median, max))]
        )
    parts.append(
        table(["model", "cells", "processor, median", "processor, longest", "wall, median", "wall, longest"], lines)
    )
    if ablation:
        parts.append("## What each correction is worth (steady allocated peak)\n")
        lines = [
            [CORRECTIONS.get(name, "everything on"), str(len(found)),
             *map(show, summary([e["error"]["steady", "allocated"] for e in found if "error" in e]))]
            for name, found in ablation.items()
        ]  # fmt: skip
        parts.append(table(["left out", "cells", "median", "95th percentile", "worst"], lines))
    if peers:
        ran = [e for e in peers if "error" in e]
        parts.append(
            "## Peer: `torch.distributed._tools.mem_tracker.MemTracker` under fake tensors (steady allocated peak)\n"
        )
        ours = {e["recipe"]: e for e in done}
        lines = []
        if ran:
            lines.append(
                ["MemTracker", str(len(ran)), *map(show, summary([e["error"]["steady", "allocated"] for e in ran]))]
            )
            same = [ours[e["recipe"]]["error"]["steady", "allocated"] for e in ran if e["recipe"] in ours]
            if same:
                lines.append(["labkit, same cells", str(len(same)), *map(show, summary(same))])
        parts.append(table(["predictor", "cells", "median", "95th percentile", "worst"], lines))
        reasons: dict[str, int] = {}
        for e in peers:
            if "failure" in e:
                reasons[e["failure"]] = reasons.get(e["failure"], 0) + 1
        parts += [f"MemTracker could not run {count} cells: {reason}\n" for reason, count in reasons.items()]
    worst = sorted(done, key=lambda e: -abs(e["error"]["steady", "allocated"]))[:8]
    parts.append("## The cells farthest off\n")
    parts.append(
        table(
            ["recipe", "measured", "allocated", "requested", "reserved"],
            [
                [str(e["recipe"]), show_bytes(e["row"]["steady"]["allocated_bytes"]),
                 *(f"{e['error']['steady', n]:+.3f} %" for n in ("allocated", "requested", "reserved"))]
                for e in worst
            ],
        )
    )  # fmt: skip
    return "\n".join(parts)


def verdicts(entries: list[dict]) -> list[str]:
    """Every bound that is missed, and every false "fits" outside a band of one per cent."""
    missed = []
    done = [e for e in entries if "error" in e]
    missed += [f"no prediction for {e['recipe']}: {e['failure']}" for e in entries if "failure" in e]
    for step, name in QUANTITIES:
        for label, value, bound in zip(
            ("median", "95th percentile", "worst"),
            summary([e["error"][step, name] for e in done]),
            BOUNDS[name],
            strict=True,
        ):
            if value > bound:
                missed.append(f"{step} {name}: {label} {value:.2f} % > {bound} %")
    for budget in (8, 16, 24):
        for e in done:
            said = max(e["found"][s]["reserved"] for s in ("first", "steady")) <= budget * GiB
            true = max(e["row"][s]["reserved_bytes"] for s in ("first", "steady"))
            if said and true > 1.01 * budget * GiB:
                missed.append(f"a false fit at {budget} GiB: {e['recipe']}")
    return missed


def draw(entries: list[dict], file: Path) -> None:
    """Predicted against measured, and the errors sorted."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    done = [e for e in entries if "error" in e]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    truth = [e["row"]["steady"]["allocated_bytes"] / GiB for e in done]
    found = [e["found"]["steady"]["allocated"] / GiB for e in done]
    left.loglog(truth, found, ".", color="#0072b2")
    left.loglog([min(truth), max(truth)], [min(truth), max(truth)], color="0.6", linewidth=0.8)
    left.set(xlabel="measured, GiB", ylabel="predicted, GiB", title="Steady allocated peak (H200)")
    for name, colour in (("allocated", "#0072b2"), ("requested", "#009e73"), ("reserved", "#d55e00")):
        ranked = sorted(abs(e["error"]["steady", name]) for e in done)
        right.plot(
            [100 * (i + 1) / len(ranked) for i in range(len(ranked))],
            [max(v, 1e-4) for v in ranked],
            label=name,
            color=colour,
        )
    right.set(yscale="log", xlabel="per cent of cells", ylabel="error, per cent (1e-4: none)", title="Errors, sorted")
    right.legend()
    figure.savefig(file, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, default=ROOT / "data/reference/memory-h200.jsonl")
    parser.add_argument("--split", choices=("fit", "test", "all"), default="test")
    parser.add_argument("--limit", type=int, default=None, help="the first N rows only")
    parser.add_argument("--ablation", type=int, default=12, metavar="N", help="rows for the ablation (0: none)")
    parser.add_argument("--peer", type=int, default=12, metavar="N", help="rows for the peer (0: none)")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results")
    options = parser.parse_args()

    import torch

    quiet.transformers()  # imports are not part of a prediction's time
    import transformers

    rows = [json.loads(line) for line in options.truth.read_text().splitlines()]
    rows = [r for r in rows if r["status"] == "ok" and options.split in ("all", r["split"])][: options.limit]
    small = [r for r in rows if r["recipe"]["model"] == "gpt2"]
    entries = errors(rows, predict)
    ablation: dict[str, list[dict]] = {}
    if options.ablation:
        for name in ("", *CORRECTIONS):
            ablation[name] = errors(small[: options.ablation], lambda recipe, name=name: predict(recipe, name))
    # the peer refuses modules that are called twice in a step, as in accumulation and in the chunked loss
    single = [r for r in small if r["recipe"]["accumulation"] == 1 and r["recipe"]["loss"] == "full"]
    peers = errors(single[: options.peer], peer)
    missed = verdicts(entries)
    versions = rows[0]["versions"]
    title = (
        f"{len(entries)} random recipes of split `{options.split}` in `{options.truth.name}`, measured on one "
        f"{rows[0]['card']} (driver {rows[0]['driver']}, PyTorch {versions['torch']}, transformers "
        f"{versions['transformers']}), predicted with PyTorch {torch.__version__}, transformers "
        f"{transformers.__version__}. The figures hold for that card; other cards are modelled from PyTorch's source "
        "and were not measured."
    )
    report = text(entries, ablation, peers, missed, title)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "memory.md").write_text(report)
    draw(entries, options.out / "memory.png")
    print(report)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
