"""What libraries do when they are imported, kept out of a lesson: what they say about themselves (a cell that writes to
stderr looks broken, and scores nothing where nbgrader grades it), and the objects that they leave to the collector."""

from __future__ import annotations

import functools
import gc
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


@functools.cache
def imports_are_no_garbage() -> None:
    """Take what exists now out of the garbage collector's sight, once for a process.

    `labkit.measure` collects several times for each experiment, and a pass over the objects of every imported library
    takes a fifth of a second. Called by ``lab.begin``, when there is nothing yet but imports.
    """
    gc.collect()
    gc.freeze()
