"""Tokens and text that every machine has: random tokens, and the source of Python's own standard library."""

from __future__ import annotations

import functools
import hashlib
import platform
import random
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .units import UserError

if TYPE_CHECKING:
    import torch

SPLITS = ("train", "held-out")
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
_HELD_OUT = 10  # every so many files, by a hash of the name


def random_tokens(batch: int, seq: int, *, vocab: int = 50257, device: torch.device | str = "cpu") -> torch.Tensor:
    """Random token ids ``(batch, seq)``, int64, on `device`. Memory and speed do not depend on their values."""
    import torch

    return torch.randint(0, vocab, (batch, seq), device=device)


@dataclass(frozen=True)
class Corpus:
    """Texts with where they come from: ``files`` holds (name, text), ``sha256`` is over all of them, ``python`` is the
    version of the interpreter whose library they are."""

    split: str
    python: str
    sha256: str
    files: tuple[tuple[str, str], ...]

    @property
    def characters(self) -> int:
        """Characters of all files together."""
        return sum(len(text) for _, text in self.files)

    def provenance(self) -> dict[str, str]:
        """What goes into a row that depends on this text."""
        return {"corpus": f"python {self.python} standard library, {self.split}", "corpus_sha256": self.sha256[:16]}


@functools.lru_cache
def stdlib(split: str = "train") -> Corpus:
    """The source of the running Python's standard library, without its tests: one file in ten is ``"held-out"``, the
    others are ``"train"``. Raises `UserError` for another split, and where the interpreter has no sources."""
    if split not in SPLITS:
        raise UserError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    root = Path(sysconfig.get_paths()["stdlib"])
    digest, files = hashlib.sha256(), []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _LEFT_OUT.intersection(name.parts):
            continue
        held_out = zlib.crc32(name.as_posix().encode()) % _HELD_OUT == 0
        if held_out != (split == "held-out"):
            continue
        text = path.read_bytes().decode("utf-8", errors="replace")
        digest.update(f"{name.as_posix()}\0{text}\0".encode())
        files.append((name.as_posix(), text))
    if not files:
        raise UserError(f"Python {platform.python_version()} has no source of its standard library here")
    return Corpus(split, platform.python_version(), digest.hexdigest(), tuple(files))


def token_blocks(tokenizer: Any, *, seq: int, count: int, split: str = "train", seed: int = 0) -> torch.Tensor:
    """`count` blocks of `seq` tokens of `stdlib` text, ``(count, seq)`` int64.

    Files come in an order drawn with `seed`; each is cut into consecutive blocks, its last incomplete one left out.

    Only as much text is tokenised as is needed. Raises `UserError` when the split holds less.
    """
    return _blocks(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], seq, count, split, seed)


def byte_blocks(*, seq: int, count: int, split: str = "train", seed: int = 0) -> torch.Tensor:
    """The same as `token_blocks` with bytes as tokens (vocabulary 256): for small models that have no tokenizer."""
    return _blocks(lambda text: list(text.encode("utf-8")), seq, count, split, seed)


def _blocks(encode: Any, seq: int, count: int, split: str, seed: int) -> torch.Tensor:
    import torch

    for name, value in (("seq", seq), ("count", count)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name} must be a whole number of at least 1, not {value!r}")
    files = list(stdlib(split).files)
    random.Random(seed).shuffle(files)
    per_file = max(1, count // 8)  # so that a long file does not fill everything
    found: list[list[int]] = []
    for _, text in files:
        # at least 1 character a token: enough text for the blocks that are taken, and the tokenizer reads no more
        ids = encode(text[: 8 * seq * per_file])
        whole = [ids[i : i + seq] for i in range(0, len(ids) - seq + 1, seq)]
        found += whole[:per_file]
        if len(found) >= count:
            return torch.tensor(found[:count], dtype=torch.int64)
    raise UserError(f"the {split} text has {len(found)} blocks of {seq} tokens, not {count}: ask for fewer or shorter")
