"""Rare parts that a lesson uses when they are installed: `has` looks, `missing` says how to get what is not there."""

from __future__ import annotations

from importlib import metadata, util

from . import show
from .units import UserError

# extra of this distribution: the module that it brings, and what it needs besides
EXTRAS = {
    "deepspeed": ("deepspeed", "a CUDA toolkit with nvcc, for its optimizer on the host is compiled at first use"),
    "gptq": ("gptqmodel", "a card of sm_75 or newer"),
    "xformers": ("xformers", "the torch version that its wheel was built for"),
}


def has(extra: str) -> bool:
    """Whether the part is installed. Raises `UserError` for a name that is no extra."""
    return util.find_spec(_module(extra)) is not None


def version(extra: str) -> str | None:
    """The version that is installed, or None."""
    try:
        return metadata.version(_module(extra)) if has(extra) else None
    except metadata.PackageNotFoundError:  # on the path without having been installed
        return None


def missing(extra: str, what: str) -> None:
    """Say that the part is not installed, that `what` (a clause: ``"ZeRO-Offload is not measured"``) follows from it,
    and how to install it. Says nothing where it is there."""
    module, needs = _module(extra), EXTRAS[extra][1]
    if has(extra):
        return
    command = f"pip install 'gpt2-small-gpu-lab[{extra}]'"
    text = f"{module} is not installed here, so {what}. To install it: `{command}` (needs {needs})."
    show.emit(text, show.card(f"<div>{show.inline(text)}</div>", "plain"))


def _module(extra: str) -> str:
    if extra not in EXTRAS:
        raise UserError(f"{extra!r} is no extra: {', '.join(EXTRAS)}")
    return EXTRAS[extra][0]
