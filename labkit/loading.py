"""Datasets for a DataLoader that differ in where the work is done: files read and tokenised at every access, texts held
in memory, and tokens that were prepared once. They can be sent to workers however those are started."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .passages import END
from .units import UserError

if TYPE_CHECKING:
    import torch


class TextFiles:
    """Reads and tokenises a file whenever it is asked for: tokens ``(length,)``, at most `most` of them.

    With ``cut_first`` only as many characters are tokenised as `most` tokens are sure to need, `characters_per_token`
    each (the last token may then differ); without it the whole file is tokenised, as ``truncation=True`` does.
    """

    def __init__(
        self, paths: Sequence[str | Path], tokenizer: Any, *, most: int = 1024, cut_first: bool = False,
        characters_per_token: int = 12,
    ):  # fmt: skip
        self.paths, self.tokenizer, self.most = [str(path) for path in paths], tokenizer, most
        self.limit = most * characters_per_token if cut_first else None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        text = Path(self.paths[index]).read_bytes().decode("utf-8", errors="replace")
        return tokens(text[: self.limit], self.tokenizer, self.most)


class Texts:
    """The same with texts that are in memory: tokenised at every access, but read before."""

    def __init__(self, texts: Sequence[str], tokenizer: Any, *, most: int = 1024):
        self.texts, self.tokenizer, self.most = list(texts), tokenizer, most

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return tokens(self.texts[index], self.tokenizer, self.most)


class TokenCache:
    """Tokens prepared once: all texts behind one another in ``tokens.bin`` (2 bytes each, little-endian), and in
    ``index.json`` where each begins. The file is mapped, not read: workers share its pages, and memory holds what is
    in use. Each process maps it for itself, so that none moves another's place in it."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            self.starts: list[int] = json.loads((self.folder / "index.json").read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{self.folder}: no token cache here ({error})") from error
        size = (self.folder / "tokens.bin").stat().st_size
        if size != 2 * self.starts[-1]:
            raise UserError(f"{self.folder}: tokens.bin has {size} bytes, its index says {2 * self.starts[-1]}")
        self._mapped: Any = None

    @classmethod
    def write(cls, folder: str | Path, texts: Iterable[Sequence[int]]) -> TokenCache:
        """Write `texts` (token ids below 65536) and open them. Raises `UserError` for larger ids, or without texts."""
        import numpy

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        starts = [0]
        with (folder / "tokens.part").open("wb") as file:
            for text in texts:
                ids = numpy.asarray(text, dtype=numpy.int64)
                if ids.size and (ids.min() < 0 or ids.max() > 65535):
                    raise UserError("a token cache has 2 bytes a token: ids must lie from 0 to 65535")
                file.write(ids.astype("<u2").tobytes())
                starts.append(starts[-1] + len(ids))
        if starts[-1] == 0:
            raise UserError("there is nothing to write into the token cache")
        os.replace(folder / "tokens.part", folder / "tokens.bin")
        (folder / "index.json").write_text(json.dumps(starts))
        return cls(folder)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text: what batches are made by, without looking at a text."""
        return [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> torch.Tensor:
        import numpy
        import torch

        if self._mapped is None:
            self._mapped = numpy.memmap(self.folder / "tokens.bin", dtype="<u2", mode="r")
        index = range(len(self))[index]
        return torch.from_numpy(self._mapped[self.starts[index] : self.starts[index + 1]].astype(numpy.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}


def tokens(text: str, tokenizer: Any, most: int) -> torch.Tensor:
    """Token ids of `text` by a ``tokenizers.Tokenizer`` with the end token behind it, at most `most`, int64."""
    import torch

    ids = tokenizer.encode(text).ids
    return torch.tensor([*ids, tokenizer.token_to_id(END)][:most], dtype=torch.int64)


def cores() -> int:
    """Processor cores that this process may use: the system's, less what it is not bound to, less what a container's
    quota leaves out (Linux, cgroup v2)."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return bound
    return bound if quota == "max" else max(1, min(bound, -(-int(quota) // int(period))))
