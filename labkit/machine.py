"""What this machine is: its card, driver and versions, which dtypes are native, and the budget put on its memory."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from .units import GiB, MiB, UserError, parse_size, show_bytes

if TYPE_CHECKING:
    import torch

DEFAULT_BUDGET = 8 * GiB
DEFAULT_CARD = "h200"  # predictions are checked against measurements on this one
_KNOWN_CONTEXT = (250 * MiB, 850 * MiB)  # 287 to 667 MB seen in the field, 610 to 750 MiB on an H200 by loaded kernels


@dataclass(frozen=True)
class Card:
    """A GPU as its driver and data sheet describe it. Rates are dense, in FLOP/s and bytes/s; ``half_flops`` is the
    tensor-core rate for 16-bit inputs with 32-bit accumulation. ``context_bytes`` estimates what a CUDA context takes
    outside the allocator, ``context_band`` bounds it."""

    name: str
    title: str
    capability: tuple[int, int]
    memory_bytes: int  # as nvidia-smi shows it
    bandwidth_bytes: float
    fp32_flops: float
    half_flops: float
    bus: str
    bus_bytes: float  # one direction, by the standard
    source: str
    context_bytes: int = 450 * MiB
    context_band: tuple[int, int] = _KNOWN_CONTEXT
    measured: bool = False  # whether predictions for it were checked on a real one

    @property
    def sm(self) -> str:
        """The compute capability as compilers write it: ``sm_90``."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


def _card(
    name: str, title: str, sm: int, mib: int, gb_s: float, fp32: float, half: float, gen: int, source: str, **more: Any
):
    lane = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}[gen]  # PCI-SIG, bytes/s a lane after encoding
    return Card(
        name, title, (sm // 10, sm % 10), mib * MiB, gb_s * 1e9, fp32 * 1e12, half * 1e12,
        f"PCIe {gen}.0 x16", 16 * lane, source, **more,
    )  # fmt: skip


PRESETS: dict[str, Card] = {
    c.name: c
    for c in (
        _card("rtx2070", "NVIDIA GeForce RTX 2070", 75, 8192, 448, 7.5, 29.9, 3, "NVIDIA Turing whitepaper WP-09183"),
        _card("t4", "Tesla T4", 75, 15360, 320, 8.1, 65, 3, "NVIDIA T4 data sheet"),
        _card("rtx3060-12gb", "NVIDIA GeForce RTX 3060", 86, 12288, 360, 12.7, 25.6, 4, "NVIDIA RTX 3060 specs"),
        _card("rtx3090", "NVIDIA GeForce RTX 3090", 86, 24576, 936, 35.6, 71, 4, "NVIDIA GA102 whitepaper"),
        _card("rtx4090", "NVIDIA GeForce RTX 4090", 89, 24564, 1008, 82.6, 165.2, 4, "NVIDIA Ada whitepaper"),
        _card("a100-40gb", "NVIDIA A100-SXM4-40GB", 80, 40960, 1555, 19.5, 312, 4, "NVIDIA A100 data sheet"),
        _card("a100-80gb", "NVIDIA A100-SXM4-80GB", 80, 81920, 2039, 19.5, 312, 4, "NVIDIA A100 data sheet"),
        _card("h100", "NVIDIA H100 80GB HBM3", 90, 81559, 3350, 67, 989, 5, "NVIDIA H100 data sheet"),
        _card("h200", "NVIDIA H200", 90, 143771, 4800, 67, 989, 5, "NVIDIA H200 data sheet",
              measured=True, context_bytes=744 * MiB),
    )
}  # fmt: skip


def preset(name: str | None = None) -> Card:
    """The card preset called `name`; without a name the one in the variable ``LABKIT_CARD``, else `DEFAULT_CARD`.

    Raises `UserError` naming the presets.
    """
    name = name or os.environ.get("LABKIT_CARD") or DEFAULT_CARD
    try:
        return PRESETS[name.lower()]
    except KeyError:
        raise UserError(f"unknown card {name!r}: {', '.join(PRESETS)}") from None


def has_gpu() -> bool:
    """Whether PyTorch can use a CUDA card here."""
    import torch

    return torch.version.hip is None and torch.cuda.is_available()


def device() -> torch.device:
    """``cuda`` where there is a card, else ``cpu``."""
    import torch

    return torch.device("cuda" if has_gpu() else "cpu")


@dataclass(frozen=True)
class Dtype:
    """Whether a number format is native on a card, and why."""

    name: str
    native: bool
    reason: str


def native_dtypes(capability: tuple[int, int]) -> dict[str, Dtype]:
    """Which formats the tensor cores of a `capability` multiply natively, with the reason.

    PyTorch's ``is_bf16_supported()`` also counts emulation; this does not. Source: CUDA C++ Programming Guide,
    arithmetic and tensor-core tables by compute capability.
    """
    sm, found = f"sm_{capability[0]}{capability[1]}", {}
    for name, least in (("fp16", (7, 0)), ("bf16", (8, 0)), ("tf32", (8, 0)), ("fp8", (8, 9))):
        native = capability >= least
        reason = f"tensor cores multiply {name} from sm_{least[0]}{least[1]} on; this is {sm}"
        if name == "bf16" and not native:
            reason = f"{sm} emulates bf16 (native from sm_80 on): use fp16 with a GradScaler"
        found[name] = Dtype(name, native, reason)
    return found


@dataclass(frozen=True)
class Machine:
    """This machine: versions, and the first card where there is one (its fields None otherwise)."""

    python: str
    system: str
    torch: str
    cuda: str | None  # the toolkit that this torch was built with
    driver: str | None
    driver_cuda: str | None  # the newest toolkit that the driver carries
    card: str | None
    capability: tuple[int, int] | None
    memory_bytes: int | None  # as torch sees it
    cards: int

    @property
    def sm(self) -> str | None:
        """The compute capability as compilers write it, or None."""
        return f"sm_{self.capability[0]}{self.capability[1]}" if self.capability else None

    def line(self, budget: int | str | None = None) -> str:
        """One line for people: card, budget, and where numbers will come from."""
        limit = parse_size(budget) if budget is not None else default_budget()
        if self.card is None:
            card = preset()
            return (
                f"no GPU: memory predicted for {card.name} ({card.sm}), speed from reference rows ({DEFAULT_CARD})"
                f"  ·  budget {show_bytes(limit)}"
            )
        name = f"{self.card} ({self.sm}, {show_bytes(self.memory_bytes)}, driver {self.driver})"
        return f"{name}  ·  budget {show_bytes(limit)}  ·  numbers: measured"


def nvml() -> Any:
    """The NVIDIA management library, initialised, or None where there is none (no driver, no card)."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # the binding raises its own kinds, and OSError for a missing library: no card is an answer here
        return None
    return pynvml


def nvml_card(library: Any, index: int = 0) -> Any:
    """NVML's handle of PyTorch's card `index`.

    NVML counts all cards of the host by their place on the bus, PyTorch those that ``CUDA_VISIBLE_DEVICES`` names, in
    CUDA's order: the same number can mean two cards, the card's UUID cannot.
    """
    if has_gpu():
        import torch

        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if uuid is not None:
            with contextlib.suppress(library.NVMLError):  # a slice of a card (MIG) has another name
                return library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    return library.nvmlDeviceGetHandleByIndex(index)


def here() -> Machine:
    """This machine, read now."""
    import torch

    library, driver, driver_cuda = nvml(), None, None
    if library is not None:
        driver = _text(library.nvmlSystemGetDriverVersion())
        number = library.nvmlSystemGetCudaDriverVersion_v2()
        driver_cuda = f"{number // 1000}.{number % 1000 // 10}"
    card = torch.cuda.get_device_properties(0) if has_gpu() else None
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=driver,
        driver_cuda=driver_cuda,
        card=card.name if card else None,
        capability=(card.major, card.minor) if card else None,
        memory_bytes=card.total_memory if card else None,
        cards=torch.cuda.device_count() if card else 0,
    )


def provenance() -> dict[str, Any]:
    """Where a row comes from: versions, card, driver, date, and the card's clocks, temperature and power right now."""
    machine = here()
    versions = {"python": machine.python, "torch": machine.torch, "cuda": machine.cuda, **_installed()}
    row: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "system": machine.system,
        "versions": versions,
        "card": machine.card,
        "capability": machine.sm,
        "driver": machine.driver,
    }
    return {**row, **state()} if machine.card else row


