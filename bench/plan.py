"""The planner against a measured search: ``choose`` candidates, ``measure`` them on a card, ``table`` what came out.

    python bench/plan.py choose                          # writes bench/plan-candidates.jsonl; needs no card
    python bench/plan.py measure --out rows.jsonl        # on a card, alone on it; goes on where it was stopped
    python bench/plan.py table                           # bench/results/plan.md, from data/reference/plan-h200.jsonl

For each pair of model and sequence length about 30 recipes are measured once, without a cap. Under a budget those fit
whose measured reserved peak is within it; the fastest of them is what the plan's pick is held against. The planner
chooses among the same recipes, by its predictions alone.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apart

ROOT = Path(__file__).resolve().parents[1]
CANDIDATES = ROOT / "bench" / "plan-candidates.jsonl"
ROWS = ROOT / "data" / "reference" / "plan-h200.jsonl"
LONGER = "bench/models/gpt2-2048"  # gpt2 with a position table for 2048 tokens
# model, sequence, whether rates are fitted to its rows, seconds of its turn on the card
PAIRS = (
    ("gpt2", 1024, "fit", 18), ("gpt2-xl", 1024, "fit", 48), ("gpt2-medium", 1024, "test", 20),
    ("gpt2-large", 1024, "test", 26), ("gpt2", 512, "test", 16), ("gpt2-xl", 512, "test", 40),
    ("gpt2-medium", 512, "fit", 18), ("gpt2-large", 512, "fit", 24), ("gpt2", 256, "test", 14),
    (LONGER, 2048, "test", 18),
)  # fmt: skip
BUDGETS = (8, 12, 16, 6, 24, 40)  # GiB
COUNT, DRAWN = 30, 10  # recipes of a pair; of them, drawn at random from what fits the largest budget
WARM, TIMED = 2, 4
MOST_TOKENS = 2**15  # of a micro-batch


def choose(arguments: argparse.Namespace) -> None:
    """For each pair: the fastest by estimated time under each budget, in turns, and some drawn at random.

    Memory is only guessed here (`rough_bytes`): which recipes are measured must not hang on the predictor.
    """
    from labkit import machine, quiet
    from labkit.planner import candidates, roofline
    from labkit.planner.room import rough_bytes
    from labkit.planner.shape import Shape

    quiet.transformers()
    card = machine.preset("h200")
    there = {row["pair"] for row in _rows(CANDIDATES)}
    for model, seq, _, _ in PAIRS:
        if f"{model} {seq}" in there:
            continue
        rng = random.Random(f"{model} {seq}")
        sizes = [b for b in candidates.BATCHES if b * seq <= MOST_TOKENS]
        ones = [r.changed(batch=b) for _, r in _structures(card, model, seq) for b in sizes]
        shape = Shape.of(ones[0])
        need = {r: rough_bytes(r, shape) for r in ones}
        fitting = [r for r in ones if need[r] <= max(BUDGETS) * 2**30]
        speed = {r: r.tokens / roofline.estimate(r, card, shape=shape).seconds for r in fitting}
        ranks = [sorted((r for r in fitting if need[r] <= b * 2**30), key=lambda r: -speed[r]) for b in BUDGETS]
        chosen: dict[Any, None] = {}
        for rank in range(40):
            for found in ranks:
                if rank < len(found) and len(chosen) < COUNT - DRAWN:
                    chosen.setdefault(found[rank])
        first = list(chosen)
        drawn = [r for r in rng.sample(fitting, min(len(fitting), COUNT)) if r not in chosen][:DRAWN]
        turns = [r for pair in zip(first[::2], first[1::2], drawn, strict=False) for r in pair]
        order = [*turns, *(r for r in (*first, *drawn) if r not in turns)]
        order.sort(key=lambda r: r.offload.startswith("optimizer"))  # slow to set up: last
        with CANDIDATES.open("a", encoding="utf-8") as out:
            for recipe in order:
                out.write(json.dumps({"pair": f"{model} {seq}", "recipe": recipe.to_dict()}) + "\n")
        print(f"{model} {seq}: {len(order)} of {len(fitting)}", flush=True)


def _structures(card: Any, model: str, seq: int) -> Any:
    """Without compiled blocks: a compilation for each of thirty shapes would take longer than everything else."""
    from labkit.planner import candidates

    return candidates.candidates(card, model=model, batch=1, seq=seq, compile=False)


def measure(arguments: argparse.Namespace) -> None:
    """All pairs, each in processes of its own, one of which is at work on the card while the next ones start."""
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder, "lock")
        lock.touch()
        end = time.time() + arguments.limit_s
        tasks = [pair for pair in PAIRS if not arguments.only or arguments.only == f"{pair[0]} {pair[1]}"]
        apart.run(
            tasks,
            lambda pair: ["pair", "--out", str(out), "--lock", str(lock), "--pair", f"{pair[0]} {pair[1]}",
                          "--seconds", str(arguments.seconds or pair[3]), "--end", str(end)],
            jobs=arguments.jobs, seconds=arguments.limit_s, name=lambda pair: f"{pair[0]} {pair[1]}",
        )  # fmt: skip
    print(f"{len(list(_rows(out)))} rows in {out}")


def measure_pair(arguments: argparse.Namespace) -> None:
    """One turn of a pair: its candidates that have no row yet, in order, until its seconds are over."""
    from memory_truth import provenance

    from labkit import quiet
    from labkit.recipes import Recipe

    quiet.transformers()
    import transformers

    transformers.GPT2LMHeadModel  # noqa: B018  loads the lazy module while another process measures
    import bitsandbytes  # noqa: F401
    import torch
    from torchao.optim import AdamW8bit  # noqa: F401

    device = torch.device("cuda", 0)
    done = {json.dumps(row["recipe"], sort_keys=True) for row in _rows(Path(arguments.out))}
    tasks = [row["recipe"] for row in _rows(CANDIDATES) if row["pair"] == arguments.pair]
    tasks = [task for task in tasks if json.dumps(task, sort_keys=True) not in done]
    split = next(split for model, seq, split, _ in PAIRS if f"{model} {seq}" == arguments.pair)
    where, count = {**provenance(), "command": "python bench/plan.py measure"}, 0
    gc.collect()
    gc.freeze()  # collecting afterwards takes no time for what is imported
    _compile_optimizers([Recipe.of(**task) for task in tasks], device)
    with open(arguments.lock) as held, open(arguments.out, "a", encoding="utf-8") as out:
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.time()
        for task in tasks:
            if time.time() - start > arguments.seconds or time.time() > arguments.end:
                break
            began = time.time()
            row = measured(Recipe.of(**task), device)
            spent = round(time.time() - began, 2)
            out.write(json.dumps({"pair": arguments.pair, "split": split, **row, "spent_s": spent, **where}) + "\n")
            out.flush()
            count += 1
    print(f"{arguments.pair}: {count} measured in {time.time() - start:.0f} s")


def _compile_optimizers(recipes: list[Any], device: Any) -> None:
    """torchao compiles its step for every shape of a weight, half a minute in all: before the card's turn, by one step
    on a few tokens for each way that gradients come."""
    from labkit.measuring import release

    for gradients in dict.fromkeys(r.gradients for r in recipes if r.optimizer == "adamw8bit"):
        one = next(r for r in recipes if r.optimizer == "adamw8bit" and r.gradients == gradients)
        step = one.changed(batch=1, seq=16, checkpoint=0, loss="full", compile="none").experiment()(device)
        step()
        del step
        release()


def measured(recipe: Any, device: Any) -> dict[str, Any]:
    """Peaks and time of a recipe's step on an empty card, without a cap."""
    import torch

    from labkit.measuring import release, warm_workspaces

    warm_workspaces(device)
    release()
    row: dict[str, Any] = {"recipe": recipe.to_dict()}
    try:
        row |= _steps(recipe, device)
    except torch.OutOfMemoryError:
        row |= {"status": "oom"}
    except Exception as error:  # one recipe that does not run must not lose the others
        row |= {"status": "error", "message": f"{type(error).__name__}: {error}"[:300]}
    release()
    return row


