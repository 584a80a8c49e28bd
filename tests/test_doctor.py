"""`labkit doctor` on machines that are not this one: each blocker with the fix that it names."""

import dataclasses
import json
import os
import sys
import types
from pathlib import Path

import pytest
import torch

from labkit import cli, doctor, fetch, machine
from labkit.doctor import card, environment, host, software, wiring
from labkit.units import GiB, MiB


@pytest.fixture
def nvidia(monkeypatch):
    """A machine as the driver describes it: ``nvidia(driver="580.95", carries=13000, built="13.0", card=...)``."""

    def describe(*, driver=None, carries=13000, built=None, card_name=None):
        library = types.SimpleNamespace(
            nvmlSystemGetDriverVersion=lambda: driver,
            nvmlSystemGetCudaDriverVersion_v2=lambda: carries,
            nvmlDeviceGetCount=lambda: 1,
        )
        monkeypatch.setattr(machine, "nvml", lambda: library if driver else None)
        monkeypatch.setattr(torch.version, "cuda", built)
        monkeypatch.setattr(card, "nvidia_card", lambda: card_name)
        monkeypatch.setattr(machine, "has_gpu", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return describe


def test_no_card_and_a_cpu_build_is_nothing_to_say_about_drivers(nvidia):
    nvidia()
    assert card.driver() is None
    finding = card.usable()
    assert finding.status == "WARN" and "predicted for h200" in finding.detail and "reference rows" in finding.detail


@pytest.mark.parametrize(
    ("driver", "carries", "wheel"), [("580.95.05", 13000, "cu130"), ("560.35", 12060, "cu126"), (None, 0, "cu130")]
)
def test_a_card_with_a_cpu_build_blocks_and_names_the_wheel_index(nvidia, driver, carries, wheel):
    nvidia(driver=driver, carries=carries, built=None, card_name="NVIDIA GeForce RTX 2070")
    finding = card.driver()
    assert finding.status == "FAIL" and "RTX 2070" in finding.detail
    assert finding.fix.endswith(f"make setup TORCH_INDEX=https://download.pytorch.org/whl/{wheel}")


@pytest.mark.parametrize(
    ("driver", "carries", "built", "status"),
    [
        ("580.95.05", 13000, "13.0", "OK"),
        ("595.10", 13020, "12.6", "OK"),  # a newer driver carries an older toolkit
        ("560.35.03", 12060, "13.0", "FAIL"),
        ("560.35.03", 12060, "12.8", "OK"),  # minor versions are compatible
        ("525.60.13", 12000, "12.6", "OK"),
        ("525.50", 12000, "12.6", "FAIL"),
        ("470.82", 11040, "12.6", "FAIL"),
    ],
)
def test_the_driver_bounds_the_toolkit(nvidia, driver, carries, built, status):
    nvidia(driver=driver, carries=carries, built=built, card_name="a card")
    finding = card.driver()
    assert finding.status == status, finding
    assert driver in finding.detail and built in finding.detail
    if status == "FAIL":
        assert "update the driver" in finding.fix
        assert ("TORCH_INDEX=" in finding.fix) == (carries >= 12000)


def test_a_card_whose_driver_does_not_answer_blocks(nvidia):
    nvidia(driver=None, built="13.0", card_name="PCI device 0000:01:00.0")
    assert card.driver().status == "FAIL" and "does not answer" in card.driver().detail
    nvidia(driver=None, built="13.0", card_name=None)
    assert card.driver().status == "WARN"


def test_a_driver_that_works_while_torch_finds_no_card_blocks(nvidia, monkeypatch):
    nvidia(driver="580.95", built="13.0", card_name="a card")
    monkeypatch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(RuntimeError("CUDA unknown error\nmore")))
    finding = card.usable()
    assert finding.status == "FAIL" and "CUDA unknown error" in finding.detail and "more" not in finding.detail
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert card.usable().status == "WARN"


