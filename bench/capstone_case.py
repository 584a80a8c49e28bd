"""The case study of lesson 12 on a card: one change at a time under 8 GiB, and what each does to the F1 score.

python bench/capstone_case.py cost --out rows.jsonl     # peaks, and the time of an epoch
python bench/capstone_case.py quality --out rows.jsonl  # trains each arm with several seeds
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import apart
from capstone import BUDGET, ROOT, write

LONGEST = 688  # tokens: four rows of this length just fit 8 GiB, as in the log
FIRST = {"batch": 4, "padding": "longest", "precision": "fp32", "attention": "eager", "checkpoint": 0}
CHANGES: dict[str, dict[str, Any]] = {
    "as it was": {},
    "every block checkpointed": {"checkpoint": 1},
    "every 3 blocks one segment": {"checkpoint": 3},
    "batch 32": {"checkpoint": 1, "batch": 32},
    "dynamic padding": {"padding": "batch"},
    "bucketed by length": {"padding": "buckets"},
    "mixed precision, fp16": {"precision": "amp-fp16"},
    "mixed precision, bf16": {"precision": "amp-bf16"},
    "fused attention": {"attention": "sdpa"},
    "no checkpointing": {"checkpoint": 0},
}
# padding is masked out, so that the first arm learns the same with each batch padded to its own longest passage
QUALITY: dict[str, dict[str, Any]] = {
    "as it was": {"padding": "batch", "lr": 3e-5},
    "bucketed by length": {"lr": 1e-4},
    "mixed precision, fp16": {"lr": 1e-4},
    "mixed precision, bf16": {"lr": 1e-4},
}


def arm(name: str) -> dict[str, Any]:
    """The settings after every change up to `name`."""
    settings = dict(FIRST)
    for change, fields in CHANGES.items():
        settings |= fields
        if change == name:
            return settings
    raise SystemExit(f"{name!r} is not one of {', '.join(CHANGES)}")


def prepared(settings: dict[str, Any], each: int, device: Any, seed: int) -> tuple[Any, Any, list[Any], list[Any]]:
    """Model, training step, training batches and test batches of an arm."""
    import torch

    import labkit as lab
    from labkit import casestudy
    from labkit.checkpointing import segments

    names, train, test = casestudy.passages(each=each)
    torch.manual_seed(seed)
    body = lab.models.pretrained("smollm2-135m", device=device, attention=settings["attention"])
    model = casestudy.classifier(body, len(names)).train()
    if settings["checkpoint"]:
        segments(model.body, settings["checkpoint"])
    words = lab.models.tokenizer("smollm2-135m")
    rows, others = (casestudy.encode(words, some, most=LONGEST) for some in (train, test))
    how = {"longest": LONGEST, "seed": seed}
    some = casestudy.batches(rows, settings["batch"], padding=settings["padding"], **how)
    return (
        model,
        casestudy.step_on(model, settings["precision"], settings.get("lr", 3e-5)),
        some,
        casestudy.batches(others, 16, padding="buckets", **how),
    )


def cost(arguments: argparse.Namespace) -> None:
    """Each arm in turn, in one process: peaks under the budget and seconds of an epoch, or that it does not fit."""
    import torch

    import labkit as lab
    from labkit import measuring

    start = time.time()
    measuring.warm_workspaces(torch.device("cuda", 0))
    for name in CHANGES:
        if time.time() - start > arguments.limit_s:
            print(f"{name}: not started, the time is up")
            continue
        settings = arm(name)
        try:
            with lab.budget(BUDGET):
                found = costs(settings, arguments)
        except torch.OutOfMemoryError as error:
            measuring.forget(error)
            found = {"status": "oom", "message": str(error).splitlines()[0]}
        left = measuring.release()
        write(arguments.out, "fact", name="case study", what=name, value=found.get("epoch_seconds"), unit="s",
              settings=settings, left_bytes=left, **found)  # fmt: skip
        print(f"[{time.time() - start:4.0f} s] {name}: {found}", flush=True)


def costs(settings: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    import labkit as lab

    device = lab.device()
    model, step_on, some, _ = prepared(settings, arguments.each, device, seed=0)
    longest = max(some, key=lambda batch: batch[0].numel())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):  # the worst batch first: the peak is known, the state is born
        step_on(*(x.to(device) for x in longest))()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    part, begin = 0, time.perf_counter()
    for batch in some:  # once over them: a new length costs something once (a kernel is looked for, a plan is made)
        step_on(*(x.to(device) for x in batch))()
        part += 1
        torch.cuda.synchronize()
        if part * settings["batch"] >= 64 and time.perf_counter() - begin > arguments.seconds:
            break
    first_seconds, begin = time.perf_counter() - begin, time.perf_counter()
    for number, batch in enumerate(some[:part]):
        step_on(*(x.to(device) for x in batch))()
        if number % 4 == 3:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    passages = sum(len(batch[0]) for batch in some[:part])
    tokens = sum(int(batch[1].sum()) for batch in some[:part])
    every = sum(batch[0].numel() for batch in some) / sum(batch[0].numel() for batch in some[:part])
    real = sum(int(batch[1].sum()) for batch in some) / sum(batch[0].numel() for batch in some)
    return {
        "status": "ok", "allocated_bytes": stats["allocated_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.peak"],
        "epoch_seconds": seconds * every, "first_epoch_seconds": first_seconds * every,
        "passages": passages, "tokens_per_second": tokens / seconds, "real_tokens": real,
        "device_bytes": lab.machine.device_bytes(),
    }  # fmt: skip


def quality(arguments: argparse.Namespace) -> None:
    """Every arm with every seed, each in a process of its own; time means nothing here."""
    options = {name: getattr(arguments, name) for name in ("out", "each", "epochs")}
    shared = [f"--{key}={value}" for key, value in options.items()]
    tasks = [(name, seed) for seed in range(arguments.seeds) for name in QUALITY]
    done = apart.run(
        tasks, lambda task: ["one", f"--arm={task[0]}", f"--seed={task[1]}", *shared],
        jobs=arguments.jobs, seconds=arguments.limit_s,
    )  # fmt: skip
    raise SystemExit(not done)


def quality_one(arguments: argparse.Namespace) -> None:
    """One arm: some epochs with each seed, the F1 score on passages of other files."""
    import math

    import torch

    import labkit as lab
    from labkit import casestudy

    seed, settings = arguments.seed, {**arm(arguments.arm), **QUALITY[arguments.arm]}
    model, step_on, some, test = prepared(settings, arguments.each, lab.device(), seed)
    steps = len(some) * arguments.epochs
    schedule = torch.optim.lr_scheduler.LambdaLR(step_on.optimizer, falling(steps))
    losses = []
    for _ in range(arguments.epochs):
        for batch in some:
            losses.append(step_on(*(x.to(lab.device()) for x in batch))())
            schedule.step()
    labels, guesses = casestudy.predict(model, test)
    score = casestudy.macro_f1(labels, guesses)
    last = float(torch.stack(losses[-20:]).mean())
    write(arguments.out, "fact", name="case study F1", what=f"{arguments.arm}, seed {seed}", value=score,
          seed=seed, epochs=arguments.epochs, steps=steps, loss=last if math.isfinite(last) else None,
          settings=settings, tested=len(labels), **lab.data.stdlib().provenance())  # fmt: skip
    print(f"{arguments.arm}, seed {seed}: F1 {score:.3f}, loss {last:.3f}, {steps} steps", flush=True)


def falling(steps: int) -> Any:
    """Ten steps of warm-up, then down to a tenth in a straight line."""
    return lambda n: min(1.0, (n + 1) / 10) * (1 - 0.9 * n / steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "quality", "one"))
    parser.add_argument("--out", default=str(ROOT / "runs" / "capstone.jsonl"))
    parser.add_argument("--each", type=int, default=120, help="passages of each package")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3, help="of `quality`")
    parser.add_argument("--seconds", type=float, default=2.0, help="of `cost`: how long each arm is timed")
    parser.add_argument("--limit-s", type=float, default=3600)
    parser.add_argument("--jobs", type=int, default=1, help="of `quality`: processes side by side")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    {"cost": cost, "quality": quality, "one": quality_one}[arguments.what](arguments)


if __name__ == "__main__":
    main()
