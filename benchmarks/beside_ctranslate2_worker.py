"""CTranslate2's side of `beside_ctranslate2.py`: converts and decodes; needs ctranslate2 and numpy alone."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.specs import TransformerSpec, common_spec

OFFSET = 2
"""Of the positions, in transformers' table."""


def main() -> None:
    checkpoint, threads = Path(sys.argv[1]), int(sys.argv[2])
    converted = checkpoint.parent / "ctranslate2"
    if not converted.is_dir():
        convert(checkpoint, converted)
    models: dict[str, Any] = {}
    for line in sys.stdin:
        task = json.loads(line)
        dtype = task["dtype"]
        if dtype not in ctranslate2.get_supported_compute_types("cpu"):
            print("null", flush=True)
            continue
        if dtype not in models:
            models[dtype] = ctranslate2.Translator(str(converted), compute_type=dtype, intra_threads=threads)
        rows = [[str(number) for number in row] for row in task["rows"]]
        limits = {"min_decoding_length": task["tokens"], "max_decoding_length": task["tokens"]}
        start = time.perf_counter()
        outputs = models[dtype].translate_batch(rows, beam_size=task["beam"], **limits)
        taken = time.perf_counter() - start
        chosen = [[int(token) for token in output.hypotheses[0]] for output in outputs]
        print(json.dumps({"seconds": taken, "chosen": chosen}), flush=True)


def convert(checkpoint: Path, target: Path) -> None:
    """Write CTranslate2's form of it, in float32."""
    config = json.loads((checkpoint / "config.json").read_text())
    weights = read_weights(checkpoint)
    spec = TransformerSpec.from_config(
        (config["encoder_layers"], config["decoder_layers"]),
        config["encoder_attention_heads"],
        activation=common_spec.Activation.RELU,
    )
    table = weights["model.shared.weight"]
    fill_stack(spec.encoder, weights, "model.encoder", spec.encoder.embeddings[0], config)
    fill_stack(spec.decoder, weights, "model.decoder", spec.decoder.embeddings, config)
    spec.decoder.projection.weight = table
    words = ["<s>", "<pad>", "</s>", "<unk>", *map(str, range(4, len(table)))]
    words[2] = "2"  # sources end in it by number
    for register in (spec.register_source_vocabulary, spec.register_target_vocabulary):
        register(words)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "<s>", "2", "<unk>"
    spec.config.decoder_start_token = "2"
    spec.validate()
    spec.optimize(quantization=None)
    target.mkdir()
    spec.save(str(target))


def fill_stack(spec: Any, weights: dict[str, np.ndarray], name: str, embeddings: Any, config: Any) -> None:
    """The encoder's, or the decoder's, part of the weights."""

    def linear(part: Any, *names: str) -> None:
        part.weight = np.concatenate([weights[f"{one}.weight"] for one in names])
        part.bias = np.concatenate([weights[f"{one}.bias"] for one in names])

    def norm(part: Any, own: str) -> None:
        part.gamma, part.beta = weights[f"{own}.weight"], weights[f"{own}.bias"]

    def attention(part: Any, own: str, *, cross: bool = False) -> None:
        query, key, value = (f"{own}.{which}_proj" for which in "qkv")
        if cross:
            linear(part.linear[0], query)
            linear(part.linear[1], key, value)
        else:
            linear(part.linear[0], query, key, value)
        linear(part.linear[-1], f"{own}.out_proj")
        norm(part.layer_norm, f"{own}_layer_norm")

    embeddings.weight = weights["model.shared.weight"]
    spec.scale_embeddings = config["scale_embedding"]
    spec.position_encodings.encodings = positions(config["max_position_embeddings"], config["d_model"])
    norm(spec.layer_norm, f"{name}.layer_norm")
    for number, layer in enumerate(spec.layer):
        own = f"{name}.layers.{number}"
        attention(layer.self_attention, f"{own}.self_attn")
        if hasattr(layer, "attention"):
            attention(layer.attention, f"{own}.encoder_attn", cross=True)
        norm(layer.ffn.layer_norm, f"{own}.final_layer_norm")
        linear(layer.ffn.linear_0, f"{own}.fc1")
        linear(layer.ffn.linear_1, f"{own}.fc2")


def positions(count: int, width: int) -> np.ndarray:
    """Sines, then cosines, of the positions that transformers' table begins with."""
    half = width // 2
    rates = np.exp(np.arange(half) * -(math.log(10000) / (half - 1)))
    angles = (np.arange(count) + OFFSET)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def read_weights(checkpoint: Path) -> dict[str, np.ndarray]:
    """Name -> values, of float32 in .safetensors files."""
    made = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in json.loads(data[8 : 8 + size].tobytes()).items():
            if name != "__metadata__":
                start, end = (8 + size + offset for offset in entry["data_offsets"])
                made[name] = data[start:end].view(np.float32).reshape(entry["shape"])
    return made


if __name__ == "__main__":
    main()
