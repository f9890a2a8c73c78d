"""Gate statistics as additive sums (2212.09811, 4.1-4.2; 2510.13999, eq. 9), and sums of experts' outputs.

Symbols: `layers` counts the sparse layers, `experts` the experts of the original model's layer. Ids are
always the original ones; an expert that a checkpoint no longer holds has zeros.

The files that the authors of 2212.09811 published at github.com/naver/nllb-pruning are read too. Their lists are flat:
1536 values = 12 sparse layers x 128 experts, encoder layers first. A statistic is a ratio, so each entry is read as the
sums over one token; several are averaged (`combine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PlainSerializer, PlainValidator, model_validator

from prunecli.architectures.records import Side
from prunecli.errors import StatisticsError, reason_of
from prunecli.model.axes import Axis, axis_name
from prunecli.model.decision import Floats
from prunecli.results.document import (
    Blocks,
    Cells,
    Count,
    Json,
    Record,
    Shown,
    Statistics,
    Tables,
    Total,
    array_of,
)
from prunecli.tensors.json_files import read_json
from prunecli.tensors.quantities import counted
from prunecli.tensors.stream import Output, given
from prunecli.tensors.transaction import new_file
from prunecli.tensors.writer import header_bytes

Array = NDArray[Any]
Mode = Literal["forced", "beam", "published", "text"]
SUMS = ("tokens", "top1", "top2", "gate_sum", "conf1_sum", "conf2_sum")
TEXT_SUMS = (
    *SUMS,
    "routed",
    "gate_sq_sum",
    "norm_sum",
    "norm_sq_sum",
    "gate_norm_sum",
    "gate_norm_sq_sum",
    "norm_max",
)
"""What is collected of language models: besides SUMS, those over the tokens that are routed to an expert."""
COUNTS = ("tokens", "top1", "top2", "routed")
ROWS_SHOWN = 12
"""Entries that the terminal shows."""
ANY = "X"
"""In a pair of the authors' files, "any language": `eng_Latn-X` sums over all targets."""
NLLB_200_LAYERS = tuple(
    f"model.{side}.layers.{layer}.ffn" for side in ("encoder", "decoder") for layer in range(3, 24, 4)
)
"""The sparse layers of NLLB-200 54.5B, of 128 experts each."""
FIELDS = {"top1": "top1", "top2": "top2", "gate_sum": "mean", "conf1_sum": "conf1", "conf2_sum": "conf2"}
"""Name of a sum -> field of a published entry. `top2` is the share of tokens that rank the expert second."""
AGAIN = "Collect the statistics again."
OUTPUTS_FORMAT = "prunecli.outputs/1"
COLLECT_OUTPUTS = "Collect again with `mean_outputs`."


class GateSums(dict[str, Array]):
    """Name of a sum -> array, over the real tokens of one entry: no padding, no finished beams. Also as attributes.

    The gate g is the softmax over all experts, before the renormalisation over the chosen ones; of language models
    it is the weight by which the router multiplies an expert's output, 0 for a token that is not routed to it, and
    ranks go by it. f is an expert's output before that.

    - tokens: `[layers]`, tokens routed.
    - top1, top2: `[layers, experts]`, tokens that rank the expert first, and second.
    - gate_sum: `[layers, experts]`, sum of g over all tokens.
    - conf1_sum, conf2_sum: `[layers, experts]`, sum of g over the tokens that rank the expert first, and second.
    - routed: `[layers, experts]`, tokens routed to the expert. This and all that follow: language models alone.
    - gate_sq_sum: `[layers, experts]`, sum of g² over those.
    - norm_sum, norm_sq_sum: `[layers, experts]`, sums of ‖f‖ and of ‖f‖² over those.
    - gate_norm_sum, gate_norm_sq_sum: `[layers, experts]`, sums of g‖f‖ and of g²‖f‖² over those.
    - norm_max: `[layers, experts]`, the largest ‖f‖ among those, 0 without any.
    """

    def __getattr__(self, name: str) -> Array:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error

    def __add__(self, other: GateSums) -> GateSums:
        """The sums of both, of those that both hold."""
        return GateSums({name: _added(name, own, other[name]) for name, own in self.items() if name in other})

    def plus(self, layers: Mapping[int, GateSums]) -> GateSums:
        """These sums, with the sums of some layers added: number of the layer -> its sums, of one row."""
        sums = self.of_layers(range(len(self.tokens)))
        for index, row in layers.items():
            for name, array in sums.items():
                array[index] = _added(name, array[index], row[name][0])
        return sums

    def of_layers(self, rows: Sequence[int]) -> GateSums:
        """A copy of the sums of some layers, in this order."""
        return GateSums({name: own[list(rows)] for name, own in self.items()})

    @classmethod
    def zeros(cls, layers: int, experts: int, names: Sequence[str] = SUMS) -> GateSums:
        """No tokens yet: integer counts, float64 sums."""
        shape = layers, experts
        return cls(
            {
                name: np.zeros(shape[: 1 if name == "tokens" else 2], int if name in COUNTS else float)
                for name in names
            }
        )


