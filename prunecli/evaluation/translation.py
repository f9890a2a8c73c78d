"""Translation quality of several checkpoints on the same sentences, compared with the first."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING

from prunecli.evaluation.comet import require_comet
from prunecli.evaluation.decoding import Translation, translate
from prunecli.evaluation.examples import examples_of
from prunecli.evaluation.hardware import threads, threads_for
from prunecli.evaluation.options import EvaluationOptions
from prunecli.evaluation.scoring import make_metrics
from prunecli.evaluation.significance import check_bootstrap
from prunecli.evaluation.translation_scores import score_translations
from prunecli.processes import ALONE, ProcessGroup
from prunecli.progress import Progress, Say, foretelling, silent, unsaid
from prunecli.tensors.documents import partial_path
from prunecli.tensors.quantities import counted
from prunecli.tensors.unfinished import Store, digest
from prunecli.text.choice import Dataset
from prunecli.text.parallel import ParallelText, groups_of, lines_sha256, pair_name, read_groups

if TYPE_CHECKING:
    from prunecli.model.checkpoint import Checkpoint
    from prunecli.results.evaluation import Evaluation


def evaluate_translation(
    checkpoints: Mapping[str, Path],
    data: Dataset,
    options: EvaluationOptions,
    output: Path | None = None,
    *,
    force: bool = False,
    progress: Progress = silent,
    process_group: ProcessGroup = ALONE,
    say: Say = unsaid,
) -> Evaluation | None:
    """Translate with each checkpoint, score, compare with the first, write `output`.

    Finished (checkpoint, pair) translations are kept in `partial_path(output)` until `output` is written. Of several
    processes each translates some of the batches; the first scores and writes.

    All models are computed in one type. An interrupted run keeps to the type that it began in, whatever memory is free.

    Args:
        checkpoints: label -> directory, the baseline first.
        data: parallel text and its directions.
        output: None: nothing is written, and nothing kept on the way.
        say: hears of that type, where it is not what is stored.

    Returns:
        What was written; None on other processes than the first.

    Raises:
        PruneError: a checkpoint, language, option or output that cannot be used.
    """
    from prunecli.model.checkpoint import open_model
    from prunecli.results.evaluation import Evaluation
    from prunecli.results.header import header
    from prunecli.tensors.documents import refuse_unwritable, write_json

    text, pairs = data.text, data.pairs
    assert isinstance(text, ParallelText)
    file, groups = options.groups, dict[str, str]()
    if file is not None:
        groups = groups_of(chain(*pairs), read_groups(file), file)
    names = [pair_name(*pair) for pair in pairs]
    folder = options.hypotheses
    hypotheses = {}
    if folder is not None:
        for label, name in product(checkpoints, names):
            hypotheses[hypothesis_path(folder, label, text.split, name)] = (label, name)
    with process_group.in_step():
        if process_group.is_main:  # what would be refused after the work
            if output is not None:
                refuse_unwritable(output, force=force)
            for path in hypotheses:
                if path.exists():  # directories that are missing will be made
                    refuse_unwritable(path, force=force)
    if options.samples:
        check_bootstrap(options.samples, options.seed)
    if options.comet is not None and process_group.is_main:
        require_comet()
    metrics = make_metrics(options.spm)
    opened = {label: open_model(path) for label, path in checkpoints.items()}
    partial = translations_kept(output)
    models = sorted([checkpoint.fingerprint, checkpoint.total_bytes] for checkpoint in opened.values())
    run = digest({"models": models, "device": options.device})  # what the type is chosen by
    earlier = {record["run"]: record["dtype"] for record in partial.records.values()}
    options = replace(options, dtype=_dtype(opened, options, earlier.get(run), process_group, say))
    keys = {
        label: {pair: _key(checkpoint, text.sentences[pair[0]], pair, options) for pair in pairs}
        for label, checkpoint in opened.items()
    }
    left = sum(
        _finished(partial, key, len(text)) is None
        for key in {key for own in keys.values() for key in own.values()}
    )
    counts = ((len(opened), "checkpoint"), (len(pairs), "pair"), (len(text), "sentence"))
    what = " x ".join(counted(count, unit) for count, unit in counts)
    less = "--max-sentences and --pairs take fewer"
    foretold = foretelling(progress, left * len(text), say, what, less)
    with threads(threads_for(opened.values())):
        translations = {
            label: _translate_checkpoint(
                label, checkpoint, text, keys[label], options, partial, run, foretold, process_group
            )
            for label, checkpoint in opened.items()
        }
    if not process_group.is_main:
        return None
    evaluation = Evaluation(
        **header(Evaluation.FORMAT, list(opened.values()), options.seed),
        task="translation",
        data={"split": text.split, "sentences": len(text), "sha256": text.sha256},
        pairs=names,
        decoding=asdict(options.decoding),
        **score_translations(opened, translations, text, pairs, groups, metrics, options, progress),
        examples=examples_of(translations, text, pairs, options.examples),
    )
    for path, (label, pair) in hypotheses.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        # One line each, so that the file stays aligned with the source whatever the model made.
        lines = [" ".join(sentence.text.split("\n")) for sentence in translations[label][pair]]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if output is not None:
        write_json(output, evaluation.to_json(), force=force)
    partial.remove()
    return evaluation


def _dtype(
    opened: Mapping[str, Checkpoint],
    options: EvaluationOptions,
    earlier: str | None,
    process_group: ProcessGroup,
    say: Say,
) -> str:
    """The type of all models: as asked, as an interrupted run had it (`earlier`), or as they fit."""
    from prunecli.modules.devices import choose_devices
    from prunecli.modules.fitting import COMPUTE, decoding, dtype_name, fitting_dtype

    earlier = process_group.broadcast(earlier)
    if earlier in COMPUTE and options.dtype == "auto":  # what a damaged state says may be none
        say(f"Computed in {earlier}, as before the interruption.")
        return earlier
    devices = choose_devices(options.device)
    beside = decoding(options.decoding.load)
    return dtype_name(
        fitting_dtype(
            opened,
            devices,
            options.dtype,
            beside=beside,
            only_runs=True,
            process_group=process_group,
            say=say,
        )
    )


def _translate_checkpoint(
    label: str,
    checkpoint: Checkpoint,
    text: ParallelText,
    keys: Mapping[tuple[str, str], str],
    options: EvaluationOptions,
    partial: Store,
    run: str,
    progress: Progress,
    process_group: ProcessGroup,
) -> dict[str, Sequence[Translation]]:
    kept = process_group.broadcast({pair: _finished(partial, key, len(text)) for pair, key in keys.items()})
    left = [pair for pair in keys if kept[pair] is None]
    translations = {pair_name(*pair): done for pair, done in kept.items() if done is not None}
    if left:
        from prunecli.modules.fitting import COMPUTE, decoding_room
        from prunecli.modules.loading import load_for_decoding
        from prunecli.text.tokens import language_id, languages, load_tokenizer

        tokenizer = load_tokenizer(checkpoint.path)
        for language in {name for pair in left for name in pair} if languages(tokenizer) else ():
            language_id(tokenizer, language)  # refused before the model is loaded
        room = decoding_room(checkpoint, options.decoding.load, COMPUTE[options.dtype])
        model = load_for_decoding(checkpoint.path, device=options.device, dtype=options.dtype, room=room)
        with progress(f"{label}: translating", len(left) * len(text), "sentences") as advance:
            for pair in left:
                sentences = text.sentences[pair[0]]
                done = translate(model, tokenizer, sentences, pair, options.decoding, advance, process_group)
                if process_group.is_main:
                    rows = [[one.text, one.finished] for one in done]
                    partial.put(keys[pair], {"run": run, "dtype": options.dtype, "translations": rows})
                translations[pair_name(*pair)] = done
        del model
        gc.collect()  # before the next checkpoint is loaded
    return {pair_name(*pair): translations[pair_name(*pair)] for pair in keys}


def translations_kept(output: Path | None) -> Store:
    """What an unfinished run for the file `output` keeps; None: nothing is kept."""
    return Store(None if output is None else partial_path(output), "prunecli.translations/1")


def _finished(partial: Store, key: str, count: int) -> list[Translation] | None:
    """The `count` translations that an interrupted run finished under `key`; None if they are not all there."""
    rows = partial.records.get(key, {"translations": []})["translations"]
    return [Translation(*row) for row in rows] if len(rows) == count else None


def _key(
    checkpoint: Checkpoint, sentences: Sequence[str], pair: tuple[str, str], options: EvaluationOptions
) -> str:
    return digest(
        {
            "fingerprint": checkpoint.fingerprint,
            "bytes": checkpoint.total_bytes,  # a float16 copy has its original's fingerprint
            "config": checkpoint.config,
            "pair": pair,
            "sentences": lines_sha256(sentences),
            "decoding": asdict(options.decoding),
            "device": options.device,
            "dtype": options.dtype,
        }
    )


def hypothesis_path(directory: Path, label: str, split: str, pair: str) -> Path:
    """Where the outputs of one checkpoint and pair are kept: DIR/LABEL/SPLIT.PAIR.hyp."""
    return directory / label.strip("/").replace("/", "_") / f"{split}.{pair}.hyp"
