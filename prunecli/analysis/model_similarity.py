"""How alike two models are inside (2309.01826, sections 2.3 and 4.4): CKA and LNS of all of their components."""

from __future__ import annotations

import gc
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from prunecli.analysis.components import Component, components
from prunecli.errors import DataError, UsageError
from prunecli.progress import Progress, silent
from prunecli.text.parallel import ParallelText, pair_name
from prunecli.text.plain import PlainText

if TYPE_CHECKING:
    from prunecli.analysis.representations import Representations
    from prunecli.model.checkpoint import Checkpoint

Measure = Literal["cka", "lns"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
LEAST = 20
"""Sentences below which neither measure says anything."""


@dataclass(frozen=True)
class SimilarityOptions:
    """How similarity is measured.

    Attributes:
        measures: which of them.
        neighbours: k of LNS as a share of the sentences.
        batch_tokens: padded tokens in a batch.
        context: tokens that a plain text is cut to; None: see `window_length`.
        device, dtype: as in `load_model`.
        random_seeds: of random weights of the first model's architecture that it is compared with too.
    """

    measures: tuple[Measure, ...] = MEASURES
    neighbours: float = 0.05
    batch_tokens: int = 4096
    context: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    random_seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Portion:
    """Sentences that are compared with each other: those of one language pair, or plain texts.

    Attributes:
        name: of the pair, or of the files.
        sources: what the encoder reads, or the only stack.
        targets: what the decoder reads; None for plain texts.
        pair: languages of the two.
    """

    name: str
    sources: tuple[str, ...]
    targets: tuple[str, ...] | None = None
    pair: tuple[str, str] | None = None

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def sha256(self) -> str:
        """A hash of the sentences."""
        return hashlib.sha256("\n".join((*self.sources, "", *(self.targets or ()))).encode()).hexdigest()


@dataclass(frozen=True)
class Comparison:
    """The similarities of the components of two models, or of one.

    Attributes:
        first, second: the components that have outputs; the second's are none where one model stands alone.
        removed: names of the components that either lacks.
        widths: of the outputs of either.
        similarities: measure -> `[first and second, first and second]`, mean over the portions; NaN for components
            with the same output for every sentence.
    """

    first: tuple[Component, ...]
    second: tuple[Component, ...]
    removed: tuple[tuple[str, ...], tuple[str, ...]]
    widths: tuple[int, int]
    similarities: Mapping[Measure, NDArray[np.float64]]

    def within_first(self, measure: Measure) -> NDArray[np.float64]:
        """`[first, first]`."""
        return self.similarities[measure][: len(self.first), : len(self.first)]

    def within_second(self, measure: Measure) -> NDArray[np.float64]:
        """`[second, second]`."""
        return self.similarities[measure][len(self.first) :, len(self.first) :]

    def between(self, measure: Measure) -> NDArray[np.float64]:
        """`[first, second]`."""
        return self.similarities[measure][: len(self.first), len(self.first) :]


def parallel_portions(text: ParallelText, pairs: Sequence[tuple[str, str]]) -> tuple[Portion, ...]:
    """A portion for each pair, without the lines that are blank on either side.

    Raises:
        DataError: a pair has fewer than `LEAST` sentences.
    """
    portions = []
    for pair in pairs:
        lines = zip(text.sentences[pair[0]], text.sentences[pair[1]], strict=True)
        both = [line for line in lines if line[0].strip() and line[1].strip()]
        sources, targets = tuple(line[0] for line in both), tuple(line[1] for line in both)
        portions.append(_enough(Portion(pair_name(*pair), sources, targets, pair)))
    return tuple(portions)


def plain_portions(text: PlainText) -> tuple[Portion, ...]:
    """All texts as one portion.

    Raises:
        DataError: there are fewer than `LEAST`.
    """
    return (_enough(Portion(", ".join(path.name for path in text.files), text.texts)),)


def _enough(portion: Portion) -> Portion:
    if len(portion) < LEAST:
        raise DataError(
            f"{portion.name}: {len(portion):,} sentences are too few to compare models on",
            f"Give at least {LEAST}, better some thousand.",
        )
    return portion


def compare(
    checkpoints: Mapping[str, Checkpoint],
    portions: Sequence[Portion],
    options: SimilarityOptions,
    progress: Progress = silent,
) -> dict[str, Comparison]:
    """Compare the first checkpoint with each of the others, or look at it alone where there are none.

    One model is in memory at a time. The outputs of the first lie in temporary files (4 bytes x components x sentences
    x width); those of the others too, but only of the portion at hand.

    Args:
        checkpoints: label -> checkpoint.
        portions: compared one by one; similarities are their means.

    Returns:
        Label of each of the others -> comparison; of one checkpoint alone, its own label -> that of it. Random weights
        have the labels of `random_label`.

    Raises:
        PruneError: a checkpoint, text or option that cannot be used, or outputs that are no numbers.
    """
    for checkpoint in checkpoints.values():
        require_text(checkpoint, portions)
    counts = {portion.name: neighbours_of(portion, options) for portion in portions}
    (label, first), *others = checkpoints.items()
    with tempfile.TemporaryDirectory(prefix="prunecli-") as directory:
        scratch = Path(directory)
        own = dict(_represented(label, first, portions, options, scratch, progress, keep=True))
        shape = next(iter(own.values()))
        if not others and not options.random_seeds:
            similarities = [_similarities((outputs,), options, counts[name]) for name, outputs in own.items()]
            return {label: _comparison([(first, shape)], similarities)}
        comparisons = {}
        drawn = [(random_label(seed), first, seed) for seed in options.random_seeds]
        for label, other, seed in [*((label, other, None) for label, other in others), *drawn]:
            similarities = []
            for name, outputs in _represented(label, other, portions, options, scratch, progress, seed=seed):
                similarities.append(_similarities((own[name], outputs), options, counts[name]))
            comparisons[label] = _comparison([(first, shape), (other, outputs)], similarities)
        return comparisons


def random_label(seed: int) -> str:
    """What random weights are called among the comparisons: no directory's name."""
    return f"random weights, seed {seed}"


def neighbours_of(portion: Portion, options: SimilarityOptions) -> int | None:
    """k of LNS for this portion; None where LNS is not asked for.

    Raises:
        UsageError: there is no such k.
    """
    from prunecli.analysis.lns import neighbour_count

    return neighbour_count(options.neighbours, len(portion)) if "lns" in options.measures else None


def require_text(checkpoint: Checkpoint, portions: Sequence[Portion]) -> None:
    """Refuse text of the wrong kind before a model is loaded.

    Raises:
        UsageError: parallel text for a model with one stack, or plain text for one with two.
    """
    parallel = any(portion.pair is not None for portion in portions)
    stacks = checkpoint.require_architecture().stacks
    if len(stacks) > 1 and not parallel:
        raise UsageError(
            f"{checkpoint.path}: an encoder with a decoder reads pairs of sentences, not --text",
            "Give --data DIR, or --source-file, --target-file and --pairs.",
        )
    if len(stacks) == 1 and parallel:
        raise UsageError(
            f"{checkpoint.path}: a model with one stack reads plain text, not pairs of sentences",
            "Give --text FILE, one sentence a line.",
        )


def _represented(
    label: str,
    checkpoint: Checkpoint,
    portions: Sequence[Portion],
    options: SimilarityOptions,
    scratch: Path,
    progress: Progress,
    *,
    keep: bool = False,
    seed: int | None = None,
) -> Iterator[tuple[str, Representations]]:
    """Name of each portion, and the outputs of the model on it; without `keep` they last until the next portion.

    Args:
        seed: of random weights in the place of the checkpoint's, in float32.
    """
    from prunecli.analysis.representations import represent
    from prunecli.modules.devices import choose_device
    from prunecli.modules.drawing import random_model
    from prunecli.modules.loading import load_model
    from prunecli.running.encoding import text_examples, translation_examples
    from prunecli.running.examples import Examples
    from prunecli.running.runner import InMemory
    from prunecli.text.tokens import load_tokenizer

    tokenizer = load_tokenizer(checkpoint.path)
    if seed is None:
        model = load_model(checkpoint.path, device=options.device, dtype=options.dtype)
    else:
        model = random_model(checkpoint, seed).to(choose_device(options.device)).eval()
    runner = InMemory(model)
    with progress(f"{label}: reading", sum(map(len, portions)), "sentences") as advance:
        for portion in portions:
            examples: Examples
            if portion.pair is None or portion.targets is None:
                examples = text_examples(
                    tokenizer, runner.model, portion.sources, options.context, skip_empty=False
                )
            else:
                sentences = dict(zip(portion.pair, (portion.sources, portion.targets), strict=True))
                text = ParallelText(portion.name, sentences)
                examples = translation_examples(tokenizer, runner.model, text, [portion.pair])
            batches = examples.batches(options.batch_tokens)
            directory = Path(tempfile.mkdtemp(dir=scratch))
            yield portion.name, represent(runner, components(checkpoint), batches, directory, advance)
            if not keep:
                shutil.rmtree(directory)
    del runner, model
    gc.collect()  # before the next one is loaded


def _similarities(
    models: Sequence[Representations], options: SimilarityOptions, k: int | None
) -> dict[Measure, NDArray[np.float64]]:
    """Measure -> the similarities of all components of `models`, a square matrix."""
    from prunecli.analysis.cka import linear_cka
    from prunecli.analysis.lns import local_neighbourhood_similarity

    features = [array for model in models for array in model.features]
    similarities: dict[Measure, NDArray[np.float64]] = {}
    if "cka" in options.measures:
        similarities["cka"] = linear_cka(features)
    if k is not None:
        similarities["lns"] = local_neighbourhood_similarity(features, k)
    return similarities


def _comparison(
    models: Sequence[tuple[Checkpoint, Representations]],
    similarities: Sequence[Mapping[Measure, NDArray[np.float64]]],
) -> Comparison:
    """Of one or two models, from the similarities on each portion."""
    (checkpoint, outputs), *others = models
    other = others[0] if others else None
    return Comparison(
        outputs.components,
        other[1].components if other else (),
        (_removed(checkpoint), _removed(other[0]) if other else ()),
        (outputs.width, other[1].width if other else 0),
        {measure: np.mean([each[measure] for each in similarities], axis=0) for measure in similarities[0]},
    )


def _removed(checkpoint: Checkpoint) -> tuple[str, ...]:
    return tuple(component.name for component in components(checkpoint) if component.removed)
