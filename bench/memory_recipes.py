"""The recipe's later fields on a real GPU: gradients on the host or in backward, fp16 with master copies, offload,
compile, torchao's states. Each in a fresh process, as bench/memory_truth.py does, and beside what is predicted.

    python bench/memory_recipes.py measure --out rows.jsonl        (needs a CUDA card; about 100 s with 6 jobs)
    python bench/memory_recipes.py compare --out rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import memory_truth

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from labkit.recipes import Recipe

XL: dict[str, Any] = {
    "model": "gpt2-xl",
    "batch": 4,
    "checkpoint": 1,
    "dropout": 0.0,
    "activation": "gelu_pytorch_tanh",
}
MEDIUM: dict[str, Any] = {"model": "gpt2-medium", "batch": 4}
SMALL: dict[str, Any] = {"model": "gpt2", "batch": 8}
ROUNDED: dict[str, Any] = {"precision": "bf16", "stochastic_rounding": True}
RECIPES: list[dict[str, Any]] = [  # those that take longest first
    {**XL, **ROUNDED, "optimizer": "adamw8bit", "gradients": "host", "loss": "in-place", "loss_chunks": 16, "clip": 1},
    {**XL, "precision": "fp16", "offload": "optimizer+gradients", "loss": "in-place", "loss_chunks": 16, "clip": 1.0},
    {**XL, "precision": "fp16", "offload": "optimizer", "loss": "chunked", "batch": 2},
    {**MEDIUM, **ROUNDED, "optimizer": "adamw8bit", "gradients": "in-backward", "checkpoint": 1},
    {**SMALL, **ROUNDED, "optimizer": "adamw4bit"},
    {**MEDIUM, "precision": "bf16", "compile": "whole", "checkpoint": 1, "optimizer": "adamw-fused"},
    {**MEDIUM, "precision": "fp16", "optimizer": "adamw8bit", "checkpoint": 1, "accumulation": 2, "loss": "in-place"},
    {**SMALL, "precision": "amp-bf16", "compile": "whole"},
    {**SMALL, "precision": "amp-bf16", "compile": "blocks"},
    {**MEDIUM, "precision": "bf16", "compile": "blocks", "checkpoint": 1, "loss": "in-place", "optimizer": "adam8bit"},
    {**SMALL, "precision": "bf16", "compile": "blocks", "offload": "optimizer"},
    {**MEDIUM, "precision": "fp16", "clip": 1.0},
    {**MEDIUM, "precision": "fp16", "gradients": "host", "optimizer": "adam8bit", "checkpoint": 1},
    {**MEDIUM, "seq": 512, "precision": "bf16", "gradients": "in-backward"},
    {**MEDIUM, "seq": 512, "gradients": "two-backward-passes", "clip": 1.0, "optimizer": "sgd-momentum"},
    {**MEDIUM, "seq": 512, "precision": "bf16", "gradients": "in-backward-each-clipped", "clip": 1.0,
     "optimizer": "adam8bit", "checkpoint": 2},
    {**MEDIUM, "batch": 8, "precision": "amp-bf16", "offload": "activations"},
    {**MEDIUM, "precision": "bf16", "offload": "activations", "checkpoint": 1, "optimizer": "adam8bit", "batch": 16},
    {**SMALL, "offload": "activations", "loss": "chunked", "accumulation": 2},
    {**MEDIUM, "precision": "bf16", "offload": "optimizer"},
    {**MEDIUM, "precision": "bf16", "offload": "optimizer+gradients", "checkpoint": 1, "loss": "chunked"},
    {**MEDIUM, "gradients": "host", "clip": 1.0, "accumulation": 2},
    {**SMALL, "precision": "amp-bf16", "expandable_segments": True},
    {**MEDIUM, "precision": "bf16", "gradients": "in-backward", "checkpoint": 1, "expandable_segments": True},
    {**MEDIUM, "precision": "amp-fp16", "clip": 1.0, "accumulation": 2},
    {**SMALL, "precision": "bf16", "loss": "in-place", "loss_chunks": 16},
    {**SMALL, "loss": "chunked", "loss_chunks": 4, "clip": 1.0},
]  # fmt: skip


def measure(arguments: argparse.Namespace) -> None:
    """All recipes, through bench/memory_truth.py."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "recipes.jsonl")
        file.write_text("".join(json.dumps(Recipe.of(**fields).to_dict()) + "\n" for fields in RECIPES))
        limits = ["--jobs", str(arguments.jobs), "--limit-s", str(arguments.limit_s)]
        sys.argv[1:] = ["--recipes", str(file), "--out", arguments.out, *limits]
        memory_truth.main()


def predicted(fields: dict[str, Any]) -> dict[str, Any]:
    """Peaks in bytes by step, exact and estimated, and the host's memory."""
    from labkit import memory, quiet
    from labkit.memory import estimate, host

    quiet.transformers()
    recipe = Recipe.of(**fields)
    report = memory.predict_recipe(recipe, card="h200")
    quick = estimate.estimate(recipe, card="h200")
    kept = host.host_memory(recipe)
    assert report.first is not None and report.steady is not None
    return {
        "first": report.first.__dict__, "steady": report.steady.__dict__, "band": report.band_bytes,
        "estimated_bytes": quick.steady.allocated_bytes, "pinned_bytes": kept.pinned_bytes,
        "pageable_bytes": kept.pageable_bytes,
    }  # fmt: skip


def compare(arguments: argparse.Namespace) -> None:
    """A line for each row: predicted / measured GiB of the first and the steady step, allocated and reserved."""
    rows = [json.loads(line) for line in Path(arguments.out).read_text().splitlines()]
    done = [row for row in rows if row["status"] == "ok"]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        found = list(pool.map(predicted, [row["recipe"] for row in done]))
    for row, guess in zip(done, found, strict=True):
        said = []
        for step in ("first", "steady"):
            for name in ("allocated", "reserved"):
                ours, truth = guess[step][f"{name}_bytes"], row[step][f"{name}_bytes"]
                said.append(f"{ours / 2**30:.2f}/{truth / 2**30:.2f} {(ours - truth) / truth:+.1%}")
        kept = row.get("host_pinned_bytes")
        said.append(f"pinned {guess['pinned_bytes'] / 2**30:.2f}/{'?' if kept is None else f'{kept / 2**30:.2f}'}")
        said.append(f"estimate {guess['estimated_bytes'] / row['steady']['allocated_bytes'] - 1:+.1%}")
        said.append(f"{row['shared_card_seconds']:.2f} s, loss {row['losses'][0]} {row['losses'][-1]}")
        print(f"{Recipe.of(**row['recipe'])}: {'; '.join(said)}{' (compiled)' if guess['band'] else ''}", flush=True)
    for row in rows:
        if row["status"] != "ok":
            print(f"{row['status']}: {Recipe.of(**row['recipe'])}: {row.get('message', '')[:300]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "compare"))
    parser.add_argument("--out", required=True)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=80, help="start no new recipe after this many seconds")
    arguments = parser.parse_args()
    {"measure": measure, "compare": compare}[arguments.what](arguments)


if __name__ == "__main__":
    main()
