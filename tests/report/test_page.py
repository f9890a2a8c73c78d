"""The page: its sections from results written by hand and from real tiny checkpoints."""

import base64
import hashlib
import json
import shlex
import shutil
from pathlib import Path

from prunecli.analysis.language_comparison import compare_by_text
from prunecli.commands.prune import prune_experts, prune_heads, prune_layers
from prunecli.methods.options import LanguageOptions
from prunecli.model.checkpoint import open_model
from prunecli.report.collect import collect, findings
from prunecli.report.history import command_lines
from prunecli.report.page import report_page
from tests.commands.calls import done
from tests.commands.gates import text_statistics
from tests.commands.heads import scored
from tests.report import results
from tests.report.pages import Page
from tests.tiny import change_config, fewer_experts, tiny_nllb_moe, write_json

HOSTILE = '<script>alert("x")</script>&amp;\'"\u202e\0--><svg onload=x>'


def page(**files) -> Page:
    """The page of the working directory, after `files` (name -> JSON) are written to it."""
    for name, payload in files.items():
        write_json(f"{name}.json", payload)
    return Page(report_page(collect(Path())))


def says(found: Page, *texts: str) -> None:
    for text in texts:
        assert text in found.text, text


def points(found: Page, caption: str) -> list[tuple]:
    return [(row["name"], row["x"], row["y"]) for row in found.rows(caption, "point")]


def series(found: Page, caption: str, mark: str = "point") -> set[str]:
    return {row["series"] for row in found.rows(caption, mark)}


def axis(found: Page, caption: str, name: str) -> str:
    return found.charts[caption]["layer"][0]["encoding"][name]["title"]


def heads(found: Page, caption: str) -> dict[tuple[str, str], float]:
    return {(row["row"], row["column"]): row["value"] for row in found.rows(caption, "rect")}


def reduced(directory, source, steps):
    """A copy of `source` whose config.json tells of steps; nothing is removed."""
    shutil.copytree(source, directory)
    change_config(directory, prunecli={"version": 1, "history": steps})
    return directory


def step(command, source, **arguments):
    statistics = [{"file": "gates.json", "sha256": "0123456789"}]
    made = {"command": command, "arguments": arguments, "prunecli": "0.1.0"}
    return {**made, "source": source, "statistics": statistics}


def source_of(directory):
    return {"path": Path(directory).name, "fingerprint": open_model(directory).fingerprint}


def test_quality_beside_size_and_speed_of_checkpoints_that_are_gone():
    found = page(evaluation=results.evaluation(), latency=results.latency())
    assert found.sections() == ["Quality, size and speed", "Speed and memory"]
    says(found, "61.5", "58.2", "1.50M", "2.86 MiB", "150.0 ± 2.0", "1.50 ± 0.02", "p = 0.012", "25.0%")
    says(found, "2 CPU threads")
    assert "chrF++ against parameters" in found.figures
    assert "chrF++ against speed" in found.figures
    assert ("small", 150, 58.25) in points(found, "chrF++ against speed")


def test_scores_by_text():
    found = page(lm=results.language_model_by_text())
    says(found, "By text", "code", "5.25", "6.25", "prose", "40.5", "41.5")
    found = page(lm=results.language_model())
    assert "By text" not in found.text


def test_an_original_elsewhere_has_its_point_in_every_chart(tmp_path_factory):
    original = source_of(tiny_nllb_moe(tmp_path_factory.mktemp("elsewhere") / "full"))
    for count, balance in ((2, "1:1"), (3, "3:1"), (4, "1:1"), (6, "3:1")):
        arguments = {"ratio": 1 - count / 8, "balance": balance}
        step = {"command": "prune-experts", "arguments": arguments, "source": original}
        fewer_experts(f"kept-{count}", range(count), step)
    names = [f"kept-{count}" for count in (2, 3, 4, 6)]
    payload = results.evaluation([original, *(source_of(name) for name in names)])
    row = payload["results"][0] | {"parameters": 3_000_000, "checkpoint_bytes": 6_000_000}
    payload["results"] = [row | {"checkpoint": name} for name in ("full", *names)]
    found = page(evaluation=payload)
    assert {"chrF++ against the experts removed", "chrF++ against parameters"} <= set(found.figures)
    removed = points(found, "chrF++ against the experts removed")
    starts = [(name, x) for name, x, _ in removed if name == "full"]
    assert starts == [("full", 0)] * 2, "it starts either line"
    assert axis(found, "chrF++ against the experts removed", "x") == "% of experts removed"
    assert ("full", 3) in [(name, x) for name, x, _ in points(found, "chrF++ against parameters")]
    assert series(found, "chrF++ against the experts removed", "line") == {"balance 1:1", "balance 3:1"}
    assert "other models" not in series(found, "chrF++ against parameters")


