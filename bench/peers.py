"""This course's recipes against their peers: the same model, tokens and optimizer settings, under the same caps.

    python bench/peers.py run --out rows.jsonl                 # needs a card, alone on it; goes on where it stopped
    python bench/peers.py run --only "gpt2-xl, 8 GiB" --limit-s 200
    python bench/peers.py table                                # bench/results/peers.md and .png, from committed rows

Each trial is a new process. Several of them start (imports, compiling) while one measures: they keep to cores of their
own until it is their turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peers_cases
import peers_trial
from peers_trial import Case, Trial

from labkit import places

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "data" / "reference" / "peers-h200.jsonl"
EXTENSIONS = Path(tempfile.gettempdir(), "labkit-peers-extensions")  # what DeepSpeed compiles
DONE = ("ok", "oom")  # errors and what was not installed are tried again
NOISY = 0.25  # of the median step, between the longest and the shortest: the next call measures it again


def run(arguments: argparse.Namespace) -> None:
    """All cases that are asked for, each with its search; those of `Case` before trainings for the loss."""
    out, until = Path(arguments.out), time.time() + arguments.limit_s
    chosen = [c for c in peers_cases.cases() if all(part in c.name for part in arguments.only.split("+"))]
    if arguments.model:
        chosen = [dataclasses.replace(c, model=arguments.model) for c in chosen]
    if not chosen:
        raise SystemExit(f"no case has {arguments.only!r} in its name")
    for lock in EXTENSIONS.rglob("lock"):  # of a process that was ended while it compiled: others would wait for it
        lock.unlink()
    arguments.again = {row["key"] for row in peers_trial.rows(out) if _noisy(row)}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        turn = Path(folder, "turn")
        turn.touch()
        if arguments.losses:
            trials = [dataclasses.replace(t, **_sizes(arguments)) for t in peers_cases.losses(chosen)]
            list(pool.map(lambda trial: _one(trial, out, turn, until, arguments), trials))
        else:  # where the card is filled, no other process may need a part of it
            for _, some in itertools.groupby(chosen, key=lambda case: case.ballast):
                list(pool.map(lambda case: _search(case, out, turn, until, arguments), list(some)))
    there = peers_trial.rows(out)
    print(f"{len(there)} rows in {out}; {sum(r['status'] == 'error' for r in there)} errors")
    _print_short(there)


def _noisy(row: dict[str, Any]) -> bool:
    return "tokens_per_second" in row and row["spread_seconds"] > NOISY * row["seconds"]


def _sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"device": arguments.device, "layers": arguments.layers, "seq": arguments.seq, "seconds": arguments.seconds}


def _search(case: Case, out: Path, turn: Path, until: float, arguments: argparse.Namespace) -> None:
    """The case's batches, one process after another, until `peers_cases.next_batch` knows enough."""
    known: dict[int, dict[str, Any]] = {}
    primed = case.ballast or not peers_cases.compiles(case)
    while (batch := peers_cases.next_batch(case, known)) is not None and time.time() < until:
        trial = Trial(case, batch, **_sizes(arguments))
        if not primed and not _there(trial, out, arguments.again):
            _one(dataclasses.replace(trial, kind="prime", layers=2), out, turn, until, arguments)
        primed = True
        row = _one(trial, out, turn, until, arguments)
        if row is None:
            return
        known[batch] = row


def _there(trial: Trial, out: Path, again: set[str]) -> dict[str, Any] | None:
    done = (r for r in peers_trial.rows(out) if r["key"] == trial.key and r["status"] in DONE)
    return None if trial.key in again else next(done, None)