def _steps(recipe: Any, device: Any) -> dict[str, Any]:
    import torch

    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step = recipe.experiment()(device)
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    first, cold = _peaks(), time.perf_counter() - began
    for _ in range(WARM - 1):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(TIMED)]
    for begin, end in events:
        begin.record()
        step()
        end.record()
    torch.cuda.synchronize()
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in events]
    return {
        "status": "ok", "first": first, "steady": _peaks(), "seconds": statistics.median(seconds),
        "all_seconds": [round(s, 6) for s in seconds], "cold_seconds": round(cold, 3),
    }  # fmt: skip


def _peaks() -> dict[str, int]:
    import torch

    stats = torch.cuda.memory_stats()
    return {f"{name}_bytes": stats[f"{name}_bytes.all.peak"] for name in ("allocated", "requested", "reserved")}


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        yield from (json.loads(line) for line in path.read_text("utf-8").splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("choose", "measure", "table", "pair"))
    parser.add_argument("--out", default=str(ROOT / "runs" / "plan.jsonl"))
    parser.add_argument("--only", help="of `measure`: one pair, such as 'gpt2 512'")
    parser.add_argument("--jobs", type=int, default=3, help="processes; one of them measures, the others start")
    parser.add_argument("--limit-s", type=float, default=3600, help="of `measure`: for everything together")
    parser.add_argument("--seconds", type=float, help="of `measure`: for each pair, instead of its share")
    for hidden in ("--pair", "--lock"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    {"choose": choose, "measure": measure, "pair": measure_pair, "table": table}[arguments.what](arguments)


def table(arguments: argparse.Namespace) -> None:
    """The honest table, from the committed rows."""
    import plan_table

    plan_table.write(list(_rows(ROWS)), ROOT / "bench" / "results" / "plan.md")


if __name__ == "__main__":
    main()
