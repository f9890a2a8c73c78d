"""prunecli: make pretrained transformers smaller and faster.

The same few calls that the commands make, for a notebook or a program:

    model = prunecli.open_model("facebook/nllb-moe-54b")
    plan = prunecli.plan_experts(model, prunecli.ExpertOptions(gates=(Path("gates.json"),)))
    prunecli.apply(model, prunecli.cut(model, plan), "pruned")

Names are imported when they are first used: `import prunecli` imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
PACKAGE = "the Python package prunecli"
"""What cards and errors say is needed; an address belongs here once there is one. No package index has it yet."""

if TYPE_CHECKING:  # a name that is given itself again is one that type checkers know as public
    from prunecli import demo as demo
    from prunecli import results as results
    from prunecli.analysis.explanation import explain as explain
    from prunecli.errors import PruneError as PruneError
    from prunecli.evaluation.evaluate import evaluate as evaluate
    from prunecli.evaluation.latency import bench_latency as bench_latency
    from prunecli.evaluation.on_text import RunOptions as RunOptions
    from prunecli.evaluation.options import EvaluationOptions as EvaluationOptions
    from prunecli.evaluation.options import LatencyOptions as LatencyOptions
    from prunecli.methods.embeddings.factorize import fit_embeddings as fit_embeddings
    from prunecli.methods.embeddings.options import EmbeddingOptions as EmbeddingOptions
    from prunecli.methods.embeddings.plan import EmbeddingPlan as EmbeddingPlan
    from prunecli.methods.embeddings.plan import plan_embeddings as plan_embeddings
    from prunecli.methods.embeddings.rewrite import rewrite_embeddings as rewrite_embeddings
    from prunecli.methods.experts.collect import collect_gates as collect_gates
    from prunecli.methods.experts.constant import mean_outputs as mean_outputs
    from prunecli.methods.experts.constant import rewrite_constant as rewrite_constant
    from prunecli.methods.experts.plan import plan_experts as plan_experts
    from prunecli.methods.ffn.narrow import plan_widths as plan_widths
    from prunecli.methods.heads.plan import plan_heads as plan_heads
    from prunecli.methods.heads.score import score_heads as score_heads
    from prunecli.methods.layers.plan import plan_layers as plan_layers
    from prunecli.methods.options import ExpertOptions as ExpertOptions
    from prunecli.methods.options import HeadOptions as HeadOptions
    from prunecli.methods.options import LayerOptions as LayerOptions
    from prunecli.methods.options import NarrowOptions as NarrowOptions
    from prunecli.methods.options import VocabularyOptions as VocabularyOptions
    from prunecli.methods.scoring import CollectOptions as CollectOptions
    from prunecli.methods.scoring import ScoreOptions as ScoreOptions
    from prunecli.methods.sharing.arrange import SharePlan as SharePlan
    from prunecli.methods.sharing.options import AttentionOptions as AttentionOptions
    from prunecli.methods.sharing.options import FfnOptions as FfnOptions
    from prunecli.methods.sharing.plan import plan_attention as plan_attention
    from prunecli.methods.sharing.plan import plan_ffn as plan_ffn
    from prunecli.methods.sharing.rewrite import rewrite_shared as rewrite_shared
    from prunecli.methods.units import TextRun as TextRun
    from prunecli.methods.vocabulary.plan import plan_vocabulary as plan_vocabulary
    from prunecli.model.checkpoint import Checkpoint as Checkpoint
    from prunecli.model.checkpoint import open_model as open_model
    from prunecli.model.rewrite import Rewrite as Rewrite
    from prunecli.model.streamed import stream_model as stream_model
    from prunecli.modules.loading import load_model as load_model
    from prunecli.pipeline import Applied as Applied
    from prunecli.pipeline import apply as apply
    from prunecli.planning import plan_ffn_on_text as plan_ffn_on_text
    from prunecli.results.decisions import Answer as Answer
    from prunecli.selection.cut import cut as cut
    from prunecli.selection.selection import Selection as Selection
    from prunecli.shrinking.options import ShrinkOptions as ShrinkOptions
    from prunecli.shrinking.shrink import shrink as shrink
    from prunecli.text.choice import Dataset as Dataset
    from prunecli.text.choice import TextChoice as TextChoice
    from prunecli.text.plain import Corpus as Corpus
    from prunecli.training.finetune import Destination as Destination
    from prunecli.training.finetune import finetune as finetune
    from prunecli.training.options import LossOptions as LossOptions
    from prunecli.training.options import TrainingOptions as TrainingOptions
    from prunecli.training.start import Start as Start

_MODULES = {
    "analysis.explanation": ("explain",),
    "errors": ("PruneError",),
    "evaluation.evaluate": ("evaluate",),
    "evaluation.latency": ("bench_latency",),
    "evaluation.on_text": ("RunOptions",),
    "evaluation.options": ("EvaluationOptions", "LatencyOptions"),
    "methods.embeddings.factorize": ("fit_embeddings",),
    "methods.embeddings.options": ("EmbeddingOptions",),
    "methods.embeddings.plan": ("EmbeddingPlan", "plan_embeddings"),
    "methods.embeddings.rewrite": ("rewrite_embeddings",),
    "methods.experts.collect": ("collect_gates",),
    "methods.experts.constant": ("mean_outputs", "rewrite_constant"),
    "methods.heads.score": ("score_heads",),
    "methods.scoring": ("CollectOptions", "ScoreOptions"),
    "methods.options": (
        "ExpertOptions",
        "HeadOptions",
        "LayerOptions",
        "NarrowOptions",
        "VocabularyOptions",
    ),
    "methods.experts.plan": ("plan_experts",),
    "methods.ffn.narrow": ("plan_widths",),
    "methods.heads.plan": ("plan_heads",),
    "methods.layers.plan": ("plan_layers",),
    "methods.sharing.arrange": ("SharePlan",),
    "methods.sharing.options": ("AttentionOptions", "FfnOptions"),
    "methods.sharing.plan": ("plan_attention", "plan_ffn"),
    "methods.sharing.rewrite": ("rewrite_shared",),
    "methods.units": ("TextRun",),
    "methods.vocabulary.plan": ("plan_vocabulary",),
    "model.checkpoint": ("Checkpoint", "open_model"),
    "model.rewrite": ("Rewrite",),
    "model.streamed": ("stream_model",),
    "modules.loading": ("load_model",),
    "pipeline": ("Applied", "apply"),
    "results.decisions": ("Answer",),
    "planning": ("plan_ffn_on_text",),
    "selection.cut": ("cut",),
    "selection.selection": ("Selection",),
    "shrinking.options": ("ShrinkOptions",),
    "shrinking.shrink": ("shrink",),
    "text.choice": ("Dataset", "TextChoice"),
    "text.plain": ("Corpus",),
    "training.finetune": ("Destination", "finetune"),
    "training.options": ("LossOptions", "TrainingOptions"),
    "training.start": ("Start",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
_PACKAGES = ("demo", "results")

if not TYPE_CHECKING:  # they do not work it out, and would take nothing for public
    __all__ = ["__version__", *_PACKAGES, *_HOME]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"prunecli.{name}")
    if name in _HOME:
        value = globals()[name] = getattr(import_module(f"prunecli.{_HOME[name]}"), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *_HOME})
