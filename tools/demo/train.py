"""Train the demo's NLLB-MoE: `python -m tools.demo.train --output DIR`."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from prunecli.demo import DATA
from prunecli.text.parallel import read_parallel
from tools.demo.languages import BY_CODE
from tools.demo.model import build_model, save_checkpoint, sparse_ffns
from tools.demo.muon import Muon
from tools.demo.objective import Gates, RoutingGoals, routing_loss
from tools.demo.vocabulary import EOS, PAD, build_tokenizer


@dataclass(frozen=True)
class Settings:
    """A training run; the defaults made the bundled checkpoint."""

    steps: int = 2000
    sentences: int = 192
    muon_rate: float = 0.02
    adam_rate: float = 5e-3
    warmup: int = 100
    routing_weight: float = 0.1
    experts_per_language: float = 6.0
    experts_per_family: float = 10.0
    vocab_size: int = 800
    seed: int = 1
    threads: int = 1


@dataclass(frozen=True)
class Batch:
    """Token ids `[sentences, length]`, padded with PAD, and the index of each sentence's two languages."""

    source: Tensor
    target: Tensor
    source_language: Tensor
    target_language: Tensor


def encode(tokenizer: Any, text: Mapping[str, Sequence[str]]) -> list[list[list[int]]]:
    """Ids of the text by language, `[language][line]`, as source and as target: language code, pieces, `</s>`."""
    encoded = []
    for code, sentences in text.items():
        tokenizer.src_lang = code
        encoded.append(tokenizer(list(sentences))["input_ids"])
    return encoded


def _pad(rows: Sequence[list[int]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


def batches(encoded: Sequence[Sequence[list[int]]], settings: Settings) -> Iterator[Batch]:
    """Endless batches of random sentences in random directions, similar lengths together, languages mixed."""
    rng = np.random.default_rng(settings.seed)
    lines, pool = len(encoded[0]), 16 * settings.sentences
    while True:
        line = rng.integers(lines, size=pool).tolist()
        source = rng.integers(len(encoded), size=pool)
        target = (source + rng.integers(1, len(encoded), size=pool)) % len(encoded)
        sources = [encoded[language][at] for language, at in zip(source.tolist(), line, strict=True)]
        targets = [encoded[language][at] for language, at in zip(target.tolist(), line, strict=True)]
        lengths = [len(one) + len(other) for one, other in zip(sources, targets, strict=True)]
        order = sorted(range(pool), key=lengths.__getitem__)
        chunks = [order[start : start + settings.sentences] for start in range(0, pool, settings.sentences)]
        for chunk in (chunks[index] for index in rng.permutation(len(chunks))):
            yield Batch(
                _pad([sources[index] for index in chunk]),
                _pad([targets[index] for index in chunk]),
                torch.from_numpy(source[chunk]),
                torch.from_numpy(target[chunk]),
            )


def schedule(step: int, settings: Settings) -> float:
    """Share of the full learning rates: linear warm-up, then a cosine down to a hundredth."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(settings.steps - settings.warmup, 1)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))


def losses(model: Any, gates: Gates, batch: Batch, settings: Settings) -> tuple[Tensor, Tensor]:
    """Cross-entropy per target token in nats, and the routing loss summed over the sparse layers."""
    start = torch.full((len(batch.target), 1), EOS)
    inputs = torch.cat([start, batch.target[:, :-1]], dim=1)
    inputs = inputs.masked_fill(batch.target == PAD, PAD)
    logits = model(
        input_ids=batch.source,
        attention_mask=batch.source.ne(PAD).long(),
        decoder_input_ids=inputs,
        decoder_attention_mask=inputs.ne(PAD).long(),
        use_cache=False,
    ).logits
    real = batch.target.ne(PAD)
    cross_entropy = functional.cross_entropy(logits[real], batch.target[real])
    goals = RoutingGoals(settings.routing_weight, settings.experts_per_language, settings.experts_per_family)
    families = [index // 2 for index in range(len(BY_CODE))]
    routing = torch.zeros(())
    for name, layer_gates in gates.by_layer.items():
        encoder = ".encoder." in name
        mask = batch.source.ne(PAD) if encoder else inputs.ne(PAD)
        language = batch.source_language if encoder else batch.target_language
        per_token = language.unsqueeze(1).expand(mask.shape)[mask]
        routing = routing + routing_loss(layer_gates, per_token, families, goals)
    return cross_entropy, routing


def _optimizers(model: Any) -> tuple[Muon, torch.optim.Optimizer]:
    """Muon for the weights of attention and FFNs, Adam for embeddings, routers, norms and biases."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        apart = "shared" in name or ".router." in name or name.endswith("bias")
        (others if apart or parameter.dim() < 2 else matrices).append(parameter)
    return Muon(matrices), torch.optim.Adam(others, betas=(0.9, 0.98), eps=1e-9)


def train(settings: Settings, output: Path) -> None:
    """Train and write a stock checkpoint directory. The same settings give the same bytes on the same machine."""
    torch.manual_seed(settings.seed)
    torch.set_num_threads(settings.threads)
    text = read_parallel(DATA, "train").sentences
    tokenizer = build_tokenizer((line for lines in text.values() for line in lines), settings.vocab_size)
    model = build_model(len(tokenizer)).train()
    gates = Gates(sparse_ffns(model))
    muon, adam = _optimizers(model)
    begin = time.perf_counter()
    for step, batch in zip(range(settings.steps), batches(encode(tokenizer, text), settings), strict=False):
        rate = schedule(step, settings)
        for group in adam.param_groups:
            group["lr"] = rate * settings.adam_rate
        cross_entropy, routing = losses(model, gates, batch, settings)
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(cross_entropy + routing)
        muon.step(rate * settings.muon_rate)
        adam.step()
        if (step + 1) % 50 == 0 or step + 1 == settings.steps:
            parts = (
                f"cross-entropy {float(cross_entropy.detach()):.4f}, routing {float(routing.detach()):.4f}"
            )
            seconds = time.perf_counter() - begin
            print(f"step {step + 1}/{settings.steps}: {parts}, {seconds:.0f} s", file=sys.stderr, flush=True)
    save_checkpoint(model.eval(), tokenizer, output)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the training script."""
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="python -m tools.demo.train", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory to write the checkpoint to")
    for name, value in vars(defaults).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"default {value}"
        )
    options = vars(parser.parse_args(arguments))
    output = options.pop("output")
    train(Settings(**options), output)


if __name__ == "__main__":
    main()
