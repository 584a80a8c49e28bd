"""Where a prediction without a GPU deviates from CUDA's own dispatcher, operator by operator.

    python bench/compare_fake.py [--recipes FILE.jsonl] [--experiments] [--count 20] [--out FILE.jsonl]

Needs a CUDA card, and computes nothing on it: every experiment runs twice on tensors without data, once on the stand-in
device and once on ``cuda:0``, and the operators of one training step with the blocks that each of them takes are laid
side by side. Prints the operators that only one side has, and the peaks; exits with 1 when a peak differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from labkit import machine
from labkit.memory.kernels import chip
from labkit.memory.prediction import Run, report
from labkit.recipes import Recipe
from labkit.units import GiB

STEP = 2  # of the run, counted from 0: optimizer states are there


def operators(experiment: Callable[..., Any], *, on_fake_cuda: bool) -> tuple[list[Any], Any]:
    """(phase, operator, sizes of the blocks it took) of every operator of one step, and the report of the run."""
    preset = machine.preset("h200")
    run = Run(chip(preset.name, preset.capability), on_fake_cuda=on_fake_cuda)
    seen: list[tuple[int, Any]] = []
    ghosts_run = run.ghosts.run

    def watched(func: Any, args: Any, kwargs: Any) -> Any:
        recorder = run.recorder
        before = len(recorder.events)
        out = ghosts_run(func, args, kwargs)
        sizes = tuple(recorder.sizes[e] for e in recorder.events[before:] if e >= 0)
        phase = recorder.places[recorder.here][0]
        seen.append((before, (phase, str(func).removesuffix(".default"), sizes)))
        return out

    run.tracer._run = watched
    run.play(experiment)
    start, end = run.starts[STEP], run.starts[STEP + 1] if len(run.starts) > STEP + 1 else 1 << 60
    listed = [entry for at, entry in seen if start <= at < end]
    return listed, report(run, preset, trace=False)


def compare(name: str, experiment: Callable[..., Any]) -> dict[str, Any]:
    """One experiment's differences as plain values."""
    start = time.time()
    here, ours = operators(experiment, on_fake_cuda=False)
    there, cuda = operators(experiment, on_fake_cuda=True)
    only_here, only_there = Counter(), Counter()
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, here, there, autojunk=False).get_opcodes():
        if tag != "equal":
            only_here.update(here[i1:i2])
            only_there.update(there[j1:j2])
    for entry in list(only_here & only_there):  # the same operators in another order
        common = min(only_here[entry], only_there[entry])
        only_here[entry] -= common
        only_there[entry] -= common
    peaks = {
        step: {
            counter: [getattr(getattr(r, step), f"{counter}_bytes") for r in (ours, cuda)]
            for counter in ("allocated", "requested", "reserved")
        }
        for step in ("first", "steady")
    }
    return {
        "name": name, "operators": [len(here), len(there)], "peaks": peaks, "seconds": round(time.time() - start, 1),
        "only_stand_in": [[*entry, n] for entry, n in only_here.items() if n],
        "only_cuda": [[*entry, n] for entry, n in only_there.items() if n],
    }  # fmt: skip


def show(row: dict[str, Any]) -> bool:
    """Print a comparison; returns whether the requested peaks agree."""
    same = all(a == b for peaks in row["peaks"].values() for a, b in [peaks["requested"]])
    print(f"{row['name']}: {row['operators']} operators, peaks {'agree' if same else row['peaks']} {row['seconds']} s")
    for side in ("only_stand_in", "only_cuda"):
        for phase, operator, sizes, count in sorted(row[side], key=lambda e: -sum(e[2]) * e[3])[:12]:
            print(f"   {side.removeprefix('only_'):9s} {count:4d} x {operator} in {phase}, blocks {list(sizes)}")
    return same


def main() -> None:
    import memory_truth

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", help="a file of recipes, one JSON object a line, instead of random ones")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--experiments", action="store_true", help="also those of memory_experiments.py")
    parser.add_argument("--limit-s", type=float, default=500)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    if not machine.has_gpu():
        sys.exit("no CUDA card: there is nothing to compare with")
    if arguments.recipes:
        recipes = [Recipe.of(**json.loads(line)) for line in Path(arguments.recipes).read_text().splitlines()]
    else:
        rng = random.Random(arguments.seed)
        recipes = [memory_truth.random_recipe(rng, 20 * GiB, [1, 0, 0, 0]) for _ in range(arguments.count)]
    work = [(str(recipe), recipe.experiment()) for recipe in recipes]
    if arguments.experiments:
        import memory_experiments

        rows = [r for r in memory_experiments.chosen() if r["kind"] not in ("cpu_offload", "quantised_lora")]
        work += [(memory_experiments.name_of(row), memory_experiments.experiment_of(row)) for row in rows]
    start, agree, done = time.time(), 0, 0
    for name, experiment in work:
        if time.time() - start > arguments.limit_s:
            break
        done += 1
        try:
            row = compare(name, experiment)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        agree += show(row)
        sys.stdout.flush()
        if arguments.out:
            with open(arguments.out, "a") as out:
                out.write(json.dumps(row) + "\n")
    print(f"{agree} of {done} agree to the byte in requested peaks; {len(work) - done} not begun")
    sys.exit(0 if agree == done else 1)


if __name__ == "__main__":
    main()
