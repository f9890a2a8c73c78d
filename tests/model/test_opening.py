"""The file that opens a result through transformers: its options, and where it must not go."""

import sys

import huggingface_hub
import pytest
import torch

import prunecli
from prunecli.model.opening import shim_source

SPACE = {"__name__": "modeling_prunecli"}
exec(
    compile(shim_source(("NllbMoeModel", "NllbMoeForConditionalGeneration")), "modeling_prunecli.py", "exec"),
    SPACE,
)


@pytest.fixture
def asked(monkeypatch):
    """Arguments that the shim calls `load_model` with; the hub is out of reach."""
    seen = {}

    def no_hub(*arguments, **options):
        raise AssertionError("reached for the hub")

    monkeypatch.setattr(prunecli, "load_model", lambda path, **options: seen.update(options, path=path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    return seen


@pytest.mark.parametrize(
    ("device_map", "device"),
    [
        (None, "cpu"),
        ("cpu", "cpu"),
        ("auto", "auto"),
        ("balanced", "auto"),
        ("cuda:1", "cuda:1"),
        (0, "cuda:0"),
        ({"": 2}, "cuda:2"),
        ({"": "cpu"}, "cpu"),
        ({"model.encoder": "cuda:0", "model.decoder": "cuda:0"}, "cuda:0"),
        (torch.device("cpu"), torch.device("cpu")),
    ],
)
def test_device_maps(tmp_path, asked, device_map, device):
    SPACE["PrunecliModel"].from_pretrained(str(tmp_path), device_map=device_map)
    assert asked == {"path": str(tmp_path), "dtype": "auto", "device": device, "model_class": None}


def test_each_class_asks_for_the_one_that_it_stands_in_for(tmp_path, asked):
    SPACE["PrunecliNllbMoeModel"].from_pretrained(tmp_path)
    assert asked["model_class"] == "NllbMoeModel"


@pytest.mark.parametrize(
    "options",
    [
        {"device_map": {"model.encoder": 0, "model.decoder": 1}},
        {"device_map": {}},
        {"quantization_config": {"load_in_8bit": True}},
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path, asked, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SPACE["PrunecliModel"].from_pretrained(tmp_path, **options)
    assert not asked


def test_the_hub_is_asked_for_what_is_no_directory(monkeypatch, tmp_path, asked):
    seen = {}
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **options: seen.update(options, name=name) or tmp_path,
    )
    SPACE["PrunecliModel"].from_pretrained("someone/model", revision="main", token=None, config=object())
    assert seen == {"name": "someone/model", "revision": "main"}
    assert asked["path"] == tmp_path


def test_without_prunecli_it_is_named_and_no_index_is(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prunecli", None)
    with pytest.raises(ImportError, match=r"needs the Python package prunecli.*its repository") as caught:
        SPACE["PrunecliModel"].from_pretrained(tmp_path)
    assert "pip install" not in str(caught.value)
