"""A small gates.json whose selections and clusters are known beforehand."""

import numpy as np

from prunecli.results.gates import SUMS, TEXT_SUMS, GateStatistics, GateSums
from prunecli.tensors.transaction import write_json
from tests.gates import gate_statistics

LANGUAGES = ("qba", "qbo", "qka", "qko")
LAYERS = ("model.encoder.layers.1.ffn", "model.decoder.layers.1.ffn")
EXPERTS = 16
"""The four experts that a language uses: sisters share two of them."""
USED = {"qba": (0, 1, 2, 3), "qbo": (2, 3, 4, 5), "qka": (8, 9, 10, 11), "qko": (10, 11, 12, 13)}


def statistics(languages=LANGUAGES):
    """The encoder uses the source's experts, the decoder the target's."""
    pairs = {f"{a}-{b}": _sums(a, b) for a in languages for b in languages if a != b}
    return gate_statistics(LAYERS, pairs)


def _sums(source, target):
    top1 = np.ones((2, EXPERTS), np.int64)
    for row, language in enumerate((source, target)):
        top1[row, list(USED[language])] = 100
    gate = top1 * 0.5
    sums = (top1.sum(axis=1), top1, top1[:, ::-1].copy(), gate, gate, gate)
    return GateSums(zip(SUMS, sums, strict=True))


def write_gates(path="gates.json"):
    write_json(path, {**GateStatistics.header([], None), **statistics().to_json()})


TEXT_LAYERS = ("model.layers.0.mlp", "model.layers.1.mlp")
TEXTS = {"code": (0, 1, 2, 3), "shell": (2, 3, 4, 5), "novel": (8, 9, 10, 11)}
"""The four experts that a text uses in each layer."""


def text_statistics():
    """Experts that a text does not use see no token."""
    entries = {name: _text_sums(used) for name, used in TEXTS.items()}
    return gate_statistics(TEXT_LAYERS, entries)


def _text_sums(used):
    sums = GateSums.zeros(2, EXPERTS, TEXT_SUMS)
    sums.tokens[:] = 200 * len(used)
    for name in TEXT_SUMS[1:]:
        getattr(sums, name)[:, list(used)] = 100
    return sums


def write_text_gates():
    write_json("gates.json", {**GateStatistics.header([], None), **text_statistics().to_json()})
