"""Measures random recipes on a real GPU, each in a fresh process: the truth that predictions are held against.

    python bench/memory_truth.py --count 300 --seed 1 --out memory-h200.jsonl        (needs a CUDA card)

The parent imports the libraries and never touches CUDA; each recipe runs in a forked child, so that its allocator is
new. Peaks are counters of the process's own allocator, so children can share the card; times cannot be read from it.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a card must not create a context in the parent
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from labkit.models import GPT2_SIZES
from labkit.recipes import CHOICES, Recipe, conflict
from labkit.units import GiB


def random_recipe(rng: random.Random, limit_bytes: float, weights: list[int]) -> Recipe:
    """A recipe over all fields whose crude estimate stays below `limit_bytes`; `weights` are of the model sizes."""
    while True:
        fields: dict = {
            "model": rng.choices(list(GPT2_SIZES), weights=weights)[0],
            "batch": rng.choice((1, 1, 2, 2, 3, 4, 4, 5, 6, 8, 8, 12, 16)),
            "seq": rng.choice((64, 128, 200, 256, 384, 500, 512, 512, 640, 768, 1000, 1024, 1024, 1024)),
            "precision": rng.choice(CHOICES["precision"]),
            "attention": rng.choice(("eager", "sdpa", "sdpa")),
            "checkpoint": rng.choice((0, 0, 0, 1, 1, 2, 3, 4, 5, 6, 12)),
            "optimizer": rng.choice(CHOICES["optimizer"]),
            "loss": rng.choice(CHOICES["loss"]),
            "activation": rng.choice(CHOICES["activation"]),
            "accumulation": rng.choice((1, 1, 1, 2, 3)),
            "dropout": rng.choice((0.1, 0.1, 0.0, 0.05)),
        }
        if conflict(fields) is None and crude_bytes(recipe := Recipe.of(**fields)) < limit_bytes:
            return recipe


def crude_bytes(recipe: Recipe) -> float:
    """An upper guess that only serves to keep recipes inside the card."""
    layers, width, heads = GPT2_SIZES[recipe.model]
    parameters = 12 * layers * width**2 + 51300 * width
    tokens = recipe.batch * recipe.seq
    kept = layers if not recipe.checkpoint else layers / recipe.checkpoint / 30 + recipe.checkpoint
    block = 130 * width + (14 * heads * recipe.seq if recipe.attention == "eager" else 0)
    head = 50257 * (14 if recipe.loss == "full" else 2)
    return parameters * 20 + tokens * (kept * block + head)


def measure_once(recipe: Recipe) -> dict:
    """One recipe in this (fresh) process: peaks of the first and of the fourth step, and the host's pinned memory."""
    import torch

    row = {"recipe": recipe.to_dict(), **measure_experiment(recipe.experiment())}
    held = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
    return {**row, "host_pinned_bytes": held.get("allocated_bytes.current")}


def measure_experiment(experiment) -> dict:
    """The same of any experiment."""
    import torch

    device = torch.device("cuda", 0)
    warm_workspaces(device)
    base = torch.cuda.memory_stats()
    row: dict = {"status": "ok"}
    row["base_allocated_bytes"] = base["allocated_bytes.all.current"]
    row["base_reserved_bytes"] = base["reserved_bytes.all.current"]
    try:
        step = experiment(device)
        torch.cuda.synchronize()
        row["built_allocated_bytes"] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        losses = [step()]
        row["first"] = peaks()
        losses += [step(), step()]
        torch.cuda.synchronize()
        row["between_allocated_bytes"] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(step())
        row["steady"] = peaks()
        row["shared_card_seconds"] = time.perf_counter() - start
        found = [float(loss) for loss in losses if loss is not None]
        row["losses"] = [round(loss, 4) if math.isfinite(loss) else None for loss in found]
    except torch.OutOfMemoryError as error:
        row["status"], row["message"] = "oom", str(error).splitlines()[0][:300]
    return row


