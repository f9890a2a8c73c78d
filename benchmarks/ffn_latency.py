"""How much faster a Transformer Big decodes where FFNs are shared or dropped (2309.01826, Tables 2 to 4, Appendix D).

    python benchmarks/ffn_latency.py --configs SharedEncNoDec,NoDec,OneWide --beam 5 --batch-sizes 1,8

A checkpoint of random weights in the paper's shape (6 + 6 layers, d_model 1024, d_ff 4096, 16 heads) is written to a
temporary directory and reduced by prunecli; all are run in turn on the same random sentences, so that drift hits them
alike, to the same length. The paper saw +20 % for NoDec and +22 % for SharedEncNoDec at batch 1, beam 5, on a V100.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import runs
import torch

from prunecli.methods.sharing.options import FfnOptions
from prunecli.methods.sharing.plan import plan_ffn, rewrite_shared
from prunecli.model.checkpoint import open_model
from prunecli.modules.loading import load_model
from prunecli.pipeline import apply


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        full = write_big(Path(folder) / "full", options)
        models = {"full": load_model(full, device=options.device, dtype=options.dtype)}
        for config in options.configs:
            reduced = share(full, Path(folder) / config, config)
            models[config] = load_model(reduced, device=options.device, dtype=options.dtype)
    threads = f"{options.threads} threads" if options.device == "cpu" else options.device
    print(f"Transformer Big, {options.dtype}, beam {options.beam}, {options.tokens} tokens, {threads}")
    base = parameters(models["full"])
    for batch in options.batch_sizes:
        turns = measure(models, batch, options)
        for name, taken in turns.items():
            rate = batch * options.tokens / runs.median(taken)
            gain = runs.median(turns["full"], taken) - 1
            share_of = parameters(models[name]) / base
            print(f"batch {batch:3}: {name:16} {rate:8.1f} tokens/s, {gain:+6.1%}, parameters {share_of:.1%}")


def write_big(directory: Path, options: argparse.Namespace) -> Path:
    """A stock M2M-100 in the shape of Transformer Big, random weights."""
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    torch.manual_seed(0)
    config = M2M100Config(
        vocab_size=options.vocabulary,
        d_model=1024,
        encoder_layers=6,
        decoder_layers=6,
        encoder_ffn_dim=4096,
        decoder_ffn_dim=4096,
        encoder_attention_heads=16,
        decoder_attention_heads=16,
        decoder_start_token_id=2,
        max_position_embeddings=512,
    )
    M2M100ForConditionalGeneration(config).save_pretrained(directory)
    return directory


def share(source: Path, output: Path, config: str) -> Path:
    """One of the paper's configurations of it."""
    checkpoint = open_model(source)
    rewrite = rewrite_shared(checkpoint, plan_ffn(checkpoint, FfnOptions(preset=config)))
    apply(checkpoint, rewrite, output)
    return output


def parameters(model: Any) -> int:
    return sum(held.numel() for held in model.parameters())


def measure(models: dict[str, Any], batch: int, options: argparse.Namespace) -> dict[str, list[runs.Turn]]:
    """Decode one batch with all models in turn."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, options.vocabulary, (batch, options.source), generator=generator)

    def generate(model: Any) -> None:
        with torch.inference_mode():
            model.generate(
                ids.to(model.device),
                num_beams=options.beam,
                do_sample=False,
                min_new_tokens=options.tokens,
                max_new_tokens=options.tokens,
            )
        if model.device.type == "cuda":
            torch.cuda.synchronize()

    ways = {name: partial(generate, model) for name, model in models.items()}
    return runs.in_turns(ways, options.runs)


def parse() -> argparse.Namespace:
    parser = runs.parser(__doc__)
    parser.add_argument(
        "--configs", type=lambda text: text.split(","), default=["NoDec", "SharedEncNoDec", "OneWide"]
    )
    parser.add_argument("--batch-sizes", type=runs.numbers, default=[1])
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--source", type=int, default=28, help="tokens of a source sentence")
    parser.add_argument("--tokens", type=int, default=28, help="tokens that are generated")
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1, help="the paper's host had one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
