"""What measuring costs: the timing pass against a bare loop, the tracer's pass, imports, a run of the course.

    python bench/overheads.py                 on this machine; rows go to data/reference/overheads-<where>.jsonl
    python bench/overheads.py --run runs/ID   also: how long each lesson of that run took
    python bench/overheads.py --parts imports    on a busy machine: processor time alone means something there
    python bench/overheads.py --show          the committed rows as a table

A step of GPT-2 124M on a card (8 x 1024, autocast in bf16), of a small model on the processor. Bare means: the same
step in a loop between two synchronisations, without events, hooks or anything else of labkit. Bare and timed series
take turns, so that a drifting clock hits both.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from labkit import __version__, lesson, machine, places, timing
from labkit.results import METHOD, SCHEMA
from labkit.runs import Run

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "data" / "reference"
ROUNDS = 7


def experiment(device: Any) -> Callable[[], Any]:
    """A training step in plain PyTorch: GPT-2 124M on a card, two narrow layers on the processor."""
    import torch

    from labkit import models

    on_card = device.type == "cuda"
    sizes: dict[str, Any] = (
        {}
        if on_card
        else {"n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 0}
    )
    model = models.gpt2("gpt2", attention="sdpa", **sizes).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=on_card)
    shape = (8, 1024) if on_card else (2, 128)
    tokens = torch.randint(0, model.config.vocab_size, shape, device=device)

    def step() -> Any:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_card):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def passes(write: Callable[..., None]) -> None:
    """The timing pass and the tracer's pass, each against the bare step."""
    import torch

    import labkit

    device = machine.device()
    torch.set_num_threads(1)  # on the processor: threads that wait for each other are not what is measured here

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    step = experiment(device)
    for _ in range(5):
        step()
    steps = 20 if device.type == "cuda" else 10
    bare, timed = [], []
    for _ in range(ROUNDS):
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        bare.append((time.perf_counter() - start) / steps)
        found = timing.time_step(step, device=device, repeats=steps, least=steps)
        timed.append(found.median_seconds)
    ratios = [100 * (t / b - 1) for t, b in zip(timed, bare, strict=True)]
    write("bare step", statistics.median(bare), "s", low=min(bare), high=max(bare))
    write("timed step", statistics.median(timed), "s", low=min(timed), high=max(timed))
    write("timing pass beside a bare step", statistics.median(ratios), "%", low=min(ratios), high=max(ratios))
    del step
    where = "cuda" if device.type == "cuda" else None
    if where:
        took = {}
        for trace in (False, True, False, True):
            start = time.perf_counter()
            labkit.measure(experiment, repeats=0, trace=trace, record=False)
            took[trace] = (
                time.perf_counter() - start
            )  # the second of each, so that nothing is loaded for the first time
        write("a measurement without the tracer's pass", took[False], "s")
        write("the tracer's pass", took[True] - took[False], "s")
        write("the tracer's pass in bare steps", (took[True] - took[False]) / statistics.median(bare), "steps")
        return
    took_cpu = []
    for _ in range(2):
        start = time.perf_counter()
        labkit.measure(experiment, record=False, card=machine.DEFAULT_CARD)
        took_cpu.append(time.perf_counter() - start)
    write("a prediction of the same step, traced", took_cpu[-1], "s")


def imports(write: Callable[..., None]) -> None:
    """Processor time of fresh processes that import something and end."""
    python = [sys.executable, "-c"]
    processes = {
        "pass": ([*python, "pass"], ROUNDS), "import labkit": ([*python, "import labkit"], ROUNDS),
        "labkit --help": ([sys.executable, "-m", "labkit.cli", "--help"], ROUNDS),
        "import torch": ([*python, "import torch"], 3),
        "import labkit, torch, transformers": ([*python, "import labkit, torch, transformers"], 3),
    }  # fmt: skip
    for what, (command, rounds) in processes.items():
        seconds = [_process_seconds(command) for _ in range(rounds)]
        span = {"low": min(seconds), "high": max(seconds)}
        write("processor time of a process", statistics.median(seconds), "s", what=what, **span)


