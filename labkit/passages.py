"""Short texts with a natural spread of lengths, and a tokenizer for them, on every machine: the functions of the
standard library, and byte-pair encoding learned from them. Nothing is downloaded."""

from __future__ import annotations

import ast
import random
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .data import stdlib
from .units import UserError

END = "<end>"  # the token 0: ends a text, and pads


def functions(count: int, *, split: str = "train", seed: int = 0) -> list[str]:
    """The source of `count` functions and methods of the standard library, of files in an order drawn with `seed`.

    Functions inside functions belong to the outer one. Raises `UserError` when the `split` has fewer.
    """
    files = list(stdlib(split).files)
    random.Random(seed).shuffle(files)
    found: list[str] = []
    for _, text in files:
        found += _functions(text)
        if len(found) >= count:
            return found[:count]
    raise UserError(f"the {split} text has {len(found)} functions, not {count}")


def _functions(text: str) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in somebody else's source
        try:
            waiting: list[ast.AST] = list(reversed(ast.parse(text).body))
        except (SyntaxError, ValueError):  # templates of lib2to3 and the like are no Python of this version
            return
    lines = text.splitlines()
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
        elif isinstance(node, ast.ClassDef):
            waiting += reversed(node.body)


def learned_tokenizer(texts: Sequence[str], vocabulary: int = 4096) -> Any:
    """A byte-level BPE tokenizer (a ``tokenizers.Tokenizer``) with at most `vocabulary` tokens, learned from `texts`.

    Token 0 is `END`. The same texts give the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator(texts, trainer)
    return found


def encoded(tokenizer: Any, texts: Iterable[str], *, most: int | None = None) -> list[list[int]]:
    """Token ids of each text, with `END` behind it, cut to `most` tokens."""
    end = tokenizer.token_to_id(END)
    return [[*found.ids, end][:most] for found in tokenizer.encode_batch(list(texts))]
