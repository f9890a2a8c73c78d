"""Trains the demo's language model, a Qwen3-MoE: `python -m tools.demo.language_model --output DIR`.

On prose and programs, half a batch of each, with cross-entropy and the stock class's own term for even use of experts
over all tokens of a batch. Nothing asks it to keep a domain on experts of its own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prunecli.demo import DATA
from tools.demo.model import UNUSED
from tools.demo.programs import PROSE, TRAIN, programs

END = "<|end|>"
"""Before and behind every text; also what fills rows up."""
VOCABULARY = 400

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "router_aux_loss_coef": 0.01,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Settings:
    """A training run; the defaults made the bundled checkpoint."""

    steps: int = 1000
    lines: int = 48
    rate: float = 6e-3
    warmup: int = 50
    seed: int = 1
    threads: int = 1
    sentences: int = 24_000
    programs: int = TRAIN


def training_lines(settings: Settings) -> tuple[list[str], list[str]]:
    """Prose and programs."""
    packed = (DATA / f"train.{PROSE}.gz").read_bytes()
    prose = gzip.decompress(packed).decode().splitlines()[: settings.sentences]
    return prose, programs(settings.programs)["train"]


def build_tokenizer(lines: Sequence[str]) -> Any:
    """A byte-level BPE of `VOCABULARY` pieces; every digit is one of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=END,
        model_max_length=SIZES["max_position_embeddings"],
    )


def batches(
    domains: Sequence[Sequence[Sequence[int]]], settings: Settings
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches, half of each domain: ids `[lines, length]`, and the labels, -100 at what fills a row up."""
    rng = np.random.default_rng(settings.seed)
    while True:
        rows = [
            domain[index]
            for domain in domains
            for index in rng.integers(len(domain), size=settings.lines // len(domains)).tolist()
        ]
        ids = np.zeros((len(rows), max(map(len, rows)) + 2), np.int64)
        labels = np.full_like(ids, -100)
        for row, tokens in enumerate(rows):
            ids[row, 1 : len(tokens) + 1] = tokens
            labels[row, : len(tokens) + 2] = ids[row, : len(tokens) + 2]
        yield torch.from_numpy(ids), torch.from_numpy(labels)


def train(settings: Settings, output: Path) -> None:
    """Train and write a stock checkpoint directory. The same settings give the same bytes on the same machine."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(settings.seed)
    torch.set_num_threads(settings.threads)
    domains = training_lines(settings)
    tokenizer = build_tokenizer([line for domain in domains for line in domain])
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(tokenizer), **SIZES)).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        settings.rate,
        total_steps=settings.steps + 1,
        pct_start=min(0.5, settings.warmup / (settings.steps + 1)),
    )
    begin = time.perf_counter()
    encoded = [tokenizer(list(domain))["input_ids"] for domain in domains]
    for step, (ids, labels) in zip(range(settings.steps), batches(encoded, settings), strict=False):
        loss = model(
            input_ids=ids,
            attention_mask=labels.ge(0).long(),
            labels=labels,
            output_router_logits=True,
            use_cache=False,
        ).loss
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0 or step + 1 == settings.steps:
            done = f"step {step + 1}/{settings.steps}: loss {float(loss.detach()):.4f}"
            print(f"{done}, {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    save(model, tokenizer, output)


def save(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write the stock directory in float16."""
    model.half().save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)
    config = {key: value for key, value in model.config.to_dict().items() if key not in UNUSED}
    config |= {"architectures": [type(model).__name__], "dtype": "float16"}
    generation = {"eos_token_id": 0, "pad_token_id": 0}
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        text = json.dumps(values, indent=2, sort_keys=True) + "\n"
        (directory / name).write_text(text, encoding="utf-8")
    tokenizer.save_pretrained(directory)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the training script."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo.language_model", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory to write the checkpoint to")
    for name, value in vars(Settings()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"default {value}")
    options = vars(parser.parse_args(arguments))
    output = options.pop("output")
    train(Settings(**options), output)


if __name__ == "__main__":
    main()