def _read_sums(value: Any) -> GateSums:
    """Sums from lists of numbers."""
    if isinstance(value, GateSums):
        return value
    found = GateSums()
    for name in TEXT_SUMS if isinstance(value, dict) else ():
        if name in value:
            try:
                found[name] = array_of(value[name], counts=name in COUNTS)
            except ValueError as error:
                raise ValueError(f"{name} {error}") from error
    return found


Entry = Annotated[
    GateSums,
    PlainValidator(_read_sums),
    PlainSerializer(lambda sums: {name: own.tolist() for name, own in sums.items()}),
]
"""Sums that pydantic reads from JSON and writes as JSON."""


def _added(name: str, one: Array, other: Array) -> Array:
    """Both together; of the maxima the larger stands for both."""
    return np.asarray(np.maximum(one, other) if name == "norm_max" else one + other)


def ratio(numerator: Array, denominator: Array) -> Floats:
    """numerator / denominator, 0 where the denominator is 0."""
    zeros = np.zeros(np.shape(numerator))
    return np.asarray(np.divide(numerator, denominator, out=zeros, where=denominator != 0))


def combine(parts: Sequence[GateSums], mode: Mode) -> GateSums:
    """At least one in one; the order is the caller's, so that equal inputs give equal bits.

    Sums are added, of maxima the largest stays. Published ratios are averaged, each of them alone and every entry
    weighing alike, as the authors' code does: the mean of conf, not conf over all tokens.
    """
    if mode != "published" or len(parts) == 1:
        return reduce(GateSums.__add__, parts)

    ratios = [
        part | {f"conf{rank}_sum": ratio(part[f"conf{rank}_sum"], part[f"top{rank}"]) for rank in "12"}
        for part in parts
    ]
    return _of_ratios({name: np.mean([part[name] for part in ratios], axis=0) for name in SUMS})


def _of_ratios(ratios: Mapping[str, Array]) -> GateSums:
    """Sums over one token, from ratios of published statistics; conf is a mean over the tokens of its rank."""
    return GateSums(
        ratios, **{f"conf{rank}_sum": ratios[f"conf{rank}_sum"] * ratios[f"top{rank}"] for rank in "12"}
    )


class GateModel(Record):
    """The checkpoint that was run.

    Attributes:
        fingerprint: None for the authors' published files.
        model_type: model type in config.json; None for published files.
        routers: `router_fingerprint` of the checkpoint; None where the file does not say it.
    """

    fingerprint: str | None
    model_type: str | None
    routers: str | None = None


