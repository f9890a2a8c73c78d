"""The training script writes a directory that loads, with the bundled sizes and tokenizer."""

import torch

from prunecli import load_model
from prunecli.demo import CHECKPOINT
from prunecli.text.parallel import read_parallel
from tests.tiny import config_of, json_of
from tools.demo import train
from tools.demo.model import SIZES


def test_two_steps_write_a_directory_that_loads(tmp_path, monkeypatch):
    """On the first 4,000 lines: all 24,000 take seconds to learn the tokenizer from and to encode."""
    monkeypatch.setattr(train, "read_parallel", lambda data, split: read_parallel(data, split).first(4000))
    train.main(["--output", str(tmp_path), "--steps", "2", "--sentences", "8", "--threads", "1"])
    model = load_model(tmp_path, device="cpu")
    ids = torch.tensor([[800, 10, 11, 2]])
    logits = model(input_ids=ids, decoder_input_ids=ids).logits
    assert logits.shape == (1, 4, model.config.vocab_size)
    assert torch.isfinite(logits).all()
    for path in (tmp_path, CHECKPOINT):
        assert SIZES.items() <= config_of(path).items()
    for name in ("generation_config.json", "tokenizer_config.json"):
        assert json_of(tmp_path / name) == json_of(CHECKPOINT / name)