def test_models_without_layers_or_tokens_are_reduced():
    base = tiny_nllb_moe("base")
    done(prune_layers, base, "--remove encoder:1 -o shallow")
    done(prune_layers, base, "--remove decoder:1 -o other")
    done(prune_experts, base, "--metric random --ratio 0.25 -o 'a fourth'")
    done(prune_experts, base, "--metric random --ratio 0.5 -o half")
    names = ["base", "shallow", "other", "a fourth", "half"]
    payload = results.evaluation([source_of(name) for name in names])
    payload["results"] = [payload["results"][0] | {"checkpoint": name} for name in names]
    payload["results"][-1] = payload["results"][-1] | {"mean": {"chrf++": 30.0, "length_ratio": 2.0}}
    write_json("evaluation.json", payload)
    data = collect(Path())
    found = Page(report_page(data))
    caption = "chrF++ against parameters"
    assert "other models" in series(found, caption), "the original starts the line of experts"
    assert len(series(found, caption, "line")) == 1, "the two without a layer are no curve"
    assert len(found.rows(caption, "line")) == 3
    assert "7 of 8" in found.text
    assert "half: the outputs are 2.00 times as long" in found.text
    ((_, compared),) = findings(data)
    headline = {one.name: one for one in compared}
    sizes = [entry.inventory.total.parameters for entry in data.checkpoints]
    by_name = dict(zip([entry.name for entry in data.checkpoints], sizes, strict=True))
    assert headline["half"].smaller == 1 - by_name["half"] / by_name["base"]
    assert (headline["half"].difference, headline["shallow"].difference) == ("-31.5 chrF++", "+0.0 chrF++")


def test_the_headline_names_what_no_other_model_surpasses():
    payload = results.evaluation()
    sizes = {"big": 100, "small": 40, "worse": 50, "smallest": 10, "gone": 5}
    scores = {"big": 60.0, "small": 58.25, "worse": 50.0, "smallest": 20.0, "gone": 1.0}
    payload["results"] = [
        {"checkpoint": name, "parameters": size, "checkpoint_bytes": size, "mean": {"chrf++": scores[name]}}
        for name, size in sizes.items()
    ]
    payload["results"][-1]["mean"] |= {"over_generated": 0.9}
    payload["models"] = [{"path": name, "fingerprint": f"sha256:{name}"} for name in sizes]
    timed = results.latency()
    timed["models"] = payload["models"][:2]
    timed["results"][1]["timings"][0]["speedup"]["deviation"] = 1.2
    found = page(evaluation=payload, latency=timed)
    assert "small: 60 % smaller, -1.8 chrF++, 1.50x (noisy)" in found.text
    assert "90 % smaller, -40.0 chrF++" in found.text
    assert "50 % smaller" not in found.text
    assert "95 % smaller" not in found.text
    assert "gone: 90% of the outputs run on as if the model repeats itself." in found.text
    assert found.text.count("noisy") == 3  # the headline and both tables


def test_outputs_stand_side_by_side():
    example = {"pair": "eng_Latn-fra_Latn", "source": "A dog.", "reference": "Un chien."}
    example["outputs"] = {"big": "Un chien.", "small": "Un un un"}
    found = page(evaluation={**results.evaluation(), "examples": [example]})
    assert "Examples of outputs" in found.figures
    says(found, "A dog.", "Un chien.", "Un un un")


