import json

import pytest
import torch

from labkit import models
from labkit.recipes import CHOICES, Recipe, blocks, checkpoint_segments, chunked_loss, conflict, make_optimizer
from labkit.units import UserError

SMALL = {"n_layer": 4, "n_embd": 32, "n_head": 2, "vocab_size": 97, "n_positions": 64}


def small(dropout=0.0, **changes):
    torch.manual_seed(0)
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return models.gpt2("gpt2", **{**SMALL, **dropouts, **changes}).train()


def loss_and_gradients(model, loss):
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"batch": 0}, "batch"), ({"seq": -1}, "seq"), ({"batch": 1.5}, "batch"), ({"batch": True}, "batch"),
        ({"checkpoint": -1}, "checkpoint"), ({"precision": "fp64"}, "amp-bf16"), ({"optimizer": "adam"}, "adamw-fused"),
        ({"colour": 1}, "unknown field 'colour'"), ({"dropout": 1.0}, "dropout"), ({"dropout": "a lot"}, "dropout"),
        ({"model": ""}, "model"), ({"model": 3}, "model"),
        ({"attention": ["sdpa"]}, "attention"), ({"batch": 2**31 - 1}, "batch .* to 65536"),
        ({"clip": 0}, "clip"), ({"clip": float("nan")}, "clip"), ({"clip": True}, "clip"),
        ({"compile": "all"}, "blocks"),
        ({"offload": "everything"}, "activations"), ({"stochastic_rounding": 1}, "true or false"),
        ({"loss_chunks": 0}, "loss_chunks"), ({"accumulation": 65537}, "accumulation"),
        ({"seq": 2**20 + 1}, "seq"), ({"checkpoint": 1001}, "checkpoint"),
    ],
)  # fmt: skip
def test_what_a_recipe_cannot_be(fields, word):
    with pytest.raises(UserError, match=word):
        Recipe.of(**fields)


def test_defaults_are_those_of_the_vocabulary():
    assert Recipe.of().to_dict() == {
        "model": "gpt2", "batch": 8, "seq": 1024, "precision": "fp32", "attention": "sdpa", "checkpoint": 0,
        "optimizer": "adamw", "loss": "full", "activation": "gelu_new", "accumulation": 1, "dropout": 0.1,
        "loss_chunks": 8, "gradients": "card", "clip": None, "stochastic_rounding": False, "offload": "none",
        "compile": "none", "expandable_segments": False, "flat": False,
    }  # fmt: skip
    assert str(Recipe.of(batch=2, checkpoint=3)) == "gpt2 2x1024 checkpoint=3"
    assert Recipe.of().changed(accumulation=4).tokens == 8 * 1024 * 4


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"gradients": "in-backward", "clip": 1.0}, "two-backward-passes"),
        ({"gradients": "two-backward-passes"}, "give clip"),
        ({"gradients": "in-backward", "accumulation": 2}, "gradients=card or host"),
        ({"gradients": "in-backward", "precision": "fp16"}, "host with precision=fp16"),
        ({"gradients": "host", "precision": "amp-fp16"}, "use precision=fp16"),
        ({"gradients": "host", "offload": "optimizer"}, "gradients=card"),
        ({"offload": "optimizer", "clip": 1.0}, "use precision=fp16"),
        ({"offload": "optimizer", "precision": "amp-fp16"}, "use precision=fp16"),
        ({"offload": "optimizer", "optimizer": "adam8bit"}, "use optimizer=adamw"),
        ({"offload": "optimizer+gradients", "accumulation": 2}, "gradients=card or host"),
        ({"offload": "activations", "compile": "blocks"}, "compile=none"),
        ({"compile": "whole", "gradients": "host"}, "compile=blocks"),
        ({"loss": "in-place", "precision": "amp-bf16"}, "loss=chunked"),
        ({"stochastic_rounding": True, "precision": "bf16"}, "adamw8bit"),
        ({"stochastic_rounding": True, "optimizer": "adamw8bit"}, "precision=bf16"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_with_advice(fields, advice):
    with pytest.raises(UserError, match=advice) as caught:
        Recipe.of(**fields)
    assert "\n" not in str(caught.value) and conflict(fields) == str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "fp16", "offload": "optimizer+gradients", "clip": 1.0, "accumulation": 4},
        {"precision": "fp16", "gradients": "host", "optimizer": "adam8bit", "clip": 1.0},
        {"gradients": "two-backward-passes", "clip": 1.0}, {"compile": "whole", "checkpoint": 1},
        {"compile": "blocks", "gradients": "host", "clip": 0.5, "accumulation": 2}, {"expandable_segments": True},
    ],
)  # fmt: skip
def test_what_goes_together_is_taken(fields):
    assert conflict(Recipe.of(**fields)) is None


def test_rows_of_lesson_12_load_with_their_spelling():
    fields = {"gradients": "in backward, each clipped", "loss": "in place", "compile": True, "clip": 1}
    recipe = Recipe.of(**fields)
    assert (recipe.gradients, recipe.loss, recipe.compile) == ("in-backward-each-clipped", "in-place", "blocks")
    assert Recipe.of(**recipe.to_dict()) == recipe and Recipe.of(compile=False).compile == "none"


def test_a_label_says_what_differs_and_nothing_else():
    assert str(
        Recipe.of(batch=2, loss_chunks=4, stochastic_rounding=True, precision="bf16", optimizer="adamw8bit")
    ) == ("gpt2 2x1024 precision=bf16 optimizer=adamw8bit stochastic_rounding")
    assert str(Recipe.of(loss="chunked", loss_chunks=4)).endswith("loss=chunked loss_chunks=4")


