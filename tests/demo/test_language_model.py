"""The demo's language model: a stock directory that knows both domains; the script that trains it."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prunecli.demo import LM_CHECKPOINT, LM_DATA, LM_TEXTS
from tests.commands.calls import names
from tests.tiny import json_of
from tools.demo import language_model

MOST = {"prose": 16.0, "code": 5.0}
"""Perplexity of a token, of 400."""


@pytest.mark.parametrize("name", LM_TEXTS)
def test_stock_transformers_opens_it_and_finds_held_out_text_likely(name):
    model, information = AutoModelForCausalLM.from_pretrained(
        LM_CHECKPOINT, dtype=torch.float32, output_loading_info=True
    )
    assert not any(information.values())
    tokenizer = AutoTokenizer.from_pretrained(LM_CHECKPOINT)
    nats = tokens = 0.0
    for line in (LM_DATA / f"test.{name}").read_text(encoding="utf-8").splitlines()[:40]:
        ids = tokenizer(line)["input_ids"]
        assert tokenizer.decode(ids) == line
        row = torch.tensor([[0, *ids]])
        with torch.no_grad():
            nats += float(model(input_ids=row, labels=row).loss) * len(ids)
        tokens += len(ids)
    assert math.exp(nats / tokens) < MOST[name]


def test_two_steps_write_a_directory_that_loads(tmp_path):
    few = ["--steps", "2", "--lines", "4", "--sentences", "200", "--programs", "100"]
    language_model.main(["--output", str(tmp_path), *few])
    for name in ("config.json", "generation_config.json"):
        assert json_of(tmp_path / name) == json_of(LM_CHECKPOINT / name)
    assert {*names(tmp_path), "README.md"} == {*names(LM_CHECKPOINT)}