class GateStatistics(Statistics):
    """gates.json: gate sums per language pair, or of language models per text.

    Attributes:
        mode: teacher-forced, beam search, or published; "text" of language models.
        layers: names of the sparse layers, encoder first.
        num_experts: number of experts of an original layer.
        top_k: experts per token.
        groups: number of groups of experts, of which a router picks some first; 1: it knows no groups.
        entries: `"SOURCE-TARGET"` -> sums, or the text's name -> sums. In published files either language may be
            `X`, and the ratios stand for the sums over one token.
        lacks: names of the sums that the file does not give; zeros stand for them.
        dtype: type that the model was computed in; None if the file does not say it.
    """

    FORMAT = "prunecli.gates/1"
    TEXT_FORMAT: ClassVar[str] = "prunecli.gates/2"
    """With TEXT_SUMS, and a text's name for each entry."""
    UPGRADES = {TEXT_FORMAT: dict}
    REMEDY = AGAIN
    EMPTY = (None,)
    ALIKE = ("fingerprint", "model_type", "layers", "num_experts", "top_k", "mode")
    APART = "Merge only statistics of one model, collected in one mode."

    model: GateModel
    mode: Mode
    layers: tuple[str, ...]
    num_experts: Count
    top_k: Count
    groups: Total = 1
    entries: dict[str, Entry] = Field(min_length=1)
    dtype: str | None = None
    lacks: frozenset[str] = Field(default=frozenset(), exclude=True)

    @property
    def names(self) -> tuple[str, ...]:
        """The sums that an entry of such a file holds."""
        return TEXT_SUMS if self.mode == "text" else SUMS

    @property
    def about(self) -> str:
        """See `Document`."""
        if self.mode == "text":
            return f"{counted(len(self.entries), 'text')}."
        return f"{counted(len(self.entries), 'pair')}, collected with {self.mode} decoding."

    @property
    def blocks(self) -> Blocks:
        """Tokens of each entry, and how many of a layer's experts rank first for nine tokens in ten."""
        is_text = self.mode == "text"
        sides = np.array([side_of(layer) for layer in self.layers])
        rows: list[Cells] = []
        for name, sums in list(self.entries.items())[:ROWS_SHOWN]:
            running = np.cumsum(-np.sort(-sums.top1, axis=1), axis=1)
            busy = (running < 0.9 * running[:, -1:]).sum(axis=1) + 1
            first, last = f"{int(sums.tokens[0]):,}", f"{int(sums.tokens[-1]):,}"
            tokens = {"text": name, "tokens": first}
            if not is_text:
                tokens = {"pair": name, "encoder tokens": first, "decoder tokens": last}
            shares = {
                f"busy experts, {side}": f"{busy[sides == side].mean():.1f}" if side in sides else None
                for side in ("encoder", "decoder")
            }
            idle = f"{int((sums.routed == 0).sum()):,} of {sums.routed.size:,}" if is_text else None
            rows.append({**tokens, **shares, "experts without a token": idle})
        yield Shown("Gate statistics", rows)
        hidden = len(self.entries) - len(rows)
        more = f"{hidden} more {'text' if is_text else 'pair'}s in the file. " if hidden else ""
        yield (
            f"{more}Busy: those that take 90% of a layer's first choices, of {self.num_experts}; mean over layers."
        )

    @property
    def fingerprint(self) -> str | None:
        """Fingerprint of the checkpoint that was run."""
        return self.model.fingerprint

    @property
    def model_type(self) -> str | None:
        """Model type of the checkpoint that was run."""
        return self.model.model_type

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The experts of each layer of the original model."""
        ids = tuple(range(self.num_experts))
        return tuple(
            Axis(axis_name(name, "expert"), "expert", ids, len(ids), side_of(name)) for name in self.layers
        )

    @classmethod
    def from_json(cls, payload: Any, path: Path) -> GateStatistics:
        found = super().from_json(payload, path)
        if found.fingerprint is None or found.mode == "published":
            raise StatisticsError(f"{path}: states no fingerprint, or the mode {found.mode!r}.", AGAIN)
        return found

    @model_validator(mode="after")
    def _go_together(self) -> GateStatistics:
        is_text, shape = self.mode == "text", (len(self.layers), self.num_experts)
        if is_text != (self.format == self.TEXT_FORMAT):
            raise ValueError(f"mode is {self.mode!r} in a file of {self.format}")
        if self.num_experts % self.groups:
            raise ValueError(f"{self.num_experts} experts are no {self.groups} groups of one size")
        for entry, sums in self.entries.items():
            if not entry or not (is_text or all(split_pair(entry))):
                raise ValueError(
                    f"{entry!r} is not a {'name of a text' if is_text else 'pair SOURCE-TARGET'}"
                )
            for name in self.names:
                needed, held = shape[: 1 if name == "tokens" else 2], sums.get(name)
                if held is None or held.shape != needed:
                    stated = "missing" if held is None else f"of the shape {held.shape}"
                    raise ValueError(f"{entry}: {name} is {stated}; {needed} is needed")
        return self

    def _tables(self) -> Tables:
        """`gates`: a row for each entry, layer and expert; `tokens` are those of the layer."""
        entry = "text" if self.mode == "text" else "pair"
        return {
            "gates": [
                {
                    entry: pair,
                    "layer": layer,
                    "expert": expert,
                    "tokens": sums["tokens"][index],
                    **{name: sums[name][index][expert] for name in self.names[1:]},
                }
                for pair, sums in self.to_json()["entries"].items()
                for index, layer in enumerate(self.layers)
                for expert in range(self.num_experts)
            ]
        }

    def sums(self, parts: Sequence[GateStatistics]) -> Json:
        """See `Statistics`; entries of a pair or text that several parts hold are combined."""
        found: dict[str, list[GateSums]] = {}
        for part in parts:
            for pair, sums in part.entries.items():
                found.setdefault(pair, []).append(sums)
        return {
            "entries": {pair: combine(held, self.mode) for pair, held in found.items()},
            "lacks": frozenset[str]().union(*(part.lacks for part in parts)),
        }

    def combined(self, pairs: Iterable[str]) -> GateSums:
        """The entries of at least one pair or text in one: added, or of published files the means of their ratios."""
        return combine([self.entries[pair] for pair in pairs], self.mode)


def side_of(name: str) -> Side:
    """The side of a layer or its axis, read from the name; "decoder" if the name contains neither side."""
    return "encoder" if "encoder" in name.split(".") else "decoder"


def split_pair(pair: str) -> tuple[str, str]:
    """`eng_Latn-fra_Latn` -> its source and target."""
    source, _, target = pair.partition("-")
    return source, target


def read_gates(path: Path, layers: Sequence[str] = NLLB_200_LAYERS, num_experts: int = 128) -> GateStatistics:
    """Read a gates.json, or statistics that the paper's authors published.

    Those are `{pair: {"top1": [...], "conf1": [...], "mean": [...]}}`; pairs are named SRC-TGT, SRC-X or X-TGT.

    Args:
        path: the file.
        layers: names of the model's sparse layers, which a published file does not give.
        num_experts: experts of an original layer, likewise.

    Raises:
        StatisticsError: missing, cut short, not statistics, misshapen, with values that no run could give.
    """
    payload = read_json(path)
    if not isinstance(payload, dict):
        raise StatisticsError(f"{path}: no gate statistics.", "A list of expert ids goes with `keep`.")
    if "format" in payload:
        return GateStatistics.from_json(payload, path)
    remedy = "Give a file that `collect-gates` wrote."
    for pair, entry in payload.items():
        is_entry = isinstance(entry, Mapping) and not set(entry).isdisjoint(FIELDS.values())
        if not is_entry or not all(split_pair(pair)):
            raise StatisticsError(
                f"{path}: neither a gates.json nor published gate statistics ({pair!r} fits neither).", remedy
            )
    if not payload:
        raise StatisticsError(f"{path}: no language pairs.", remedy)
    held = [name for name, field in FIELDS.items() if all(field in entry for entry in payload.values())]
    shape, entries = (len(layers), num_experts), {}
    for pair, entry in payload.items():
        sums = GateSums.zeros(*shape)
        sums["tokens"] = np.ones(len(layers))
        for name in held:
            try:
                sums[name] = array_of(entry[FIELDS[name]], (len(layers) * num_experts,)).reshape(shape)
            except ValueError as error:
                raise StatisticsError(
                    f"{path}: {pair}: {FIELDS[name]} {error}.",
                    "Collect the gates of this model; the authors' are of NLLB-200 54.5B, 12 layers x 128 experts.",
                ) from error
        entries[pair] = _of_ratios(sums)
    lacks = frozenset(FIELDS).difference(held)
    return GateStatistics(
        format=GateStatistics.FORMAT,
        model=GateModel(fingerprint=None, model_type=None),
        mode="published",
        layers=tuple(layers),
        num_experts=num_experts,
        top_k=2,
        entries=entries,
        lacks=lacks,
    )


OutputArrays = dict[tuple[str, str], Floats]
"""(text's name, layer's name) -> `[experts, width]`, sum of f over the tokens routed to an expert."""


def write_outputs(path: Path, fingerprint: str, parts: Sequence[OutputArrays]) -> None:
    """Write the sums of several processes, added up, to the file beside a gates.json; the file appears whole.

    Args:
        fingerprint: fingerprint of the checkpoint that was run.
    """
    keys = sorted({key for part in parts for key in part})
    tensors = {"/".join(key): np.sum([part[key] for part in parts if key in part], axis=0) for key in keys}
    outputs = [Output(name, "F64", own.shape, given(own)) for name, own in tensors.items()]
    # safetensors would write the two in an order that changes from call to call.
    head = header_bytes(outputs, {"format": OUTPUTS_FORMAT, "fingerprint": fingerprint})
    with new_file(path) as temporary:
        temporary.write_bytes(head + b"".join(own.tobytes() for own in tensors.values()))


def read_outputs(path: Path) -> tuple[str, OutputArrays]:
    """Fingerprint of the checkpoint that was run, and the sums of its outputs.

    Raises:
        StatisticsError: the file is missing, damaged or of another format.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise StatisticsError(f"{path}: no such file", COLLECT_OUTPUTS)
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            # By the header: numpy has no bfloat16, nor other types of fewer bits.
            names = [*file.keys()]
            is_sound = all(file.get_slice(name).get_dtype() == "F64" for name in names)
            tensors = {name: file.get_tensor(name) for name in names if is_sound}
    except (SafetensorError, OSError, ValueError) as error:
        raise StatisticsError(f"{path}: is damaged ({reason_of(error)})", COLLECT_OUTPUTS) from error
    is_sound &= all(values.ndim == 2 and np.isfinite(values).all() for values in tensors.values())
    if metadata.get("format") != OUTPUTS_FORMAT or not is_sound:
        raise StatisticsError(f"{path}: holds no sums of outputs", COLLECT_OUTPUTS)
    sums = {name.rpartition("/")[::2]: values for name, values in tensors.items()}
    return str(metadata.get("fingerprint")), sums


def outputs_path(statistics: Path) -> Path:
    """The file of sums of outputs beside a gates.json."""
    return statistics.with_name(f"{statistics.stem}.outputs.safetensors")


def added(parts: Sequence[OutputArrays], texts: Sequence[str], layer: str) -> Floats:
    """`[experts, width]`: the sums of a layer over some texts of several files.

    Raises:
        StatisticsError: a file lacks a text, or the files have different widths.
    """
    found = []
    for text in texts:
        own = [part[text, layer] for part in parts if (text, layer) in part]
        if not own:
            raise StatisticsError(f"No sums of outputs of the text {text!r} in {layer}.", COLLECT_OUTPUTS)
        found += own
    if len({values.shape for values in found}) > 1:
        raise StatisticsError(f"Sums of outputs of {layer} are of different shapes.", COLLECT_OUTPUTS)
    return np.asarray(np.sum(found, axis=0))