@cache
def _installed() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in ("transformers", "bitsandbytes", "torchao", "gpt2-small-gpu-lab"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def state(index: int = 0) -> dict[str, Any]:
    """The card's clocks (MHz), temperature (°C), power (W) and bus link now; a value it does not report is None."""
    library = nvml()
    if library is None:
        return {}
    handle = nvml_card(library, index)

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(library, function)(handle, *arguments)
        except library.NVMLError:  # "not supported" differs from card to card
            return None

    power = ask("nvmlDeviceGetPowerUsage")
    return {
        "sm_mhz": ask("nvmlDeviceGetClockInfo", library.NVML_CLOCK_SM),
        "memory_mhz": ask("nvmlDeviceGetClockInfo", library.NVML_CLOCK_MEM),
        "temperature_c": ask("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU),
        "power_w": power / 1000 if power is not None else None,
        "bus_generation": ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        "bus_width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
    }


def device_bytes() -> int | None:
    """What the driver counts for this process: allocator segments, CUDA context and everything else. Where it cannot
    name processes (containers, WSL), the use of the whole card; None without a card."""
    if not has_gpu():
        return None
    import torch

    library = nvml()
    if library is not None:
        try:
            handle = nvml_card(library, torch.cuda.current_device())
            for process in library.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory:
                    return int(process.usedGpuMemory)
        except library.NVMLError:
            pass  # the whole card's use, below, is then the answer
    free, total = torch.cuda.mem_get_info()
    return total - free


def default_budget() -> int:
    """``LABKIT_BUDGET`` where it is set, else 8 GiB, or 90 % of a card that is smaller than that leaves room for."""
    if wish := os.environ.get("LABKIT_BUDGET"):
        return parse_size(wish)
    if has_gpu():
        import torch

        return min(DEFAULT_BUDGET, int(0.9 * torch.cuda.get_device_properties(0).total_memory))
    return DEFAULT_BUDGET


@contextmanager
def budget(size: int | str | None) -> Iterator[int | None]:
    """Inside the block PyTorch's allocator may reserve at most `size` on the current card: a real cap, with a real
    out-of-memory error. The CUDA context is outside it. None imposes nothing; without a card nothing is imposed.

    Raises `UserError` when the budget is larger than the card, or smaller than what is reserved already.
    """
    limit = None if size is None else parse_size(size)
    if limit is None or not has_gpu():
        yield limit
        return
    import torch

    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if limit > total:
        raise UserError(f"budget {show_bytes(limit)} is larger than this card ({show_bytes(total)})")
    if torch.cuda.memory_reserved() > limit:
        torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    if held > limit:
        raise UserError(f"budget {show_bytes(limit)} is below the {show_bytes(held)} this process holds already")
    before = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        yield limit
    finally:
        torch.cuda.set_per_process_memory_fraction(before)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
