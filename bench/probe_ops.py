"""Records, on a real GPU, every allocation of one steady step of a few recipes, and the operator that asked for it.

    python bench/probe_ops.py --out events.json.gz [--recipes FILE.jsonl]        (needs a CUDA card)

For each recipe two records: ``events`` is the allocator's own history of the fourth step without any tracer
(action, address, requested bytes), ``ops`` the operators of the fifth step under a dispatch mode, each with the
number of allocations made before it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import sys
import traceback
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from memory_truth import peaks, warm_workspaces

from labkit.recipes import Recipe

DEFAULT = [
    {"batch": 4, "seq": 512},
    {"batch": 4, "seq": 512, "attention": "eager"},
    {"batch": 4, "seq": 512, "precision": "amp-bf16"},
    {"batch": 4, "seq": 512, "precision": "amp-fp16", "attention": "eager", "optimizer": "adamw-fused"},
    {"batch": 4, "seq": 512, "precision": "amp-bf16", "attention": "eager"},
    {"batch": 4, "seq": 512, "precision": "bf16", "optimizer": "adam8bit"},
    {"batch": 4, "seq": 512, "precision": "bf16", "checkpoint": 1, "loss": "chunked", "optimizer": "sgd"},
    {"batch": 4, "seq": 500, "precision": "amp-bf16", "checkpoint": 3, "activation": "gelu_pytorch_tanh"},
    {"batch": 4, "seq": 512, "dropout": 0.0, "accumulation": 2, "optimizer": "adamw-forloop"},
    {"batch": 4, "seq": 512, "precision": "amp-fp16", "loss": "chunked", "optimizer": "sgd-momentum"},
    {"batch": 3, "seq": 200, "precision": "bf16", "attention": "eager", "dropout": 0.0},
    {"batch": 3, "seq": 200, "precision": "amp-bf16", "optimizer": "adam8bit", "checkpoint": 1},
]


def probe(fields: dict) -> dict:
    """Both records for one recipe, in this fresh process."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    warm_workspaces(torch.device("cuda"))
    out: dict = {"recipe": Recipe.of(**fields).to_dict()}

    def history() -> None:
        torch.cuda.memory._record_memory_history(max_entries=400_000, context=None)

    def events() -> list:
        torch.cuda.synchronize()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        return [[e["action"], e["addr"], e["size"]] for e in trace]

    history()
    step = Recipe.of(**fields).experiment()(torch.device("cuda"))
    out["build"] = events()
    history()
    step()
    out["first"] = events()
    step(), step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    history()
    step()
    out["events"] = events()
    out["steady"] = peaks()

    class Ops(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            result = func(*args, **(kwargs or {}))
            shapes = [
                [str(t.dtype)[6:], list(t.shape), t.is_contiguous()]
                for t in torch.utils._pytree.tree_leaves((args, kwargs))
                if isinstance(t, torch.Tensor)
            ]
            after = torch.cuda.memory_stats()["allocation.all.allocated"]
            self.rows.append([str(func), before - self.start, after - before, shapes[:6]])
            return result

    ops = Ops()
    history()
    ops.start = torch.cuda.memory_stats()["allocation.all.allocated"]
    with ops:
        step()
    out["events_under_ops"] = events()
    out["ops"] = ops.rows
    return out


def probe_or_error(fields: dict) -> dict:
    """`probe`, with a failure kept as a row so that the other recipes' records survive."""
    try:
        return probe(fields)
    except Exception:
        return {"recipe": fields, "error": traceback.format_exc()[-2000:], "events": [], "ops": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--recipes")
    arguments = parser.parse_args()
    recipes = DEFAULT
    if arguments.recipes:
        recipes = [json.loads(line) for line in Path(arguments.recipes).read_text().splitlines()]
    context = multiprocessing.get_context("spawn")
    with context.Pool(4, maxtasksperchild=1) as pool:
        rows = pool.map(probe_or_error, recipes, chunksize=1)
    with gzip.open(arguments.out, "wt") as out:
        json.dump(rows, out)
    for row in rows:
        if "error" in row:
            print(row["recipe"], row["error"])
    print([(len(r["events"]), len(r["ops"])) for r in rows], os.path.getsize(arguments.out))


if __name__ == "__main__":
    main()
