"""What no card can do: the bounds that a measured row must keep, from the card's data sheet and from arithmetic."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from . import machine
from .machine import Card
from .units import GiB, KiB, MiB, show_bytes, show_seconds

SLACK = 1.15  # above the data sheet: cards run at higher clocks than the sheet's boost clock (consumer cards, by 10 %)
_SCALES = {"bytes": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB}
_RATES = {"FLOP/s": 1.0, "TFLOP/s": 1e12, "bytes/s": 1.0, "GB/s": 1e9, "tokens/s": 1.0}
_SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
_PEAKS = ("allocated_bytes", "requested_bytes", "reserved_bytes", "device_bytes")


def preset(row: dict[str, Any]) -> Card | None:
    """The data sheet of the card in a row; None where there is none."""
    wanted = str(row.get("card", "")).lower()
    return next((c for c in machine.PRESETS.values() if wanted in (c.name, c.title.lower())), None)


def problems(row: dict[str, Any]) -> list[str]:
    """Why a card cannot have given these numbers, one sentence each."""
    found = [
        f"has {where} = {value}, which is not a number" for where, value in _numbers(row) if not math.isfinite(value)
    ]
    card = preset(row)
    if card is None or row.get("source", "measured") != "measured":
        return found
    if row.get("kind") == "fact":
        return [*found, *_fact(row, card)]
    if row.get("kind") == "report" or "steady" in row:
        found += _peaks(row, card)
    if row.get("timing"):
        found += _time(row, card)
    return found


def _numbers(value: Any, where: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _numbers(inner, where)
    elif isinstance(value, float):
        yield where, value


def _peaks(row: dict[str, Any], card: Card) -> list[str]:
    """Sizes are positive, nothing is larger than what it is part of, and none exceeds the budget or the card."""
    found = []
    budget = row.get("budget_bytes")
    for when in ("first", "steady"):
        peaks = row.get(when)
        if not peaks:
            continue
        sizes = {name: peaks[name] for name in _PEAKS if peaks.get(name) is not None}
        found += [f"has {when}.{name} = {size}" for name, size in sizes.items() if type(size) is not int or size < 0]
        allocated, requested, reserved = (sizes.get(name, 0) for name in _PEAKS[:3])
        # requested may exceed allocated: PyTorch counts it until a block that another stream uses is really given back
        if max(allocated, requested) > reserved:
            found.append(f"has in {when}: allocated {allocated}, requested {requested}, of only {reserved} reserved")
        if budget and reserved > budget:
            found.append(f"reserved {show_bytes(reserved)} under a budget of {show_bytes(budget)}")
        for name, size in sizes.items():
            if size > card.memory_bytes:
                found.append(
                    f"has {when}.{name} = {show_bytes(size)}; a {card.title} has {show_bytes(card.memory_bytes)}"
                )
    if row.get("status") == "ok" and not (row.get("first") or row.get("steady")):
        found.append("ran, and has no peak")
    if row.get("status") not in ("ok", "oom", "limit", "skipped", None):
        found.append(f"has status {row['status']!r}")
    return found


def _time(row: dict[str, Any], card: Card) -> list[str]:
    """A step cannot end before the card has done its products and read its weights once."""
    timing = row["timing"]
    seconds, spread, repeats = timing["median_seconds"], timing["spread_seconds"], timing["repeats"]
    if not seconds > 0 or spread < 0 or repeats < 1:
        return [f"has a step of {seconds} s, spread {spread} s, over {repeats} repeats"]
    held: dict[str, int] = {}
    for holding in row.get("alive") or ():
        held[holding["category"]] = held.get(holding["category"], 0) + holding["nbytes"]
    weights = held.get("parameter", 0)
    trained = 3 if held.get("optimizer state", 0) >= weights > 0 else 1  # forward and backward, or forward at least
    # at least half of the weights are in products (the others may be tables), of 4 bytes at most; 2 operations a token
    work = 0.5 * weights / 4 * 2 * (row.get("tokens") or 0) * trained
    least = max(work / card.half_flops, 0.5 * weights / card.bandwidth_bytes) / SLACK
    if seconds < least:
        return [
            f"has a step of {show_seconds(seconds)}; with {show_bytes(weights)} of weights, {row.get('tokens')} tokens"
            f" a {card.title} needs at least {show_seconds(least)}"
        ]
    return []


def _fact(row: dict[str, Any], card: Card) -> list[str]:
    """Sizes, times and rates are positive; a rate stays below the data sheet's."""
    value, unit, found = row.get("value"), str(row.get("unit") or ""), []
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return []
    if value < 0 and unit in (*_SCALES, *_RATES, *_SECONDS):
        return [f"is {value} {unit}, below nothing"]
    if value == 0 and unit in (*_RATES, *_SECONDS):
        return [f"is 0 {unit}"]
    words = f"{row.get('name')} {row.get('what')}"
    if unit in _RATES and unit != "tokens/s":
        rate, (most, what) = value * _RATES[unit], _ceiling(unit, words, card)
        if rate > SLACK * most:
            found.append(
                f"is {value:.4g} {unit}; {what} of a {card.title} is {most / _RATES[unit]:.4g} ({card.source})"
            )
    return found


def _ceiling(unit: str, words: str, card: Card) -> tuple[float, str]:
    if "FLOP" in unit:
        if re.search(r"float32|fp32", words) and "tf32" not in words:
            return card.fp32_flops, "the float32 rate"
        return card.half_flops * (2 if re.search(r"fp8|int8|float8", words) else 1), "the 16-bit rate"
    if re.search(r"\b(?:bus|host)\b", words):
        return card.bus_bytes, f"one direction of the bus ({card.bus})"
    return card.bandwidth_bytes, "the memory bandwidth"
