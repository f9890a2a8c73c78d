"""Similarity of two models' components (2309.01826, sections 2.3 and 4.4): CKA and LNS of all of them."""

import errno
import gc
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import pandas as pd
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prunecli.analysis.measures import Features, linear_cka, local_neighbourhood_similarity, neighbour_count
from prunecli.architectures.records import Side
from prunecli.errors import DataError, OutputError, UnsupportedModelError, UsageError
from prunecli.evaluation.options import SimilarityOptions
from prunecli.model.checkpoint import Checkpoint
from prunecli.model.decision import Floats
from prunecli.model.patchwork import submodule
from prunecli.modules.devices import choose_device
from prunecli.modules.drawing import random_model
from prunecli.modules.hooks import states_of
from prunecli.modules.loading import load_model
from prunecli.progress import Progress, silent
from prunecli.results.document import Json
from prunecli.results.similarity import Similarity, ends_of
from prunecli.running.batches import TokenObserver, observe_batches
from prunecli.running.encoding import text_examples, translation_examples
from prunecli.running.examples import Batch, Examples, num_examples
from prunecli.running.runner import Advance, InMemory, ignored
from prunecli.text.choice import Text, columns
from prunecli.text.files import lines_sha256
from prunecli.text.parallel import Pairs, ParallelText, pair_name
from prunecli.text.tokens import load_tokenizer

Kind = Literal["self", "cross", "ffn"]
SHORT = {"self": "sa", "cross": "ca", "ffn": "ffn"}
"""Kind -> what Figure 1 of 2309.01826 calls it."""
Key = tuple[Side, int, Kind]
"""Which component of a model it is, whatever the family calls it."""


@dataclass(frozen=True)
class Component:
    """One component of a model.

    Attributes:
        name: of the attention, as in `Structure`, or `FfnLayer.own_name`.
        side: of which stack.
        layer: its number in the stack.
        kind: self-attention, cross-attention or FFN.
        block: name of its layer.
        output: name of the module whose output is added to the residual stream.
        removed: the checkpoint holds no such component.
    """

    name: str
    side: Side
    layer: int
    kind: Kind
    block: str
    output: str
    removed: bool = False

    @property
    def key(self) -> Key:
        """Key of the corresponding component in another model."""
        return self.side, self.layer, self.kind

    @property
    def label(self) -> str:
        """Label of Figure 1: "0.sa" is the self-attention of the first layer."""
        return f"{self.layer}.{SHORT[self.kind]}"


def components(checkpoint: Checkpoint) -> Iterator[Component]:
    """Yield every component, the encoder's first, in the order in which a token goes through them.

    Raises:
        UnsupportedModelError: its class says nothing.
        CheckpointError: config.json lacks a size, or says of its FFNs what cannot be.
    """
    for layer in checkpoint.layout.layers:
        block, ffn, spec = layer.name, layer.ffn, layer.ffn.stack.ffn
        where = layer.side, layer.number
        for one in layer.attentions:
            output = f"{block}.{one.spec.residual or one.spec.output}"
            yield Component(one.name, *where, one.spec.kind, block, output, one.removed)
        if not (spec.name or spec.tensors):
            continue  # of a found family whose FFN no key sizes
        # Where an FFN is no module, its last linear layer makes its output.
        last = "" if spec.name else f".{spec.tensors[-1].name.rpartition('.')[0]}"
        inner = spec.residual or spec.module
        output = f"{block}.{inner}" if inner else f"{ffn.name}{last}"
        yield Component(ffn.own_name, *where, "ffn", block, output, ffn.removed)


