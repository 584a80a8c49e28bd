"""What the capstone's recipes do to the loss: the same data and seeds for each, against fp32 AdamW.

python bench/capstone_training.py train --out rows.jsonl     # SmolLM2-135M on a card; --small on a processor
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import apart
from capstone import ROOT, write

RECOMMENDED = {
    "precision": "bf16", "stochastic_rounding": True, "optimizer": "adamw8bit", "gradients": "host", "loss": "in place",
}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "fp32, AdamW": {"precision": "fp32", "optimizer": "adamw", "gradients": "card"},
    "recommended": RECOMMENDED,
    "recommended, rounded to nearest": {**RECOMMENDED, "stochastic_rounding": False},
    "step in backward, each clipped": {**RECOMMENDED, "gradients": "in backward, each clipped"},
    "4-bit states, gradients on the card": {**RECOMMENDED, "optimizer": "adamw4bit", "gradients": "card"},
    "torchao, optimizer on the host": {
        "precision": "bf16", "optimizer": "adamw", "gradients": "card", "offload": "optimizer", "loss": "in place",
    },
}  # fmt: skip
CLIP, WARMUP, LAST = 1.0, 20, 20
SIZES = {"batch": 8, "seq": 256, "steps": 200, "held_out": 64, "lr": 1e-4}
SMALL = {"batch": 4, "seq": 32, "steps": 25, "held_out": 16, "lr": 1e-3}


def train(arguments: argparse.Namespace) -> None:
    """Every arm with every seed, each in a process of its own; the first arms first."""
    arms = [arm for arm in ARMS if not arguments.only or arguments.only in arm]
    tasks = [(arm, seed) for seed in range(arguments.seeds) for arm in arms]
    tasks.sort(key=lambda task: (list(ARMS).index(task[0]) > 1, task[1]))

    done = apart.run(
        tasks,
        lambda task: ["one", "--out", arguments.out, "--arm", task[0], "--seed", str(task[1]),
                      *(["--small"] if arguments.small else [])],
        jobs=arguments.jobs, seconds=arguments.limit_s,
    )  # fmt: skip
    raise SystemExit(not done)


def train_one(arguments: argparse.Namespace) -> None:
    """One arm with one seed: 200 steps with clipping, warm-up and a cosine; training and held-out loss as rows."""
    import torch

    import labkit as lab
    from labkit import capstone, compiling
    from labkit.checkpointing import segments
    from labkit.training import evaluate

    sizes, arm = SMALL if arguments.small else SIZES, arguments.arm
    switches, recommended = ARMS[arm], arm != "fp32, AdamW"
    device, seed = lab.device(), arguments.seed
    torch.manual_seed(seed)
    model, blocks_of = subject(arguments.small, device)
    if switches["precision"] == "bf16":
        model.to(torch.bfloat16)
    model.config.use_cache = False
    texts = blocks_of(count=sizes["batch"] * sizes["steps"], seq=sizes["seq"], seed=seed)
    held_out = blocks_of(count=sizes["held_out"], seq=sizes["seq"], split="held-out")
    before = evaluate(model, held_out)
    if recommended:
        if device.type == "cuda":
            compiling.compile_blocks(model)
        segments(model, 1)
    clip = None if "offload" in switches else CLIP
    step = capstone.step_of(model.train(), [], clip=clip, lr=sizes["lr"], **switches)
    each = getattr(step.optimizer, "optimizers", [step.optimizer])  # type: ignore[attr-defined]
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, cosine(sizes["steps"])) for one in each]
    losses, start = [], time.perf_counter()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    for rows in order.split(sizes["batch"]):
        losses.append(step([texts[rows].to(device)]))  # type: ignore[call-arg]
        for schedule in schedules:
            schedule.step()
    found = [float(loss) for loss in losses]
    seconds = time.perf_counter() - start
    after = evaluate(model, held_out)
    more = {
        "model": "a small GPT-2 that reads bytes" if hasattr(model, "transformer") else "SmolLM2-135M", "seed": seed,
        "steps": len(found), "lr": sizes["lr"], "small": arguments.small, **lab.data.stdlib().provenance(),
    }  # fmt: skip
    what = f"{arm}, seed {seed}"
    last = sum(found[-LAST:]) / LAST
    write(arguments.out, "fact", name="held-out loss", what=what, value=after, unit="nats", before=before, **more)
    write(arguments.out, "fact", name="training loss", what=what, value=last, unit="nats", curve=found[::5], **more)
    print(f"{what}: {found[0]:.4f} -> {last:.4f}, held out {before:.4f} -> {after:.4f}, {seconds:.0f} s")


def subject(small: bool, device: Any) -> tuple[Any, Any]:
    """The model and its blocks of text: SmolLM2-135M with its tokenizer, or a small GPT-2 that reads bytes."""
    import functools

    import labkit as lab
    from labkit import capstone

    if not small and lab.models.has("smollm2-135m"):
        blocks_of = functools.partial(lab.data.token_blocks, lab.models.tokenizer("smollm2-135m"))
        return lab.models.pretrained("smollm2-135m", device=device), blocks_of
    shape = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": 256}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    with device:
        model = lab.models.gpt2("gpt2", attention="sdpa", bos_token_id=0, eos_token_id=0, **shape, **off)
    capstone.draw_weights(model)
    return model, lab.data.byte_blocks


def cosine(steps: int) -> Any:
    """Linear warm-up over `WARMUP` steps, then half a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))

    return factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "one"))
    parser.add_argument("--out", default=str(ROOT / "runs" / "capstone.jsonl"))
    parser.add_argument("--only", help="only arms with this in their name")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=3600)
    parser.add_argument("--small", action="store_true", help="a small GPT-2 that reads bytes, a few steps")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    if arguments.what == "train":
        train(arguments)
        return
    import torch

    # a processor compiles torchao's step for minutes and then takes seconds: there it runs as it is
    with torch.compiler.set_stance("default" if torch.cuda.is_available() else "force_eager"):
        train_one(arguments)


if __name__ == "__main__":
    main()
