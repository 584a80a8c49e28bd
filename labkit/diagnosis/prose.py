"""What a person wrote, cut into passages, with the concepts that each of them names and does not deny."""

# ruff: noqa: E501 (a pattern stands on one line, where it can be searched for)
from __future__ import annotations

import re
from dataclasses import dataclass

from .concepts import CONCEPTS
from .errors import PREFIX
from .reading import Reading
from .rule import compiled

_DENIED = re.compile(
    r"(?:\bno\b|\bnot\b|\bnever\b|\bwithout\b|\bzero\b|n['’]t\b|\bavoid(?:s|ed|ing)?|\bprevent(?:s|ed|ing)?|\binstead of|\bnor\b|\bany\b|"
    r"\bno longer|\bstopped|\bfixes|\bsolves|\bcures|\bagainst|\bdetected 0|\bfree of|\bif (?:you|your|the|it|a) (?:\w+ ){0,3}|\bin case of|\bin the event of)[\s\w,'\"()/-]{0,24}$|(?<!gpu )(?<!card )(?<!rank )(?<!cuda:)\b0\s*$"
)
_ASKED = re.compile(r"\bhow\b|\?|can(?:not|['’]t)|still|unable")
SOLVED = re.compile(
    r"\b(?:fix(?:ed|es)|solved|resolved|no longer|not (?:\w+ ){0,4}any ?more|n['’]t (?:\w+ ){0,4}any ?more|went away|(?:is|are|all) gone(?! up)|gone now|disappear\w*|"
    r"works? (?:now|again|perfectly|great|flawlessly)|now (?:it )?(?:works|fits|runs|trains)|cured|(?:problem|issue|error) (?:is )?(?:over|closed)|"
    r"did the trick|(?:that|this) (?:helped|worked)(?= for (?:me|us)|[.!,]|$)|thanks,? (?:it|that)|used to)\b"
)
_STILL_BROKEN = re.compile(
    r"\b(?:not|n['’]t|never|isn.?t|wasn.?t|only|partly|partially|should be|supposed(?:ly)? to be|is (?:it|this)|was (?:it|this)|how|until|before|hoping|to get|to be|want|need|can(?:not| it| this)) (?:\w+ ){0,4}(?:fix|solv|resolv|works? now|gone)|"
    r"(?:fixed|solved) (?:length|size|seed|batch|shape|number|point|seq\w*|width|vocab\w*|lr|learning|sized?|block|window|the same)|"
    r"(?:no longer|not|n['’]t) (?:\w+ ){0,2}(?:works?|fits?|runs?|trains?|converges?|learns?|match\w*|improves?|loads?|enough|compil\w*|any faster)"
)
_SENTENCE = re.compile(r"(?<=[.!?;])\s+(?=\S)|\n{2,}|\n(?=[-*•])")


@dataclass(frozen=True)
class Passage:
    """A piece of what a person wrote, with the line it begins on and the concepts in it: name -> where it stands."""

    line: int
    text: str
    concepts: dict[str, tuple[int, str]]


def found_in(text: str) -> dict[str, tuple[int, str]]:
    """Concept -> (position, words) for those that `text` (lower case) names and does not deny."""
    found = {}
    for name, concept in CONCEPTS.items():
        for match in compiled(concept.pattern).finditer(text):
            if concept.trouble and _denied(text, match.start(), match.end()):
                continue
            found[name] = (match.start(), match.group())
            break
    for name, at in _by_numbers(text):
        found.setdefault(name, at)
    return found


_QUANTITY = r"(\d+(?:\.\d+)?) ?(k?)(ms|s/it|s|sec\w*|min\w*|it/s|steps?/s\w*|tok\w*/s\w*|samples?/s\w*|gib|gb|mib|mb)\b"
_BEFORE_AFTER = rf"{_QUANTITY}[^.\d\n]{{0,14}}?(->|→|=>|\bto|instead of|rather than|\bvs\.?|versus|against|compared (?:to|with))[^.\d\n]{{0,14}}?{_QUANTITY}"


def _by_numbers(text: str) -> list[tuple[str, tuple[int, str]]]:
    """Concepts that two numbers tell: "0.4 s -> 2.9 s" is slow, "7.1 GB to 7.8 GB" more memory, "51 ms vs 50 ms" no
    gain."""
    found = []
    for match in compiled(_BEFORE_AFTER).finditer(text):
        first, k1, unit, how, second, k2, unit2 = match.groups()
        a, b = float(first) * (1000 if k1 else 1), float(second) * (1000 if k2 else 1)
        if unit[:2] != unit2[:2] or not a or not b:
            continue
        ratio = a / b if how.startswith(("instead", "rather")) else b / a  # after over before
        at = (match.start(), match.group())
        memory, rate = unit[0] in "gm" and unit[-1] == "b", unit.endswith(("/s", "/sec", "/second"))
        directed = not how.startswith(("v", "against", "compared"))
        if memory and directed and ratio >= 1.03:
            found.append(("more memory", at))
        elif not memory and 0.93 <= ratio <= 1.08:
            found.append(("no gain", at))
        elif not memory and directed and (ratio <= 0.85 if rate else ratio >= 1.18):
            found.append(("slow", at))
    return found


