"""The table of rules, in parts by subject."""

from __future__ import annotations

from ..rule import Rule
from . import libraries, memory, precision, speed, training

RULES: tuple[Rule, ...] = (*memory.RULES, *precision.RULES, *training.RULES, *speed.RULES, *libraries.RULES)
