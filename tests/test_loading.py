"""Datasets of texts and tokens, the functions of the standard library, and the tokenizer that is learned from them."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from labkit import loading, passages
from labkit.batching import Padded
from labkit.loading import TextFiles, Texts, TokenCache, cores
from labkit.units import UserError


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return passages.functions(300)


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> Any:
    return passages.learned_tokenizer(texts, 600)


def test_functions_are_whole_and_the_same_each_time(texts: list[str]) -> None:
    assert len(texts) == 300 and texts == passages.functions(300)
    assert texts != passages.functions(300, seed=1)
    for text in texts[:50]:
        compile(text, "<function>", "exec", dont_inherit=True)
        assert text.startswith(("def ", "async def ", "@"))  # dedented, decorators left out by lineno of the def
    assert not set(texts) & set(passages.functions(200, split="held-out")) - {t for t in texts if len(t) < 200}
    with pytest.raises(UserError, match="functions, not"):
        passages.functions(10**7, split="held-out")


def test_functions_of_broken_source_are_none() -> None:
    assert list(passages._functions("def f(:\n")) == []
    found = list(
        passages._functions("class A:\n    def f(self):\n        def inner(): pass\n        return 1\ndef g(): pass\n")
    )
    assert found == ["def f(self):\n    def inner(): pass\n    return 1\n", "def g(): pass\n"]


def test_the_tokenizer_gives_every_text_back(texts: list[str], tokenizer: Any) -> None:
    assert tokenizer.get_vocab_size() <= 600 and tokenizer.token_to_id(passages.END) == 0
    for text in [*texts[:20], "ünïcode → \U0001f600\n\ttabs"]:
        ids = passages.encoded(tokenizer, [text])[0]
        assert ids[-1] == 0 and tokenizer.decode(ids[:-1]) == text
    assert passages.learned_tokenizer(texts, 600).to_str() == tokenizer.to_str()
    assert [len(ids) for ids in passages.encoded(tokenizer, texts[:5], most=4)] == [4] * 5


def test_files_and_texts_give_the_same_tokens(tmp_path: Path, texts: list[str], tokenizer: Any) -> None:
    paths = []
    for number, text in enumerate(texts[:20]):
        paths.append(tmp_path / f"{number}.py")
        paths[-1].write_text(text)
    whole = TextFiles(paths, tokenizer, most=64)
    memory = Texts(texts[:20], tokenizer, most=64)
    cut = TextFiles(paths, tokenizer, most=64, cut_first=True)
    assert len(whole) == len(memory) == 20
    for i in range(20):
        assert torch.equal(whole[i], memory[i]) and len(whole[i]) <= 64
        assert torch.equal(cut[i][:-1], whole[i][:-1]) and len(cut[i]) == len(whole[i])
    assert torch.equal(pickle.loads(pickle.dumps(whole))[3], whole[3])


def test_a_cache_gives_back_what_was_written(tmp_path: Path) -> None:
    chance = random.Random(0)
    rows = [[chance.randrange(65536) for _ in range(chance.randrange(1, 40))] for _ in range(50)]
    cache = TokenCache.write(tmp_path / "a" / "b", rows)
    for opened in (cache, TokenCache(tmp_path / "a" / "b"), pickle.loads(pickle.dumps(cache))):
        assert [row.tolist() for row in opened] == rows  # type: ignore[attr-defined]
        assert opened.lengths == [len(row) for row in rows] and len(opened) == 50
        assert opened[-1].tolist() == rows[-1] and opened[0].dtype == torch.int64
    assert cache.folder.joinpath("tokens.bin").stat().st_size == 2 * sum(map(len, rows))


def test_workers_read_the_same_cache(tmp_path: Path) -> None:
    rows = [[n] * (1 + n % 5) for n in range(40)]
    cache = TokenCache.write(tmp_path, rows)
    loader = DataLoader(cache, batch_size=3, collate_fn=Padded(pad=99), num_workers=2)
    found = [[x for x in row if x != 99] for batch in loader for row in batch["input_ids"].tolist()]
    assert found == rows


@pytest.mark.parametrize(
    ("rows", "words"), [([[65536]], "2 bytes"), ([[-1]], "2 bytes"), ([], "nothing"), ([[]], "nothing")]
)
def test_what_a_cache_refuses(tmp_path: Path, rows: list[list[int]], words: str) -> None:
    with pytest.raises(UserError, match=words):
        TokenCache.write(tmp_path, rows)


def test_a_cache_that_is_none_or_was_cut(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no token cache"):
        TokenCache(tmp_path)
    TokenCache.write(tmp_path, [[1, 2, 3]])
    (tmp_path / "tokens.bin").write_bytes(b"1234")
    with pytest.raises(UserError, match="its index says"):
        TokenCache(tmp_path)


def test_cores_keep_to_the_quota_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores() >= 1
    monkeypatch.setattr(loading.os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    for quota, expected in (("max 100000", 64), ("250000 100000", 3), ("50000 100000", 1)):
        monkeypatch.setattr(Path, "read_text", lambda self, *a, q=quota, **k: q)
        assert cores() == expected
