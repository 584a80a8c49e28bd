"""Where a run stands: the module by hooks, the phase by autograd's state and the optimizer's hooks."""

from __future__ import annotations

import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .recorder import Place, Recorder

if TYPE_CHECKING:
    import torch


class Whereabouts:
    """Keeps a recorder's place up to date: module by hooks, phase by autograd's state and the optimizer's hooks.

    In backward the module is that of the forward operator whose node runs, found by autograd's sequence numbers; a
    module called while backward runs, or an operator there that is recorded for autograd, is a recomputation.
    """

    def __init__(self, recorder: Recorder):
        import torch

        self._recorder = recorder
        self._torch = torch
        self._stack: list[str] = []
        self._phases: list[str] = ["build"]
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self.modules: dict[str, str] = {}  # path -> class name, in the order of registration
        self._starts: list[int] = []  # autograd sequence numbers at which a place begins, rising
        self._owners: list[str] = []
        self._handles: list[Any] = []
        self._in_backward = torch._C._current_graph_task_id
        self._node = torch._C._current_autograd_node
        self._grad = torch.is_grad_enabled
        self._sequence = torch.autograd._get_sequence_nr
        self._here: Place | None = None
        self.optimizers: list[Any] = []

    def adopt(self, root: Any, path: str = "") -> None:
        """Name the modules of `root`, a module."""
        for name, module in root.named_modules(prefix=path):
            if module not in self._names:
                self._names[module] = name
                self.modules.setdefault(name, type(module).__name__)

    def owned(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The adopted modules that live, with their paths, outermost first."""
        return ((name, module) for module, name in list(self._names.items()))

    def forget(self) -> None:
        """Someone else moved the recorder's place: find it anew at the next operator."""
        self._here = None

    def begin_step(self) -> None:
        """Outside autograd the phase is forward from here on, until an optimizer has stepped."""
        self._phases[:] = ["forward"]
        self._stack.clear()
        self._starts.clear()
        self._owners.clear()

    def end_step(self) -> None:
        """Outside a step the phase is ``other``."""
        self._phases[:] = ["other"]
        self.update()

    def __enter__(self) -> Whereabouts:
        from torch.nn.modules import module as modules
        from torch.optim import optimizer

        self._quiet = warnings.catch_warnings()
        self._quiet.__enter__()
        warnings.filterwarnings("ignore", message="Using `torch.compile")  # compiled modules mention hooks like these
        self._handles = [
            modules.register_module_forward_pre_hook(self._enter_module),
            modules.register_module_forward_hook(self._leave_module, always_call=True),
            optimizer.register_optimizer_step_pre_hook(self._enter_optimizer),
            optimizer.register_optimizer_step_post_hook(self._leave_optimizer),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._quiet.__exit__(None, None, None)

    def update(self) -> None:
        """Called before each operator: where are we now?"""
        phase, stack = self._phases[-1], self._stack
        module = stack[-1] if stack else ""
        if phase != "optimizer" and self._in_backward() != -1:
            if stack or self._grad():
                phase = "recompute"
            else:
                phase, module = "backward", self._module_of_node()
        here = (phase, module)
        if here != self._here:
            self._here = here
            self._recorder.here = self._recorder.place(phase, module)

    def _module_of_node(self) -> str:
        node = self._node()
        if node is None or not self._starts:
            return ""
        index = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._owners[index] if index >= 0 else ""

    def _turn(self, owner: str) -> None:
        """From the present autograd sequence number on, nodes belong to `owner`."""
        number = self._sequence()
        if self._starts and self._starts[-1] == number:
            self._owners[-1] = owner
        elif not self._starts or number > self._starts[-1]:
            self._starts.append(number)
            self._owners.append(owner)

    def _enter_module(self, module: torch.nn.Module, _args: Any) -> None:
        name = self._names.get(module)
        if name is None:
            prefix = self._stack[-1] if self._stack else ""
            self.adopt(module, prefix or type(module).__name__)
            name = self._names[module]
        if self._phases == ["optimizer"]:  # a module called after an optimizer's step begins another forward pass
            self._phases[:] = ["forward"]
        self._stack.append(name)
        self._turn(name)

    def _leave_module(self, _module: torch.nn.Module, _args: Any, _out: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._turn(self._stack[-1] if self._stack else "")

    def _enter_optimizer(self, optimizer: Any, *_: Any) -> None:
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        for group in optimizer.param_groups:
            self._recorder.name((p.grad for p in group["params"]), "gradient")
        self._phases.append("optimizer")
        self.update()

    def _leave_optimizer(self, optimizer: Any, *_: Any) -> None:
        if len(self._phases) > 1:
            self._phases.pop()
        if self._phases == ["forward"]:  # what follows, as a rule zero_grad, belongs to the optimizer
            self._phases[:] = ["optimizer"]
        self.update()


def states_of(optimizer: Any) -> list[dict[str, Any]]:
    """The states that an optimizer keeps of each parameter; some wrap others and have none of their own."""
    return [state for state in getattr(optimizer, "state", {}).values() if isinstance(state, dict)]


def found_in(step: Callable[..., Any], kinds: tuple[type, ...], depth: int = 4) -> list[tuple[str, Any]]:
    """Objects of `kinds` that a step function holds in its closure, its globals, defaults, bound object or nested
    functions, with the names they have there."""
    seen: set[int] = set()
    found: list[tuple[str, Any]] = []

    def look(name: str, value: Any, level: int) -> None:
        if id(value) in seen or level < 0:
            return
        seen.add(id(value))
        if isinstance(value, kinds):
            found.append((name, value))
        elif isinstance(value, dict):
            for key, item in list(value.items())[:1000]:
                look(str(key), item, level - 1)
        elif isinstance(value, (list, tuple, set)):
            for item in list(value)[:1000]:
                look(name, item, level - 1)
        elif callable(value) or hasattr(value, "__dict__"):
            function = getattr(value, "__func__", value)
            if getattr(value, "__self__", None) is not None and not isinstance(value.__self__, type(weakref)):
                look(name, value.__self__, level - 1)
            code = getattr(function, "__code__", None)
            for key, cell in zip(
                getattr(code, "co_freevars", ()), getattr(function, "__closure__", None) or (), strict=False
            ):
                try:
                    look(key, cell.cell_contents, level - 1)
                except ValueError:
                    continue  # not yet filled
            for key in getattr(code, "co_names", ()):  # globals, but only what is looked for: a module leads anywhere
                if isinstance(function.__globals__.get(key), kinds):
                    look(key, function.__globals__[key], level - 1)
            for item in getattr(function, "__defaults__", None) or ():
                look(name, item, level - 1)
            if not isinstance(value, type) and type(value).__module__ != "builtins" and code is None:
                look(name, getattr(value, "__dict__", {}), level - 1)

    look("step", step, depth)
    return found
