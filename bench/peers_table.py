"""The peers' table and figure, from rows: for each way to train its largest batch, and what its fastest one takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers_cases

ROOT = Path(__file__).resolve().parents[1]
GiB = 2**30
HEAD = (
    "Rows: `data/reference/peers-h200.jsonl`; again: `make bench-peers`. Each trial is a process of its own; sequences "
    "of 1024 tokens; the same weights, tokens, AdamW settings and no dropout for all; gradients are clipped to a norm "
    "of 1, but not by torchao, which takes them as they arrive. Memory in GiB, peaks of the timed steps: PyTorch's "
    "allocator (allocated, reserved), the driver's count for the process (with CUDA's context), the process's largest "
    "resident memory on the host and the part of it that PyTorch pinned. Of bitsandbytes' paged states PyTorch knows "
    "nothing: for them the rest of the card was filled, so that they had to share what was left. MFU: (6 N + 12 L d T) "
    "a token against lesson 00's bf16 product. Spread: longest less shortest step, of the median. Losses: 20 steps on "
    "the same 4 (gpt2-xl) or 8 sequences."
)
ORDER = ("gpt2-xl", "gpt2-medium", "gpt2")


@dataclass(frozen=True)
class Way:
    """One way to train under one cap: all its rows of speed, and the row of its training for the loss, if any."""

    rows: tuple[dict[str, Any], ...]
    loss: dict[str, Any] | None = None

    @property
    def peer(self) -> str:
        """Whose code."""
        return str(self.rows[0]["peer"])

    @property
    def name(self) -> str:
        """Peer and variant, and whether it was not held to the cap of those beside it."""
        return f"{self.peer}: {self.rows[0]['variant']}{', no cap' if self.rows[0]['cap_gib'] is None else ''}"

    @property
    def best(self) -> dict[str, Any] | None:
        """The row with the most tokens a second; None where nothing fits."""
        return max(_fitting(self.rows), key=lambda row: float(row["tokens_per_second"]), default=None)

    @property
    def largest(self) -> str:
        """The largest batch that fits; with a sign where no larger one was tried."""
        fits = max((row["batch"] for row in _fitting(self.rows)), default=0)
        full = any(row["status"] == "oom" and row["batch"] > fits for row in self.rows)
        return str(fits) if full or not fits else f">= {fits}"


def _fitting(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["status"] == "ok" and row["trial"] == "speed"]


def grouped(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, float | None], list[Way]]:
    """The ways by model and cap, the fastest first. What has no cap stands beside those of its model that have."""
    caps: dict[str, float | None] = {}
    for row in rows:
        if caps.get(row["model"]) is None:
            caps[row["model"]] = row["cap_gib"]
    found: dict[tuple[str, float | None], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        name = json.dumps([row["peer"], row["variant"], row["how"]], sort_keys=True)
        cap = caps[row["model"]] if row["cap_gib"] is None else row["cap_gib"]
        found.setdefault((row["model"], cap), {}).setdefault(name, []).append(row)
    groups = {}
    for group in sorted(found, key=lambda g: (ORDER.index(g[0]) if g[0] in ORDER else len(ORDER), g[1] or 1e9)):
        ways = [_way(of_one) for of_one in found[group].values()]
        groups[group] = sorted(ways, key=lambda w: -float(w.best["tokens_per_second"]) if w.best else 0.0)
    return groups


def _way(rows: Sequence[dict[str, Any]]) -> Way:
    loss = next((row for row in rows if row["trial"] == "loss"), None)
    return Way(tuple(row for row in rows if row["trial"] == "speed") or tuple(rows), loss)


def flops_per_token(model: str, seq: int) -> float:
    """What a training step has to compute for a token, ``6 N + 12 L d T``; what is computed again does not count."""
    from labkit.models import GPT2_SIZES

    layers, width, _ = GPT2_SIZES[model]
    parameters = 12 * layers * width**2 + 13 * layers * width + (50257 + 1024) * width + 2 * width
    return 6.0 * parameters + 12.0 * layers * width * seq


def ceiling() -> float | None:
    """FLOP/s of the best bf16 product that lesson 00 measured on this card; None without its row."""
    file = ROOT / "data" / "reference" / "lessons-h200.jsonl"
    for line in file.read_text("utf-8").splitlines():
        row = json.loads(line)
        if row.get("name") == "ceiling" and row.get("what") == "product, bfloat16":
            return float(row["value"])
    return None


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The page, in Markdown."""
    top = ceiling()
    for (model, cap), ways in grouped(rows).items():
        yield f"## {model}, {'no cap' if cap is None else f'{cap:g} GiB'}"
        yield ""
        yield (
            "| way | largest batch | fastest with | tokens/s | spread | MFU | allocated | reserved | driver | "
            "host (pinned) | loss after 20 steps |"
        )
        yield "| --- |" + " ---: |" * 10
        for way in (w for w in ways if w.best):
            yield _line(way, top, model)
        failed = [w for w in ways if w.best is None]
        if failed:
            yield ""
            yield "Without a number:"
            yield ""
            yield from (f"- {way.name}: {_why(way)}" for way in failed)
        yield from _ratios(ways)
        yield ""