def _process_seconds(command: list[str]) -> float:
    """User and system seconds of a process and what it waited for: other work on the machine does not count."""
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=places.environment())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def runner(write: Callable[..., None]) -> None:
    """What `labkit run` adds to a lesson that does nothing: start, kernel, files, report."""
    import nbformat

    with tempfile.TemporaryDirectory() as name:
        books = Path(name) / "notebooks"
        books.mkdir()
        for number in (1, 2):
            book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1", id="cell-1")])
            nbformat.write(book, books / f"0{number}_empty.ipynb")
        command = [sys.executable, "-m", "labkit.cli", "run", "--out", str(Path(name) / "run")]
        start = time.perf_counter()
        environment = places.environment(LABKIT_HOME=name)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        whole = time.perf_counter() - start
        state = Run.load(Path(name) / "run")
        assert state is not None
        lessons = [one.seconds or 0.0 for one in state.lessons]
    write("a run of two empty lessons", whole, "s")
    write("of it, the two lessons with their kernels", sum(lessons), "s")


def course(folder: Path, write: Callable[..., None]) -> None:
    """How long each lesson of a run took, and all, on the machine of that run."""
    run = Run.load(folder)
    if run is None:
        raise SystemExit(f"{folder} holds no run")
    card, capability = run.machine.get("card"), run.machine.get("capability")
    there = {
        "at": run.started, "source": "measured" if card else "cpu", "card": card or "processor",
        "capability": f"sm_{capability[0]}{capability[1]}" if capability else None,
        "driver": run.machine.get("driver"), "system": run.machine.get("system"), "command": "labkit run",
        "versions": {"labkit": run.labkit, "python": run.python, "torch": run.machine.get("torch")},
    }  # fmt: skip
    done = [one for one in run.lessons if one.status == "done" and one.seconds]
    for one in done:
        write("a lesson of a run", one.seconds, "s", what=one.name, **there)
    write("the lessons of a run", sum(one.seconds or 0.0 for one in done), "s", what=f"{len(done)} lessons", **there)


def show() -> str:
    """The committed rows as a table."""
    lines = ["| what | where | value | range |", "| --- | --- | --- | --- |"]
    for file in sorted(REFERENCE.glob("overheads-*.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            name = f"{row['name']} {row['what']}" if row.get("what") else row["name"]
            span = f"{row['low']:.3g} to {row['high']:.3g}" if row.get("low") is not None else ""
            lines.append(f"| {name} | {row['card']} | {row['value']:.3g} {row['unit']} | {span} |")
    return "\n".join(lines)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--run", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", nargs="*", default=["passes", "imports", "runner"])
    parser.add_argument(
        "--remark", default="", help="what the rows should say of themselves, such as other work beside"
    )
    parser.add_argument("--show", action="store_true")
    wish = parser.parse_args()
    if wish.show:
        print(show())
        return
    here = machine.here()
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    common = {
        "schema": SCHEMA, "kind": "fact", "lesson": "bench/overheads", "at": now,
        "source": "measured" if here.card else "cpu", "card": here.card or "processor", "capability": here.sm,
        "driver": here.driver, "method": METHOD, "versions": lesson.versions(), "system": here.system,
        "command": "python bench/overheads.py",
    }  # fmt: skip
    common |= {"remark": wish.remark} if wish.remark else {}
    rows: list[dict[str, Any]] = []

    def write(name: str, value: float, unit: str, **more: Any) -> None:
        rows.append({**common, "name": name, "value": value, "unit": unit, **more})
        print(f"{name} {more.get('what', '')}: {value:.4g} {unit}", flush=True)

    print(f"labkit {__version__}, {here.line()}")
    out = wish.out or REFERENCE / f"overheads-{'cpu' if not here.card else machine.DEFAULT_CARD}.jsonl"
    parts: list[Callable[..., None]] = [part for part in (passes, imports, runner) if part.__name__ in wish.parts]
    if wish.run:
        parts.append(functools.partial(course, wish.run))
    for part in parts:
        part(write)
        out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))  # kept if the next fails


if __name__ == "__main__":
    main()
