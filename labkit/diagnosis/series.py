"""Numbers that run through a log: loss, gradient norm, loss scale, memory, utilisation, step time."""

# ruff: noqa: E501 (a pattern stands on one line, where it can be searched for)
from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from ..units import KiB

_NUMBER = r"(nan(?=\.0\b)|-?inf(?=\.0\b)|nan|-?inf|[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?)"
_END = r"(?:(?<=nan)\.0|(?<=inf)\.0)?(?![\w.])"
_SIZE = r"(\d+(?:\.\d+)?) ?(gib|gb|mib|mb)\b"
PATTERNS: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern)  # over lower-case lines
    for name, pattern in {
        "loss": rf"(?<![a-z_/])(?<!eval )(?<!val )(?<!best )(?:train(?:ing)?[_ /]?)?loss['\"]?\s{{0,4}}[:= ]\s{{0,4}}['\"]?(?:tensor\()?{_NUMBER}{_END}",
        "grad_norm": rf"grad(?:ient)?[_ ]?norm['\"]?\s{{0,4}}[:= ]\s{{0,4}}['\"]?{_NUMBER}{_END}",
        "scale": rf"(?:loss[_ ]?scale|grad[_ ]?scale|scaler?)['\"]?\s{{0,4}}[:= ]\s{{0,4}}{_NUMBER}{_END}",
        "memory": rf"(?:memory|mem|allocated|vram|max_mem)\w*(?:[^\d\n]{{0,24}}?){_SIZE}",
        "utilisation": r"(?:gpu[ _-]?)?util(?:i[sz]ation)?(?:\.gpu)?[^\d%\n]{0,16}?(\d{1,3}(?:\.\d+)?) ?%|\d+mib ?/ *\d+mib \| +(\d{1,3})%",
        "mfu": r"\bmfu\b[^\d\n-]{0,14}(-?\d+(?:\.\d+)?) ?(%?)",
        "step_seconds": r"(\d+(?:\.\d+)?) ?s/it|(?:time|step|dt|took)\w*[ :=]{1,3}(\d+(?:\.\d+)?) ?ms",
        "data_seconds": r"data(?:[_ ]?(?:time|load(?:ing)?|wait|fetch))+\w*[ :=(]{1,4}(\d+(?:\.\d+)?) ?(ms|s)?\b",
        "whole_seconds": r"(?:step|batch|iter(?:ation)?|total)[_ ]?time\w*[ :=(]{1,4}(\d+(?:\.\d+)?) ?(ms|s)?\b",
        "rate": r"(\d+(?:\.\d+)?) ?it/s",
    }.items()
}
_HINTS = {
    "loss": ("loss",), "grad_norm": ("norm",), "scale": ("scale",),
    "memory": ("mem", "allocated", "vram"), "utilisation": ("util", "mib |"), "mfu": ("mfu",),
    "step_seconds": ("s/it", "ms"), "data_seconds": ("data",), "whole_seconds": ("time",), "rate": ("it/s",),
}  # fmt: skip
# the end of a run that went well, or a run that goes on
DONE = re.compile(
    r"train_runtime|training (?:is )?(?:completed|complete|finished|done)|(?:saved|saving) (?:final )?(?:model|checkpoint)"
    r"|finished training|=+ \d+ passed|successfully"
)
_DONE_HINTS = ("train", "sav", "passed", "success")
_MOST = 4096


_UNITS = {"k": KiB, "m": KiB**2, "g": KiB**3, "t": KiB**4}


def nbytes(number: str, unit: str) -> float:
    """Bytes in a size that a text gives, however absurd; ``GB`` is 10**9 of them, ``GiB`` and ``G`` 2**30."""
    letter = unit[:1].lower()
    decimal = unit.lower().endswith("b") and "i" not in unit.lower()
    scale = 1000 ** " kmgt".index(letter) if decimal and letter in "kmgt" else _UNITS.get(letter, 1)
    return float(number) * scale


@dataclass
class Track:
    """Values with their lines; when there are too many every second one is dropped, the last ones never."""

    lines: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    stride: int = 1
    count: int = 0
    bad: int = 0  # nan or infinite
    first_bad: int = 0
    last_line: int = 0

    def add(self, line: int, value: float) -> None:
        """Take a value."""
        self.count += 1
        self.last_line = line
        if not math.isfinite(value):
            self.bad += 1
            self.first_bad = self.first_bad or line
        if self.count % self.stride:
            return
        self.lines.append(line)
        self.values.append(value)
        if len(self.values) > _MOST:
            self.lines, self.values, self.stride = self.lines[::2], self.values[::2], self.stride * 2

    def finite(self) -> list[float]:
        """The values that are numbers."""
        return [v for v in self.values if math.isfinite(v)]


@dataclass
class Series:
    """The tracks of a log by name, and the last line that told of success."""

    tracks: dict[str, Track] = field(default_factory=dict)
    done_line: int = 0

    def feed(self, number: int, line: str) -> None:
        """Read the numbers of a line."""
        low = line.lower()
        for name, hints in _HINTS.items():
            if not any(hint in low for hint in hints):
                continue
            if name == "memory" and "tried to allocate" in low:
                continue
            match = PATTERNS[name].search(low)
            if match:
                self._take(name, number, match)
        if any(hint in low for hint in _DONE_HINTS) and DONE.search(low):
            self.done_line = number

    def _take(self, name: str, number: int, match: re.Match[str]) -> None:
        found = [g for g in match.groups() if g is not None]
        if name == "memory":
            value = nbytes(found[0], found[1])
        elif name == "mfu":
            value = float(found[0]) if found[1:] and found[1] else float(found[0]) * (100 if float(found[0]) < 3 else 1)
        elif name in ("data_seconds", "whole_seconds"):
            value = float(found[0]) / (1000 if found[1:] == ["ms"] else 1)
        elif name == "step_seconds":
            value = float(found[0]) / (1 if match[1] else 1000)
        else:
            value = float(found[0])
        self.tracks.setdefault(name, Track()).add(number, value)

    def track(self, name: str) -> Track:
        """The track of that name, empty where the log has none."""
        return self.tracks.get(name, Track())

    def progress_after(self, line: int) -> int:
        """How many losses or rates were written after `line`, which tells that the run went on."""
        return max(
            (sum(n > line for n in t.lines) for k, t in self.tracks.items() if k in ("loss", "rate", "step_seconds")),
            default=0,
        )
