"""Families that nobody declared: what is found of their classes, cut, does what the model does masked."""

import functools
import random
import re
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from prunecli.architectures import NLLB_MOE
from prunecli.commands.prune import prune_ffn, prune_layers
from prunecli.errors import CheckpointError, PruneError, UnsupportedModelError, UsageError
from prunecli.methods.options import HeadOptions, NarrowOptions
from prunecli.methods.plans import plan_heads, plan_widths
from prunecli.model.checkpoint import Checkpoint, open_model
from prunecli.model.find_axes import axes_of
from prunecli.model.patchwork import submodule
from prunecli.model.probe import layer_keys
from prunecli.model.skeleton import Skeleton
from prunecli.model.trial import Trial
from prunecli.modules.define import require_replaceable
from prunecli.running.encoding import require_task
from prunecli.selection.cut import Selection, cut
from prunecli.text.choice import task_of
from tests.commands.calls import done
from tests.contracts.method_contract import written
from tests.factorised import cached, factorised
from tests.families import cutting, tiny
from tests.families.__main__ import NAMES, PAGE
from tests.opening import load
from tests.reference.masks import passed_by
from tests.tiny import change_config, config_of, write_json, write_plain_tokenizer

BOTH = {"layer", "unit", "head", "uneven head"}
FOUND = {
    "granite": {*BOTH, "channel"},
    "gpt_neox": {"layer", "unit", "uneven head"},
    "bitnet": {"layer"},  # a norm over the hidden units
    "bloom": {"layer", "uneven unit", "uneven head"},  # a slope for each head; four units for each channel
    "mpt": {"layer", "uneven unit", "uneven head"},
    "deberta": {"layer", "unit", "uneven head"},  # biases of heads that are no layer's
    "gpt_neox_japanese": {"layer", "uneven unit", "uneven head"},  # one of the output that is no layer's
    "modernbert": {"layer", "unit", "uneven head"},
    "umt5": BOTH,
    "qwen3_5_text": {*BOTH, "channel"},
    "lfm2": BOTH,  # its config says the width of FFNs before it is rounded
    "deepseek_v3": {*BOTH, "expert unit", "channel"},
    "gpt_oss": {"layer", "head", "uneven head", "expert unit", "channel"},
    "gemma4_text": {*BOTH, "expert unit"},  # a share for each layer in a table; settings by number of layer
    "nemotron_h": {*BOTH, "expert unit", "channel"},  # a list says how many layers there are
    "falcon_h1": {*BOTH, "channel"},  # the state-space part of each layer keeps its heads
    "gte": {"layer", "unit", "head"},  # its files part a matrix under the same name
    "mpnet": {"layer", "unit", "uneven head"},  # the encoder adds a bias for all heads
    "esm": {"layer", "unit", "uneven head"},
    "diffllama": {"layer", "unit", "channel"},  # a norm over heads that has no weights
    "xlnet": {"layer", "unit"},  # parameters that keep their type whatever the class is opened in
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Type -> a tiny model and its checkpoint: what takes seconds is found once for all tests of the type."""
    with ExitStack() as stack:

        @functools.cache
        def saved(model_type: str) -> tuple[PreTrainedModel, Checkpoint]:
            path = tmp_path_factory.mktemp("found") / "model"
            return cutting.saved(model_type, path), stack.enter_context(open_model(path))

        yield saved


@pytest.mark.parametrize("model_type", FOUND)
def test_a_cut_model_is_the_masked_one(model_type, opened):
    model, checkpoint = opened(model_type)
    found = cutting.axes_found(checkpoint)
    able = {kind for kind in found if cutting.stays_stock(checkpoint, kind)}
    uneven = [kind for kind in found if cutting.can_differ(checkpoint, kind)]
    other = {f"uneven {kind}" for kind in uneven if kind == "head" or kind not in able}
    assert able | other == FOUND[model_type]
    every = [axis for kind in able for axis in found[kind]]
    # LFM2's second layer is the only one with an attention; DiffLlama's depend on their number.
    gone = 2 if model_type in ("lfm2", "diffllama") else 1
    assert cutting.apart(model, checkpoint, every, "out", gone) < 2e-4
    config = config_of("out")
    assert config["model_type"] == checkpoint.config["model_type"]
    assert "auto_map" not in config
    if uneven:
        axes = [axis for own in found.values() for axis in own]
        assert cutting.apart(model, checkpoint, axes, "uneven", gone, uneven=True) < 2e-4
        if "auto_map" in config_of("uneven"):
            with pytest.raises(ValueError, match="Not a stock model"):
                type(model).from_pretrained("uneven")


@pytest.mark.parametrize("number", range(24))
def test_types_by_chance(number):
    """All kinds at once. Each run draws others of the 240; `make families` tries all, and each kind alone."""
    types = [name for name in tiny.model_types() if name != NLLB_MOE.model_type]
    model_type = random.SystemRandom().choice(types[number::24])
    model = cutting.saved(model_type, "model")
    checkpoint = open_model("model")
    found = cutting.axes_found(checkpoint)
    able = {kind for kind in found if cutting.stays_stock(checkpoint, kind)}
    told = re.search(rf"(?m)^\| ([^|]+) \| \d+ \| .*`{model_type}`", PAGE.read_text())[1].split(", ")
    assert {kind for kind in (*cutting.KINDS, "expert unit") if NAMES[kind] in told} <= able, model_type
    axes = [axis for kind in able for axis in found[kind]]
    for gone in (1, 0, 2):  # a class may need layers of each kind to answer
        with suppress(PruneError, ValueError):
            assert cutting.apart(model, checkpoint, axes, f"out{gone}", gone) < 2e-4, model_type
            break


@pytest.mark.parametrize(
    ("treatment", "model_type", "part"),
    [
        ("share", "ibert", "ffn"),  # has buffers
        ("drop", "granite", "attention"),
        ("drop", "electra", "ffn"),
        ("share", "gptj", "attention"),
        ("share", "umt5", "ffn"),  # classes of the encoder alone lack fewer tensors of the result
        ("share", "gemma4", "attention"),  # heads of two widths
        ("drop", "mpt", "ffn"),  # it is given the residual
        ("share", "openai-gpt", "attention"),  # a turned matrix: its bias is not as long as it has rows
    ],
)
def test_layers_share_or_drop(treatment, model_type, part, opened):
    model, checkpoint = opened(model_type)
    assert cutting.treated_apart(model, checkpoint, part, treatment, "out") < 1e-5
    before = load("out")
    before.save_pretrained("again")
    rows = tiny.inputs(model)
    assert torch.equal(cutting.logits(before, rows), cutting.logits(load("again"), rows))


def test_a_cache_counts_tokens_where_no_attention_is_left(opened):
    model, checkpoint = opened("gpt_neo")  # its positions follow from the first layer's cache
    cutting.treated_apart(model, checkpoint, "attention", "drop", "out")
    result = load("out")
    written = [
        result.generate(**tiny.inputs(model), max_new_tokens=9, use_cache=use) for use in (True, False)
    ]
    assert torch.equal(*written)


@pytest.mark.parametrize(
    ("treatment", "model_type", "part", "said"),
    [
        ("drop", "modernbert", "attention", "attentions are removed"),  # the first has no norm
        ("share", "gte", "ffn", "FFNs are shared"),  # its class parts a matrix of the files
        ("drop", "gte", "ffn", "FFNs are removed"),
    ],
)
def test_layers_that_cannot_share_or_be_dropped(treatment, model_type, part, said, opened):
    with pytest.raises(UnsupportedModelError, match=said):
        cutting.treated_apart(*opened(model_type), part, treatment, "out")


@pytest.mark.parametrize("model_type", ["granite", "electra", "gpt_neox"])
def test_every_class_opens_a_result(model_type, opened):
    model, checkpoint = opened(model_type)
    axis, *_ = axes_of(checkpoint, "head")
    written(checkpoint, Selection({axis.name: axis.ids[1:]}), "out")
    opened_by = config_of("out")["auto_map"]
    assert {"AutoModel"} < {*opened_by}
    rows = tiny.inputs(model)
    hidden = {}
    for auto, shim in opened_by.items():
        made = getattr(transformers, auto).from_pretrained("out", trust_remote_code=True)
        assert type(made).__name__ == shim.partition(".Prunecli")[2]
        base = made if auto == "AutoModel" else made.base_model
        with torch.no_grad():
            hidden[auto] = base(**rows)[0]
    assert all(torch.equal(found, hidden["AutoModel"]) for found in hidden.values())


@pytest.mark.parametrize(
    ("model_type", "side"), [("granite", "input"), ("umt5", "both"), ("modernbert", "both")]
)
def test_embeddings_are_factorised(model_type, side):
    model = cutting.saved(model_type, "model")
    factorised("model", "unit", side=side)
    cached("unit", "table")
    unit, table = load("unit"), load("table")
    rows = tiny.inputs(model)
    assert torch.allclose(cutting.logits(unit, rows), cutting.logits(table, rows), atol=1e-5)
    assert not torch.allclose(cutting.logits(unit, rows), cutting.logits(model, rows), atol=1e-2)
    unit.save_pretrained("again")
    assert torch.equal(cutting.logits(unit, rows), cutting.logits(load("again"), rows))


@pytest.mark.parametrize(
    ("name", "model_type", "head"),
    [
        ("GPTNeoXForSequenceClassification", "gpt_neox", None),  # without a padding token
        ("PLBartForSequenceClassification", "plbart", "seq2seq"),  # looks at the end
        ("MusicgenForCausalLM", "musicgen", None),  # has a list of output layers
    ],
)
def test_classes_that_look_elsewhere_are_found(name, model_type, head):
    getattr(transformers, name)(tiny.tiny_config(model_type, head)).save_pretrained("model")
    assert {"layer", "unit"} <= cutting.axes_found(open_model("model")).keys()


@pytest.mark.parametrize("model_type", ["granite", "gte"])
def test_tokens_are_found(model_type, opened):
    _, checkpoint = opened(model_type)
    (axis,) = axes_of(checkpoint, "token")
    assert {*axis.carriers} == {name for name, info in checkpoint.tensors.items() if tiny.VOCAB in info.shape}


def test_layers_whose_number_matters_are_refused(opened):
    """Every second layer has experts, and another one attention."""
    _, checkpoint = opened("jamba")
    (axis,) = axes_of(checkpoint, "layer")
    with pytest.raises(UnsupportedModelError, match="a small copy of the model cannot lose these layers"):
        cut(checkpoint, Selection({axis.name: axis.ids[1:]}))
    config = cut(checkpoint, Selection({axis.name: axis.ids[:-1]})).config
    assert config["num_hidden_layers"] == len(axis.ids) - 1


def test_layers_that_get_features_of_images_stay():
    """Qwen3-VL adds three sets of features after the first three layers."""
    values = tiny.values_of(transformers.Qwen3VLConfig)
    values["text_config"]["num_hidden_layers"] = 5
    values["vision_config"] |= {"depth": 3, "deepstack_visual_indexes": [0, 1, 2], "out_hidden_size": 48}
    model = tiny.drawn(transformers.Qwen3VLForConditionalGeneration, transformers.Qwen3VLConfig(**values))
    model.save_pretrained("model")
    checkpoint = open_model("model")
    (axis,) = axes_of(checkpoint, "layer")
    with pytest.raises(UnsupportedModelError, match="numbers of the layers 0 to 2"):
        cut(checkpoint, Selection({axis.name: (0, 2, 3, 4)}))
    config = cut(checkpoint, Selection({axis.name: (0, 1, 2, 4)})).config
    assert config["text_config"]["num_hidden_layers"] == 4


def test_lists_of_numbers_of_layers_follow():
    model = cutting.saved("flint", "source")
    assert model.config.mlp_only_layers == [0, 1]
    checkpoint = open_model("source")
    axes = axes_of(checkpoint, "layer")
    assert cutting.apart(model, checkpoint, axes, "cut", 0) < 2e-4
    assert config_of("cut")["mlp_only_layers"] == [0]


def test_a_list_of_numbers_of_layers_may_name_some_that_are_not_there():
    """The cross-attention of Mllama's layer 3 has no heads of the self-attention that its neighbours have."""
    config = tiny.tiny_config("mllama")
    config.num_hidden_layers = 5
    model = tiny.drawn(tiny.auto_class("mllama"), config)
    model.save_pretrained("model")
    checkpoint = open_model("model")
    heads = axes_of(checkpoint, "head")
    assert [axis.layer for axis in heads] == [0, 1, 2, 4]
    assert cutting.apart(model, checkpoint, heads, "out", uneven=True) < 2e-4


def test_remedies_of_refusals_work(opened):
    with pytest.raises(UnsupportedModelError, match="No FFN was found") as caught:
        plan_widths(opened("bitnet")[1], NarrowOptions(metric="norms"))
    assert "experts" not in str(caught.value.remedy)
    _, checkpoint = opened("gpt_neox")
    with pytest.raises(UsageError, match="cannot say how many heads") as caught:
        plan_heads(checkpoint, HeadOptions(metric="random", uniform=True))
    assert str(caught.value.remedy).startswith("Leave `uniform` out")
    plan_heads(checkpoint, HeadOptions(metric="random"))


def test_other_classes_of_declared_types_are_asked():
    model = transformers.T5ForTokenClassification(tiny.tiny_config("t5")).eval()
    model.save_pretrained("model")
    checkpoint = open_model("model")
    assert checkpoint.family is None
    for kind, axes in cutting.axes_found(checkpoint).items():
        assert cutting.apart(model, checkpoint, axes, kind, uneven=kind == "head") < 2e-4
    assert task_of(checkpoint) == "embedding"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("BertLMHeadModel", {"is_decoder": True, "add_cross_attention": True}),
        ("BartForConditionalGeneration", {"tie_word_embeddings": False}),
        ("FalconForCausalLM", {}),  # one key and value for all queries, fused with them
        ("FalconForCausalLM", {"multi_query": False, "parallel_attn": False, "alibi": True}),
        ("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        # Its class computes positions, and never stores them.
        ("MarianMTModel", {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 120}),
    ],
)
def test_settings_that_no_record_knows_are_asked(name, settings):
    model_class = getattr(transformers, name)
    config = tiny.tiny_config(model_class.config_class.model_type)
    for key, value in {**settings, "encoder_layers": 2, "decoder_layers": 2}.items():
        setattr(config, key, value)
    model = tiny.drawn(model_class, config)
    model.save_pretrained("model")
    checkpoint = open_model("model")
    assert checkpoint.family is None
    found = cutting.axes_found(checkpoint)
    axes = [*found["unit"], *found["head"]]
    assert cutting.apart(model, checkpoint, axes, "out", uneven=True) < 2e-4


