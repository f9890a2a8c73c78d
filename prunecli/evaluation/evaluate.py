"""Measure the quality of checkpoints on the same text, translation above all, and compare them with the first."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from prunecli import processes
from prunecli.errors import PruneError, UsageError
from prunecli.evaluation.decoding import Translation, translate
from prunecli.evaluation.language_model import CausalLanguageModel
from prunecli.evaluation.latency import threads, threads_for
from prunecli.evaluation.options import EvaluationOptions
from prunecli.evaluation.scoring import (
    SPM_MISSING,
    bootstrap_of_means,
    comet_scores,
    grouped_means,
    make_metrics,
    means,
    paired_bootstrap,
    require_comet,
    rounded,
    score,
    spm_file,
)
from prunecli.evaluation.tasks import Classification, Embedding, MaskedLanguageModel, Task
from prunecli.model.checkpoint import Checkpoint, directory_of, open_model
from prunecli.model.decision import Floats
from prunecli.model.history import pruned_pairs
from prunecli.modules.devices import choose_device
from prunecli.modules.fitting import COMPUTE
from prunecli.modules.loading import load_for_decoding
from prunecli.progress import Progress, Say, foretelling, silent, unsaid
from prunecli.results.document import Json, sizes
from prunecli.results.evaluation import Evaluation
from prunecli.tensors.quantities import counted
from prunecli.tensors.transaction import Store, digest, partial_path, refuse_unwritable
from prunecli.text.choice import Dataset, TaskName, TextChoice, task_of_all
from prunecli.text.files import lines_sha256
from prunecli.text.parallel import ParallelText, groups_of, pair_name, read_groups
from prunecli.text.tokens import encode, load_tokenizer

EXAMPLE_CANDIDATES = 200
"""Sentences of all pairs among which the examples are chosen, spread evenly."""


class TranslationTask(Task):
    """Translates each pair with each checkpoint; scores every pair, and tests it against the first checkpoint.

    Finished translations of a checkpoint and pair are stored in `partial` until the result is written. Several
    processes share the batches; the first scores. An interrupted run keeps the dtype that it began with.
    """

    def prepare(self) -> None:
        """Check what would fail after the work, and find the translations of an interrupted run."""
        options, data = self.options, self.data
        assert isinstance(data.text, ParallelText)
        self.text, self.names = data.text, {pair_name(*pair): pair for pair in data.pairs}
        groups = options.groups
        self.groups = {} if groups is None else groups_of(chain(*data.pairs), read_groups(groups), groups)
        with self.process_group.in_step():
            if self.process_group.is_main:
                for _, _, path in self._hypothesis_paths():
                    if path.exists():  # missing directories will be made
                        refuse_unwritable(path, force=self.force)
                if options.comet is not None:
                    require_comet()
        spm = spm_file(options.spm)
        if spm is None:
            self.say(SPM_MISSING)
        self.metrics = make_metrics(spm)
        partial = None if self.output is None else partial_path(self.output)
        self.partial = Store(partial, "prunecli.translations/1")
        if self.partial.records:
            self.say(f"Resuming from {partial}, which an interrupted run left behind.")
        models = sorted([one.fingerprint, one.total_bytes] for one in self.opened.values())
        self.run_key = digest({"models": models, "device": options.device})  # what the dtype depends on
        dtypes = {record["run"]: record["dtype"] for record in self.partial.records.values()}
        earlier = self.process_group.broadcast(dtypes.get(self.run_key))
        if earlier in COMPUTE and options.dtype == "auto":  # a damaged file may name another type
            self.say(f"Computed in {earlier}, as before the interruption.")
            self.options = options.updated(dtype=earlier)

    def needs(self) -> dict[str, Any]:
        """See `Task`: what decoding takes."""
        return {
            "load": self.options.decoding.load,
            "only_runs": True,
            "process_group": self.process_group,
        }

    def __post_init__(self) -> None:
        """See `Task`; then announce the length of the work."""
        super().__post_init__()
        count = len(self.text)
        keys = {self._key(label, pair) for label, pair in product(self.opened, self.data.pairs)}
        left = sum(self._finished(key) is None for key in keys)
        what = (
            f"{counted(len(self.opened), 'checkpoint')} x {counted(len(self.names), 'pair')} x "
            f"{counted(count, 'sentence')}"
        )
        fewer = "`max_sentences` and `pairs` take fewer"
        self.progress = foretelling(self.progress, left * count, self.say, what, fewer)

    def _key(self, label: str, pair: tuple[str, str]) -> str:
        """Hash of everything that the translations of a checkpoint and pair depend on."""
        checkpoint, options = self.opened[label], self.options
        return digest(
            {
                "fingerprint": checkpoint.fingerprint,
                "bytes": checkpoint.total_bytes,  # a float16 copy has its original's fingerprint
                "config": checkpoint.config,
                "pair": pair,
                "sentences": lines_sha256(self.text.sentences[pair[0]]),
                "decoding": asdict(options.decoding),
                "device": options.device,
                "dtype": options.dtype,
            }
        )

    def _finished(self, key: str) -> list[Translation] | None:
        """The translations under `key` of an interrupted run; None if some of the text are missing."""
        rows = self.partial.records.get(key, {"translations": []})["translations"]
        return [Translation(*row) for row in rows] if len(rows) == len(self.text) else None

    def measure(self, label: str) -> None:
        """Translate the pairs that are not in `partial`."""
        checkpoint, options, group, text = self.opened[label], self.options, self.process_group, self.text
        keys = {name: self._key(label, pair) for name, pair in self.names.items()}
        found: dict[str, Any] = group.broadcast({name: self._finished(key) for name, key in keys.items()})
        left = [name for name, done in found.items() if done is None]
        if left:
            tokenizer = load_tokenizer(checkpoint.path)
            for language in {*chain(*(self.names[name] for name in left))}:
                encode(tokenizer, [], language)  # refused before the model is loaded
            device, dtype, load = options.device, options.dtype, options.decoding.load
            model = load_for_decoding(checkpoint.path, device=device, dtype=dtype, load=load)
            with self.progress(f"{label}: translating", len(left) * len(text), "sentences") as advance:
                for name in left:
                    pair = self.names[name]
                    sentences = text.sentences[pair[0]]
                    done = translate(model, tokenizer, sentences, pair, options.decoding, advance, group)
                    if group.is_main:
                        record = {"run": self.run_key, "dtype": options.dtype, "translations": done}
                        self.partial.put(keys[name], record)
                    found[name] = done
            del model
            gc.collect()  # before the next checkpoint is loaded
        self.measured[label] = found

    def fields(self) -> Json:
        """See `Task`."""
        options, labels = self.options, list(self.opened)
        compare, resamples = len(labels) > 1 and options.samples > 0, (options.samples, options.seed)
        comet, rows = self._comet(), {label: dict[str, Json]() for label in labels}
        metrics = [*self.metrics, *(["comet"] if comet else [])]
        columns = [*metrics, "length_ratio", "over_generated"]
        with self.progress("scoring", len(self.names), "pairs") as advance:
            for name, pair in self.names.items():
                references = self.text.sentences[pair[1]]
                outputs = [own[name] for own in self.measured.values()]
                systems = [[made.text for made in own] for own in outputs]
                tests = (
                    paired_bootstrap(systems, references, self.metrics, *resamples)
                    if compare
                    else [{} for _ in labels]
                )
                if compare and comet:
                    values = [own[name] for own in comet.values()]
                    for test, of_means in zip(tests, bootstrap_of_means(values, *resamples), strict=True):
                        test["comet"] = of_means
                for label, own, test in zip(labels, outputs, tests, strict=True):
                    found = score(own, references, self.metrics)
                    if comet:
                        found["comet"] = float(comet[label][name].mean())
                    row = rows[label][name] = {column: found[column] for column in columns}
                    if test:
                        row["bootstrap"] = {metric: rounded(one, 4) for metric, one in test.items()}
                advance(1)
        pairs = pd.MultiIndex.from_tuples(self.names.values(), names=["source", "target"])
        frames = {label: pd.DataFrame(own.values(), pairs, columns) for label, own in rows.items()}
        results = []
        for label, frame in frames.items():
            first = None if label == labels[0] else frames[labels[0]]
            mean = means(frame, first if len(pairs) > 1 else None)
            mean.pop("pairs")
            if compare and first is not None:
                tested = [row["bootstrap"] for row in rows[label].values()]
                p_values = np.array([[test[one]["p_value"] for one in metrics] for test in tested])
                certain = (frame - first)[metrics].where(p_values < options.level)
                mean["significant"] = {
                    metric: {"worse": int((own < 0).sum()), "better": int((own > 0).sum())}
                    for metric, own in certain.items()
                }
            results.append(
                {
                    "checkpoint": label,
                    "dtype": options.dtype,
                    "mean": mean,
                    "pairs": {name: rounded(row, 4) for name, row in rows[label].items()},
                    **grouped_means(frame, self.groups, first),
                    **sizes(self.opened[label]),
                }
            )
        signatures = {name: str(metric.get_signature()) for name, metric in self.metrics.items()}
        if comet:
            signatures["comet"] = f"model:{options.comet}|scale:100"
        significance = None
        if compare:
            significance = {
                "test": "paired bootstrap",
                "samples": options.samples,
                "seed": options.seed,
                "level": options.level,
                "baseline": labels[0],
            }
        return {
            "data": {"split": self.text.split, "sentences": len(self.text), "sha256": self.text.sha256},
            "pairs": list(self.names),
            "decoding": asdict(options.decoding),
            **({"groups": self.groups} if self.groups else {}),
            "signatures": signatures,
            "significance": significance,
            "results": results,
            "examples": self._examples(),
        }

    def _comet(self) -> dict[str, dict[str, Floats]]:
        """Label -> pair -> COMET of each sentence, from one run of the program; empty without --comet."""
        if self.options.comet is None:
            return {}

        sides = [[line for pair in self.data.pairs for line in self.text.sentences[pair[i]]] for i in (0, 1)]
        systems = {
            label: [made.text for name in self.names for made in own[name]]
            for label, own in self.measured.items()
        }
        total = len(systems) * len(sides[0])
        with self.progress("COMET", total, "sentences") as advance:
            gpu = choose_device(self.options.device).type == "cuda"
            found = comet_scores(self.options.comet, sides[0], sides[1], systems, gpu=gpu)
            advance(total)
        count = len(self.names)
        return {
            label: dict(zip(self.names, np.split(own, count), strict=True)) for label, own in found.items()
        }

    def _examples(self) -> list[Json]:
        """The sentences where the other outputs are least like those of the first checkpoint, by chrF++.

        The outputs of a single checkpoint are compared with the references.
        """
        metric, (first, *others) = self.metrics["chrf++"], self.measured.values()
        rows, found = list(product(self.names, range(len(self.text)))), []
        for name, index in rows[:: -(-len(rows) // EXAMPLE_CANDIDATES)]:
            source, reference = (self.text.sentences[language][index] for language in self.names[name])
            right = first[name][index].text if others else reference
            alike = sum(
                metric.sentence_score(own[name][index].text, [right]).score for own in others or [first]
            )
            outputs = {label: own[name][index].text for label, own in self.measured.items()}
            if others and len({*outputs.values()}) == 1:
                continue
            example = {"pair": name, "source": source, "reference": reference, "outputs": outputs}
            found.append((alike, example))
        return [example for _, example in sorted(found, key=lambda one: one[0])[: self.options.examples]]

    def save(self, evaluation: Evaluation) -> None:
        """Write the translations, then the result; the stored translations are no longer needed."""
        for label, name, path in self._hypothesis_paths():
            path.parent.mkdir(parents=True, exist_ok=True)
            # One line each: the file stays aligned with the source whatever the model returned.
            lines = [" ".join(made.text.split("\n")) for made in self.measured[label][name]]
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        super().save(evaluation)
        self.partial.remove()

    def _hypothesis_paths(self) -> Iterator[tuple[str, str, Path]]:
        """Label, pair, and file of the translations DIR/LABEL/SPLIT.PAIR.hyp; nothing without --hypotheses."""
        if (folder := self.options.hypotheses) is not None:
            for label, name in product(self.opened, self.names):
                own = folder / label.strip("/").replace("/", "_")
                yield label, name, own / f"{self.text.split}.{name}.hyp"


TASK_CLASSES: Mapping[TaskName, type[Task]] = {
    "translation": TranslationTask,
    "lm": CausalLanguageModel,
    "mlm": MaskedLanguageModel,
    "classification": Classification,
    "embedding": Embedding,
}


def evaluate(
    checkpoints: Mapping[str, Checkpoint | Path | str],
    choice: TextChoice | Dataset,
    options: EvaluationOptions | None = None,
    output: str | Path | None = None,
    *,
    task: TaskName | None = None,
    force: bool = False,
    progress: Progress = silent,
    say: Say = unsaid,
) -> Evaluation | None:
    """Measure each checkpoint at `task` on the text that `choice` names, and compare it with the first.

    If no pairs are chosen, translation takes the pairs that the checkpoints were pruned for. Several processes share
    the sentences of a translation; an interrupted translation resumes from the state stored beside `output`.

    Args:
        checkpoints: label -> an open model, a directory or a name on the hub, the baseline first.
        choice: the text, named or read. Text that was read states its task.
        output: file for the result; None: nothing is written, and an interrupted run cannot resume.
        task: None: the task of the models.
        force: replace `output`.
        say: called with each automatic choice and its reason, with a line about each run layer by layer, and with one
            about the state that an interrupt leaves behind.

    Returns:
        The result; None on processes other than the first.

    Raises:
        PruneError: a checkpoint, text, option or output that cannot be used.
    """
    if not checkpoints:
        raise UsageError("no checkpoint is given", "Give one or several: {label: directory}.")
    options = options or EvaluationOptions()
    output = None if output is None else Path(output)
    paths = {label: directory_of(model, say) for label, model in checkpoints.items()}
    directories = list(paths.values())
    task = choice.task if isinstance(choice, Dataset) else task or task_of_all(directories)
    options.check_limits(task, len(paths))
    if isinstance(choice, Dataset):
        data = choice
    else:
        choice.check_task(task, options.changed)
        if task != "translation" and processes.world_size() > 1:
            raise UsageError(f"`task={task}`: one process does it", "Start it without torchrun.")
        data = choice.read(task, say)
        if task == "translation" and choice.pairs is None:
            kept = pruned_pairs(directories, data.pairs)
            if kept != data.pairs:
                say(
                    f"{len(kept)} of {len(data.pairs)} pairs: those of the pruned checkpoints "
                    "(`pairs` takes others)."
                )
            data = replace(data, pairs=kept)
    try:
        with processes.together() as group:
            with group.in_step():
                if output is not None and group.is_main:  # before the work
                    refuse_unwritable(output, force=force)
            opened = {label: open_model(path) for label, path in paths.items()}
            measured = TASK_CLASSES[task](opened, data, options, progress, say, group, output, force)
            with closing(measured), threads(threads_for(opened.values())):
                for label in opened:
                    measured.measure(label)
            if not group.is_main:
                return None
            seed = options.seed if task in ("translation", "mlm") else None
            head = Evaluation.header(opened.values(), seed)
            evaluation = Evaluation(**head, task=task, **measured.fields())
            measured.save(evaluation)
            return evaluation
    except (KeyboardInterrupt, SystemExit, PruneError):
        if output is not None and task == "translation" and partial_path(output).is_file():
            say("Finished pairs are kept: the same command resumes from them.")
        raise
