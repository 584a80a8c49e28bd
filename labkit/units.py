"""Sizes and times: parsed from what people write, shown in one way everywhere."""

from __future__ import annotations

import re

KiB, MiB, GiB = 2**10, 2**20, 2**30
_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": KiB, "m": MiB, "g": GiB, "t": 2**40,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)


class UserError(Exception):
    """A mistake of the user's that one sentence explains; the command line shows it and exits with code 2."""

    def _render_traceback_(self) -> list[str]:
        """What IPython prints in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


def parse_size(size: int | float | str) -> int:
    """Bytes in a size such as ``"8GiB"``, ``"500 MB"``, ``"7.5g"`` or a plain number of bytes.

    ``GB`` is 10**9 bytes, ``GiB`` and the bare letter ``G`` are 2**30. Raises `UserError` when the size cannot be
    read or is not positive.
    """
    if isinstance(size, bool):
        raise UserError(f"not a size: {size!r}; write for example '8GiB'")
    if isinstance(size, (int, float)):
        value = float(size)
    else:
        match = _SIZE.fullmatch(str(size))
        if not match or match[2].lower() not in _UNITS:
            raise UserError(f"not a size: {size!r}; write for example '8GiB', '500MiB' or a number of bytes")
        value = float(match[1]) * _UNITS[match[2].lower()]
    if not 1 <= value < 2**60:  # also refuses nan and infinity
        raise UserError(f"a size must be positive (and below an exabyte): {size!r}")
    return int(value)


def show_bytes(nbytes: int | float | None) -> str:
    """``"7.98 GiB"``, ``"66.1 MiB"``, ``"512 B"``; a dash for None. Never ``0.0 GB`` for something that is there."""
    if nbytes is None:
        return "–"
    sign, size = ("-" if nbytes < 0 else ""), abs(nbytes)
    if size >= GiB:
        return f"{sign}{size / GiB:.2f} GiB"
    if size >= MiB:
        return f"{sign}{size / MiB:.1f} MiB"
    if size >= KiB:
        return f"{sign}{size / KiB:.1f} KiB"
    return f"{sign}{size:.0f} B"


def show_seconds(seconds: float | None) -> str:
    """``"48.8 ms"`` below ten seconds, ``"12.1 s"`` below two minutes, else ``"2:03"``; a dash for None."""
    if seconds is None:
        return "–"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 10:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