def test_the_class_of_a_result_opens_where_no_auto_class_names_it():
    transformers.T5EncoderModel(tiny.tiny_config("t5")).save_pretrained("model")
    checkpoint = open_model("model")
    axes = cutting.axes_found(checkpoint)["head"]
    kept = cutting.kept_of(checkpoint, axes, 0, uneven=True)
    written(checkpoint, Selection(kept, step={"command": "test"}), "out")
    assert task_of(checkpoint) == "embedding"
    opened = transformers.AutoModel.from_pretrained("out", trust_remote_code=True)
    assert type(opened).__name__ == "T5EncoderModel"


def test_the_decoder_alone_opens_no_result():
    cutting.saved("plbart", "model", "seq2seq")
    classes = {one.auto_class for one in open_model("model").require_architecture().found.classes}
    assert classes >= {"AutoModelForSeq2SeqLM", "AutoModel"}
    assert "AutoModelForCausalLM" not in classes


@pytest.mark.parametrize("kind", ["layer", "head"])
def test_a_null_is_what_the_class_makes_of_it(kind):
    """Phi-1.5's config.json has a null as its number of key/value heads."""
    config = tiny.tiny_config("phi")
    config.num_key_value_heads = config.num_attention_heads
    model = transformers.PhiForCausalLM(config).eval()
    model.save_pretrained("model")
    change_config("model", num_key_value_heads=None)
    checkpoint = open_model("model")
    axes = axes_of(checkpoint, kind)
    assert cutting.apart(model, checkpoint, axes, "out", uneven=kind == "head") < 2e-4


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ("MPNetModel", ["MPNetForMaskedLM"]),  # all-mpnet-base-v2
        ("BloomModel", ["BloomForCausalLM"]),  # bloom-560m
        ("CamembertForMaskedLM", ["CamembertModel"]),
        ("DebertaV2ForMaskedLM", None),  # deberta-v3-base, whose head has other names
    ],
)
def test_tensors_of_another_class_than_is_named(stored, named):
    model_type = getattr(transformers, stored).config_class.model_type
    model = getattr(transformers, stored)(tiny.tiny_config(model_type)).eval()
    model.save_pretrained("model")
    path = "model/model.safetensors"
    tensors = load_file(path)
    if named is None:
        tensors = {name: value for name, value in tensors.items() if not name.startswith("cls.")}
    tensors["embeddings.position_ids"] = torch.arange(9)
    save_file(tensors, path, metadata={"format": "pt"})
    change_config("model", architectures=named)
    checkpoint = open_model("model")
    assert "embeddings.position_ids" not in checkpoint.tensors
    kept = cutting.kept_of(checkpoint, axes := axes_of(checkpoint, "layer"), 1)
    assert axes
    written(checkpoint, Selection(kept, step={"command": "test"}), "out")
    reduced = transformers.AutoModel.from_pretrained("out").eval()
    whole = transformers.AutoModel.from_pretrained("model").eval()
    layers = [
        name
        for name, module in whole.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == len(axes[0].ids)
    ]
    rows = tiny.inputs(whole)
    with torch.no_grad(), passed_by(whole, [f"{layers[0]}.1"]):
        assert torch.allclose(whole(**rows)[0], reduced(**rows)[0], atol=1e-5)
    load("out")


