"""The planner against a measured search: ``choose`` candidates, ``measure`` them on a card, ``table`` what came out.

    python bench/plan.py choose                          # writes bench/plan-candidates.jsonl; needs no card
    python bench/plan.py measure --out rows.jsonl        # on a card, alone on it; goes on where it was stopped
    python bench/plan.py table                           # bench/results/plan.md, from data/reference/plan-h200.jsonl

For each pair of model and sequence length recipes are measured once, without a cap: those that plans choose under any
of the budgets, their neighbours, and what else is fast by a guess that knows nothing of the predictor. Under a budget
those fit whose measured reserved peak is within it; the fastest of them is what the plan's pick is held against. The
planner chooses among the same recipes, by its predictions alone.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
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
COUNT, PICKED = 30, 14  # recipes of a pair; of them, that plans choose, or neighbours of those
WARM, TIMED = 2, 4
STARTING = 70  # seconds until the first of them can measure
SLOW = 0.4  # seconds: of a longer step, half as many are measured
COMPILED = 7  # shapes of a pair that are compiled beforehand, in the order in which they are measured
SEGMENTS = "expandable_segments:True"
MOST_TOKENS = 2**15  # of a micro-batch


def choose(arguments: argparse.Namespace) -> None:
    """For each pair: what plans choose under each budget, the first of all budgets before the second; their uncompiled
    twins and neighbours in size; and the fastest by estimated time whose memory is only guessed (`rough_bytes`): which
    recipes are measured must not hang on the predictor alone."""
    from labkit import machine, quiet

    quiet.transformers()
    card = machine.preset("h200")
    CANDIDATES.write_text("", "utf-8")
    for model, seq, _, _ in PAIRS:
        picks = _picks(card, model, seq)
        order = dict.fromkeys((*picks, *_guessed(card, model, seq)))
        with CANDIDATES.open("a", encoding="utf-8") as out:
            for recipe in list(order)[:COUNT]:
                out.write(json.dumps({"pair": f"{model} {seq}", "recipe": recipe.to_dict()}) + "\n")
        print(f"{model} {seq}: {len(picks)} picked, {min(len(order), COUNT)} in all", flush=True)


def _picks(card: Any, model: str, seq: int) -> list[Any]:
    """What plans choose, by rank; then twins and neighbours of the first ones."""
    from labkit.planner import candidates, search
    from labkit.planner.room import Room

    ones = [c for c in candidates.candidates(card, model=model, batch=1, seq=seq) if _quick(c[1])]
    plans = [search.fastest(ones, card, Room(card, budget * 2**30), batch=None) for budget in BUDGETS]
    ranks = [[p[rank].recipe.changed(expandable_segments=True) for p in plans if rank < len(p)] for rank in range(3)]
    first = list(dict.fromkeys(ranks[0]))
    around = []
    for recipe in first:
        place = candidates.BATCHES.index(recipe.batch)
        for near in candidates.BATCHES[max(place - 1, 0) : place + 2 : 2]:
            around.append(candidates.several(recipe.changed(batch=near, accumulation=1)) or recipe.changed(batch=near))
    twins = [recipe.changed(compile="none") for recipe in first]
    return list(dict.fromkeys((*first, *ranks[1], *twins[:2], *around[::2], *ranks[2], *around[1::2])))[:PICKED]


def _guessed(card: Any, model: str, seq: int) -> list[Any]:
    """The fastest by estimated time under each budget, in turns, memory guessed from shapes; one size of a structure
    under one budget."""
    from labkit.planner import candidates, roofline
    from labkit.planner.room import rough_bytes
    from labkit.planner.shape import Shape

    sizes = [b for b in candidates.BATCHES if b * seq <= MOST_TOKENS]
    ranks = []
    ones = [r for _, r in candidates.candidates(card, model=model, batch=1, seq=seq) if _quick(r)]
    shape = Shape.of(ones[0])
    for budget in BUDGETS:
        largest = []
        for one in ones:
            fitting = [b for b in sizes if rough_bytes(one.changed(batch=b), shape) <= budget * 2**30]
            if fitting:
                recipe = one.changed(batch=fitting[-1])
                largest.append(candidates.several(recipe) or recipe)
        ranks.append(sorted(largest, key=lambda r: roofline.estimate(r, card, shape=shape).seconds / r.tokens))
    return list(dict.fromkeys(rank[n] for n in range(12) for rank in ranks if n < len(rank)))


def _quick(recipe: Any) -> bool:
    """Whether it is measured in seconds: masters on the host take half a minute to make, and torchao compiles its step
    for every shape of a weight where these are not in one piece."""
    apart = recipe.gradients == "host" or recipe.offload.startswith("states")
    return not recipe.offload.startswith("optimizer") and (recipe.optimizer != "adamw8bit" or apart)


def measure(arguments: argparse.Namespace) -> None:
    """All pairs, each in processes of its own, one of which is at work on the card while the next ones start."""
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder, "lock")
        lock.touch()
        end = time.time() + arguments.limit_s
        share = max(arguments.limit_s - STARTING, 60) / sum(pair[3] for pair in PAIRS)
        tasks = [pair for pair in PAIRS if not arguments.only or arguments.only == f"{pair[0]} {pair[1]}"]
        apart.run(
            tasks,
            lambda pair: ["pair", "--out", str(out), "--lock", str(lock), "--pair", f"{pair[0]} {pair[1]}",
                          "--seconds", str(arguments.seconds or pair[3] * share), "--end", str(end)],
            jobs=arguments.jobs, seconds=arguments.limit_s - 60, name=lambda pair: f"{pair[0]} {pair[1]}",
            environment=lambda pair: {"PYTORCH_ALLOC_CONF": SEGMENTS, "TORCHINDUCTOR_COMPILE_THREADS": "4"},
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
    _compile([Recipe.of(**task) for task in tasks], device)
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


def _compile(recipes: list[Any], device: Any) -> None:
    """Before the card's turn: a step of one block for each shape that the compiler asks for. torchao compiles its step
    for every piece of weights, Inductor each block for its batch."""
    import torch._dynamo

    from labkit.measuring import release

    # a shape that was compiled for once is compiled as it is, also where another came before
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 256
    shapes: dict[Any, Any] = {}
    for r in recipes:
        block = (r.batch, r.precision, bool(r.checkpoint)) if r.compile == "blocks" else None
        shapes.setdefault((block, r.optimizer, r.gradients, r.offload), r)
    for one in list(shapes.values())[:COMPILED]:
        step = one.changed(accumulation=1).experiment(layers=1)(device)
        step()
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
    began = time.perf_counter()
    for _ in range(WARM - 1):
        step()
    torch.cuda.synchronize()
    count = TIMED // 2 if (time.perf_counter() - began) / (WARM - 1) > SLOW else TIMED
    torch.cuda.reset_peak_memory_stats()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
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
    parser.add_argument("--jobs", type=int, default=5, help="processes; one of them measures, the others start")
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
