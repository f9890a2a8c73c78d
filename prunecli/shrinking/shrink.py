"""`shrink`: from a model, a text and a target to the smaller model that is best on the text."""

import shutil
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from prunecli import __version__
from prunecli.errors import PruneError, UnsupportedModelError, UsageError
from prunecli.evaluation.latency import bench_latency
from prunecli.evaluation.options import LatencyOptions
from prunecli.evaluation.quality_check import Measurer, little
from prunecli.methods.experts.options import margin_bytes
from prunecli.methods.layers.score import Maps, cut_replaced
from prunecli.methods.units import TextRun
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.cost import decoding_bytes, usual_load
from prunecli.model.rewrite import Rewrite
from prunecli.pipeline import Applied, apply
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.rewriting import Shrunk, Stage, Tried
from prunecli.selection.cut import Selection, cut, together
from prunecli.shrinking.levers import KINDS, Levers, named, parts, windowed
from prunecli.shrinking.options import DEFAULT_SHARE, ShrinkOptions
from prunecli.shrinking.search import Metrics, Search, Shares, sizes_of
from prunecli.tensors.transaction import Store, digest, partial_path, refuse_target, refuse_unwritable
from prunecli.text.choice import Dataset, Lines, TextChoice, all_texts, task_of
from prunecli.text.parallel import ParallelText
from prunecli.text.plain import LabelledText, PlainText
from prunecli.training.data import TrainingData
from prunecli.training.finetune import Destination, finetune
from prunecli.training.loss import check_logits_file
from prunecli.training.options import LossOptions, TrainingOptions
from prunecli.training.state import Start

WARMUP, EVERY = 20, 100
"""Updates of the warm-up and between validations, if the healing is bounded by time."""
CLOSING = 4
"""The closing table is measured on as many times more text as a trial."""


def figures_path(output: Path) -> Path:
    """The file beside a result that holds everything that was tried."""
    return output.with_name(f"{output.name}.shrink.json")