def test_steps_can_be_typed_again():
    """Each line of a history, parsed by a shell and run by the command, makes the same weights."""
    write_json("it's scored.json", scored(open_model(tiny_nllb_moe("base"))))
    arguments = "--metric random --ratio 0.5 --seed 3"
    done(prune_experts, "base", arguments, "-o 'few experts'")
    done(prune_heads, "'few experts' --count 3 -o heads --scores", Path("it's scored.json"))
    done(prune_layers, "heads --remove encoder:1,decoder:0 -o small")
    data = collect(Path())
    made = {entry.name: entry for entry in data.checkpoints}
    lines = command_lines(made["small"], data.checkpoints)
    commands = {"prune-experts": prune_experts, "prune-heads": prune_heads, "prune-layers": prune_layers}
    for line in lines:
        name, *words = shlex.split(line, comments=True)[1:]
        done(commands[name], shlex.join(words), "--force")
    again = {entry.name: entry for entry in collect(Path()).checkpoints}
    for name in ("few experts", "heads", "small"):
        assert again[name].fingerprint == made[name].fingerprint
        assert again[name].history == made[name].history


def test_speed_against_batch_size():
    found = page(latency=results.latency((1, 4)))
    caption = "Tokens per second, beam 5, against batch size"
    assert ("small, batch 4", 4, 600) in points(found, caption)
    assert {(row["low"], row["high"]) for row in found.rows(caption, "rule")} == {
        (98, 102), (398, 402), (148, 152), (598, 602)
    }  # fmt: skip


def test_languages():
    families = {"deu_Latn": "Germanic", "eng_Latn": "Germanic", "fra_Latn": "Romance"}
    found = page(languages={**results.languages(), "families": families})
    assert found.sections() == ["Languages"]
    tree = "Languages by the encoder experts of their source"
    assert [row.get("family") for row in found.rows(tree, "point")] == ["Germanic", "Germanic", "Romance"]
    assert max(row["distance"] for row in found.rows(tree, "line")) == 1.25
    cell = {"row": "deu_Latn-eng_Latn", "column": "eng_Latn-fra_Latn", "value": 0.25}
    assert cell in found.rows("Jaccard similarity, encoder experts", "rect")
    says(found, "88%", "36.5", "30", "41")
    (bar,) = found.rows(
        "Experts kept by each layer under the global threshold: mean and range over the pairs", "bar"
    )
    assert (bar["name"], bar["text"]) == ("encoder 3", "36.5 (30 to 41)")


def test_similarity():
    found = page(similarity=results.similarity())
    says(found, "CKA, % of the benchmark", "97.2")
    both = "CKA, encoder: big and small"
    # 0.ffn has no value.
    assert found.rows(both, "rect") == [{"row": "0.sa", "column": "0.sa", "value": 0.9125}]
    assert (axis(found, both, "y"), axis(found, both, "x")) == ("big", "small")


def test_heads_that_matter_or_harm_and_heads_alone():
    payload = results.heads() | {"method": "ablation", "metric": "loss", "base": 2.0}
    payload["without"] = payload["sum"]
    found = page(heads=payload)
    assert "without the head; translation, 10 examples; loss, 2 with all heads" in found.text
    assert heads(found, "encoder self-attention")["0", "0"] == 10.5  # the loss rises from 2 to 12.5
    assert heads(found, "cross-attention")["1", "0"] == -2
    found = page(heads=payload | {"method": "all-but-one", "only": payload["without"]})
    assert heads(found, "encoder self-attention")["0", "0"] == 12.5


def test_parts_history_and_families_of_checkpoints():
    base = tiny_nllb_moe("base")
    first = step("prune-experts", source_of(base), ratio=0.5, languages=["a", "b"], quick=True, spare=None)
    reduced("pruned", base, [first])
    second = step("finetune", source_of("pruned"), steps=10, teacher={"path": "base"})
    reduced("tuned", base, [first, second])
    third = step("prune-heads", {"path": "lost", "fingerprint": "sha256:77"}, ratio=0.1)
    reduced("grandchild", base, [first, step("share-ffn", first["source"]), third])
    found = page()
    assert found.sections() == ["Checkpoints", "Pruning history"]
    for text in ("prune-experts --languages a,b --quick --ratio 0.5", "finetune --steps 10 --teacher base"):
        assert any(text in node for node in found.nodes), text
    assert "--spare" not in found.text
    # An ancestor that no longer exists has the name its child read it under.
    assert "lost: share-ffn" in found.nodes
    assert len(found.nodes) == 5
    total = sum(info.numel for info in open_model(base).tensors.values())
    assert f"{total:,}" in found.text


