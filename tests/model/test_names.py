from prunecli.model.names import by_module
from tests.contracts.method_contract import logits, written
from tests.selections import kept_heads
from tests.tiny import config_of, tiny_nllb_moe, write_json


def test_groups_by_module_have_stars_for_numbers():
    names = [f"h.{layer}.experts.{expert}.w1.weight" for layer in (0, 1) for expert in range(3)]
    groups = by_module([*names, "embed.wte.weight", "model.layers.0.mlp.experts.gate_up_proj", "bias"])
    assert {group: len(own) for group, own in groups.items()} == {
        "h.*.experts": 6,
        "embed.wte": 1,
        "model.layers.*.mlp": 1,
        "bias": 1,
    }


def test_results_of_older_types_have_the_name_of_today():
    source = tiny_nllb_moe("source")
    wanted = logits(source)
    config = config_of(source)
    write_json(source / "config.json", {**config, "model_type": "nllb_moe"})
    assert (logits(source) == wanted).all()
    written(source, kept_heads({}), "out")
    assert config_of("out")["model_type"] == "nllb-moe"
    assert (logits("out") == wanted).all()