def represent(
    runner: InMemory,
    components: Iterable[Component],
    batches: Sequence[Batch],
    advance: Advance = ignored,
) -> dict[Component, Features]:
    """Run a model over sentences, and keep the mean of each component's outputs over a sentence's tokens.

    An output is what the component adds to the residual stream. Every token that the model reads counts, special
    tokens too; padding does not. The decoder reads the reference (forced decoding). Memory is that of the model and
    of one batch: the means go to files, 4 x components x sentences x width bytes.

    Args:
        runner: of a model with the components of its checkpoint; removed ones are left out.
        batches: their `indices` are 0 to n - 1, each once.
        advance: called with the number of sentences done.

    Returns:
        Each component that the model has -> its outputs.

    Raises:
        DataError: a representation is NaN or infinite; the message names the component and the sentence.
        UnsupportedModelError: the model has no component, or one gave no output.
        OutputError: the disk is full.
    """
    present = tuple(component for component in components if not component.removed)
    if not present:
        raise UnsupportedModelError("the model has no layer, so that there is nothing to compare")
    observer, sentences = ComponentObserver(present), num_examples(batches)
    found: dict[Component, Features] = {}

    def finish(batch: Batch) -> None:
        means = observer.take()
        for component in present:
            if component not in means:
                raise UnsupportedModelError(f"{component.name}: the model does not run it")
            rows = means[component].cpu().numpy()
            finite = np.isfinite(rows).all(axis=1)
            if not finite.all():
                sentence = batch.indices[int(np.argmin(finite))] + 1
                raise DataError(
                    f"{component.name}: its output for sentence {sentence:,} holds NaN or infinity",
                    "The weights are damaged, or overflow the type: try `dtype=float32`.",
                )
            if component not in found:
                found[component] = _file(sentences, rows.shape[1])
            found[component][list(batch.indices)] = rows
        advance(len(batch.indices))

    observe_batches(runner, observer, batches, "components", finish=finish)
    return found


class ComponentObserver(TokenObserver):
    """Takes the token means of components' outputs.

    Several layers may share one module: an output belongs to the layer that is running.
    """

    def __init__(self, components: Sequence[Component]) -> None:
        self._components = components
        self._means: dict[Component, Tensor] = {}
        self._block = ""

    def hooks(self, model: nn.Module) -> Iterator[RemovableHandle]:
        """See `TokenObserver`."""
        sharing: dict[nn.Module, dict[str, Component]] = defaultdict(dict)
        for component in self._components:
            sharing[submodule(model, component.output)][component.block] = component
        for block in dict.fromkeys(component.block for component in self._components):
            layer = submodule(model, block)
            yield layer.register_forward_pre_hook(partial(self._enter, block))
        for module, own in sharing.items():
            yield module.register_forward_hook(partial(self._leave, own))

    def take(self) -> dict[Component, Tensor]:
        """Each component that has run since the last call -> `[batch, width]` float32."""
        means, self._means = self._means, {}
        return means

    def _enter(self, block: str, _module: nn.Module, _inputs: Any) -> None:
        self._block = block

    def _leave(self, own: Mapping[str, Component], _module: nn.Module, _inputs: Any, output: Any) -> None:
        component = own[self._block]
        outputs = self.by_text(states_of(output))
        mask = self.mask.to(outputs.device)
        # At once, so that one output at a time is held.
        total = outputs.float().masked_fill(~mask[..., None], 0).sum(dim=1)
        self._means[component] = total / mask.sum(dim=1, keepdim=True)


def _file(sentences: int, width: int) -> Features:
    """A temporary file that is mapped into memory, and lives as long; its place on the disk is taken at once.

    Raises:
        OutputError: the disk is full. A write to a mapping without a place would end the process.
    """
    with tempfile.TemporaryFile() as file:
        found = np.memmap(file, np.float32, "w+", shape=(sentences, width))
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, found.nbytes)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise OutputError(
                    f"{tempfile.gettempdir()}: no space left for the outputs of the components",
                    "Free some, name another directory in TMPDIR, or compare on fewer pairs or sentences.",
                ) from error
    return found


Outputs = Mapping[Component, Features]
"""Component of a model -> its outputs."""
LEAST = 20
"""Sentences below which neither measure is meaningful."""


class Portion(ParallelText):
    """Sentences that are compared with each other: those of one language pair, or plain texts.

    Attributes:
        split: name of the pair, or of the files.
        sentences: source and target language -> sentences; or "" -> plain texts.
    """

    @property
    def sha256(self) -> str:
        """A hash of the sentences."""
        first, *others = self.sentences.values()
        return lines_sha256([*first, "", *chain(*others)])


def portions_of(text: Text, pairs: Pairs = ()) -> list[Portion]:
    """A portion for each pair, without the lines that are blank on either side; one of all plain texts.

    Raises:
        DataError: a portion has fewer than `LEAST` sentences.
    """
    if isinstance(text, ParallelText):
        named = {pair_name(*pair): columns(text, (pair,)) for pair in pairs}
    else:
        named = {", ".join(path.name for path in text.files): columns(text)}
    found = [Portion(name, {side: tuple(own) for side, own in both.items()}) for name, both in named.items()]
    for portion in found:
        if len(portion) < LEAST:
            raise DataError(
                f"{portion.split}: {len(portion):,} sentences are too few to compare models on",
                f"Give at least {LEAST}, better some thousand.",
            )
    return found