def warm_workspaces(device) -> None:
    """Make cuBLAS take its workspaces in the main thread and in the autograd thread before anything is built."""
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
        b = torch.randn(64, device=device, dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(x, x, b).sum().backward()
        (x.view(4, 16, 64) @ x.view(4, 64, 16)).sum().backward()
        del x, b
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()


def peaks() -> dict:
    """The allocator's three peak counters, in bytes."""
    import torch

    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {f"{name}_bytes": stats[f"{name}_bytes.all.peak"] for name in ("allocated", "requested", "reserved")}


def _child(recipe: dict) -> dict:
    start = time.time()
    if recipe.get("expandable_segments"):  # before this process takes its first memory
        os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        import torch

        setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (setter or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")
    try:
        row = measure_once(Recipe.of(**recipe))
    except Exception as error:
        row = {"recipe": recipe, "status": "error", "message": f"{type(error).__name__}: {error}"[:500]}
    return {**row, "process_seconds": round(time.time() - start, 2)}


def provenance() -> dict:
    """Card, driver and versions, read in a child so that the parent stays without CUDA."""
    import bitsandbytes
    import torch
    import transformers

    card = torch.cuda.get_device_properties(0)
    import pynvml

    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
    return {
        "card": card.name,
        "capability": f"sm_{card.major}{card.minor}",
        "card_bytes": card.total_memory,
        "driver": driver if isinstance(driver, str) else driver.decode(),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "bitsandbytes": bitsandbytes.__version__,
            "python": sys.version.split()[0],
        },
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python bench/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:2])}".strip(),
    }


def import_without_cuda() -> None:
    """Import what the children need before forking them, so that they start in milliseconds. Some of it asks for the
    card while it is imported (torchao its capability), after which no fork could use CUDA: it is told there is none.
    PyTorch remembers for good what followed from that answer about Triton, and no child could compile: it forgets it.
    """
    from unittest import mock

    import torch
    from torch.utils import _triton

    no_card = {"is_available": lambda: False, "device_count": lambda: 0}
    with mock.patch.multiple(torch.cuda, **no_card):
        import transformers

        transformers.GPT2LMHeadModel  # noqa: B018  loads the lazy module
        transformers.AutoModelForCausalLM  # noqa: B018
    for kept in vars(_triton).values():
        if hasattr(kept, "cache_clear"):
            kept.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit-gib", type=float, default=30, help="no recipe whose crude estimate is larger")
    parser.add_argument("--weights", type=int, nargs=4, default=[50, 20, 15, 15], help="of the four model sizes")
    parser.add_argument("--out", required=True)
    parser.add_argument("--recipes", help="a file of recipes, one JSON object a line, instead of random ones")
    parser.add_argument("--limit-s", type=float, default=500, help="start no new recipe after this many seconds")
    arguments = parser.parse_args()

    import_without_cuda()
    rng = random.Random(arguments.seed)
    if arguments.recipes:
        recipes = [Recipe.of(**json.loads(line)) for line in Path(arguments.recipes).read_text().splitlines()]
    else:
        recipes = [random_recipe(rng, arguments.limit_gib * GiB, arguments.weights) for _ in range(arguments.count)]
    context = multiprocessing.get_context("fork")
    start, rows = time.time(), []
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        shared = pool.submit(provenance).result()

    def run(batch: list[Recipe], jobs: int) -> list[Recipe]:
        failed, waiting = [], list(batch)
        running: dict = {}
        ending: list = []  # have answered, still giving their memory back
        while waiting or running:
            ending = [process for process in ending if process.is_alive()]
            while waiting and len(running) + len(ending) < jobs and time.time() - start < arguments.limit_s:
                recipe = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=lambda s, r: s.send(_child(r)), args=(sender, recipe.to_dict()))
                process.start()
                sender.close()
                running[process] = (recipe, receiver)
            if not running:
                if waiting and ending and time.time() - start < arguments.limit_s:
                    ending[0].join(0.1)
                    continue
                break
            for process, (recipe, receiver) in list(running.items()):
                if not receiver.poll(0.02):
                    continue
                try:
                    row = receiver.recv()
                except EOFError:
                    row = {"recipe": recipe.to_dict(), "status": "error", "message": "the process died"}
                ending.append(process)
                del running[process]
                if row["status"] != "ok" and jobs > 1:
                    failed.append(recipe)
                    print("again, alone:", recipe, row["status"], row.get("message", "")[:200], flush=True)
                    continue
                rows.append(row)
                split = "fit" if len(rows) % 2 else "test"
                with open(arguments.out, "a") as out:
                    out.write(json.dumps({**row, "split": split, **shared}) + "\n")
        for process in ending:
            process.join()
        return failed

    again = run(recipes, arguments.jobs)
    run(again, 1)
    done = [r for r in rows if r["status"] == "ok"]
    held = {r["base_allocated_bytes"] for r in done}
    print(f"{len(done)} ok of {len(rows)} run, {len(recipes)} asked, {time.time() - start:.0f} s; held before: {held}")


if __name__ == "__main__":
    main()
