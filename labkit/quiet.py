"""What libraries say about themselves when they are imported, kept out of a lesson: a cell that writes to stderr looks
broken, and scores nothing where nbgrader grades it."""

from __future__ import annotations

import functools
import logging
import warnings

# torchao: which of its own kernels this machine cannot load; torch's pytree: how torchao registers its classes
_CHATTER = ("torchao", "torch.utils._pytree")


@functools.cache
def libraries() -> None:
    """Let only errors of the known chatterers through, from their import on. Once for a process; costs nothing."""
    for name in _CHATTER:
        logging.getLogger(name).setLevel(logging.ERROR)


@functools.cache
def transformers() -> None:
    """Import transformers; what it imports complains in a notebook, about widgets and its own source."""
    libraries()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, GPT2LMHeadModel  # noqa: F401
