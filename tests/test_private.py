"""Private names of transformers and torch: each test names the one that a release has moved."""

import ast
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations import deepspeed

import prunecli
from prunecli import private

OWN = {"_files", "_logits", "_shared_names", "_stored_config", "_stored_layers", "_own_ties", "_descriptor"}
OF_PYTHON = {"_replace", "_initializing"}

PRETRAINED = (
    "_from_config _init_weights _get_dtype_plan _no_split_modules _skip_keys_device_placement "
    "_can_set_experts_implementation _keys_to_ignore_on_load_unexpected _keys_to_ignore_on_save"
)
NAMES = {
    "nn.Module": "_apply _non_persistent_buffers_set",
    "Tensor": "_version",
    "cpu": "_is_avx512_bf16_supported _is_amx_tile_supported _is_vnni_supported",
    "PreTrainedModel": PRETRAINED,
    "GenerationMixin": "_beam_search_has_unfinished_sequences",
    "PreTrainedConfig": "_attn_implementation _decode_special_floats",
    "Trainer": "_save_checkpoint",
    "models.rag.modeling_rag.RagTokenForGeneration": "_reorder_cache",
    "MarianTokenizer": "_switch_to_target_mode _switch_to_input_mode",
    "models.mixtral.modeling_mixtral.MixtralExperts": "_apply_gate",
}


def config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )


@pytest.mark.parametrize(
    "name", [f"{owner}.{name}" for owner, names in NAMES.items() for name in names.split()]
)
def test_exists(name):
    owner, _, attribute = name.rpartition(".")
    library = torch if owner.startswith(("nn", "cpu", "Tensor")) else transformers
    found = attrgetter(owner)(library)
    # Every module has the set of names only once it is made.
    assert hasattr(found() if found is nn.Module else found, attribute)


def test_is_hf_initialized():
    """A marked parameter keeps its value."""
    model = private.model_from_config(transformers.LlamaForCausalLM, config())
    for marked in (True, False):
        layer = nn.Linear(4, 4)
        before = layer.weight.detach().clone()
        if marked:
            private.keep_value(layer.weight)
        private.init_weights(model, layer)
        assert torch.equal(layer.weight, before) == marked


def test_hf_deepspeed_config_weak_ref():
    """Beside a config of ZeRO-3, a model on the meta device is made as without, and the config stays."""
    sharding = Mock()  # whose answers are all true
    deepspeed.set_hf_deepspeed_config(sharding)
    try:
        with torch.device("meta"):
            model = private.model_from_config(transformers.LlamaForCausalLM, config())
        assert deepspeed.is_deepspeed_zero3_enabled()
    finally:
        deepspeed.unset_hf_deepspeed_config()
    assert model.lm_head.weight.is_meta


def test_attn_implementation():
    model = private.model_from_config(transformers.LlamaForCausalLM, config(), attn_implementation="eager")
    assert getattr(model.config, private.ATTENTION_FUNCTION) == "eager"


def test_decode_special_floats():
    written = {"a": {"__float__": "Infinity"}}
    assert private.with_special_floats(transformers.LlamaConfig, written) == {"a": float("inf")}


def test_fake_tensors():
    with private.fake_tensors():
        assert type(torch.empty(2)).__name__ == "FakeTensor"


def test_pytree():
    tree = {"a": (1, [2.0]), "b": 3}
    assert private.pytree().tree_leaves(tree) == [1, 2.0, 3]
    assert private.pytree().tree_map_only(int, str, tree) == {"a": ("1", [2.0]), "b": "3"}


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


@needs_onednn
def test_onednn_linear_pointwise_and_reorder_linear_weight():
    rows, weight, bias = torch.randn(3, 16), torch.randn(32, 16), torch.randn(32)
    expected = rows @ weight.T + bias
    for given in (weight, private.onednn_packed(weight)):
        torch.testing.assert_close(private.onednn_linear(rows, given, bias), expected)


@needs_onednn
def test_is_mkldnn_bf16_supported():
    assert isinstance(private.onednn_has_bfloat16(), bool)


@needs_onednn
def test_qlinear_prepack_and_qlinear_pointwise():
    rows, matrix = torch.tensor([[1, 2]], dtype=torch.uint8), torch.tensor([[3, 4]], dtype=torch.int8)
    packed, half, one = private.int8_packed(matrix), torch.tensor([0.5]), torch.ones(1)
    # (1 * 3 + 2 * 4) / 2 + 1
    assert private.int8_linear(rows, packed, half, one).item() == pytest.approx(6.5)


def test_no_other_module_uses_private_names():
    """Private names of libraries occur in `private` alone; prunecli's own and Python's are listed above."""
    root = Path(prunecli.__file__).parent
    found = [
        f"{path.relative_to(root)}:{line}: {name}"
        for path in sorted(root.rglob("*.py"))
        if path != Path(private.__file__)
        for line, name in _private_names(ast.parse(path.read_text(encoding="utf-8")))
        if name not in OWN | OF_PYTHON | {*private.OVERRIDDEN}
    ]
    assert not found


def _private_names(tree: ast.AST) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names = [] if own else [node.attr]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("prunecli"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            names = [str(one.value) for one in node.args[1:2] if isinstance(one, ast.Constant)]
        found += [(node.lineno, name) for name in names if name.startswith("_") and not name.startswith("__")]
    return found