def test_an_output_layer_of_its_own_stays_apart():
    """Transformers leaves it apart where config.json ties it, and the files hold another one."""
    cutting.saved("gemma", "model")
    tensors = load_file("model/model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, "model/model.safetensors", metadata={"format": "pt"})
    change_config("model", "tie_word_embeddings")  # as published: the class's default ties them
    model = transformers.GemmaForCausalLM.from_pretrained("model").eval()
    checkpoint = open_model("model")
    axes = axes_of(checkpoint, "unit")
    assert cutting.apart(model, checkpoint, axes, "out", uneven=True) < 2e-4
    opened = load("out")
    assert torch.equal(opened.lm_head.weight, tensors["lm_head.weight"])


def test_a_model_of_sound_is_cut():
    config = tiny.tiny_config("whisper")
    config.encoder_layers = config.decoder_layers = 2
    config.max_source_positions = 16
    model = tiny.drawn(transformers.WhisperForConditionalGeneration, config)
    model.generation_config.alignment_heads = [[1, 1]]
    model.save_pretrained("model")
    checkpoint = open_model("model")
    found = cutting.axes_found(checkpoint)
    assert [len(found[kind]) for kind in ("layer", "unit", "head")] == [2, 4, 6]
    assert not cut(checkpoint, Selection(cutting.kept_of(checkpoint, found["unit"], 1))).files
    heads = [*found["unit"], *found["head"]]
    assert cutting.apart(model, checkpoint, heads, "uneven", uneven=True) < 2e-4
    stock = [*found["layer"], *found["unit"]]
    assert cutting.apart(model, checkpoint, stock, "stock") < 2e-4
    for output in ("uneven", "stock"):
        assert "alignment_heads" not in Path(f"{output}/generation_config.json").read_text()
    with pytest.raises(UnsupportedModelError, match="which has input_features in the place of text"):
        require_task(model, "translation")


def test_the_text_model_is_found_though_that_of_sounds_is_deeper():
    config = tiny.tiny_config("granite_speech")
    config.text_config.num_hidden_layers = 2
    tiny.drawn(transformers.GraniteSpeechForConditionalGeneration, config).save_pretrained("model")
    names = {name for axis in axes_of(open_model("model"), "unit") for name in axis.carriers}
    assert names
    assert all(name.startswith("language_model.") for name in names)


def test_a_model_of_another_sound_is_refused_as_such():
    config = transformers.Speech2TextConfig(d_model=16, vocab_size=99)
    transformers.Speech2TextForConditionalGeneration(config).save_pretrained("model")
    with pytest.raises(UnsupportedModelError, match="takes input_features"):
        open_model("model").require_architecture()


def test_sizes_of_the_text_model_move_from_the_top():
    """They are there in the published Qwen2.5-VL."""
    text = tiny.tiny_config("qwen2").to_dict()
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
    vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": 48, "intermediate_size": 24, "num_heads": 2}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text | {"model_type": "qwen2_5_vl_text"}, vision_config=vision
    )
    model = tiny.drawn(transformers.Qwen2_5_VLForConditionalGeneration, config)
    model.save_pretrained("model")
    values = config_of("model")
    own = values.pop("text_config")
    own["rope_scaling"] = {**own.pop("rope_parameters"), "type": "mrope"}
    write_json("model/config.json", {**own, **values})
    checkpoint = open_model("model")
    found = cutting.axes_found(checkpoint)
    axes = [*found["layer"], *found["unit"]]
    assert cutting.apart(model, checkpoint, axes, "cut") < 2e-4
    written = config_of("cut")
    assert "num_hidden_layers" not in written
    assert written["text_config"]["num_hidden_layers"] == 2