def test_a_sequence_beyond_the_positions_is_refused():
    with pytest.raises(UserError, match="1024 positions"):
        Recipe.of(seq=1025).experiment()


def test_models_that_do_not_exist(tmp_path):
    with pytest.raises(UserError, match="gpt2-medium"):
        models.config("gpt3")
    with pytest.raises(UserError, match="no config.json"):
        models.config(str(tmp_path))
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(UserError, match="not readable as JSON"):
        models.config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UserError, match="not the configuration of a causal language model"):
        models.config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "never-heard-of"}')
    with pytest.raises(UserError, match="no usable configuration"):
        models.config(str(tmp_path))


def folder(path, **fields):
    """A folder with the config.json of a small GPT-2, some fields changed."""
    (path / "config.json").write_text(json.dumps({"model_type": "gpt2", **SMALL, **fields}))
    return str(path)


@pytest.mark.parametrize(
    "fields",
    [
        {"n_head": 0}, {"n_head": 3}, {"n_embd": 0}, {"n_embd": -4}, {"n_embd": 10**9}, {"n_inner": -1},
        {"activation_function": "foo"},
    ],
)  # fmt: skip
def test_a_configuration_that_makes_no_model_is_one_sentence(tmp_path, fields):
    name = folder(tmp_path, **fields)
    with pytest.raises(UserError, match="its configuration makes no model") as caught:
        models.causal_lm(models.config(name), device="meta")
    assert str(caught.value).startswith(name)


def test_absurd_sizes_in_a_configuration_are_refused(tmp_path):
    with pytest.raises(UserError, match="1000000 layers"):
        Recipe.of(model=folder(tmp_path, n_layer=1_000_000), seq=8).config()
    with pytest.raises(UserError, match="vocabulary of 0"):
        Recipe.of(model=folder(tmp_path, vocab_size=0), seq=8).config()


def test_a_model_without_sdpa_says_what_to_use(tmp_path):
    fields = {"model_type": "bloom", "vocab_size": 97, "hidden_size": 32, "n_layer": 1, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match="use --attention eager"):
        models.causal_lm(models.config(str(tmp_path)), device="meta")
    models.causal_lm(models.config(str(tmp_path)), device="meta", attention="eager")


def test_a_configuration_with_a_byte_order_mark_or_absurd_nesting(tmp_path):
    text = json.dumps({"model_type": "gpt2", **SMALL})
    (tmp_path / "config.json").write_text(text, encoding="utf-8-sig")
    found = models.config(str(tmp_path))
    assert found.n_embd == 32 and found.name_or_path == str(tmp_path)
    for wrong, word in (("[" * 100_000, "nested too deeply"), ("[]", "object of fields")):
        (tmp_path / "config.json").write_text(wrong)
        with pytest.raises(UserError, match=word):
            models.config(str(tmp_path))


def test_parameter_counts_are_those_of_the_released_models():
    expected = {"gpt2": 124.4, "gpt2-medium": 354.8, "gpt2-large": 774.0, "gpt2-xl": 1557.6}
    for name, millions in expected.items():
        model = models.causal_lm(models.config(name), device="meta")
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize("every", [1, 2, 3, 4, 9])
def test_segments_compute_the_same_with_dropout_too(every):
    tokens = torch.arange(60).view(2, 30) % 97
    results = []
    for wrap in (False, True):
        model = small(dropout=0.1)
        if wrap:
            checkpoint_segments(model, every)
            assert len(blocks(model)) == -(-4 // every)
        torch.manual_seed(1)
        loss, gradients = loss_and_gradients(model, model(input_ids=tokens, labels=tokens).loss)
        results.append((loss, list(gradients.values())))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_a_segment_recomputes_in_backward():
    model = small()
    seen = []
    for block in blocks(model):
        block.mlp.act.register_forward_hook(lambda *_: seen.append(1))
    checkpoint_segments(model, 2)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert len(seen) == 8  # four blocks, twice


def test_the_chunked_loss_equals_the_full_one():
    tokens = torch.arange(60).view(2, 30) % 97
    one, two = small(), small()
    loss, gradients = loss_and_gradients(one, one(input_ids=tokens, labels=tokens).loss)
    chunked, chunked_gradients = loss_and_gradients(two, chunked_loss(two, tokens))
    torch.testing.assert_close(loss, chunked)
    torch.testing.assert_close(gradients, chunked_gradients)


@pytest.mark.parametrize("optimizer", CHOICES["optimizer"])
def test_every_optimizer_lowers_the_loss(optimizer):
    model = small()
    tokens = torch.arange(60).view(2, 30) % 97
    optimizer = make_optimizer(optimizer, model.parameters(), lr=0.05)
    losses = []
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps, which takes a processor a minute
        for _ in range(4):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "amp-bf16", "accumulation": 2}, {"precision": "bf16", "loss": "chunked", "checkpoint": 1},
        {"gradients": "two-backward-passes", "clip": 1.0}, {"offload": "activations", "loss": "in-place"},
        {"precision": "fp16", "offload": "optimizer", "clip": 1.0, "accumulation": 2},
    ],
)  # fmt: skip
def test_a_recipe_is_an_experiment(fields, tmp_path):
    from transformers import GPT2Config

    GPT2Config(**SMALL).save_pretrained(tmp_path)
    recipe = Recipe.of(model=str(tmp_path), batch=2, seq=16, **fields)
    step = recipe.experiment()(torch.device("cpu"))
    losses = [float(step()) for _ in range(6)]
    assert losses[-1] < losses[0] and step.tokens == recipe.tokens
