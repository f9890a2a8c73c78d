"""From a rewrite to a directory: the same few steps for every method."""

import json
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prunecli import __version__
from prunecli.errors import CheckpointError, HubError, MemoryShortError, located
from prunecli.evaluation.on_text import describe, measured_text
from prunecli.methods.sharing.options import FfnOptions
from prunecli.methods.sharing.plan import SharePlan, arranged, plan_ffn, rewrite_shared
from prunecli.methods.units import TextRun
from prunecli.model.card import model_card
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.history import named
from prunecli.model.mixtures import find_mixtures
from prunecli.model.opening import SHIM_FILE, shim_classes, shim_source
from prunecli.model.quantised import find_quantised, settings_of, values_of
from prunecli.model.rewrite import Rewrite
from prunecli.model.stock import StockSupport, stock_support
from prunecli.model.structure import KEY, Structure
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.results.decisions import with_decision
from prunecli.results.unit_scores import Scores
from prunecli.tensors.directory import find_weights, read_config
from prunecli.tensors.dtypes import config_dtype
from prunecli.tensors.json_files import refuse_pointers_beside_weights
from prunecli.tensors.quantities import bytes_text
from prunecli.tensors.stream import Generated, check_expressions
from prunecli.tensors.transaction import Journal, digest, new_directory, write_json
from prunecli.tensors.writer import SHARD_BYTES, write_tensors


@dataclass(frozen=True)
class Summary:
    """Sizes before and after, of the tensors alone."""

    parameters_before: int
    parameters_after: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Applied:
    """A result: written, or of a dry run only known.

    Attributes:
        source: what it was made of.
        rewrite: what it is made of, and how.
        summary: sizes before and after.
        output: where it lies; None: nowhere, this was a dry run.
    """

    source: Checkpoint
    rewrite: Rewrite
    summary: Summary
    output: Path | None

    @property
    def left_out(self) -> tuple[str, ...]:
        """Files of the source's directory that the result does not have."""
        unfit = (name for name, content in self.rewrite.files.items() if content is None)
        return (*self.source.side_files.left_out, *unfit)

    @cached_property
    def stock_support(self) -> StockSupport:
        """Whether plain transformers opens it."""
        return stock_support(self.source, self.rewrite.structure)


def apply(
    source: Checkpoint,
    rewrite: Rewrite,
    output: str | Path | None = None,
    *,
    force: bool = False,
    weights: bool = True,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
    say: Say = unsaid,
) -> Applied:
    """Carry out `rewrite`: stream the result into `output`, which appears whole or not at all.

    Args:
        source: what the rewrite was made for.
        rewrite: of any method's `rewrite_…`.
        output: a new directory; None: a dry run, which checks what a run would and writes nothing.
        force: replace `output` where it is an earlier result.
        weights: write them; else only config.json and what lies beside, for a model of random weights.
        shard_bytes: size of a file of weights at most.
        progress: hears of it.
        say: hears of what an ended run left and this one goes on from, and of what is left out.

    Raises:
        HubError: a source elsewhere gives nothing more; what is written is kept for the same call.
        OutputError: `output` exists, overlaps the source, or the disk lacks room.
        CheckpointError: the source is damaged or has Git LFS pointers, or the result would not be what its config says.
    """
    rewrite = with_decision(source, rewrite, say)
    if output is None:
        return Applied(source, rewrite, summarize(source, rewrite), None)
    refuse_pointers_beside_weights(source.path)
    summary = summarize(source, rewrite)
    names = {path.relative_to(source.path).as_posix(): path for path in source.side_files.carried}
    # An earlier result's own code is written anew or not at all.
    beside = {name: path for name, path in names.items() if name not in rewrite.files and name != SHIM_FILE}
    needed = (
        (summary.bytes_after if weights else 0)
        + sum(path.stat().st_size for path in beside.values())
        + sum(len(content) for content in rewrite.files.values() if content is not None)
    )
    output = Path(output)
    key = None  # of all that the result depends on: the commit, and how each tensor is made
    is_known = not any(isinstance(output.expression, Generated) for output in rewrite.outputs)
    if source.is_remote and weights and is_known:
        key = digest(
            {
                "prunecli": __version__,
                "source": named(source),
                "files": [str(path.relative_to(source.path)) for path in source.files],
                "shard_bytes": shard_bytes,
                "config": dict(rewrite.config),
                "outputs": [repr(output) for output in rewrite.outputs],
            }
        )
    with new_directory(output, force=force, needed_bytes=needed, source=source.path, resume=key) as directory:
        journal = Journal(directory, key)
        if journal.nbytes:
            journal.tidy()
            say(f"Resuming from an ended run: {bytes_text(journal.nbytes)} of the result are there.")
        if weights:
            try:
                write_tensors(
                    source,
                    rewrite.outputs,
                    directory,
                    shard_bytes=shard_bytes,
                    journal=journal,
                    progress=progress,
                )
            except (HubError, SystemExit):
                if journal.nbytes:
                    kept = bytes_text(journal.nbytes)
                    say(f"Kept {kept} of the result: the same command resumes from there.")
                raise
        for name, content in {**beside, **rewrite.files}.items():
            if content is None:
                continue
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, directory / name)
            else:
                (directory / name).write_bytes(content)
        config = _with_dtype(rewrite)
        write_json(directory / "config.json", config, allow_nan=True)
        if classes := shim_classes(rewrite.config):
            (directory / SHIM_FILE).write_text(shim_source(classes), encoding="utf-8")
        card = source.path / "README.md"
        text = model_card(
            source.resolved.changed(rewrite.structure, rewrite.config),
            card.read_text(encoding="utf-8", errors="replace") if card.is_file() else "",
            summary.parameters_after,
            summary.bytes_after,
            weights=weights,
        )
        (directory / "README.md").write_text(text, encoding="utf-8")
        if weights:
            # What lies on the disk, opened again, is what `summarize` found to fit its config.
            files = find_weights(directory)
            held = {name: stored.info for file in files for name, stored in file.tensors.items()}
            meant = {one.name: one.info for one in rewrite.outputs}
            if held != meant or read_config(directory) != json.loads(json.dumps(config)):
                differing = (name for name in {**meant, **held} if meant.get(name) != held.get(name))
                raise CheckpointError(
                    f"{directory}: {next(differing, 'config.json')} was not written as it was to be",
                    "Is the disk sound?",
                )
        journal.remove()
    return Applied(source, rewrite, summary, output)


