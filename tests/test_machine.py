import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from labkit import machine
from labkit.units import GiB, MiB, UserError


def test_importing_labkit_loads_nothing_heavy():
    heavy = "'torch', 'transformers', 'matplotlib', 'pandas', 'numpy', 'rich'"
    code = f"import sys, labkit; print([m for m in ({heavy}) if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_every_public_name_resolves():
    import labkit

    for name in labkit.__all__:
        assert getattr(labkit, name) is not None
    with pytest.raises(AttributeError):
        labkit.no_such_thing  # noqa: B018


def test_presets():
    assert set(machine.PRESETS) == {
        "rtx2070", "t4", "rtx3060-12gb", "rtx3090", "rtx4090", "a100-40gb", "a100-80gb", "h100", "h200",
    }  # fmt: skip
    for card in machine.PRESETS.values():
        low, high = card.context_band
        assert low <= card.context_bytes <= high and card.source and card.memory_bytes > 7 * GiB
    assert machine.preset("t4").memory_bytes == 15 * GiB and machine.preset("T4").sm == "sm_75"
    with pytest.raises(UserError, match="rtx2070, t4"):
        machine.preset("rtx9999")


def test_the_card_without_a_name(monkeypatch):
    monkeypatch.delenv("LABKIT_CARD", raising=False)
    assert machine.preset().name == "h200"
    monkeypatch.setenv("LABKIT_CARD", "rtx2070")
    assert machine.preset().name == "rtx2070"


def test_turing_has_no_native_bf16_and_says_what_to_do():
    turing, ampere = machine.native_dtypes((7, 5)), machine.native_dtypes((8, 6))
    assert turing["fp16"].native and not turing["bf16"].native and "fp16" in turing["bf16"].reason
    assert ampere["bf16"].native and not ampere["fp8"].native and machine.native_dtypes((8, 9))["fp8"].native


def test_default_budget(monkeypatch):
    monkeypatch.delenv("LABKIT_BUDGET", raising=False)
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    assert machine.default_budget() == 8 * GiB
    monkeypatch.setenv("LABKIT_BUDGET", "6GiB")
    assert machine.default_budget() == 6 * GiB
    monkeypatch.setenv("LABKIT_BUDGET", "lots")
    with pytest.raises(UserError):
        machine.default_budget()


class Cuda:
    """The few calls of torch.cuda that a budget uses, for a card of 8 GiB."""

    total_memory = 8 * GiB

    def __init__(self, monkeypatch, reserved=0):
        self.fraction, self.reserved = 1.0, reserved
        monkeypatch.setattr(machine, "has_gpu", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: self)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: self.reserved)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda *_: self.fraction)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda f, *_: setattr(self, "fraction", f))


def test_a_budget_is_a_cap_and_is_released(monkeypatch):
    cuda = Cuda(monkeypatch)
    with machine.budget("2GiB") as limit:
        assert limit == 2 * GiB and cuda.fraction == 0.25
        with machine.budget("1GiB"):
            assert cuda.fraction == 0.125
        assert cuda.fraction == 0.25
        with pytest.raises(ZeroDivisionError), machine.budget("1GiB"):
            1 / 0  # noqa: B018
        assert cuda.fraction == 0.25
    assert cuda.fraction == 1.0
    with machine.budget(None) as limit:
        assert limit is None and cuda.fraction == 1.0


def test_budgets_that_cannot_be(monkeypatch):
    Cuda(monkeypatch, reserved=512 * MiB)
    with pytest.raises(UserError, match=r"larger than this card \(8.00 GiB\)"), machine.budget("9GiB"):
        pass
    with pytest.raises(UserError, match="512.0 MiB this process holds"), machine.budget("100MiB"):
        pass
    with pytest.raises(UserError, match="not a size"), machine.budget("some"):
        pass


def test_a_card_smaller_than_the_default_budget_lowers_it(monkeypatch):
    monkeypatch.delenv("LABKIT_BUDGET", raising=False)
    Cuda(monkeypatch)
    assert machine.default_budget() == int(0.9 * 8 * GiB)


def test_provenance_names_versions():
    row = machine.provenance()
    assert row["versions"]["torch"] == torch.__version__ and row["date"].endswith("Z")
    assert row["card"] is None or row["driver"]


class _TwoCards:
    """NVML on a host with two cards; only the first of them is known by its UUID."""

    NVMLError = RuntimeError

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"card {index} of the bus"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-abc":
            raise self.NVMLError("Not Found")
        return "the card with that UUID"


@pytest.mark.parametrize(
    ("uuid", "handle"),
    [("abc", "the card with that UUID"), ("MIG-1", "card 0 of the bus"), (None, "card 0 of the bus")],
)
def test_the_driver_is_asked_about_pytorchs_card(monkeypatch, uuid, handle):
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuid))
    assert machine.nvml_card(_TwoCards()) == handle
