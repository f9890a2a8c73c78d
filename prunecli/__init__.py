# ruff: noqa: F401 (type checkers see the imports, everybody else the table below them)
"""prunecli: make pretrained transformers smaller and faster.

The same few calls that the commands make, for a notebook or a program:

    model = prunecli.open_model("facebook/nllb-moe-54b")
    plan = prunecli.plan_experts(model, prunecli.ExpertOptions(gates=(Path("gates.json"),)))
    prunecli.apply(model, prunecli.rewrite_experts(model, plan), "pruned")

Names are imported when they are first used: `import prunecli` imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
PACKAGE = "the Python package prunecli"
"""What cards and errors say is needed; an address belongs here once there is one. No package index has it yet."""

if TYPE_CHECKING:
    from prunecli import demo, results
    from prunecli.errors import PruneError
    from prunecli.evaluation.evaluate import evaluate
    from prunecli.evaluation.latency import bench_latency
    from prunecli.evaluation.on_text import RunOptions
    from prunecli.evaluation.options import EvaluationOptions
    from prunecli.evaluation.timing import LatencyOptions
    from prunecli.methods.attention.arrange import AttentionPlan
    from prunecli.methods.attention.plan import AttentionOptions, plan_attention
    from prunecli.methods.attention.rewrite import rewrite_attention
    from prunecli.methods.embeddings.factorize import fit_embeddings
    from prunecli.methods.embeddings.plan import EmbeddingOptions, EmbeddingPlan, plan_embeddings
    from prunecli.methods.embeddings.rewrite import rewrite_embeddings
    from prunecli.methods.experts.collect import collect_gates
    from prunecli.methods.experts.constant import mean_outputs, rewrite_constant
    from prunecli.methods.experts.options import Amount, ExpertOptions
    from prunecli.methods.experts.plan import ExpertPlan, plan_experts
    from prunecli.methods.experts.rewrite import rewrite_experts
    from prunecli.methods.experts.score import CollectOptions
    from prunecli.methods.ffn.arrange import FfnPlan
    from prunecli.methods.ffn.narrow import NarrowOptions, plan_widths
    from prunecli.methods.ffn.plan import FfnOptions, plan_ffn
    from prunecli.methods.ffn.rewrite import rewrite_ffn
    from prunecli.methods.heads.collect import ScoreOptions, score_heads
    from prunecli.methods.heads.plan import HeadOptions, HeadPlan, plan_heads
    from prunecli.methods.heads.rewrite import rewrite_heads
    from prunecli.methods.layers.plan import LayerOptions, LayerPlan, plan_layers
    from prunecli.methods.layers.rewrite import rewrite_layers
    from prunecli.methods.vocabulary.plan import VocabularyPlan, plan_vocabulary
    from prunecli.methods.vocabulary.rewrite import rewrite_vocabulary
    from prunecli.methods.vocabulary.select import VocabularyOptions
    from prunecli.model.checkpoint import Checkpoint, open_model
    from prunecli.model.rewrite import Rewrite
    from prunecli.model.streamed import stream_model
    from prunecli.modules.loading import load_model
    from prunecli.pipeline import Applied, apply
    from prunecli.planning import plan_ffn_on_text, plan_layers_on_text, plan_widths_on_text
    from prunecli.text.choice import Dataset, TextChoice
    from prunecli.text.corpus import Corpus
    from prunecli.training.finetune import Destination, finetune
    from prunecli.training.options import LossOptions, TrainingOptions
    from prunecli.training.start import Start

_MODULES = {
    "errors": ("PruneError",),
    "evaluation.evaluate": ("evaluate",),
    "evaluation.latency": ("bench_latency",),
    "evaluation.on_text": ("RunOptions",),
    "evaluation.options": ("EvaluationOptions",),
    "evaluation.timing": ("LatencyOptions",),
    "methods.attention.arrange": ("AttentionPlan",),
    "methods.attention.plan": ("AttentionOptions", "plan_attention"),
    "methods.attention.rewrite": ("rewrite_attention",),
    "methods.embeddings.factorize": ("fit_embeddings",),
    "methods.embeddings.plan": ("EmbeddingOptions", "EmbeddingPlan", "plan_embeddings"),
    "methods.embeddings.rewrite": ("rewrite_embeddings",),
    "methods.experts.collect": ("collect_gates",),
    "methods.experts.constant": ("mean_outputs", "rewrite_constant"),
    "methods.experts.score": ("CollectOptions",),
    "methods.heads.collect": ("ScoreOptions", "score_heads"),
    "methods.experts.options": ("Amount", "ExpertOptions"),
    "methods.experts.plan": ("ExpertPlan", "plan_experts"),
    "methods.experts.rewrite": ("rewrite_experts",),
    "methods.ffn.arrange": ("FfnPlan",),
    "methods.ffn.narrow": ("NarrowOptions", "plan_widths"),
    "methods.ffn.plan": ("FfnOptions", "plan_ffn"),
    "methods.ffn.rewrite": ("rewrite_ffn",),
    "methods.heads.plan": ("HeadOptions", "HeadPlan", "plan_heads"),
    "methods.heads.rewrite": ("rewrite_heads",),
    "methods.layers.plan": ("LayerOptions", "LayerPlan", "plan_layers"),
    "methods.layers.rewrite": ("rewrite_layers",),
    "methods.vocabulary.plan": ("VocabularyPlan", "plan_vocabulary"),
    "methods.vocabulary.rewrite": ("rewrite_vocabulary",),
    "methods.vocabulary.select": ("VocabularyOptions",),
    "model.checkpoint": ("Checkpoint", "open_model"),
    "model.rewrite": ("Rewrite",),
    "model.streamed": ("stream_model",),
    "modules.loading": ("load_model",),
    "pipeline": ("Applied", "apply"),
    "planning": ("plan_ffn_on_text", "plan_layers_on_text", "plan_widths_on_text"),
    "text.choice": ("Dataset", "TextChoice"),
    "text.corpus": ("Corpus",),
    "training.finetune": ("Destination", "finetune"),
    "training.options": ("LossOptions", "TrainingOptions"),
    "training.start": ("Start",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
_PACKAGES = ("demo", "results")

__all__ = [
    "__version__",
    *_PACKAGES,
    *_HOME,
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"prunecli.{name}")
    if name in _HOME:
        value = globals()[name] = getattr(import_module(f"prunecli.{_HOME[name]}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