_WAVED_OFF = re.compile(
    r"\W{0,3}(?:\w+\W+){0,2}(?:can|could|may|might|should|will|would) (?:be |often be |usually be )?(?:avoided|prevented|handled|solved|fixed|caught|ignored|happen|occur)"
)


def _denied(text: str, start: int, end: int) -> bool:
    if _WAVED_OFF.match(text, end):
        return True
    clause = re.split(r"[.;:!?\n]|\bbut\b|\bhowever\b", text[max(0, start - 60) : start])[-1]
    if not _DENIED.search(clause):
        return False
    stop = re.search(r"[.!\n]|$", text[start:])
    sentence = clause + text[start : start + (stop.end() if stop else 80)]
    return not _ASKED.search(sentence)


def passages(reading: Reading) -> list[Passage]:
    """What a person wrote in this text, in passages of a few sentences; empty for a log.

    Sentences that tell of a problem that is solved are left out, so that only what is still wrong counts.
    """
    if not reading.short:
        return []
    blocks: list[tuple[int, str]] = []
    brief = reading.count <= 12 and not _FRAMES.search(reading.lower)
    for number, line in reading.lines():
        low = line.lower().strip()
        if not low:
            blocks.append((number, ""))
        elif reading.count <= 3 or _prose(low) or (brief and not _LOGGED.search(low)):
            if blocks and blocks[-1][1] and blocks[-1][0] >= 0:
                blocks[-1] = (blocks[-1][0], f"{blocks[-1][1]}\n{low}")
            else:
                blocks.append((number, low))
    kept = [(n, s) for n, block in blocks if block for s in _SENTENCE.split(block) if s and s.strip()]
    open_sentences = [(n, s) for n, s in kept if not _solved(s)]
    if len(open_sentences) < len(kept):  # what was said before the solution belongs to the solved problem
        last = max(i for i, (n, s) in enumerate(kept) if _solved(s))
        tail = _after_solution(kept[last][1])
        open_sentences = ([(kept[last][0], tail)] if tail else []) + kept[last + 1 :]
    result = []
    size = 8 if sum(len(s) for _, s in open_sentences) <= 1400 else 3
    for start in range(max(1, len(open_sentences) - size + 1)):
        window = open_sentences[start : start + size]
        if window:
            text = " ".join(s for _, s in window)[:1500]
            result.append(Passage(window[0][0], text, found_in(text)))
    return result


def _solved(sentence: str) -> bool:
    return bool(SOLVED.search(sentence)) and not _STILL_BROKEN.search(sentence)


def _after_solution(sentence: str) -> str:
    """What follows a contrast in the sentence that tells of a solution: "fixed, but now it is slow"."""
    parts = re.split(r"\b(?:but|however|yet|though|although|except)\b", sentence, maxsplit=1)
    return parts[1] if len(parts) > 1 and not _solved(parts[1]) else ""


_CODE = re.compile(
    r"^\s*(?:file \"|traceback|import |from \w[\w.]* import|def |class |>>>|\$ |#|\{|\}|\[|\||\+[-=]|at |-{3,}|={3,}|\^|~|@|%|return |with |for \w+ in|if |else:|try:|except |elif )"
    r"|^\s*[\w.\[\]]+ ?(?:=|\+=) ?\S|^[\d\-:., ]{8,}|it/s|s/it|\b(?:info|debug|warning)\b *[|:\]-]|\w\(.*\)\s*$|:\d+:|^\s*\S+\s*$"
)


# in a text of a few lines only what a program wrote is left out: frames, log lines, settings
_FRAMES = re.compile(r"^\s*file \"?\S+\"?[:,] ?(?:line )?\d+,? in |^traceback \(most recent", re.MULTILINE)
_LOGGED = re.compile(
    r"^\s*(?:try|except\b.*|for .* in .*|while .*|if .*|elif .*|else|def .*|class .*|with .*):(?:\s|$)|^\s*(?:import |from \w+ import |return )|"
    r"^\s*(?:file \"|traceback|\^|~|[\w.]*(?:error|exception)\b:|\{|\[|\d[\d\-:., ]{6,}|-{3,})|it/s|s/it|\b(?:info|debug|warning|error)\b *[|:\]-]|^\s*\S+ ?= ?\S+\s*$|\bloss:? ?\d"
)


def _prose(low: str) -> bool:
    """Whether a line reads like a sentence."""
    if _CODE.search(low) or PREFIX.match(low):
        return False
    words = re.findall(r"[a-z][a-z'’-]*", low)
    return len(words) >= 4 and sum(map(len, words)) >= 0.55 * len(low)