@pytest.mark.parametrize(
    ("capability", "compiled"),
    [((7, 5), True), ((8, 6), True), ((8, 9), True), ((9, 0), True), ((7, 0), False), ((12, 0), True), ((12, 1), True)],
)
def test_kernels_for_the_card(monkeypatch, capability, compiled):
    monkeypatch.setattr(
        torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
    )
    assert card._compiled_for(capability) is compiled


@pytest.fixture
def turing(monkeypatch):
    """A machine with an RTX 2070, as far as the doctor asks."""
    here = machine.Machine("3.12", "Linux", "2.13", "13.0", "580.95", "13.0", "RTX 2070", (7, 5), 8 * GiB, 1)
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(machine, "here", lambda: here)
    monkeypatch.setattr(machine, "default_budget", lambda: int(7.2 * GiB))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75"])
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(card, "_holders", lambda index=0: [f"process {42 + index} python (3.00 GiB)"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_bf16_on_turing_is_emulated_and_the_reason_is_given(turing):
    finding = card.dtypes()
    assert finding.status == "WARN" and "native: fp16;" in finding.detail and "emulates bf16" in finding.detail
    assert "fp16=True" in finding.fix


def test_cards_of_two_kinds_are_told_apart(turing, monkeypatch):
    two = dataclasses.replace(machine.here(), cards=2)
    monkeypatch.setattr(machine, "here", lambda: two)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    finding = card.dtypes()
    assert finding.status == "WARN" and "sm_75: native: fp16;" in finding.detail
    assert "sm_89: native: fp16, bf16, tf32, fp8" in finding.detail


def test_a_product_on_the_card_is_checked(turing, monkeypatch):
    assert card.usable().status == "OK"
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self + 1)
    assert card.usable().status == "FAIL" and "wrong" in card.usable().detail

    def broken(self):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.Tensor, "cuda", broken)
    assert card.usable().status == "FAIL" and "illegal memory access" in card.usable().detail


@pytest.mark.parametrize(("free", "total", "status"), [(7.9, 8.0, "OK"), (5.0, 8.0, "WARN"), (6.0, 6.0, "FAIL")])
def test_the_budget_against_the_card_and_who_holds_it(turing, monkeypatch, free, total, status):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index=0: (int(free * GiB), int(total * GiB)))
    finding = card.memory()
    assert finding.status == status and "process 42 python (3.00 GiB)" in finding.detail
    assert status != "WARN" or "CUDA_VISIBLE_DEVICES" in finding.fix
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "card 1: " in card.memory().detail and "process 43 python" in card.memory().detail