def _one(trial: Trial, out: Path, turn: Path, until: float, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The row of a trial: an earlier one, or that of a new process; None when time is up or it was to prime only."""
    if (row := _there(trial, out, arguments.again)) is not None:
        return row
    if time.time() > until:
        return None
    began = time.time()
    task = json.dumps(dataclasses.asdict(trial))
    command = [sys.executable, str(Path(__file__).resolve()), "one", "--task", task, "--out", str(out), "--turn",
               str(turn), "--until", str(until), "--each", str(arguments.each)]  # fmt: skip
    quiet = {
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(len(_cores()[0])),
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        "UNSLOTH_COMPILE_LOCATION": str(turn.with_name("unsloth")),  # its generated code, else where it is started
    }  # fmt: skip
    first = {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    }  # Trainer would use every card it sees
    environment = places.environment(**quiet, **first, **trial.case.environment)
    with tempfile.TemporaryFile("w+") as text:  # no pipe, which a compiler's helpers would keep open
        done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=text, check=False)
        text.seek(0)
        end = text.read()[-2000:].strip()
    row = next((r for r in peers_trial.rows(out) if r["key"] == trial.key), None)
    arguments.again.discard(trial.key)
    if trial.kind == "prime":
        if done.returncode:
            print(f"not primed: {trial.case.name}: {end[-300:]}", flush=True)
        return None
    if row is None and time.time() < until:
        reason = f"ended with code {done.returncode}: {(end.splitlines() or [''])[-1][:300]}"
        row = _row(trial, {"status": "error", "reason": reason, **_where(trial)})
        peers_trial.keep(out, row)
    print(f"[{time.time() - began:4.0f} s] {said(row) if row else f'{trial.case.name}: time is up'}", flush=True)
    return row


def _cores() -> tuple[list[int], list[int]]:
    """The cores for the process whose turn it is, and those for the ones that start: one in four."""
    there = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    apart = len(there) // 4
    return (there[:-apart], there[-apart:]) if apart else (there, there)


def _move(cores: list[int]) -> None:
    """Have all threads of this process run on these cores."""
    if hasattr(os, "sched_setaffinity"):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)


def _row(trial: Trial, found: dict[str, Any]) -> dict[str, Any]:
    case = trial.case
    return {
        "key": trial.key, "experiment": f"{case.name}, {case.accumulation} x {trial.batch}, {trial.kind}",
        "peer": case.peer, "variant": case.variant, "how": case.how, "model": case.model, "cap_gib": case.cap_gib,
        "batch": trial.batch, "accumulation": case.accumulation, "seq": trial.seq, "trial": trial.kind,
        "ballast": case.ballast, **found,
    }  # fmt: skip


def said(row: dict[str, Any]) -> str:
    """A row as one line."""
    cap = "no cap" if row["cap_gib"] is None else f"{row['cap_gib']:g} GiB"
    head = f"{row['model']}, {cap}: {row['peer']}, {row['variant']}, batch {row['batch']}"
    if row["status"] != "ok":
        return f"{head}: {row['status']}: {row.get('reason', '')[:160]}"
    peaks, parts = row["steady"], []
    if peaks:
        names = ("allocated", "reserved", "device")
        parts.append(" / ".join(f"{peaks[f'{name}_bytes'] / 2**30:.2f}" for name in names) + " GiB")
    host = [row.get("host_resident_bytes"), row.get("host_pinned_bytes")]
    parts.append("host {} ({} pinned)".format(*(f"{n / 2**30:.1f}" if n is not None else "?" for n in host)))
    if "tokens_per_second" in row:
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s (+-{row['spread_seconds'] / row['seconds']:.0%})")
    parts.append(f"loss {row['losses'][0]} to {row['losses'][-1]} in {len(row['losses'])}")
    return f"{head}: {', '.join(parts)}"


def _print_short(there: list[dict[str, Any]]) -> None:
    import peers_table

    for line in peers_table.short(there):
        print(line)


def one(arguments: argparse.Namespace) -> None:
    """One trial, in this process: import, wait for the turn, train, keep the row."""
    fields = json.loads(arguments.task)
    trial = Trial(**{**fields, "case": Case(**fields["case"])})
    workers, starters = _cores()
    _move(starters)
    out = Path(arguments.out)
    module, name = peers_cases.ADAPTERS[trial.case.peer]
    train = getattr(importlib.import_module(module), name)
    _import(trial)
    if trial.kind == "prime":
        found = peers_trial.run(dataclasses.replace(trial, kind="loss", steps=2), train)
        raise SystemExit(0 if found["status"] == "ok" else found.get("reason", "?"))
    with open(arguments.turn) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        left = arguments.until - time.time()
        if left < 2:
            return
        _watch(trial, out, min(arguments.each, left), patient=arguments.each <= left)
        _move(workers)
        began = time.time()
        found = peers_trial.run(trial, train)
        where = {"spent_s": round(time.time() - began, 2), "host_cores": len(workers), **_where(trial)}
        peers_trial.keep(out, _row(trial, {**found, **where}))
    sys.stdout.flush()
    os._exit(0)  # threads of somebody else's code must not hold the next one up


def _import(trial: Trial) -> None:
    """What takes long to import, before the turn. What is not there says so when it trains."""
    peer = trial.case.peer
    names = ["transformers.models.gpt2.modeling_gpt2", "labkit.steps", "labkit.capstone", "labkit.compiling"]
    if peer != "Unsloth":  # which must be the first to import transformers
        from labkit import quiet

        quiet.transformers()
    names += {"Trainer": ["transformers.trainer"], "TRL": ["trl.trainer.sft_trainer", "datasets"],
              "DeepSpeed": ["deepspeed"], "Liger": ["liger_kernel.transformers"]}.get(peer, [])  # fmt: skip
    names = ["unsloth", "trl.trainer.sft_trainer"] if peer == "Unsloth" else names
    names += ["bitsandbytes"] if "8bit" in json.dumps(trial.case.how) else []
    names += ["torchao.optim"] if peer in ("torchao", peers_cases.OURS) else []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # the adapter imports it again, and its row has the reason
            return
    import peers_loops

    peers_loops.tokens(trial.seq)
    if peer == "DeepSpeed" and trial.device == "cuda":
        peers_loops.build_deepspeed()


def _watch(trial: Trial, out: Path, seconds: float, *, patient: bool) -> None:
    """End this process after `seconds`, with a row that says so if it had all the time that any trial gets."""

    def end() -> None:
        if patient:
            found = {"status": "error", "reason": f"not done after {seconds:.0f} s"}
            peers_trial.keep(out, _row(trial, {**found, **_where(trial)}))
        os._exit(4)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _where(trial: Trial) -> dict[str, Any]:
    """Where the row comes from: card, driver, versions of everything that took part."""
    from importlib import metadata, util

    from labkit import machine

    here, versions = machine.here(), {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "accelerate", "bitsandbytes", "torchao", "trl", "datasets", "deepspeed",
                 "liger_kernel", "unsloth", "triton"):  # fmt: skip
        if name.split(".")[0] in sys.modules and util.find_spec(name):
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:  # carried without its metadata
                versions[name] = str(getattr(sys.modules[name], "__version__", "?")).strip()
    return {
        "card": here.card or "processor", "capability": here.sm, "driver": here.driver,
        "source": "measured" if here.card else "cpu", "versions": versions, "date": time.strftime("%Y-%m-%d"),
        "command": "python bench/peers.py run",
    }  # fmt: skip


def table(arguments: argparse.Namespace) -> None:
    """The page and the figure, from rows."""
    import peers_table

    peers_table.write(peers_trial.rows(Path(arguments.out)), ROOT / "bench" / "results")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table", "one"))
    parser.add_argument("--out", default=str(ROWS))
    parser.add_argument("--only", default="", help="of `run`: cases with this in their name; several parts with +")
    parser.add_argument("--losses", action="store_true", help="of `run`: the trainings on fixed data instead")
    parser.add_argument("--jobs", type=int, default=4, help="processes; one of them measures, the others start")
    parser.add_argument("--limit-s", type=float, default=3600, help="of `run`: for everything together")
    parser.add_argument("--each", type=float, default=60, help="seconds that a trial may take from its turn on")
    parser.add_argument("--seconds", type=float, default=2.5, help="of timed steps in a trial")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: with --model and --seq, to try it out"
    )
    parser.add_argument("--layers", type=int, help="instead of the model's own")
    parser.add_argument("--model", help="a folder with a configuration, in the place of every case's model")
    parser.add_argument("--seq", type=int, default=1024)
    for hidden in ("--task", "--turn"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    {"run": run, "table": table, "one": one}[arguments.what](arguments)


if __name__ == "__main__":
    main()