@dataclass(frozen=True)
class Comparison:
    """The similarities of the components of two models, or of one.

    Attributes:
        components: the components with outputs of each model.
        width: width of the widest output.
        similarities: measure -> a square matrix over the components of all models, mean over the portions; NaN for
            components with the same output for every sentence.
    """

    components: tuple[tuple[Component, ...], ...]
    width: int
    similarities: Mapping[str, Floats]

    def part(self, name: str, measure: str) -> Floats:
        """The similarities within the `first` or the `second` model, or `between` both: `[rows, columns]`."""
        count = len(self.components[0])
        places = {"first": slice(count), "second": slice(count, None)}
        rows, columns = (places[end] for end in ends_of(name))
        return self.similarities[measure][rows, columns]


def compare(
    checkpoints: Mapping[str, Checkpoint],
    portions: Sequence[Portion],
    options: SimilarityOptions,
    progress: Progress = silent,
) -> tuple[Similarity, int]:
    """Compare two checkpoints, or the components of one.

    One model is in memory at a time. The outputs of the first are in temporary files (4 bytes x components x sentences
    x width); those of the others too, for two portions at a time.

    Args:
        checkpoints: label -> checkpoint. Those after the second are benchmarks: their similarity to the first is the
            100 % (2309.01826, 4.4). Random weights are the lower bound (section 3).
        portions: compared one by one; similarities are their means.

    Returns:
        similarity.json, and the width of the widest output.

    Raises:
        PruneError: a checkpoint, text or option that cannot be used, or outputs that are not finite.
    """
    parallel = any(len(portion.sentences) > 1 for portion in portions)
    for checkpoint in checkpoints.values():
        if (len(checkpoint.require_architecture().stacks) > 1) != parallel:
            kind = "a model with one stack" if parallel else "an encoder with a decoder"
            raise UsageError(
                f"{checkpoint.path}: {kind} reads other text than the first model",
                "Compare models with one stack, or models with two.",
            )
    has_lns = options.measure != "cka"
    counts = [neighbour_count(options.neighbours, len(one)) if has_lns else None for one in portions]

    def compared(pairs: Iterable[Sequence[Outputs]]) -> Comparison:
        """Comparison of one or two models from their outputs on each portion."""
        found = defaultdict[str, list[Floats]](list)
        for outputs, k in zip(pairs, counts, strict=True):
            features = [array for own in outputs for array in own.values()]
            if options.measure != "lns":
                found["cka"].append(linear_cka(features))
            if k is not None:
                found["lns"].append(local_neighbourhood_similarity(features, k))
        return Comparison(
            tuple(map(tuple, outputs)),
            max(array.shape[1] for array in features),
            {measure: np.mean(own, axis=0) for measure, own in found.items()},
        )

    (label, first), *others = checkpoints.items()
    whole = [*_represented(label, first, portions, options, progress)]
    found = [
        compared(zip(whole, _represented(*other, portions, options, progress), strict=True))
        for other in others
    ]
    randoms = []
    for seed in range(options.random_baseline or 0):
        drawn = _represented(f"random weights, seed {seed}", first, portions, options, progress, seed)
        randoms.append(compared(zip(whole, drawn, strict=True)))
    main, *benchmarks = found or [compared(zip(whole, strict=True))]
    names = list(checkpoints)
    result = Similarity.model_validate(
        {
            **Similarity.header(checkpoints.values()),
            "checkpoints": names,
            "benchmarks": names[2:],
            **({"random_seeds": [*range(len(randoms))]} if randoms else {}),
            "device": options.device,
            "dtype": options.dtype,
            "context": options.context,
            "text": [
                {"name": one.split, "sentences": len(one), "neighbours": k, "sha256": one.sha256}
                for one, k in zip(portions, counts, strict=True)
            ],
            **_fields(checkpoints.values(), main, benchmarks, randoms),
        }
    )
    return result, main.width


