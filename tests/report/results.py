"""Small result files written by hand, with values that a test can look for."""

from typing import Any

FINGERPRINTS = ("sha256:aaaa", "sha256:bbbb")
MODELS = [
    {"path": name, "fingerprint": fingerprint, "model_type": "nllb-moe"}
    for name, fingerprint in zip(("big", "small"), FINGERPRINTS, strict=True)
]


def head(format_: str) -> dict[str, Any]:
    return {"format": format_, "prunecli": "0.1.0", "command": ["prunecli"], "models": MODELS, "seed": None}


def evaluation(models: list | None = None) -> dict[str, Any]:
    def row(name: str, score: float, p_value: float | None) -> dict[str, Any]:
        scores = {"chrf++": score, "bleu": score / 2, "length_ratio": 1.01, "over_generated": 0.25}
        tested = {"bootstrap": {"chrf++": {"p_value": p_value, "mean": 50.0, "ci95": 1.0}}} if p_value else {}
        return {"checkpoint": name, "mean": scores, "pairs": {"eng_Latn-fra_Latn": {**scores, **tested}}}

    return {
        **head("prunecli.evaluation/1"),
        "models": MODELS if models is None else models,
        "task": "translation",
        "data": {"split": "test", "sentences": 120, "sha256": "00"},
        "pairs": ["eng_Latn-fra_Latn"],
        "significance": {"test": "paired bootstrap", "baseline": "big", "level": 0.05},
        "results": [row("big", 61.5, None), row("small", 58.25, 0.0123)],
    }


def language_model() -> dict[str, Any]:
    results = [
        {"checkpoint": name, "scores": {"perplexity": value, "loss": 3.0, "tokens": 100}}
        for name, value in (("big", 17.25), ("small", 19.5))
    ]
    results[1]["p_value"] = 0.0004
    return {
        **head("prunecli.evaluation/1"),
        "task": "lm",
        "data": {"files": ["wiki.txt"], "texts": 70, "sha256": "00"},
        "significance": None,
        "results": results,
    }


def language_model_by_text() -> dict[str, Any]:
    """With two named texts."""
    payload = language_model()
    for number, result in enumerate(payload["results"]):
        result["by_text"] = {
            name: {"perplexity": value + number, "tokens": 50}
            for name, value in (("code", 5.25), ("prose", 40.5))
        }
    return payload


def latency(batch_sizes: tuple[int, ...] = (1,)) -> dict[str, Any]:
    def row(name: str, speed: float, parameters: int) -> dict[str, Any]:
        timings = [
            {
                "batch_size": size,
                "beam": 5,
                "tokens_per_second": {"median": speed * size, "deviation": 2.0},
                "seconds_per_sentence": {"median": 32 / speed, "deviation": 0.01},
                "speedup": {"median": speed / 100, "deviation": 0.02},
            }
            for size in batch_sizes
        ]
        sizes = {"parameters": parameters, "checkpoint_bytes": 2 * parameters}
        cost = {"load_s": 2.5, "resident_peak": 3 << 20, "device_peak": None}
        return {"checkpoint": name, **sizes, **cost, "timings": timings}

    work = {"pair": "eng_Latn-fra_Latn", "sentences": 8, "new_tokens": 32, "runs": 5, "warm_up": 1}
    machine = {"device": "cpu (some processor)", "threads": 2}
    rows = [row("big", 100.0, 4_000_000), row("small", 150.0, 1_500_000)]
    return {**head("prunecli.latency/1"), **work, **machine, "results": rows}


def head_comparison() -> dict[str, Any]:
    scored = {"method": "gradient", "task": "translation", "examples": 10, "importance": "example"}
    correlation = {"pearson": 0.8125, "pearson_p": 0.0123, "spearman": 0.625, "spearman_p": 0.25}
    return {
        **head("prunecli.head-comparison/1"),
        "first": {**scored, "file": "de.json"},
        "second": {**scored, "file": "fr.json"},
        "correlations": [{"of": kind, "heads": 3, **correlation} for kind in ("all", "cross")],
        "left_out": 0,
        "heads": [
            {"attention": "x", "kind": "cross", "layer": 0, "head": number, "first": 1.0, "second": 0.5}
            for number in range(3)
        ],
    }


def languages() -> dict[str, Any]:
    names = ["deu_Latn", "eng_Latn", "fra_Latn"]
    counts = {"mean": [36.5], "lowest": [30], "highest": [41]}
    relation = {"comparisons": 3, "mean": 0.875, "lowest": 0.5, "highest": 1.0}
    return {
        **head("prunecli.languages/1"),
        "metric": "importance",
        "ratio": 0.75,
        "strategy": "side-threshold",
        "mode": "forced",
        "pairs": ["deu_Latn-eng_Latn", "eng_Latn-fra_Latn"],
        "similarity": {
            "relations": {"encoder": {"same source": relation, "same target": None}},
            "encoder": [[1.0, 0.25], [0.25, 1.0]],
            "decoder": [[1.0, 0.5], [0.5, 1.0]],
        },
        "clustering": {
            "linkage": "ward",
            "encoder": {"languages": names, "matrix": [[0, 2, 0.5, 2], [1, 3, 1.25, 3]]},
            "decoder": None,
        },
        "experts_per_layer": {"layers": ["model.encoder.layers.3.ffn"], **counts},
    }


def similarity() -> dict[str, Any]:
    parts = [
        {"name": f"model.encoder.layers.0.{name}", "label": f"0.{short}", "side": "encoder", "layer": 0}
        for name, short in (("self_attn", "sa"), ("ffn", "ffn"))
    ]
    return {
        **head("prunecli.similarity/1"),
        "checkpoints": ["big", "small"],
        "benchmarks": ["big-2"],
        "text": [{"name": "eng_Latn-fra_Latn", "sentences": 5}],
        "components": {"first": parts, "second": parts[:1]},
        "matrices": {
            "cka": {"first": [[1.0, 0.5], [0.5, 1.0]], "second": [[None]], "between": [[0.9125], [None]]}
        },
        "mean": {"encoder": {"cka": 0.912, "cka_normalised": 97.25}},
    }


def finetune() -> dict[str, Any]:
    figures = {"steps": 400, "tokens": 51200, "tokens_per_second": 1234.5}
    return {
        **head("prunecli.finetune/1"),
        "output": "recovered",
        "arguments": {"task": "translation"},
        **figures,
        "best": {"step": 300, "chrf++": 55.5},
        "training": [
            {"step": step, "loss": 5 - step / 100, "learning_rate": 1e-4} for step in (100, 200, 300)
        ],
        "validation": [{"step": step, "loss": 4.5, "chrf++": 50 + step / 100} for step in (200, 300)],
    }


def heads(model_type: str = "nllb-moe") -> dict[str, Any]:
    names = ["model.encoder.layers.0.self_attn", "model.decoder.layers.1.cross_attention"]
    return {
        **head("prunecli.heads/1"),
        "method": "gradient",
        "model": {"fingerprint": FINGERPRINTS[0], "model_type": model_type},
        "task": "translation",
        "examples": 10,
        "heads": {name: [0, 2] for name in names},
        "sum": {names[0]: [12.5, 20.0], names[1]: [0.0, 5.0]},
    }