def test_single_heads_of_one_stack_stay_when_the_other_loses_heads():
    """T5Gemma's decoder keeps one key/value head in each attention first; its query heads look like heads then."""
    cutting.saved("t5gemma", "model")
    for source, output, kinds in (("model", "once", ["head"]), ("once", "twice", ["unit", "head"])):
        checkpoint = open_model(source)
        axes = [axis for kind in kinds for axis in axes_of(checkpoint, kind)]
        kept = cutting.kept_of(checkpoint, axes, 0, uneven=len(kinds) > 1)
        written(checkpoint, Selection(kept, step={"command": "test"}), output)
    load("twice")


def test_older_names_of_norms():
    model = cutting.saved("electra", "model", "masked")
    path = "model/model.safetensors"
    tensors = load_file(path)
    for name in [*tensors]:
        older = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        tensors[older.replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)
    save_file(tensors, path, metadata={"format": "pt"})
    checkpoint = open_model("model")
    assert cutting.apart(model, checkpoint, axes_of(checkpoint, "layer"), "out") < 2e-4


def test_single_layers_with_sizes_of_their_own_have_small_copies():
    pytest.importorskip("transformers", minversion="5.23")  # has the type
    config = tiny.tiny_config("dots3_note_text")
    assert config.per_layer_config[2].num_attention_heads == 64
    _has_small_copy(transformers.Dots3NoteForCausalLM, config)


