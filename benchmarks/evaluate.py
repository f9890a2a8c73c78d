"""Sentences per second of `evaluate`'s batches, against batches in file order, run in turns.

    python benchmarks/evaluate.py CHECKPOINT --data DIR --split test --pair eng_Latn-deu_Latn

The baseline takes the sentences one batch after the other as they stand in the file, as many in each batch as
length-bucketed batches hold on average, with the same model, beam and length limit rule.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import runs
import torch

from prunecli.evaluation.decoding import DecodingOptions, Translation, translate
from prunecli.modules.loading import load_model
from prunecli.running.encoding import length_limit, max_positions
from prunecli.text.batching import length_bucketed, pad
from prunecli.text.parallel import read_parallel
from prunecli.text.tokens import encode, language_id, load_tokenizer


def in_file_order(
    model: Any, tokenizer: Any, sentences: Sequence[str], pair: tuple[str, str], beam: int, size: int
) -> list[str]:
    """Batches of `size` sentences in file order."""
    forced = language_id(tokenizer, pair[1])
    texts: list[str] = []
    for start in range(0, len(sentences), size):
        sources = encode(
            tokenizer, sentences[start : start + size], pair[0], max_length=max_positions(model.config)
        )
        limit = length_limit(max(map(len, sources)), max_positions(model.config))
        ids, mask = pad(sources, tokenizer.pad_token_id)
        with torch.inference_mode():
            outputs = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=limit,
                num_beams=beam,
                do_sample=False,
                max_length=None,
                forced_bos_token_id=forced,
            )
        texts += tokenizer.batch_decode(outputs, skip_special_tokens=True)
    return texts


def main() -> None:
    parser = runs.parser(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--pair", required=True)
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--batch-tokens", type=int, default=DecodingOptions.batch_tokens)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()

    source, target = arguments.pair.split("-")
    text = read_parallel(arguments.data, arguments.split, (source, target)).first(arguments.sentences)
    sentences = text.sentences[source]
    model = load_model(arguments.checkpoint, device=arguments.device)
    tokenizer = load_tokenizer(arguments.checkpoint)
    lengths = [
        len(ids) for ids in encode(tokenizer, sentences, source, max_length=max_positions(model.config))
    ]
    size = round(len(sentences) / len(length_bucketed(lengths, arguments.batch_tokens)))
    options = DecodingOptions(arguments.beam, arguments.batch_tokens)

    translate(model, tokenizer, sentences[:size], (source, target), options)  # warm-up
    given = model, tokenizer, sentences, (source, target)
    plain: list[str] = []
    ours: list[Translation] = []

    def in_order() -> None:
        plain[:] = in_file_order(*given, arguments.beam, size)

    def bucketed() -> None:
        ours[:] = translate(*given, options)

    turns = runs.in_turns({"file order": in_order, "evaluate": bucketed}, arguments.runs, warm_up=0)
    same = sum(a.strip() == b.text for a, b in zip(plain, ours, strict=True))
    for name, own in turns.items():
        rate = [len(sentences) / turn.seconds for turn in own]
        each = ", ".join(f"{value:.1f}" for value in rate)
        print(f"{name:>10}: {statistics.fmean(rate):7.1f} sentences/s (runs: {each})")
    ratio = runs.median(turns["file order"], turns["evaluate"])
    print(f"     ratio: {ratio:7.2f}x, batches of about {size}, {same} of {len(ours)} alike")


if __name__ == "__main__":
    main()
