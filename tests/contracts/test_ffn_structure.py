"""Changed FFNs and the other methods: they carry them along, and even widths are a stock model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prunecli.errors import CheckpointError
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.opening import result_config, shim_classes
from prunecli.model.rewrite import Rewrite
from prunecli.pipeline import apply
from prunecli.tensors.stream import Copy, Output, Slices
from tests.contracts.method_contract import load, logits, logits_of, written
from tests.ffn_layouts import LAYOUTS, blocks_of, tiny, write_changed


def narrowed(source: Checkpoint, widths: Mapping[str, int]) -> Rewrite:
    """The first hidden units of each FFN stay."""
    layers = {layer.name: layer for layer in source.layout.ffns}
    cut = {
        f"{layers[name].prefix}{suffix}": (axis, width, blocks_of(suffix))
        for name, width in widths.items()
        for suffix, axis in layers[name].tensors.items()
        if axis is not None
    }
    outputs = []
    for name, info in source.tensors.items():
        if name not in cut:
            outputs.append(Output(name, info.dtype, info.shape, Copy(name)))
            continue
        axis, width, blocks = cut[name]
        shape = (*info.shape[:axis], blocks * width, *info.shape[axis + 1 :])
        starts = [block * info.shape[axis] // blocks for block in range(blocks)]
        ranges = tuple((start, start + width) for start in starts)
        outputs.append(Output(name, info.dtype, shape, Slices(name, axis, ranges)))
    structure = source.structure.changing(widths, {}, (), widths)
    return Rewrite(structure, tuple(outputs), result_config(source, structure))


@pytest.mark.parametrize("case", ["bart", "t5", "bert", "gpt2", "phi3", "gemma2"])
def test_an_even_width_is_a_stock_model(case: str, tmp_path: Path) -> None:
    import transformers

    source = tiny(tmp_path / "source", case)
    written(source, lambda opened: narrowed(opened, dict.fromkeys(LAYOUTS[case].names, 20)), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == case.removesuffix("-gated")
    assert {key: config[key] for key in LAYOUTS[case].width_keys} == dict.fromkeys(
        LAYOUTS[case].width_keys, 20
    )
    stock = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits_of(stock), logits(tmp_path / "out"))


def test_each_side_may_have_its_own_even_width(tmp_path: Path) -> None:
    names = LAYOUTS["m2m_100"].names
    with open_model(tiny(tmp_path / "source", "m2m_100")) as source:
        made = narrowed(source, {name: 20 if ".encoder." in name else 30 for name in names})
        assert made.config["model_type"] == "m2m_100"
        assert (made.config["encoder_ffn_dim"], made.config["decoder_ffn_dim"]) == (20, 30)
        encoder = narrowed(source, {name: 20 for name in names if ".encoder." in name})
        assert encoder.config["model_type"] == "m2m_100"
        assert (encoder.config["encoder_ffn_dim"], encoder.config["decoder_ffn_dim"]) == (20, 48)


def test_one_key_for_both_sides_needs_one_width(tmp_path: Path) -> None:
    with open_model(tiny(tmp_path / "source", "t5")) as source:
        made = narrowed(source, {name: 20 for name in LAYOUTS["t5"].names if name.startswith("encoder.")})
        assert shim_classes(made.config)
        assert made.config["d_ff"] == 48


@pytest.mark.parametrize("case", ["nllb-moe", "gpt2"])
def test_uneven_widths_have_a_type_of_their_own(case: str, tmp_path: Path) -> None:
    """A dense FFN of NLLB-MoE that is narrower than the experts is uneven too."""
    source = tiny(tmp_path / "source", case)
    names = list(LAYOUTS[case].names)[: None if case == "nllb-moe" else 1]
    written(source, lambda opened: narrowed(opened, dict.fromkeys(names, 20)), tmp_path / "out")
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "out"))
    assert shim_classes(after)
    assert all(before[key] == after[key] for key in LAYOUTS[case].width_keys)
    assert torch.isfinite(logits_of(load(tmp_path / "out"))).all()


def test_uneven_widths_can_become_stock_again(tmp_path: Path) -> None:
    source, names = tiny(tmp_path / "source", "gpt2"), list(LAYOUTS["gpt2"].names)
    written(source, lambda opened: narrowed(opened, {names[1]: 20}), tmp_path / "one")
    written(tmp_path / "one", lambda opened: narrowed(opened, dict.fromkeys(names, 20)), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["n_inner"]) == ("gpt2", 20)
    assert "auto_map" not in config


def test_a_shared_ffn_is_no_stock_model_whatever_else_changes(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source", "bert")
    first, second, third = LAYOUTS["bert"].names
    shared = write_changed(source, tmp_path / "shared", "bert", {second: {"shared_with": first}})
    with open_model(shared) as opened:
        made = narrowed(opened, {first: 20, third: 20})
        assert shim_classes(made.config)
        assert made.structure.shared == {second: first}


def test_outputs_that_do_not_fit_the_structure_are_refused(tmp_path: Path) -> None:
    """The result would still hold what its config says is shared."""
    source = tiny(tmp_path / "source", "bert")
    first, second, _ = LAYOUTS["bert"].names
    with open_model(source) as opened:
        structure = replace(opened.structure, shared={second: first})
        outputs = narrowed(opened, {}).outputs
        wrong = Rewrite(structure, outputs, result_config(opened, structure))
        with pytest.raises(CheckpointError, match=r"would not be what its config says: .*\(4 such tensors\)"):
            apply(opened, wrong, tmp_path / "out")
    assert not (tmp_path / "out").exists()
