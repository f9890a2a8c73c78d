"""A text's vector from its tokens' hidden states, beside a loop over texts and tokens."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from prunecli.errors import CheckpointError, UnsupportedModelError
from prunecli.modules.pooling import MODES, Pooling, read_pooling
from prunecli.running.encoding import embedding_examples
from prunecli.text.tokens import load_tokenizer
from tests.sentence_model import sentence_model
from tests.tiny import change_json, write_plain_tokenizer

LOOPS = {
    "cls": lambda tokens: tokens[0],
    "mean": lambda tokens: sum(tokens) / len(tokens),
    "max": lambda tokens: np.max(tokens, axis=0),
    "mean_sqrt_len_tokens": lambda tokens: sum(tokens) / len(tokens) ** 0.5,
    "weightedmean": lambda tokens: (
        sum((n + 1) * token for n, token in enumerate(tokens)) / sum(range(1, len(tokens) + 1))
    ),
    "lasttoken": lambda tokens: tokens[-1],
}
"""Mode -> `[tokens, width]` of one text, without padding, to `[width]`."""


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from(list(LOOPS)), st.integers(0, 2**31)
)
def test_modes(lengths, mode, seed):
    draw = np.random.default_rng(seed)
    hidden = draw.normal(size=(len(lengths), max(lengths), 5)).astype(np.float32)
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    found = Pooling((mode,))(torch.from_numpy(hidden), torch.from_numpy(mask))
    want = [LOOPS[mode](row[:length]) for row, length in zip(hidden, lengths, strict=True)]
    if mode != "weightedmean":  # which counts places of the row, as sentence-transformers does
        left = [
            np.concatenate([row[length:], row[:length]]) for row, length in zip(hidden, lengths, strict=True)
        ]
        turned = Pooling((mode,))(torch.from_numpy(np.stack(left)), torch.from_numpy(mask[:, ::-1].copy()))
        np.testing.assert_allclose(turned, found, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-6)


def test_a_transformer_in_a_folder_of_its_own():
    sentence_model("model", transformer="0_Transformer")
    assert len(read_pooling(Path("model/0_Transformer")).steps) == 2
    Path("model/another").mkdir()
    said = []
    assert read_pooling(Path("model/another"), said.append) == Pooling()
    assert "no modules.json says how texts are pooled" in said[0]


@pytest.mark.parametrize("path", ["../1_Pooling", "1_Pooling\0"])
def test_a_folder_outside_is_refused(path):
    model = sentence_model("model")
    modules = json.loads((model / "modules.json").read_text())
    modules[1]["path"] = path
    (model / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="is no folder below it"):
        read_pooling(model)


@pytest.mark.parametrize(
    ("file", "text", "error", "message"),
    [
        ("modules.json", "{", CheckpointError, r"modules\.json: cut short"),
        ("modules.json", "{}", CheckpointError, "no list of modules"),
        ("modules.json", '[{"path": "", "type": "a.b.CNN"}]', UnsupportedModelError, "kind CNN is not known"),
        ("1_Pooling/config.json", '{"pooling_mode": "rank"}', UnsupportedModelError, "by rank is not known"),
        ("1_Pooling/config.json", "{}", UnsupportedModelError, "by nothing is not known"),
        (
            "2_Dense/config.json",
            '{"activation_function": "a.Odd"}',
            UnsupportedModelError,
            "Odd is not known",
        ),
        ("2_Dense/config.json", '{"use_residual": true}', UnsupportedModelError, "around which"),
        ("1_Pooling/config.json", '{"module_input_name": "x"}', UnsupportedModelError, "of tokens"),
        ("2_Dense/model.safetensors", "{", CheckpointError, "truncated"),
    ],
)
def test_what_cannot_be_is_refused(file, text, error, message):
    model = sentence_model("model")
    (model / file).write_text(text)
    with pytest.raises(error, match=message):
        read_pooling(model)


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        ((8,), (8,), "no weight and bias"),
        ((8, 32), (7,), "no weight and bias"),
        ((8, 31), (8,), "of 31 numbers, .* 32"),
    ],
)
def test_a_dense_layer_of_other_shapes_is_refused(weight, bias, message):
    model = sentence_model("model")
    tensors = {"linear.weight": torch.ones(weight), "linear.bias": torch.ones(bias)}
    save_file(tensors, model / "2_Dense" / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_pooling(model)(torch.ones(1, 2, 32), torch.ones(1, 2))


def vector() -> torch.Tensor:
    return read_pooling(Path("model"))(torch.arange(64.0).view(1, 2, 32), torch.ones(1, 2))


def test_an_older_dense_layer():
    weights = sentence_model("model") / "2_Dense" / "model.safetensors"
    before = vector()
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    torch.testing.assert_close(vector(), before)


def test_modules_follow_one_another():
    model = sentence_model("model")
    *others, dense, norm = json.loads((model / "modules.json").read_text())
    torch.testing.assert_close(vector().norm(), torch.tensor(1.0))
    (model / "modules.json").write_text(json.dumps([*others, norm, dense]))
    assert vector().norm() > 1.1


def test_the_default_prompt_is_put_before_texts():
    model = sentence_model("model")
    prompts = {"prompts": {"query": "the hat "}, "default_prompt_name": "query"}
    (model / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    write_plain_tokenizer(".")
    tokenizer, bert, pooling = load_tokenizer(Path()), AutoModel.from_pretrained(model), read_pooling(model)
    found = embedding_examples(tokenizer, bert, pooling, ["the hen"], None)
    expected = embedding_examples(tokenizer, bert, replace(pooling, prompt=""), ["the hat the hen"], None)
    assert found.ids[0].tolist() == expected.ids[0].tolist()
    change_json(model / "1_Pooling" / "config.json", include_prompt=False)
    with pytest.raises(UnsupportedModelError, match="of the prompt"):
        read_pooling(model)


@pytest.mark.parametrize(("key", "mode"), MODES.items())
def test_older_and_newer_settings(key, mode):
    model = sentence_model("model")
    for settings in ({name: name == key for name in MODES}, {"pooling_mode": mode}, {"pooling_mode": [mode]}):
        (model / "1_Pooling" / "config.json").write_text(json.dumps(settings))
        assert read_pooling(model).modes == (mode,)
