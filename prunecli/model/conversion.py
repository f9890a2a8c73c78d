"""GGUF files and LoRA adapters as checkpoint directories: transformers decodes the one, peft merges the other."""

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prunecli.errors import CheckpointError, PruneError, kind_and_reason, reason_of
from prunecli.progress import Progress, Say, silent, unsaid
from prunecli.tensors.directory import WEIGHT_NAMES, read_config
from prunecli.tensors.hub.fetch import local_directory
from prunecli.tensors.hub.names import CONVERTED, hub_name
from prunecli.tensors.json_files import read_object
from prunecli.tensors.side_files import ADAPTER, is_prompt, side_files

GGUF = "gguf>=0.10"
PEFT = "peft>=0.18"  # earlier versions import names that transformers 5 lacks

_CONVERTED: dict[Path, TemporaryDirectory[str]] = {}
"""File or directory of the user -> the temporary directory with its checkpoint, removed when Python exits."""

_TASKS = {
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}
"""Task of an adapter, as peft calls it -> the class that opens its base model."""

_LABELS = re.compile(r"(^|\.)(score|classif\w+(\.out_proj)?)\.weight$")
"""Name of a weight with a row for each label."""


def checkpoint_directory(
    name: Path | str, *, say: Say = unsaid, progress: Progress = silent, bars: bool = True
) -> Path:
    """`local_directory`; a GGUF file or an adapter is first converted to a directory that lasts as long as Python runs.

    Raises:
        HubError, OutputError, CheckpointError: as `local_directory`.
        PruneError: the package that converts is missing.
        CheckpointError: the file or adapter cannot be converted, or the base model cannot be opened.
    """
    path = local_directory(name, say=say, progress=progress, bars=bars)
    weights = [path / f"{file}{ending}" for file in WEIGHT_NAMES for ending in ("", ".index.json")]
    gguf = [path] if path.is_file() else [*path.glob("*.gguf")]
    is_gguf = len(gguf) == 1 and gguf[0].suffix == ".gguf"
    is_adapter = (path / ADAPTER).is_file() and not is_prompt(path)
    if any(file.is_file() for file in weights) or not (is_gguf or is_adapter):
        return path
    real = path.resolve()
    if real not in _CONVERTED:
        beside = Path.cwd() if os.access(Path.cwd(), os.W_OK) else None  # where results go by default
        folder = TemporaryDirectory(prefix=CONVERTED, dir=beside)
        new = Path(folder.name) / real.name  # the name that results give as their source
        with _plain_errors(path, bars and sys.stderr.isatty()):
            say(_merge(path, new, say) if is_adapter else _decode(gguf[0], new))
        _CONVERTED[real] = folder
    return Path(_CONVERTED[real].name) / real.name


def require_package(requirement: str, what: str) -> Any:
    """Import an optional package.

    Args:
        requirement: package and version, as pip takes them.
        what: the feature that needs the package.

    Raises:
        PruneError: the package is missing, or does not work with the installed transformers.
    """
    package = requirement.partition(">")[0]
    try:
        return import_module(package)
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == package
        why = "which is not installed" if is_absent else f"which cannot be imported ({reason_of(error)})"
        raise PruneError(
            f"{what} needs {package}, {why}.", f"Install it: pip install --upgrade '{requirement}'."
        ) from error


@contextmanager
def _plain_errors(path: Path, bars: bool) -> Iterator[None]:
    """Raise errors of transformers and peft as `CheckpointError`; hide warnings, and progress unless `bars`."""
    from prunecli.model.skeleton import quiet

    try:
        with quiet(), redirect_stderr(sys.stderr if bars else StringIO()):
            yield
    except (PruneError, MemoryError):
        raise
    except Exception as error:  # of any kind: what libraries make of a file
        if isinstance(error, OSError) and error.errno:  # a full disk, say
            raise
        raise CheckpointError(
            f"{path}: cannot be converted ({kind_and_reason(error)})",
            "Give the model as model.safetensors or pytorch_model.bin. An adapter's base model has to open in plain "
            "transformers: name the one before it was quantised, or merge them with peft yourself.",
        ) from error