def test_a_small_copy_can_be_stored():
    """Step 3.7's rules for saving turn rows of its images' heads, which must be two wide."""
    values = tiny.values_of(transformers.Step3p7Config)
    values["text_config"] |= {
        "sliding_window": 8,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    }
    ropes = {
        kind: {"rope_type": "default", "rope_theta": 1e4} for kind in values["text_config"]["layer_types"]
    }
    values["text_config"]["rope_parameters"] = ropes
    _has_small_copy(transformers.Step3p7ForConditionalGeneration, transformers.Step3p7Config(**values))


@pytest.mark.parametrize(("hidden", "width", "heads"), [(1024, 1024, 8), (8192, 29568, 64)])
def test_a_text_model_within_another_has_a_smaller_copy(hidden, width, heads):
    """Qwen2.5-VL's sections say how the width of a head is divided, and no key states the width.

    Of many heads few are left, since they cannot be as narrow as those of other models.
    """
    text = {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision = {"depth": 1, "hidden_size": 64, "num_heads": 4, "intermediate_size": 64}
    vision["out_hidden_size"] = hidden
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    _has_small_copy(transformers.Qwen2_5_VLForConditionalGeneration, config)


def test_parts_for_images_shrink_as_their_heads_allow():
    """Aria's vision tower has 16 heads of 72 channels, which a 128th of its width cannot have."""
    config = transformers.AriaConfig(
        text_config={"num_hidden_layers": 2}, vision_config={"num_hidden_layers": 1}
    )
    _has_small_copy(transformers.AriaForConditionalGeneration, config)


def _has_small_copy(model_class: type[PreTrainedModel], config: transformers.PreTrainedConfig) -> None:
    skeleton = Skeleton(model_class, type(config), config.to_dict())
    assert Trial.of(skeleton, layer_keys(skeleton)).modules


def test_labels_are_no_layers():
    model = transformers.ElectraForSequenceClassification(tiny.tiny_config("electra")).eval()
    model.save_pretrained("model")
    checkpoint = open_model("model")
    assert cutting.apart(model, checkpoint, axes_of(checkpoint, "layer"), "out") < 2e-4


def test_every_name_of_the_depth_follows():
    """Published configs of BlenderBot, LED and others have another name of it, which transformers believes."""
    model = cutting.saved("blenderbot-small", "model")
    change_config("model", num_hidden_layers=config_of("model")["encoder_layers"])
    checkpoint = open_model("model")
    assert cutting.apart(model, checkpoint, axes_of(checkpoint, "layer"), "out") < 2e-4


def test_layers_that_the_depth_scales_are_refused(opened):
    with pytest.raises(UnsupportedModelError, match="no layer can be removed"):
        axes_of(opened("minicpm3")[1], "layer")


@pytest.mark.parametrize("model_type", ["granite", "modernbert"])
def test_the_class_is_found_by_the_tensors(model_type):
    model = cutting.saved(model_type, "model")
    change_config("model", "architectures")
    assert open_model("model").require_architecture().model_class == type(model).__name__


def test_missing_tensors_are_named():
    cutting.saved("granite", "model")
    tensors = load_file("model/model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, "model/model.safetensors")
    named = r"1 missing \(model\.layers\.1\.mlp\.up_proj\.weight\)"
    with pytest.raises(CheckpointError, match=named):
        open_model("model").check()


def test_a_tensor_that_the_class_would_leave_out_of_a_layer_is_refused():
    """Relative positions, which transformers' class no longer has; buffers of older classes are no fault."""
    path, layer = Path("model"), "electra.encoder.layer.1.attention.self"
    cutting.saved("electra", path)
    state = {**load_file(path / "model.safetensors"), f"{layer}.masked_bias": torch.zeros(1)}
    save_file(state, path / "model.safetensors")
    checkpoint = open_model(path)
    checkpoint.require_architecture()
    checkpoint.check()
    save_file({**state, f"{layer}.distance_embedding.weight": torch.zeros(7, 12)}, path / "model.safetensors")
    checkpoint = open_model(path)
    checkpoint.require_architecture()
    with pytest.raises(CheckpointError, match=r"1 unexpected \(electra.*distance_embedding.weight\)"):
        checkpoint.check()


def test_a_config_that_its_class_refuses_is_named():
    cutting.saved("granite", "model")
    change_config("model", hidden_act="none of these")
    with pytest.raises(CheckpointError, match=r"config\.json: transformers"):
        open_model("model").require_architecture()


def test_random_numbers_of_the_caller_are_left_alone():
    cutting.saved("granite", "model")
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    checkpoint = open_model("model")
    checkpoint.require_architecture()
    require_replaceable(checkpoint.probed.trial)
    assert torch.rand(1) == expected


def test_query_heads_of_some_layers_share_others_keys():
    """Gemma 4's layers that see all tokens have fewer key/value heads: half of the queries may fit them by chance."""
    config = tiny.tiny_config("gemma4_text")
    config.attention_k_eq_v, config.num_attention_heads, config.num_key_value_heads = True, 16, 8
    config.per_layer_config = {2: {"head_dim": 8, "num_key_value_heads": 2}}
    transformers.Gemma4ForCausalLM(config).save_pretrained("model")
    assert not open_model("model").probed.units.heads


def test_the_small_copy_ignores_the_type_of_the_weights():
    """Gemma multiplies embeddings by a buffer that is rounded to the type in which a class is made."""
    config = tiny.tiny_config("gemma3")
    config.dtype = "bfloat16"
    tiny.auto_class("gemma3")(config).to(torch.bfloat16).save_pretrained("model")
    checkpoint = open_model("model")
    assert {*cutting.axes_found(checkpoint)} == {"layer", "unit", "head"}
    (axis,) = axes_of(checkpoint, "token")
    assert axis.carriers


def test_tensors_are_tied_where_no_key_says_so(opened):
    _, checkpoint = opened("nomic_bert")
    assert "tie_word_embeddings" not in checkpoint.config
    checkpoint.check()


def test_a_pattern_that_the_class_no_longer_reads_follows():
    """Published Nemotron-H say their layers in letters, which vLLM reads; transformers makes a list of these."""
    model = "model"
    cutting.saved("nemotron_h", model)
    letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    pattern = "".join(letters[kind] for kind in config_of(model)["layers_block_type"])
    change_config(model, "layers_block_type", hybrid_override_pattern=pattern, num_hidden_layers=len(pattern))
    checkpoint = open_model(model)
    (axis,) = axes_of(checkpoint, "layer")
    written(checkpoint, Selection({axis.name: axis.ids[1:]}), "out")
    config = config_of("out")
    assert (config["hybrid_override_pattern"], config["num_hidden_layers"]) == (pattern[1:], len(pattern) - 1)
    assert len(config["layers_block_type"]) == len(pattern) - 1


def test_positions_that_say_how_wide_a_head_is():
    """Long contexts have a factor for each frequency: the small copy, whose heads are narrower, has fewer."""
    config = tiny.tiny_config("phimoe")
    config.hidden_size = 256
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 32,
        "short_mscale": 1.0,
        "long_mscale": 1.0,
        "short_factor": [1.1] * 32,
        "long_factor": [2.1] * 32,
    }
    tiny.auto_class("phimoe")(config).save_pretrained("model")
    assert {"layer", "head"} <= {*cutting.axes_found(open_model("model"))}


@pytest.mark.parametrize("command", [prune_layers, prune_ffn])
def test_a_model_of_images_is_measured_under_the_names_of_its_class(command):
    cutting.saved("gemma3", "model")
    write_plain_tokenizer("model")
    Path("text.txt").write_text("the hen then ten tins on it\n" * 20)
    assert {ffn.output.rpartition(".")[2] for ffn in open_model("model").layout.ffns} == {"down_proj"}
    done(command, "model --text text.txt --ratio 0.5 -o out")


def test_a_module_is_found_by_rules_that_ask_for_a_dot_behind_it():
    model = cutting.saved("bailing_hybrid", "model")
    (layer, *_) = open_model("model").layout.own_attentions
    assert layer.output.endswith("attention.dense")
    assert isinstance(submodule(model, layer.output), torch.nn.Linear)
