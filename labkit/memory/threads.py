"""Threads and predictions: one prediction at a time, and no operator on the stand-in device from a second thread.

A dispatch mode holds for the thread that entered it. A kernel that runs on a ghost elsewhere would read memory that is
not there, so threads that an experiment starts get a mode of their own, which refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .ghosts import GPU, PredictionError, is_ghost

_one = threading.RLock()
_refused = threading.local()


def _is_refused() -> bool:
    """Whether this thread, or what it does now, was started by an experiment whose prediction is not over."""
    over = getattr(_refused, "until", None)
    return over is not None and not over.is_set()


@contextmanager
def alone() -> Iterator[None]:
    """A second prediction waits until the first is over; one from a thread of an experiment is refused."""
    if _is_refused():
        raise PredictionError("a thread of an experiment cannot make a prediction while the experiment is predicted")
    with _one:
        yield


class _Refusal(TorchDispatchMode):
    def __init__(self, over: threading.Event):
        super().__init__()
        self._over = over

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        if not self._over.is_set() and any(_of_prediction(leaf) for leaf in leaves):
            raise PredictionError(f"operator {func} ran in another thread, where a prediction cannot follow it")
        return func(*args, **kwargs)


def _of_prediction(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.get_device() == 0 or (x.is_cpu and is_ghost(x))
    return isinstance(x, torch.device) and (x == GPU or x.type == "cuda")


@contextmanager
def refusing_threads() -> Iterator[None]:
    """Threads that start inside the block, and work given to a pool, may use host tensors only.

    Raises `PredictionError` at the end of the block if one tried more, whatever became of its own exception.
    """
    owner, over, errors = threading.get_ident(), threading.Event(), list[PredictionError]()
    start: Any = threading.Thread.start
    submit: Any = ThreadPoolExecutor.submit

    def ours() -> bool:
        return threading.get_ident() == owner or getattr(_refused, "until", None) is over

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before, _refused.until = getattr(_refused, "until", None), over
            try:
                with _Refusal(over):
                    return function(*args, **kwargs)
            except PredictionError as error:
                errors.append(error)
                raise
            finally:
                _refused.until = before

        return call

    def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
        def call() -> None:
            try:
                function()
            except PredictionError:
                return  # the prediction raises it

        return call

    def starting(thread: threading.Thread) -> None:
        if ours():
            thread.run = quiet(refusing(thread.run))  # type: ignore[method-assign]
        start(thread)

    def submitting(pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return submit(pool, refusing(function) if ours() else function, *args, **kwargs)

    threading.Thread.start = starting  # type: ignore[method-assign, assignment]
    ThreadPoolExecutor.submit = submitting  # type: ignore[method-assign]
    try:
        yield
    except Exception as error:
        if errors and error is not errors[0]:
            raise errors[0] from error
        raise
    finally:
        over.set()
        threading.Thread.start = start  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
    if errors:
        raise errors[0]