def _represented(
    label: str,
    checkpoint: Checkpoint,
    portions: Sequence[Portion],
    options: SimilarityOptions,
    progress: Progress,
    seed: int | None = None,
) -> Iterator[Outputs]:
    """The outputs of the model on each portion.

    Args:
        seed: of random weights in float32 that replace the checkpoint's.
    """
    tokenizer = load_tokenizer(checkpoint.path)
    if seed is None:
        model = load_model(checkpoint.path, device=options.device, dtype=options.dtype)
    else:
        model = random_model(checkpoint, seed).to(choose_device(options.device)).eval()
    with progress(f"{label}: reading", sum(map(len, portions)), "sentences") as advance:
        for portion in portions:
            examples: Examples
            if len(portion.sentences) > 1:
                source, target = portion.sentences
                examples = translation_examples(tokenizer, model, portion, [(source, target)])
            else:
                (texts,) = portion.sentences.values()
                examples = text_examples(tokenizer, model, texts, options.context, skip_empty=False)
            batches = examples.batches(options.batch_tokens)
            yield represent(InMemory(model), components(checkpoint), batches, advance)
    del model
    gc.collect()  # before the next one is loaded


KEY = ["side", "layer", "kind"]


def diagonal(comparison: Comparison) -> pd.DataFrame:
    """Similarity of each component of the first model to that of the same side, layer and kind in the second.

    If one model stands alone, of each component to the next of its side: similar successors are redundant (4.4.2).

    Returns:
        A row for each two components, indexed by side, layer and kind of the first; columns `first` and `second`
        (names) and the measures. NaN: a component has the same output for every sentence.
    """
    first, *others = comparison.components
    if others:
        held = {component.key: len(first) + place for place, component in enumerate(others[0])}
        ends = [(row, held[one.key]) for row, one in enumerate(first) if one.key in held]
    else:
        ends = [(row, row + 1) for row in range(len(first) - 1) if first[row].side == first[row + 1].side]
    both = [component for own in comparison.components for component in own]
    rows = [(*both[row].key, both[row].name, both[column].name) for row, column in ends]
    values = {
        measure: [matrix[row, column] for row, column in ends]
        for measure, matrix in comparison.similarities.items()
    }
    return pd.DataFrame(rows, columns=[*KEY, "first", "second"]).assign(**values).set_index(KEY)


def _fields(
    checkpoints: Iterable[Checkpoint],
    comparison: Comparison,
    benchmarks: Sequence[Comparison],
    randoms: Sequence[Comparison],
) -> Json:
    """Components, matrices, the diagonal (or successive pairs) and its means, for similarity.json."""
    measures, pairs = list(comparison.similarities), diagonal(comparison)
    for measure in measures:
        for name, others in (("benchmark", benchmarks), ("random", randoms)):
            if others:
                known = pd.concat([diagonal(other)[measure] for other in others]).groupby(level=KEY)
                pairs[f"{measure}_{name}"] = known.mean()
        if benchmarks:
            whole = pairs[f"{measure}_benchmark"].replace(0, np.nan)
            pairs[f"{measure}_normalised"] = 100 * pairs[measure] / whole
    means = {}
    for side, own in pairs.groupby(level="side", sort=False):
        found: dict[str, float] = {measure: own[measure].mean() for measure in measures}
        for measure in measures:
            if benchmarks:
                known = own[own[f"{measure}_normalised"].notna()]
                # A quotient of two means, not a mean of quotients.
                share = known[measure].mean() / known[f"{measure}_benchmark"].mean()
                found[f"{measure}_normalised"] = 100 * share
            if randoms:
                found[f"{measure}_random"] = own[f"{measure}_random"][own[measure].notna()].mean()
        means[side] = found
    models = dict(zip(("first", "second"), comparison.components, strict=False))
    names = [*models, "between"] if len(models) > 1 else [*models]
    left_out = {}
    for (name, held), checkpoint in zip(models.items(), checkpoints, strict=False):
        same = np.isnan(np.diagonal(comparison.part(name, measures[0])))
        left_out[name] = {
            "removed": [one.name for one in components(checkpoint) if one.removed],
            "constant": [one.name for one, is_same in zip(held, same, strict=True) if is_same],
        }
    return {
        "components": models,
        "left_out": left_out,
        "matrices": {
            measure: {
                name: _listed(pd.DataFrame(comparison.part(name, measure))).to_numpy().tolist()
                for name in names
            }
            for measure in measures
        },
        "corresponding" if len(models) > 1 else "successive": _listed(pairs).to_dict("records"),
        "mean": _listed(pd.DataFrame(means)).to_dict(),
    }


def _listed(frame: pd.DataFrame) -> pd.DataFrame:
    """Rounded numbers as JSON has them, None for NaN."""
    return frame.round(6).astype(object).where(frame.notna(), None)
