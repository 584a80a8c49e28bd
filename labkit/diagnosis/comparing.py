"""Two things compared by a number each, as people write it: "fp32: 7.1 GB, fp16: 7.8 GB"."""

# ruff: noqa: E501 (a pattern stands on one line, where it can be searched for)
from __future__ import annotations

import re
from dataclasses import dataclass

from .rule import compiled
from .series import nbytes

_MEMORY = r"(\d+(?:[.,]\d+)?) ?(gib|gb|g|mib|mb)\b"
_RATE = r"(\d+(?:[.,]\d+)?)(k?) ?(?:it/s|tok\w*/s\w*|tok\w* per second|tokens?/sec\w*|samples?/s\w*|seq\w*/s\w*|iter\w*/s\w*|steps?/s\w*|tps)"
_TIME = r"(\d+(?:[.,]\d+)?) ?(ms|milliseconds|s/it|sec\w*|s|min\w*|m|hours?|h)\b"
_TIME_UNITS = {"ms": 1e-3, "mi": 60.0, "m": 60.0, "s": 1.0, "s/": 1.0, "se": 1.0, "h": 3600.0, "ho": 3600.0}


@dataclass(frozen=True)
class Pair:
    """A comparison: of ``what`` ("memory" or "speed"), ``first`` against ``second`` as patterns for their labels."""

    name: str
    what: str
    first: str
    second: str


_AMP = r"\b(?:amp|autocast|b?fp?16|b?float16|mixed|half|with it)\b"
_FP32 = r"\b(?:fp32|float32|full precision|no amp|without amp|without autocast|without it|amp off|32[- ]bit|single precision)\b"
PAIRS = (
    Pair("amp_memory", "memory", _AMP, _FP32),
    Pair("int8_speed", "speed", r"\b(?:int8|8[- ]?bit|load_in_8bit|llm\.int8)", r"\b(?:fp16|bf16|float16|16[- ]?bit|half|fp32|float32)\b"),
    Pair("bf16_speed", "speed", r"\b(?:bf16|bfloat16)", r"\b(?:fp16|float16|fp32|float32|half)\b"),
    Pair("compile_speed", "speed", r"compil\w*", r"\b(?:eager|uncompiled|without|no compile|baseline|before)\b"),
    Pair("compile_memory", "memory", r"compil\w*", r"\b(?:eager|uncompiled|without|no compile|baseline)\b"),
    Pair("flash_speed", "speed", r"\b(?:flash\w*|sdpa|fa2|flash_attention_2)", r"\b(?:eager|standard|vanilla|math|without|normal)\b"),
    Pair("ddp_memory", "memory", r"\b(?:ddp|distributeddataparallel|torchrun)", r"\b(?:dp|dataparallel|single|one (?:gpu|card|process)|1 (?:gpu|card|process)|without ddp|no ddp)\b"),
    Pair("driver_memory", "memory", r"\b(?:nvidia[- ]?smi|nvtop|nvitop|gpustat|nvml|task manager|device memory)", r"(?:memory_allocated|max_memory_allocated|\ballocated|torch(?:\.cuda)?|pytorch)\b"),
    Pair("cards_speed", "speed", r"\b(?:[2-9]|two|three|four|six|eight|dual)[ -]?x? ?(?:\w+ )?(?:gpus?|cards?|t4s?|a100s?|h100s?|v100s?|\d{4}(?: ?ti)?s?)\b|\bddp\b|(?<!distributed)dataparallel|multi-?gpu|\bboth\b", r"\b(?:1x?|one|a single|single)[ -]?(?:\w+ )?(?:gpu|card|t4|a100|h100|v100|\d{4})"),
    Pair("quantised_quality", "quality", r"\b(?:int[48]|[48][- ]?bit|nf4|quanti[sz]ed|gptq|awq)", r"\b(?:fp16|bf16|float16|16[- ]?bit|fp32|float32|full|original|baseline)\b"),
    Pair("accumulated_loss", "loss", r"(?:accumul\w*|\b1 ?[x×*] ?\d+)", r"(?:without|no accumulation|full batch|batch(?:[ _]size)? ?(?:of |=)? ?(?:[2-9]\d*|1\d+)\b|large batch)"),
)  # fmt: skip


def compare(text: str) -> dict[str, tuple[float, int]]:
    """Ratio first / second of every comparison that `text` (lower case) holds, with where it stands.

    For memory: more than 1 is more memory. For speed: more than 1 is faster. For quality (perplexity): more is worse.
    """
    found: dict[str, tuple[float, int]] = {}
    for pair in PAIRS:
        values = _values(pair, text)
        if values:
            (a, at), (b, _) = values
            if a > 0 and b > 0 and 0.02 < a / b < 50:
                found[pair.name] = (a / b, at)
    return found


def _values(pair: Pair, text: str) -> tuple[tuple[float, int], tuple[float, int]] | None:
    labels = sorted(
        [(m.start(), m.end(), 0) for m in compiled(pair.first).finditer(text)]
        + [(m.start(), m.end(), 1) for m in compiled(pair.second).finditer(text)]
    )[:40]
    best: dict[int, tuple[float, int]] = {}
    for order, (_, end, which) in enumerate(labels):
        following = [start for start, _, other in labels[order + 1 :] if other != which]
        stretch = text[end : min(end + 70, following[0] if following else end + 70)]
        value = _value(pair.what, stretch)
        if value is not None and which not in best:
            best[which] = (value, end)
    if 0 in best and 1 in best:
        return best[0], best[1]
    return _reversed(pair, text, labels)


def _reversed(
    pair: Pair, text: str, labels: list[tuple[int, int, int]]
) -> tuple[tuple[float, int], tuple[float, int]] | None:
    """Numbers before their labels: "7.8 GB with AMP against 7.1 GB in fp32"."""
    best: dict[int, tuple[float, int]] = {}
    for order, (start, _, which) in enumerate(labels):
        before = [end for _, end, other in labels[:order] if other != which]
        stretch = text[max(start - 45, before[-1] if before else 0) : start]
        value = _value(pair.what, stretch, last=True)
        if value is not None and which not in best:
            best[which] = (value, start)
    return (best[0], best[1]) if 0 in best and 1 in best else None


def _value(what: str, stretch: str, last: bool = False) -> float | None:
    if what == "memory":
        found = list(compiled(_MEMORY).finditer(stretch))
        if not found:
            return None
        m = found[-1 if last else 0]
        return nbytes(str(_float(m[1])), m[2]) or None
    if what == "speed":
        if rates := list(compiled(_RATE).finditer(stretch)):
            m = rates[-1 if last else 0]
            return _float(m[1]) * (1000 if m[2] else 1)
        if times := list(compiled(_TIME).finditer(stretch)):
            m = times[-1 if last else 0]
            seconds = _float(m[1]) * next(
                f for u, f in sorted(_TIME_UNITS.items(), key=lambda i: -len(i[0])) if m[2].startswith(u)
            )
            return 1 / seconds if seconds else None
        return None
    found = list(re.finditer(r"\d+\.\d+|\d+(?= ppl)", stretch))
    return float(found[-1 if last else 0][0]) if found else None


def _float(text: str) -> float:
    return float(text.replace(",", "." if re.search(r",\d{1,2}$", text) else ""))