class Library:
    """What nvidia-ml-py answers on a machine with one card; a function that is set to None refuses."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, now=(4, 16), most=(4, 16), driver="580.95", model=0, compute=(), graphics=()):
        self.now, self.most, self.driver, self.model = now, most, driver, model
        self.compute, self.graphics = compute, graphics

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlSystemGetDriverVersion(self):
        return self.driver

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle):
        if self.now is None:
            raise self.NVMLError("not supported")
        return self.now[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle):
        return self.now[1]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle):
        return self.most[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):
        return self.most[1]

    def nvmlDeviceGetCurrentDriverModel(self, handle):
        return self.model

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        if self.compute is None:
            raise self.NVMLError("not supported")
        return self.compute

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):
        return self.graphics

    def nvmlSystemGetProcessName(self, pid):
        return b"/usr/bin/python3 train.py" if pid % 2 else self._refuse()

    def _refuse(self):
        raise self.NVMLError("not found")


def process(pid, used):
    return types.SimpleNamespace(pid=pid, usedGpuMemory=used)


def test_who_holds_the_card(monkeypatch):
    many = [process(4_000_001 + i, (i + 1) * GiB) for i in range(7)]
    library = Library(compute=[*many, process(os.getpid(), GiB)], graphics=[process(4_000_001, None)])
    monkeypatch.setattr(machine, "nvml", lambda: library)
    found = card._holders()
    assert found[0] == "process 4000007 python3 (7.00 GiB)" and found[1] == "process 4000006 (6.00 GiB)"
    assert found[-1] == "2 more" and len(found) == 6
    library.compute, library.graphics = None, [process(4_000_002, None)]
    assert card._holders() == ["process 4000002 (unknown)"]
    monkeypatch.setattr(machine, "nvml", lambda: None)
    assert card._holders() == []


@pytest.mark.parametrize(
    ("now", "most", "status", "words"),
    [
        ((4, 16), (4, 16), "OK", "card 0: PCIe 4 x16 of x16, at most 31.5 GB/s"),
        ((1, 16), (4, 16), "OK", "now 1: idle cards slow down"),
        ((3, 4), (3, 16), "WARN", "PCIe 3 x4 of x16, at most 3.9 GB/s"),
        (None, (4, 16), "OK", "does not say"),
    ],
)
def test_the_link_to_the_host(monkeypatch, now, most, status, words):
    monkeypatch.setattr(machine, "nvml", lambda: Library(now=now, most=most))
    finding = wiring.bus()
    assert finding.status == status and words in finding.detail and bool(finding.fix) == (status == "WARN")
    monkeypatch.setattr(machine, "nvml", lambda: None)
    assert wiring.bus() is None and wiring.spill() is None


@pytest.mark.parametrize(
    ("system", "driver", "model", "status"),
    [
        ("linux", "580.95", 0, "OK"), ("wsl", "572.16", 0, "WARN"), ("wsl", "531.18", 0, "OK"),
        ("nt", "546.33", 0, "WARN"), ("nt", "546.33", 1, "OK"),
    ],
)  # fmt: skip
def test_a_driver_that_spills_is_told(monkeypatch, system, driver, model, status):
    monkeypatch.setattr(machine, "nvml", lambda: Library(driver=driver, model=model))
    monkeypatch.setattr(wiring, "_wsl", lambda: system == "wsl")
    monkeypatch.setattr(wiring, "os", types.SimpleNamespace(name="nt" if system == "nt" else "posix"))
    finding = wiring.spill()
    assert finding.status == status and ("Sysmem Fallback" in finding.fix) == (status == "WARN")


def test_the_compiler_and_what_is_missing_for_it(monkeypatch):
    monkeypatch.setattr(machine, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(software.compiling, "why_not", lambda device: None)
    assert software.compiler().status == "OK"
    for reason, fix in (
        ("Python's headers are missing", "python3-dev"),
        ("Triton is missing: x", "pip install triton"),
    ):
        monkeypatch.setattr(software.compiling, "why_not", lambda device, reason=reason: reason)
        finding = software.compiler()
        assert finding.status == "WARN" and reason in finding.detail and fix in finding.fix
    monkeypatch.setattr(machine, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(software.compiling, "why_not", lambda device: None)
    monkeypatch.setattr(software.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in software.compiler().detail
    monkeypatch.setenv("CC", "no-such-cc")
    assert "CC=no-such-cc" in software.compiler().detail and "unset CC" in software.compiler().fix
    monkeypatch.setattr(software.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert software.compiler().status == "OK"


def test_bitsandbytes_and_the_library_for_this_cuda(monkeypatch, tmp_path):
    import bitsandbytes
    from bitsandbytes import cextension

    assert software.bitsandbytes().status == "OK"
    for name in ("libbitsandbytes_cuda126.so", "libbitsandbytes_cuda130.so", "libbitsandbytes_cpu.so"):
        (tmp_path / name).touch()
    assert software._libraries(tmp_path) == ["12.6", "13.0"]
    monkeypatch.setattr(bitsandbytes, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(torch.version, "cuda", "13.4")
    monkeypatch.setattr(cextension, "lib", None)
    finding = software.bitsandbytes()
    assert finding.status == "WARN" and "torch has CUDA 13.4, there are libraries for 12.6, 13.0" in finding.detail
    monkeypatch.setenv("BNB_CUDA_VERSION", "118")
    assert "unset BNB_CUDA_VERSION=118" in software.bitsandbytes().fix
    library = types.SimpleNamespace(compiled_with_cuda=True, _lib=types.SimpleNamespace(_name="/x/libbnb_cuda130.so"))
    monkeypatch.setattr(cextension, "lib", library)
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    monkeypatch.setattr(software, "_wrong_on_card", lambda: "8-bit values come back wrong by 0.300")
    assert software.bitsandbytes().status == "WARN" and "wrong by 0.300" in software.bitsandbytes().detail
    monkeypatch.setattr(software, "_wrong_on_card", lambda: None)
    assert software.bitsandbytes().status == "OK" and "libbnb_cuda130.so" in software.bitsandbytes().detail
    library.compiled_with_cuda = False
    assert "without CUDA kernels" in software.bitsandbytes().detail


def test_optional_parts_are_never_a_warning(monkeypatch):
    monkeypatch.setattr(software.extras, "has", lambda name: name == "deepspeed")
    monkeypatch.setattr(software.extras, "version", lambda name: "0.18")
    finding = software.optional()
    assert finding.status == "OK" and "deepspeed 0.18 installed" in finding.detail and "[gptq,xformers]" in finding.fix


def test_caches_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "not" / "there" / "yet"))
    assert host.caches().status == "OK" and str(tmp_path) in host.caches().detail
    usage = types.SimpleNamespace(free=100 * MiB, total=100 * GiB)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda folder: usage)
    assert host.caches().status == "WARN" and "100.0 MiB free" in host.caches().detail
    monkeypatch.setattr(host.os, "access", lambda folder, mode: False)
    assert "no permission" in host.caches().detail and "HF_HOME" in host.caches().fix


def test_a_kernel_of_another_python_blocks(monkeypatch):
    from jupyter_client import kernelspec

    def spec(self, name):
        return types.SimpleNamespace(argv=[program, "-m", "ipykernel_launcher"])

    monkeypatch.setattr(kernelspec.KernelSpecManager, "get_kernel_spec", spec)
    program = sys.executable
    assert environment.kernel().status == "OK"
    program = "/opt/other/bin/python3"
    finding = environment.kernel()
    assert finding.status == "FAIL" and "/opt/other" in finding.detail and "ipykernel install" in finding.fix


def test_the_python_and_its_isolation(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert environment.python().status == "FAIL" and "3.10" in environment.python().fix
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    assert environment.python().status == "WARN"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    assert environment.isolation().status == "WARN" and environment.isolation().fix == "make setup"
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path))
    monkeypatch.setenv("CONDA_DEFAULT_ENV", "gpt2-small-gpu-lab")
    assert environment.isolation().status == "OK"
    monkeypatch.setenv("CONDA_DEFAULT_ENV", "base")
    assert environment.isolation().status == "WARN"
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    (tmp_path / "pyvenv.cfg").write_text("include-system-site-packages = true\n")
    assert environment.isolation().status == "WARN"


def test_packages_that_are_missing_or_out_of_range(monkeypatch):
    real = environment.metadata.version
    monkeypatch.setattr(environment.metadata, "requires", lambda name: ["torch>=2.8", "pytest<1 ; extra == 'dev'"])
    assert environment.packages().status == "OK"
    monkeypatch.setattr(environment.metadata, "requires", lambda name: ["torch>=99", "rich"])
    assert (
        environment.packages().status == "WARN"
        and f"torch {real('torch')} is not >=99" in environment.packages().detail
    )
    monkeypatch.setattr(environment.metadata, "requires", lambda name: ["no-such-package-at-all"])
    assert environment.packages().status == "FAIL" and "missing" in environment.packages().detail


def test_the_host(monkeypatch):
    usage = types.SimpleNamespace(free=100 * GiB, total=100 * GiB)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda folder: usage)
    assert host.disk().status == "OK"
    usage.free, usage.total = 100 * MiB, 64 * MiB  # a container's default /dev/shm
    assert host.disk().status == "WARN" and "100.0 MiB free" in host.disk().detail
    monkeypatch.setattr(Path, "is_dir", lambda self: True)
    assert host.shared_memory().status == "WARN" and "--shm-size" in host.shared_memory().fix
    usage.free, usage.total = 10 * MiB, 8 * GiB
    assert host.shared_memory().status == "WARN" and "ls -la /dev/shm" in host.shared_memory().fix
    usage.free, usage.total = 100 * MiB, 64 * MiB
    monkeypatch.setattr(host.os, "access", lambda folder, mode: False)
    assert host.disk().status == "FAIL"
    monkeypatch.setattr(host, "_meminfo", lambda: (8 * GiB, 1 * GiB))
    assert host.memory().status == "WARN"
    monkeypatch.setattr(fetch, "is_here", lambda name: False)
    monkeypatch.setattr(fetch, "needed_by", lambda notebooks: [])
    assert host.models().status == "OK" and "none fetched" in host.models().detail
    monkeypatch.setattr(fetch, "needed_by", lambda notebooks: ["smollm2-135m"])
    assert host.models().status == "WARN" and host.models().fix == "labkit fetch"


def test_one_check_that_breaks_hides_no_other(monkeypatch):
    def broken():
        raise RuntimeError("a surprise\nwith more")

    def silent():
        raise ValueError

    def lacking():
        import no_such_module_at_all  # noqa: F401

    def fine():
        return doctor.Check("fine", "OK", "all right")

    monkeypatch.setattr(doctor, "CHECKS", (broken, silent, lacking, fine))
    found = doctor.examine()
    assert [c.status for c in found] == ["WARN", "WARN", "FAIL", "OK"]
    assert found[2].detail == "the package no_such_module_at_all is missing"
    assert found[0].detail == "could not be looked at (RuntimeError: a surprise)"
    assert "2 to know" in doctor.to_text(found)


def test_a_setting_that_cannot_be_read_blocks(monkeypatch):
    monkeypatch.setenv("LABKIT_CARD", "voodoo2")
    monkeypatch.setenv("LABKIT_BUDGET", "a lot")
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    monkeypatch.setattr(doctor, "CHECKS", (card.usable, card.memory))
    assert [c.status for c in doctor.examine()] == ["FAIL", "FAIL"]


@pytest.mark.parametrize(("status", "code"), [("OK", 0), ("WARN", 0), ("FAIL", 1)])
def test_the_command_exits_1_on_a_blocker(monkeypatch, capsys, status, code):
    monkeypatch.setattr(doctor, "CHECKS", (lambda: doctor.Check("thing", status, "detail", "fix it so"),))
    for arguments in (["doctor"], ["doctor", "--json"]):
        with pytest.raises(SystemExit) as exit:
            cli.main(arguments)
        assert exit.value.code == code
        out = capsys.readouterr().out
        if "--json" in arguments:
            document = json.loads(out)
            assert document["ok"] is (code == 0)
            assert document["checks"] == [{"name": "thing", "status": status, "detail": "detail", "fix": "fix it so"}]
        else:
            assert "-> fix it so" in out and status in out


def test_this_machine_is_examined_without_a_surprise():
    found = doctor.examine()
    assert [c for c in found if "could not be looked at" in c.detail] == []
    assert {"python", "environment", "torch", "card", "disk", "models", "jupyter kernel"} <= {c.name for c in found}
    assert {"compiler", "bitsandbytes", "optional parts", "caches"} <= {c.name for c in found}
    assert all(c.fix for c in found if c.status == "FAIL")


@pytest.mark.gpu
def test_a_real_card_is_fine():
    checks = (card.torch_build, card.driver, card.usable, card.dtypes, card.memory, wiring.bus, wiring.spill)
    found = {c.name: c for c in (check() for check in (*checks, software.bitsandbytes)) if c is not None}
    assert {found[name].status for name in ("torch", "driver and CUDA", "card", "bitsandbytes")} == {"OK"}
    assert "card 0" in found["bus"].detail and "spill" in found
    assert found["number formats"].detail.startswith("native: fp16") and "free, budget" in found["card memory"].detail