def test_real_reductions_have_strips_and_head_maps():
    base = tiny_nllb_moe("base")
    write_json("experts.json", [0, 2, 3, 5, 8, 9, 12, 13, 16, 17, 18, 20, 24, 25, 26, 31])
    write_json("heads.json", scored(open_model(base)))
    done(prune_experts, base, "--keep experts.json -o fewer")
    done(prune_heads, "fewer --scores heads.json --count 3 -o small")
    found = page()
    expected = ["Checkpoints", "Pruning history", "By what was chosen", "Experts", "Attention heads"]
    assert found.sections() == expected
    mapped = "Heads by importance by gradient, over the l2 norm of its attention"
    assert mapped in found.figures
    cells = found.rows(mapped, "rect")
    assert [cell["state"] for cell in cells].count("dropped") == 3  # ranked heads; the experts were named
    kept = heads(found, "Experts kept by fewer: 16 of 32 experts")
    assert [column for (row, column), value in kept.items() if "r 1" in row and value] == list("02350124")
    assert "21 of 24" in found.text
    assert len(found.nodes) == 3
    models = [source_of(name) for name in ("base", "small")]
    found = page(evaluation=results.evaluation(models))
    assert "chrF++ against parameters" in found.figures, "experts went too: heads alone are no measure"
    assert "chrF++ against the heads removed" not in found.figures


def test_names_in_files_stay_text():
    base = tiny_nllb_moe("<img src=x onerror=y>")
    hostile = step(HOSTILE, {"path": HOSTILE, "fingerprint": HOSTILE}, **{HOSTILE: HOSTILE})
    odd = {"command": ["x"], "arguments": 3, "source": "?", "statistics": 1}
    reduced("a&b<i>", base, [hostile, odd])
    for name in ("evaluation", "latency", "languages", "similarity", "finetune", "heads"):
        text = json.dumps(getattr(results, name)())
        for word in ("small", "test", "eng_Latn", "cpu (some", "0.sa", "recovered", "importance", 'chrf++"}'):
            text = text.replace(f'"{word}', '"' + json.dumps(HOSTILE)[1:-1] + word.replace('"}', ""))
        Path(f"{name}<b>.json").write_text(text)
    source = report_page(collect(Path()))
    found = Page(source)
    assert '<script>alert("x")</script>' in found.text
    assert "<svg onload" not in source
    assert r"\u202e" not in source
    assert len(found.scripts) == 1
    digest = base64.b64encode(hashlib.sha256(found.scripts[0].encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in source
    assert "unsafe-eval" not in source
    source.encode("utf-8")


def test_results_with_values_of_another_kind_leave_cells_empty():
    payload = results.evaluation()
    payload |= {"groups": {"eng_Latn": "high"}, "pairs": ["a-b", "c-d"]}
    payload["results"][0]["by_group"] = [{"source": "high", "chrf++": 7.125}, {}]
    payload["results"][1]["by_group"] = [{"chrf++": "many"}]
    model = results.language_model()
    model["results"][0]["scores"]["tokens"] = "many"
    timed = results.latency((1, 4))
    del timed["results"][1]["timings"][1]
    similar = results.similarity()
    similar["successive"] = [{"first": "no such component"}]
    found = page(evaluation=payload, lm=model, latency=timed, similarity=similar)
    assert "7.1" in found.text
    assert "a pair of components that are not there" in found.text


def test_training():
    write_json("recovered.finetune.json", results.finetune())
    found = page()
    assert {"Loss of recovered", "chrF++ of recovered"} <= set(found.figures)
    assert ("validation", 300, 4.5) in points(found, "Loss of recovered")
    assert "300" in found.text


def test_correlations_of_heads():
    write_json("head-comparison.json", results.head_comparison())
    found = page()
    assert found.sections() == ["Attention heads"]
    says(found, "de.json and fr.json", "cross-attention", "0.812", "0.012", "0.625", "0.25")


def test_texts_and_their_gate_statistics():
    gates = text_statistics()
    texts = compare_by_text(gates, LanguageOptions(), ())
    found = page(texts=texts.to_json(), gates={**gates.header([], None), **gates.to_json()})
    assert found.sections() == ["Experts", "Texts"]
    says(found, "3 texts; 75% of the experts removed by reap", "only novel", "model.layers.1.mlp")

    assert "Share of a layer's tokens that rank an expert first, over all texts" in found.figures
    assert "3 texts." in found.text