@dataclass
class Shrinking:
    """One run: tries mixtures, and carries out the best one.

    Attributes:
        source: the original.
        choice: the text.
        options: see `ShrinkOptions`.
        output: directory of the result, beside which an unfinished run is kept. If None, nothing is kept.
        closing: the part of the text that the result is reported on.
    """

    source: Checkpoint
    choice: TextChoice
    options: ShrinkOptions
    output: Path | None
    progress: Progress
    say: Say

    def __post_init__(self) -> None:
        """Read the text, find an unfinished run, and measure the original."""
        source, options = self.source, self.options
        source.check()
        task = task_of(source)
        self.choice.check_task(task)
        if options.teacher_logits is not None:
            check_logits_file(options.teacher_logits, task)
        data = self.choice.read(task, self.say)
        if task == "embedding":
            data = replace(data, text=_plain(data))
        first, second, third = self._parts = parts(windowed(data, source.config))
        self.closing = little(third, CLOSING * options.trial_tokens)
        self._scored = little(first, options.score_tokens)
        # A run for another target can use these measurements too.
        work = digest(
            [
                *(__version__, source.fingerprint, data.text.sha256, data.pairs, first.context, task),
                *(options.uniform, options.score_tokens, options.trial_tokens, options.replace),
                options.speed is not None,
            ]
        )
        self._store = Store(None if self.output is None else partial_path(self.output), work)
        if self._store.records:
            self.say(f"Resuming an unfinished run: {len(self._store.records)} results are there.")
        self._maps: Maps = {}
        # The maps are solved from the states of a model in memory.
        self._replaces = options.replace == "linear" and options.memory is None
        self._levers = Levers(
            source, self._scored, _lines(first), options, self._store, self.progress, self.say
        ).find()
        self._measurer = Measurer(source, little(second, options.trial_tokens), options, self.progress)
        self._begun, self._begun_with = time.monotonic(), set[str]()

    def search(self) -> tuple[Tried, list[Tried]]:
        """The best mixture, and everything that was tried.

        Raises:
            UsageError: no mixture reaches the target.
        """
        options = self.options
        in_bytes = options.size is not None or options.fit is not None
        size = sizes_of(self.source, self._levers, in_bytes=in_bytes)
        whole = size({}, {})
        if options.speed is not None:
            most = 1 / options.speed
        elif in_bytes:
            most = self._most_bytes()
        else:
            most = whole * (options.params or DEFAULT_SHARE)
        search = Search(
            self._levers,
            lambda shares, metrics: size(shares, metrics) / (whole if options.speed else 1),
            lambda one: (
                1 / (one.speedup or 1) if options.speed else one.bytes if in_bytes else one.parameters
            ),
            most,
            self._measurer.original.cost or 0.0,
            self._attempt,
        )
        return search.run(options.trials), search.tried

    def _most_bytes(self) -> int:
        """Bytes that the weights may have.

        Raises:
            UsageError: decoding alone needs more.
        """
        options = self.options
        if options.fit is None:
            return options.size or 0
        left = (
            options.fit
            - margin_bytes(options.fit)
            - sum(decoding_bytes(self.source, usual_load(self.source), None))
        )
        if left <= 0:
            raise UsageError(f"`fit={options.fit}`: decoding alone needs more memory.", "Give more memory.")
        return left

    def selection(self, shares: Shares, metrics: Metrics) -> Selection:
        """The units that stay after these shares are removed."""
        own = [
            named(self._levers[name].select(shares[name], metrics[name]), self.options.target)
            for name in KINDS
            if shares.get(name)
        ]
        return together(own)

    def rewrite(self, shares: Shares, metrics: Metrics) -> Rewrite:
        """How these shares are removed; layers leave linear maps, if that is asked for and possible."""
        selection = self.selection(shares, metrics)
        if self._replaces and "layers" in shares:
            run = TextRun(self.choice, self.options, None, self.progress, self.say)
            try:
                return cut_replaced(self.source, selection, self._scored, run, self._maps)
            except UnsupportedModelError as error:
                made = cut(self.source, selection)  # which refuses layers that cannot go at all
                self._replaces = False
                self.say(f"No linear maps: {error.message}.")
                return made
        return cut(self.source, selection)

    def _attempt(self, shares: Shares, metrics: dict[str, str], stage: str) -> Tried | None:
        """Cut the model in a temporary directory and measure it, or return what an earlier run measured.

        None: the time is over, or the model cannot lose these units.
        """
        key = f"trial {sorted(shares.items())} {sorted(metrics.items())}"
        is_late = self._is_late(shares, stage)
        if key in self._store.records:
            return Tried.model_validate(self._store.records[key]).model_copy(update={"stage": stage})
        if is_late:
            return None
        what = ", ".join(f"{name} -{share:.0%}" for name, share in shares.items())
        try:
            rewrite = self.rewrite(shares, metrics)
        except UnsupportedModelError as error:  # of these units alone, perhaps
            self.say(f"Not tried, {what}: {error.message}.")
            return None
        with TemporaryDirectory(prefix="prunecli-") as folder:
            path = Path(folder) / "trial"
            applied = apply(self.source, rewrite, path)
            quality = self._measurer.measure(path, what, same_tokens="tokens" not in shares)
            speedup = None if self.options.speed is None else self._speedup(path)
        made = Tried(
            shares=dict(shares),
            metrics=dict(metrics),
            stage=stage,
            parameters=applied.summary.parameters_after,
            bytes=applied.summary.bytes_after,
            speedup=speedup,
            quality=quality,
        )
        self._store.put(key, made.to_json())
        return made

    def _is_late(self, shares: Shares, stage: str) -> bool:
        """Whether the time is over: half of it for the curves. Each curve has one point, and one mixture is tried."""
        what = "whole" if stage == "whole" else ",".join(shares)
        is_first = what not in self._begun_with
        self._begun_with.add(what)
        spent, minutes = time.monotonic() - self._begun, self.options.minutes
        return minutes is not None and not is_first and spent > (60 if stage == "whole" else 30) * minutes

    def _speedup(self, path: Path) -> float | None:
        """How many times faster than the original a model is, measured in turns; None: layer by layer, or it fails."""
        if self.options.memory is not None:
            return None
        options = LatencyOptions(sentences=2, new_tokens=16, runs=3, memory=False, device=self.options.device)
        models = {"original": self.source.path, "smaller": path}
        try:
            found = bench_latency(models, self.choice, options, task=self._parts[0].task)
        except PruneError as error:
            if self.options.speed is not None:
                raise
            self.say(f"The speed is not measured: {error.message}")
            return None
        return float(found.results[1].timings[-1].speedup.median)

    def carry_out(self, best: Tried, output: Path, *, force: bool) -> tuple[Applied, list[Stage]]:
        """Write the result, healed if that is asked for, and measure it on text that nothing was chosen by."""
        options, source = self.options, self.source
        healing = options.heal is not None or options.heal_steps is not None
        work = output.with_name(f"{output.name}.cut")
        cut_path = work / "model" if healing else output
        cut_path.parent.mkdir(parents=True, exist_ok=True)
        rewrite, same = self.rewrite(best.shares, best.metrics), "tokens" not in best.shares
        applied = apply(
            source, rewrite, cut_path, force=force or healing, progress=self.progress, say=self.say
        )
        measurer = Measurer(source, self.closing, options, self.progress)
        sizes, speedup = applied.summary, self._speedup(cut_path)

        def add(model: str, path: Path) -> None:
            quality = measurer.measure(path, f"the {model} model", same_tokens=same)
            after = {"parameters": sizes.parameters_after, "bytes": sizes.bytes_after}
            stages.append(Stage(model=model, **after, speedup=speedup, quality=quality))

        before = {"parameters": sizes.parameters_before, "bytes": sizes.bytes_before}
        stages = [Stage(model="original", **before, quality=measurer.original)]
        add("cut", cut_path)
        if healing:
            teacher = source.path
            # A teacher needs the student's vocabulary, unless it teaches sentence embeddings.
            if not same and self._parts[0].task != "embedding":
                teacher = work / "teacher"
                alone = self.selection({"tokens": best.shares["tokens"]}, {"tokens": best.metrics["tokens"]})
                apply(source, cut(source, alone), teacher, force=True)
            self._heal(cut_path, teacher, Destination(output, force=force))
            add("healed", output)
            shutil.rmtree(work)
            applied = replace(applied, output=output)
        self._store.remove()
        return applied, stages

    def _heal(self, path: Path, teacher: Path, destination: Destination) -> None:
        """Train a cut model on the text that it was chosen by, with a teacher; the last part of the text stays unseen.

        Args:
            path: the cut model.
            teacher: the original, or a copy with the same vocabulary as the cut model.
            destination: where the healed model goes.
        """
        options, (first, second, _) = self.options, self._parts
        steps = options.heal_steps
        train, valid = (
            replace(part.text, texts=tuple(one.rstrip("\n") for one in part.text.texts))
            if isinstance(part.text, PlainText)
            else part.text
            for part in (first, second)
        )
        training = TrainingOptions(
            teacher=teacher,
            teacher_logits=options.teacher_logits,
            steps=steps,
            minutes=options.heal,
            warmup=WARMUP if steps is None else max(steps // 10, 1),
            eval_every=EVERY if steps is None else max(steps // 4, 1),
            batch_tokens=options.batch_tokens,
            device=options.device,
            loss=LossOptions(label_smoothing=0.0, distill=0.5),
            # Dropout would be noise in the vectors to learn.
            dropout=0.0 if first.task == "embedding" else None,
            context=first.context,
        )
        finetune(
            Start(path),
            TrainingData(first.task, train, valid, first.pairs),
            destination,
            training,
            progress=self.progress,
            say=self.say,
        )


def shrink(
    model: Checkpoint | Path | str,
    choice: TextChoice,
    options: ShrinkOptions | None = None,
    output: Path | str | None = None,
    *,
    force: bool = False,
    progress: Progress = silent,
    say: Say = unsaid,
) -> Shrunk:
    """Make a model smaller or faster by removing units of all kinds, those whose removal costs least on a text.

    Args:
        model: an open model, a directory or a name of the hub.
        choice: the text. Units are scored on its first 60 %, mixtures chosen on the next 20 %, and the result reported
            on the last 20 %.
        options: the target, and what may be removed.
        output: a new directory. If None, mixtures are tried and nothing is written.
        force: replace `output`.
        say: called with lines about choices made by default.

    Raises:
        PruneError: a model, text, option or output that cannot be used; a target that no mixture reaches.
    """
    options = options or ShrinkOptions()
    source = model if isinstance(model, Checkpoint) else open_model(model)
    path = None if output is None else Path(output)
    if path is not None:
        refuse_target(path, force=force, source=source.path)
        refuse_unwritable(figures_path(path), force=force)
    # Several models are read and run, for which the same choices are made.
    run = Shrinking(source, choice, options, path, progress, cache(say))
    best, tried = run.search()
    if path is None:
        applied = apply(source, run.rewrite(best.shares, best.metrics))
        stages: list[Stage] = []
    else:
        applied, stages = run.carry_out(best, path, force=force)
    document = Shrunk(
        **Shrunk.header([source]),
        left_out=[*applied.left_out],
        output=None if path is None else str(path),
        stock=applied.stock_support.to_json(),
        arguments=options.recorded(),
        **asdict(applied.summary),
        target=options.target,
        shares=best.shares,
        tried=tried,
        stages=stages,
    )
    if path is not None:
        document.write(figures_path(path), force=True)
    return document


def _plain(data: Dataset) -> PlainText:
    """All texts of an embedding model, one a line."""
    texts = [" ".join(one.split()) for one in all_texts(data.text, data.pairs)]
    files = () if isinstance(data.text, ParallelText) else data.text.files
    return PlainText(tuple(files), tuple(filter(None, texts)))


def _lines(data: Dataset) -> Lines:
    """The lines of a part of the text, for the vocabulary."""
    text = data.text
    whole = (
        [*text.texts, *(text.seconds or ())]
        if isinstance(text, LabelledText)
        else all_texts(text, data.pairs)
    )
    plain = text if isinstance(text, PlainText) and text.whole_files else None
    lines = [line for one in whole for line in one.split("\n") if line.strip()]
    languages = text.languages if isinstance(text, ParallelText) else ()
    return Lines(tuple(lines), (), (), languages, plain)
