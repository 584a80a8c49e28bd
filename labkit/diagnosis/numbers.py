"""Numbers that rules compare: of an out-of-memory message, of the series of a log, of comparisons."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..units import GiB, MiB, show_bytes
from .comparing import PAIRS, compare
from .errors import Raised
from .outofmemory import OutOfMemory
from .prose import Passage
from .reading import Reading
from .settings import Settings

# what there is to compare; sizes end with _bytes, shares and ratios are plain, "oom" alone tells that there was one
NAMES = {
    "oom", "oom.phase", "oom.place", "oom.wanted_bytes", "oom.free_bytes", "oom.allocated_bytes", "oom.scattered_bytes",
    "oom.scattered_share", "oom.scattered_covers", "oom.others_bytes", "oom.others_share", "oom.pools_bytes",
    "oom.allowed_bytes", "oom.after_steps",
    "oom.logits_tokens", "oom.scores_seq",
    "loss.bad", "loss.bad_share", "loss.zero_share", "grad_norm.bad", "grad_norm.bad_share",
    "scale.fell",
    "memory.growth", "utilisation.median", "utilisation.count", "data.share", "mfu.largest", "step_seconds.slowdown",
    "error.kind",
    *(f"ratio.{pair.name}" for pair in PAIRS), "held.states_share", "held.activation_share", "held.logits_share",
    "held.attention_share",
}  # fmt: skip
_VOCABULARIES = (50257, 50304, 50258, 50260, 32000, 49152, 128256, 151936)


@dataclass
class Numbers(dict[str, Any]):
    """Name -> value, and in ``said`` the line and the words that a value was read from."""

    said: dict[str, tuple[int, str]] = field(default_factory=dict)

    def put(self, name: str, value: Any, line: int = 0, words: str = "") -> None:
        """Set a value, unless it is None."""
        if value is not None:
            assert name in NAMES, name
            self[name] = value
            self.said[name] = (line, words)


def of(
    reading: Reading | None, error: Raised | None, oom: OutOfMemory | None, settings: Settings, passages: list[Passage]
) -> Numbers:
    """All numbers that these give."""
    numbers = Numbers()
    if error is not None:
        numbers.put("error.kind", error.kind, error.line, error.quote)
    if oom is not None and not oom.handled:
        _out_of_memory(numbers, oom, settings)
        if reading is not None:
            steps = max(
                (t.count for k, t in reading.series.tracks.items() if k in ("loss", "rate", "step_seconds")), default=0
            )
            numbers.put("oom.after_steps", steps or None, oom.line, f"{steps} steps were logged before it")
    if reading is not None:
        _series(numbers, reading)
        for passage in passages:
            for name, (ratio, at) in compare(passage.text).items():
                numbers.put(f"ratio.{name}", ratio, passage.line, _around(passage.text, at))
    return numbers


def _around(text: str, at: int) -> str:
    return " ".join(text[max(0, at - 60) : at + 90].split())


def _out_of_memory(numbers: Numbers, oom: OutOfMemory, settings: Settings) -> None:
    def put(name: str, value: Any) -> None:
        numbers.put(name, value, oom.line, oom.quote)

    put("oom", True)
    put("oom.phase", oom.phase or None)
    put("oom.place", oom.place or None)
    for name, value in oom.numbers().items():
        if f"oom.{name}" in NAMES:
            put(f"oom.{name}", value)
    if oom.scattered is not None and oom.allocated is not None:
        put("oom.scattered_share", oom.scattered / max(1, oom.scattered + oom.allocated))
        if oom.wanted:
            put("oom.scattered_covers", (oom.scattered + (oom.free or 0)) / oom.wanted)
    if oom.others is not None and oom.total:
        put("oom.others_share", oom.others / oom.total)
    if oom.wanted and oom.wanted > 64 * MiB:
        put("oom.logits_tokens", _logits_tokens(oom.wanted, settings))
        put("oom.scores_seq", _scores_seq(oom.wanted, settings))


def _close(wanted: int, exact: float) -> bool:
    """Whether a size that the allocator rounded up to 2 MiB and the message to two digits can be `exact` bytes."""
    slack = 0.006 * GiB if wanted >= GiB else 0.006 * MiB
    return exact - slack <= wanted <= exact + 2 * MiB + slack


def _logits_tokens(wanted: int, settings: Settings) -> int | None:
    """The number of tokens whose logits have that size, if it is one that a batch can have."""
    batch, seq = settings.get("batch"), settings.get("seq")
    counts = [batch * (seq - cut) for cut in (0, 1)] if isinstance(batch, int) and isinstance(seq, int) else []
    counts = counts or [
        b * (s - cut) for s in (512, 1024, 2048) for b in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32) for cut in (0, 1)
    ]
    for vocabulary in _VOCABULARIES if counts and "seq" in settings else _VOCABULARIES[:2]:
        for count in counts:
            if any(_close(wanted, count * vocabulary * size) for size in (4, 2)):
                return count
    return None


def _scores_seq(wanted: int, settings: Settings) -> int | None:
    """The sequence length whose attention scores have that size, where the batch and the model are known."""
    batch, seq = settings.get("batch"), settings.get("seq")
    if not isinstance(batch, int) or not isinstance(seq, int):
        return None
    heads = {"gpt2": 12, "gpt2-medium": 16, "gpt2-large": 20, "gpt2-xl": 25}.get(str(settings.get("model", "gpt2")))
    if heads and any(_close(wanted, batch * heads * seq * seq * size) for size in (4, 2)):
        return seq
    return None


def _series(numbers: Numbers, reading: Reading) -> None:
    series = reading.series
    for name in ("loss", "grad_norm"):
        track = series.track(name)
        if track.bad:
            words = f"{track.bad} of {track.count} values of {name} are no number, first on line {track.first_bad}"
            numbers.put(f"{name}.bad", track.bad, track.first_bad, words)
            numbers.put(f"{name}.bad_share", track.bad / track.count, track.first_bad, words)
    loss = series.track("loss")
    if loss.count >= 3 and loss.values[0] != 0:  # some methods log a loss of 0 throughout
        numbers.put(
            "loss.zero_share",
            sum(v == 0 for v in loss.values) / max(1, len(loss.values)),
            loss.last_line,
            "logged losses are exactly 0",
        )
    _scale(numbers, reading)
    memory = series.track("memory").finite()
    if len(memory) >= 6 and (growth := _growth(memory)) is not None:
        count = series.track("memory").count
        words = f"{show_bytes(memory[0])} at first, {show_bytes(memory[-1])} at last, over {count} values"
        numbers.put("memory.growth", growth, series.track("memory").last_line, words)
    used = series.track("utilisation")
    if used.count:
        numbers.put(
            "utilisation.median",
            statistics.median(used.values),
            used.last_line,
            f"median of {used.count} readings of the utilisation",
        )
        numbers.put("utilisation.count", used.count, used.last_line, "")
    waits, steps = series.track("data_seconds").finite(), series.track("whole_seconds").finite()
    if waits and steps and (whole := statistics.median(steps)) > 0:
        numbers.put(
            "data.share",
            min(1.0, statistics.median(waits) / whole),
            series.track("data_seconds").last_line,
            f"{statistics.median(waits):.3g} of {whole:.3g} s",
        )
    mfu = series.track("mfu").finite()
    if mfu:
        line = series.track("mfu").lines[mfu.index(max(mfu))] if len(mfu) == len(series.track("mfu").lines) else 0
        numbers.put("mfu.largest", max(mfu), line, f"a utilisation of {max(mfu):.1f} % of the peak")
    steps = series.track("step_seconds").finite()
    if len(steps) >= 12:
        early, late = statistics.median(steps[1 : 1 + len(steps) // 4]), statistics.median(steps[-(len(steps) // 4) :])
        if early > 0:
            numbers.put(
                "step_seconds.slowdown",
                late / early,
                series.track("step_seconds").last_line,
                f"a step took {early:.3g} s at first and {late:.3g} s at last",
            )


def _scale(numbers: Numbers, reading: Reading) -> None:
    track = reading.series.track("scale")
    scale = [v for v in track.finite() if v > 0]
    if len(scale) >= 3:
        words = f"the loss scale went from {scale[0]:g} to {scale[-1]:g}"
        numbers.put("scale.fell", scale[0] / scale[-1], track.last_line, words)


def _growth(values: list[float]) -> float | None:
    """Last over first, for values that mainly rise, from start to end; None for others (a start-up, a saw tooth)."""
    later = values[max(1, len(values) // 5) :]  # the optimizer's state is born in the first steps
    rises = sum(b > a for a, b in _pairs(later))
    falls = sum(b < a for a, b in _pairs(later))
    if rises < 4 or falls > 0.2 * rises or later[0] <= 0:
        return None
    halves = statistics.median(later[len(later) // 2 :]) - statistics.median(later[: len(later) // 2])
    return later[-1] / later[0] if halves > 0 else None


def _pairs(values: list[float]) -> Iterator[tuple[float, float]]:
    return itertools.pairwise(values)