def _line(way: Way, top: float | None, model: str) -> str:
    row = way.best
    assert row is not None
    batch = str(row["batch"]) if row["accumulation"] == 1 else f"{row['accumulation']} x {row['batch']}"
    peaks = row["steady"] or {}
    memory = [_gib(peaks.get("allocated_bytes")), _gib(peaks.get("reserved_bytes")), _driver(row)]
    host = f"{_gib(row.get('host_resident_bytes'))} ({_gib(row.get('host_pinned_bytes'))})"
    share = "?"
    if top and model in ORDER:
        share = f"{row['tokens_per_second'] * flops_per_token(model, row['seq']) / top:.1%}"
    loss = way.loss["losses"][-1] if way.loss and way.loss["status"] == "ok" else None
    rate, spread = f"{row['tokens_per_second']:,.0f}", f"{row['spread_seconds'] / row['seconds']:.0%}"
    cells = [way.name, way.largest, batch, rate, spread, share, *memory, host, "" if loss is None else f"{loss:.3f}"]
    return f"| {' | '.join(cells)} |"


def _driver(row: dict[str, Any]) -> str:
    """What the driver counts for the process, without what was taken to fill the card."""
    counted = (row["steady"] or {}).get("device_bytes")
    if not row["ballast"]:
        return _gib(counted)
    return _gib(counted - row["ballast_bytes"]) if counted and "ballast_bytes" in row else "all that was left"


def _gib(nbytes: int | None) -> str:
    return "?" if nbytes is None else f"{nbytes / GiB:.2f}"


def _why(way: Way) -> str:
    """What ended the smallest batch that was tried."""
    row = min(way.rows, key=lambda r: int(r["batch"]))
    reason = (row.get("reason", "").splitlines() or [""])[0]
    words = {"oom": "out of memory", "missing": "not installed", "error": "failed"}[row["status"]]
    return f"{words} with batch {row['batch']} ({reason.partition(' GPU 0')[0]})"


def _ratios(ways: Sequence[Way]) -> Iterator[str]:
    """Ours against each peer's best, whoever wins."""
    best: dict[str, Way] = {}
    for way in ways:
        if way.best:
            best.setdefault(way.peer, way)  # the fastest comes first
    ours = best.pop(peers_cases.OURS, None)
    if ours is None or not best:
        return
    assert ours.best is not None
    said = []
    for peer, way in best.items():
        assert way.best is not None
        said.append(f"{ours.best['tokens_per_second'] / way.best['tokens_per_second']:.2f} times {peer}")
    first = next(iter(best.values()))
    assert first.best is not None
    if frugal := _frugal(ways, first.best):
        speed = frugal.best["tokens_per_second"] / first.best["tokens_per_second"]  # type: ignore[index]
        said.append(f"with no more reserved memory than {first.peer} ({frugal.name}) {speed:.2f} times its")
    winner = ours if ours.best["tokens_per_second"] >= first.best["tokens_per_second"] else first
    yield ""
    yield f"Fastest: {winner.name}. The course's fastest recipe reaches {', '.join(said)} tokens a second."


def _frugal(ways: Sequence[Way], peer: dict[str, Any]) -> Way | None:
    """The fastest of our ways that reserves no more than the peer's row."""
    most = peer["steady"]["reserved_bytes"]
    mine = [w for w in ways if w.peer == peers_cases.OURS and w.best and w.best["steady"]["reserved_bytes"] <= most]
    return mine[0] if mine else None


def missing(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Every case that has no row yet."""
    there = {(row["model"], row["cap_gib"], row["peer"], row["variant"]) for row in rows}
    for case in peers_cases.cases():
        if (case.model, case.cap_gib, case.peer, case.variant) not in there:
            yield f"- {case.name}"


def short(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A few words for each way, for a terminal."""
    for (model, cap), ways in grouped(rows).items():
        yield f"{model}, {'no cap' if cap is None else f'{cap:g} GiB'}"
        for way in ways:
            row = way.best
            if row is None:
                yield f"  {way.name[:72]:72} {_why(way)[:110]}"
                continue
            peaks = row["steady"] or {}
            memory = "/".join(_gib(peaks.get(f"{n}_bytes")) for n in ("allocated", "reserved", "device"))
            rate = f"{row['tokens_per_second']:8,.0f} tokens/s"
            yield f"  {way.name[:72]:72} {rate} at {row['batch']:3}, largest {way.largest:>6}, {memory} GiB"


def write(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """``peers.md`` and ``peers.png`` in `folder`. Raises `SystemExit` without rows."""
    if not rows:
        raise SystemExit("there are no rows of peers: run bench/peers.py on a card first")
    folder.mkdir(parents=True, exist_ok=True)
    first, cores = rows[0], " or ".join(map(str, sorted({row["host_cores"] for row in rows if "host_cores" in row})))
    versions = {name: version for row in rows for name, version in row["versions"].items()}
    said = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    where = f"{first['card']}, {said}; {cores} processor cores. {HEAD}"
    head = ["# This course's recipes against their peers", "", where, ""]
    todo = list(missing(rows))
    left = ["## Not measured yet", "", *todo] if todo else []
    (folder / "peers.md").write_text("\n".join([*head, *lines(rows), *left]).rstrip() + "\n", encoding="utf-8")
    figure(rows, folder / "peers.png")


def figure(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens a second and device memory side by side, for the first model and cap with a number."""
    from labkit import plots

    for (model, cap), ways in grouped(rows).items():
        done = [(way, way.best) for way in ways if way.best and way.best["steady"]]
        if done:
            under = "no cap" if cap is None else f"{cap:g} GiB"
            picture = plots.rates(
                {way.name: (best["tokens_per_second"], best["steady"]["reserved_bytes"]) for way, best in done},
                title=f"Training {model} in {under}", source=f"measured, {done[0][1]['card']}",
                memory="reserved by PyTorch", ours=[way.name for way, _ in done if way.peer == peers_cases.OURS],
            )  # fmt: skip
            path.write_bytes(plots.png(picture))
            return