def _decode(file: Path, new: Path) -> str:
    """Decode a GGUF file to the directory `new`; returns a line about the result."""
    gguf = require_package(GGUF, f"{file}: decoding GGUF")
    import torch
    import transformers

    reader = gguf.GGUFReader(file)
    fields = reader.fields
    kind = "GGUF"
    if (stated := fields.get("general.file_type")) is not None:
        kind = gguf.LlamaFileType(stated.contents()).name.partition("_")[2]
    dtype = {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    config = transformers.AutoConfig.from_pretrained(file.parent, **where)
    keeps_blocks = getattr(transformers, "GgufConfig", None)  # older versions always decode
    model, found = _class_of(config).from_pretrained(
        file.parent,
        **where,
        **({"quantization_config": keeps_blocks(dequantize=True)} if keeps_blocks else {}),
        dtype=getattr(torch, dtype),
        output_loading_info=True,
    )
    if missing := sorted(found["missing_keys"]):  # transformers draws them at random
        raise CheckpointError(f"{file}: lacks {missing[0]} ({len(missing)} such tensors)")
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            _scale_positions(model.config, tensor.data)
    if unread := _unread(reader, model):
        raise CheckpointError(
            f"{file}: {unread}, which transformers leaves out: the model would be another",
            "Give the model as model.safetensors.",
        )
    model.hf_quantizer = None  # which refuses to save although every weight is decoded
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(new)
    if "tokenizer.ggml.tokens" in fields:
        transformers.AutoTokenizer.from_pretrained(file.parent, **where).save_pretrained(new)
    return f"Decoded from {kind} to {dtype}: {file}"


def _scale_positions(config: Any, divisors: Any) -> None:
    """Let a config scale rotary positions as Llama 3.1 and 3.2 do, if that is what divides their frequencies."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stated = config.rope_parameters
    for factor in (8.0, 32.0):
        config.rope_parameters = {
            **stated,
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
        plain = stated["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
        if torch.allclose(plain / scaled, torch.tensor(divisors), rtol=1e-3):
            return
    config.rope_parameters = stated


def _unread(reader: Any, model: Any) -> str:
    """Return what a GGUF file holds beyond the model that transformers made of it; "" if there is nothing."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {each.get("rope_type", "default") for each in (rope, *rope.values()) if isinstance(each, dict)}
    sizes = {tensor.name: tensor.n_elements for tensor in reader.tensors}
    # "rope_freqs.weight", "rope_factors_long.weight", "llama.rope.scaling.factor"; the type of a scaling may be "none".
    scales = [
        name
        for name in (*reader.fields, *sizes)
        if re.search(r"^rope_f|\.rope\.scal.*(factor|linear)$", name)
    ]
    if scales and kinds <= {"default"}:
        return f"{scales[0]} scales rotary positions"
    other = re.compile("rope_f|output.weight" if config.tie_word_embeddings else "rope_f")
    held = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    more = -sum(held.values())
    for name, size in sizes.items():
        layer = re.match(r"blk\.(\d+)", name)  # those after the last one predict further tokens
        if not (other.match(name) or (layer and int(layer[1]) >= config.num_hidden_layers)):
            more += size
    return f"holds {more} values" if more > 0 else ""


def _merge(path: Path, new: Path, say: Say) -> str:
    """Merge an adapter into its base model, in the directory `new`; returns a line about the result."""
    peft = require_package(PEFT, f"{path}: merging an adapter")
    import transformers

    adapter = read_object(path / ADAPTER)
    named, revision = adapter.get("base_model_name_or_path"), adapter.get("revision")
    if not isinstance(named, str) or not named:
        raise CheckpointError(f"{path / ADAPTER}: names no base model", "Set base_model_name_or_path.")
    try:
        base = checkpoint_directory(f"{named}@{revision}" if revision and hub_name(named) else named, say=say)
        read_config(base)
    except PruneError as error:
        raise type(error)(f"{path}: its base model {error.message}", error.remedy) from error
    config = transformers.AutoConfig.from_pretrained(base, local_files_only=True)
    name = _TASKS.get(str(adapter.get("task_type")))
    model_class = getattr(transformers, name) if name else _class_of(config)
    stored = peft.load_peft_weights(str(path), device="cpu").items()
    own = {name.removeprefix("base_model.model.").replace(".base_layer", ""): value for name, value in stored}
    if labels := [len(value) for name, value in own.items() if _LABELS.search(name)]:
        config.num_labels = labels[0]
    model, found = model_class.from_pretrained(
        base, config=config, dtype="auto", local_files_only=True, output_loading_info=True
    )
    drawn = found["missing_keys"].difference(own)
    table = model.get_input_embeddings()
    for name, module in [*model.named_modules()]:
        if module is table and (rows := own.get(f"{name}.weight")) is not None:
            model.resize_token_embeddings(len(rows), mean_resizing=False)
    adapted = peft.PeftModel.from_pretrained(model, path)
    if absent := adapted.load_adapter(path, "default").missing_keys:  # the first call only warns
        raise CheckpointError(f"{path}: lacks {absent[0]} ({len(absent)} such tensors)")
    _part_from_tied(model, peft.tuners.tuners_utils.BaseTunerLayer)
    merged = adapted.merge_and_unload()
    state = {name: value for name, value in merged.state_dict().items() if name not in drawn}
    merged.save_pretrained(new, state_dict=state)
    for folder in (base, path):
        for file in side_files(folder, ()).carried:
            target = new / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.name != "generation_config.json":
                shutil.copyfile(file, target)
    return f"Merged with its base model {named}: {path}"


def _part_from_tied(model: Any, layer_class: Any) -> None:
    """Give layers with updates weights of their own: merged, an update would change what is tied to its layer too."""
    from torch.nn import Parameter

    holders = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for layer in model.modules():
        if isinstance(layer, layer_class):
            own = layer.get_base_layer()
            for name, weight in [*own.named_parameters(recurse=False)]:
                if holders[id(weight)] > 1:
                    setattr(own, name, Parameter(weight.clone()))


def _class_of(config: Any) -> Any:
    """The class of transformers that `config` names, or else the Auto class of language models."""
    import transformers

    pair = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    return getattr(transformers, (config.architectures or [pair])[0])
