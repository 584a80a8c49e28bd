"""One trial of a peer in a process of its own: the probe that counts its steps, and the row that comes out.

A trainer that owns its loop and a loop of our own are measured alike: whoever trains calls ``probe.done(loss)`` after
each optimizer step and stops when it returns True.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM = 3  # steps: the first (cold), the second (its peaks are the steady ones of many), one that is timed as a guess
LEAST, MOST = 2, 20  # timed steps


@dataclass(frozen=True)
class Case:
    """A way to train: which `peer`'s code in which `variant` (``how`` is its adapter's), on which model, under how many
    GiB (None: no cap). ``batch`` is where the search begins; with ``search`` False nothing else is tried. ``ballast``
    takes the rest of the card, so that memory outside PyTorch's allocator is limited, too."""

    peer: str
    variant: str
    how: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    model: str = "gpt2-xl"
    cap_gib: float | None = 8
    batch: int = 8
    accumulation: int = 1
    search: bool = True
    ballast: bool = False
    environment: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """What a reader sees."""
        cap = "no cap" if self.cap_gib is None else f"{self.cap_gib:g} GiB"
        return f"{self.model}, {cap}: {self.peer}, {self.variant}"


@dataclass(frozen=True)
class Trial:
    """One process's task: `case` at this `batch`; ``kind`` ``"speed"``, or ``"loss"`` for `steps` steps on fixed data.
    `seconds` bound the timed steps."""

    case: Case
    batch: int
    kind: str = "speed"
    seq: int = 1024
    layers: int | None = None
    steps: int = 20
    seconds: float = 2.5
    device: str = "cuda"

    @property
    def key(self) -> str:
        """What makes a row this trial's: everything that decides its numbers."""
        case = dataclasses.asdict(self.case)
        for name in ("batch", "search"):
            case.pop(name)
        rest = [self.batch, self.kind, self.seq, self.layers, self.steps if self.kind == "loss" else None, self.device]
        return json.dumps([case, *rest], sort_keys=True)


class Probe:
    """Counts optimizer steps: peaks of the first and of the later ones, times between the ends of steps, losses."""

    def __init__(self, trial: Trial):
        import torch

        self.trial = trial
        self.device = torch.device(trial.device, 0) if trial.device == "cuda" else torch.device(trial.device)
        self.losses: list[Any] = []
        self.seconds: list[float] = []
        self.found: dict[str, Any] = {}
        self._events: list[Any] = []
        self._count = MOST
        self._began = time.perf_counter()

    @property
    def most(self) -> int:
        """Steps that a trainer should be told to make at most."""
        return self.trial.steps if self.trial.kind == "loss" else WARM + MOST + 1

    def done(self, loss: Any) -> bool:
        """An optimizer step is over; whether that was enough."""
        self.losses.append(loss.detach() if hasattr(loss, "detach") else loss)
        number = len(self.losses)
        if number == 1:
            self._wait()
            self.found["cold_seconds"] = round(time.perf_counter() - self._began, 3)
            self.found["first"] = self._peaks()
        if self.trial.kind == "loss":
            return number >= self.trial.steps
        if number == WARM - 1:
            self._wait()
            self._began = time.perf_counter()
        elif number == WARM:
            self._wait()
            guess = max(1e-4, time.perf_counter() - self._began)
            self._count = max(LEAST, min(MOST, int(self.trial.seconds / guess)))
            self._reset_peaks()
        if number >= WARM:
            self._events.append(self._now())
        return number >= WARM + self._count

    def row(self) -> dict[str, Any]:
        """What was found, after the last step."""
        self._wait()
        row = {**self.found, "steady": self._peaks(), **self._host()}
        if self.trial.kind == "speed":
            times = [self._between(a, b) for a, b in zip(self._events[:-1], self._events[1:], strict=True)]
            median = statistics.median(times)
            tokens = self.trial.batch * self.trial.case.accumulation * self.trial.seq
            row |= {
                "seconds": median, "spread_seconds": max(times) - min(times), "timed_steps": len(times),
                "tokens": tokens, "tokens_per_second": tokens / median,
            }  # fmt: skip
        losses = [float(loss) for loss in self.losses]
        row["losses"] = [round(loss, 5) if math.isfinite(loss) else None for loss in losses]
        return row

    # ------------------------------------------------------------------------------------------ the machine

    def _wait(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(end - begin if self.device.type != "cuda" else begin.elapsed_time(end) / 1e3)

    def _reset_peaks(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()

    def _peaks(self) -> dict[str, int] | None:
        if self.device.type != "cuda":
            return None
        import torch

        from labkit import machine

        stats = torch.cuda.memory_stats()
        peaks = {f"{name}_bytes": stats[f"{name}_bytes.all.peak"] for name in ("allocated", "requested", "reserved")}
        return {**peaks, "device_bytes": machine.device_bytes() or 0}

    def _host(self) -> dict[str, int | None]:
        """The process's largest resident size (VmHWM), and the pinned part of it as PyTorch's allocator counts: on an
        H200's host the first one grew by exactly the second."""
        import torch

        pinned = None
        if self.device.type == "cuda" and hasattr(torch.cuda, "host_memory_stats"):
            pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak")
        lines = Path("/proc/self/status").read_text().splitlines() if os.path.exists("/proc/self/status") else []
        resident = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)
        return {"host_resident_bytes": resident, "host_pinned_bytes": pinned}


def run(trial: Trial, train: Any) -> dict[str, Any]:
    """``train(trial, probe)`` under the trial's cap; out of memory and every other end is a row, too."""
    import torch

    row: dict[str, Any] = {"status": "ok"}
    capped = trial.device == "cuda" and trial.case.cap_gib is not None
    try:
        if capped:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(trial.case.cap_gib * 2**30 / total)
            if trial.case.ballast:
                row["ballast_bytes"] = take_ballast(int(trial.case.cap_gib * 2**30))
        torch.manual_seed(0)
        probe = Probe(trial)
        train(trial, probe)
        row |= probe.row()
    except torch.OutOfMemoryError as error:
        row |= {"status": "oom", "reason": str(error).splitlines()[0][:200]}
    except ImportError as error:
        row |= {"status": "missing", "reason": f"{type(error).__name__}: {error}"[:300]}
    except Exception as error:  # of somebody else's code: a row must say what it was
        text = str(error)
        full = "out of memory" in text.lower() or "CUBLAS_STATUS_ALLOC_FAILED" in text
        row |= {"status": "oom" if full else "error", "reason": f"{type(error).__name__}: {text}"[:500]}
    return row


def take_ballast(leave: int) -> int:
    """Take all of the card but `leave` bytes, past PyTorch: managed memory then has to share them with its allocator.
    Returns how many bytes that were; they are given back when the process ends. Raises `RuntimeError` when the driver
    refuses."""
    import ctypes

    import torch

    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    library = next(
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart.so" in line
    )
    pointer, taken = ctypes.c_void_p(), max(0, free - leave)
    code = ctypes.CDLL(library).cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(taken))
    if code:
        raise RuntimeError(f"the card's rest could not be taken: cudaMalloc returned {code}")
    return taken


# ------------------------------------------------------------------------------------------------ rows


def rows(path: Path) -> list[dict[str, Any]]:
    """What is there, in order."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []


def keep(path: Path, row: dict[str, Any]) -> None:
    """Put a row in the place of an earlier one with its key, or at the end; the file is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        there = [r for r in rows(path) if r["key"] != row["key"]]
        fresh = path.with_name(f".{path.name}.new")
        with open(fresh, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(r) + "\n" for r in [*there, row])
            out.flush()
            os.fsync(out.fileno())
        os.replace(fresh, path)