def summarize(source: Checkpoint, rewrite: Rewrite) -> Summary:
    """Parameters and bytes before and after; checks every name and shape, so that a dry run refuses what a run would.

    Raises:
        CheckpointError: source tensors that its config does not ask for, or lack of some.
    """
    source.check()
    with located(source.path):
        check_expressions(source, rewrite.outputs)
    # Structure and config as who opens the result will read them.
    config, meant = json.loads(json.dumps([rewrite.config, rewrite.structure.to_json()]))
    if config.setdefault(KEY, meant) != meant:
        raise CheckpointError(
            f"{source.path}: the result would not be what its config says: another structure"
        )
    structure = Structure.from_json(meant, f"{source.path}: the result")
    layout = source.resolved.changed(structure, config)
    stated = layout.shapes
    infos = {output.name: output.info for output in rewrite.outputs}
    unquantised = values_of(infos, find_quantised(infos, rewrite.config), "F32", stated)
    written = {
        name: info.shape for name, info in unquantised.items() if name in stated or not layout.is_extra(name)
    }
    if written != stated:
        odd = sorted(name for name in {*written, *stated} if written.get(name) != stated.get(name))
        if odd[0] in source.quantised:
            raise source.quantised_refusal(odd[0])
        raise CheckpointError(
            f"{source.path}: the result would not be what its config says: {odd[0]} would have the shape "
            f"{written.get(odd[0])}, not {stated.get(odd[0])} ({len(odd)} such tensors)",
        )
    if source.runs_stock:
        find_mixtures(source.path, infos, layout.sizes, layout.structure)
    return Summary(
        parameters_before=sum(info.numel for info in source.unquantised.values()),
        parameters_after=sum(info.numel for info in unquantised.values()),
        bytes_before=source.total_bytes,
        bytes_after=sum(output.nbytes for output in rewrite.outputs),
    )


def _with_dtype(rewrite: Rewrite) -> dict[str, Any]:
    """The config with the type that most bytes have, unless it states the type that a quantised model computes in."""
    config = dict(rewrite.config)
    if settings_of(config):
        return config
    held: Counter[str] = Counter()
    for output in rewrite.outputs:
        held[output.dtype] += output.nbytes
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return {**config, key: config_dtype(max(held, key=held.__getitem__))}


def plan_ffn_on_text(checkpoint: Checkpoint, options: FfnOptions, run: TextRun) -> SharePlan:
    """`plan_ffn`; an FFN that gets narrower keeps the hidden units of the merged FFNs that are most active on text.

    With `keep_units="norms"` no text is read.

    Args:
        checkpoint: the source.
        options: see `FfnOptions`; `text` is filled in.
        run: the text, and how the model runs on it.

    Raises:
        PruneError: as `plan_ffn`; text or a model that cannot be used.
    """
    if options.keep_units == "norms" or (
        options.keep_units is None and not arranged(checkpoint, options).narrowed
    ):
        return plan_ffn(checkpoint, options)
    what, without = "`width` below that of the FFNs", "`keep_units=norms`"
    data = measured_text(checkpoint, run.choice, what, run.say, without=without)

    def activations(merging: SharePlan) -> Scores:
        """Activations of the merged FFNs; their model is written to a temporary directory, if it is new."""
        from prunecli.methods.measuring import measure_activations

        rewrite = rewrite_shared(checkpoint, merging)
        if rewrite.structure == checkpoint.structure and not any(group.is_merged for group in merging.groups):
            return measure_activations(checkpoint, data, run)
        with TemporaryDirectory(prefix="prunecli-") as folder:
            apply(checkpoint, rewrite, Path(folder) / "merged", progress=run.progress)
            with open_model(Path(folder) / "merged") as merged:
                try:
                    return measure_activations(merged, data, run)
                except MemoryShortError as error:  # the remedy looks at a checkpoint that is still there
                    error.need = replace(error.need, checkpoint=checkpoint)
                    raise

    options = options.updated(keep_units="activations", text=describe(data, run.choice))
    return plan_ffn(checkpoint, options, activations)
