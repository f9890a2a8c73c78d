"""Mixture-of-experts language models, their experts alone: all else is carried along as it is.

Most are found by asking the class (`prunecli.model.found_experts`). Declared are those of which transformers has no
class under the type's name, or no small copy can be made, or whose class does not tell all: Switch, of which no key
says how many experts a token is given to, and DeepSeek-V2, of whose groups one expert is enough.

Their stock classes run them, routers and all, so that nothing of a routing is said here.
"""

from dataclasses import replace

from prunecli.architectures.records import Architecture, ExpertGroups, Mixture

CAUSAL = "AutoModelForCausalLM"
STACKED = ("experts.gate_up_proj", "experts.down_proj")
ALIASES = ("num_local_experts", "num_experts")
"""Keys of the number of experts that other programs read, whatever the class calls it."""
TOP_K_ALIASES = ("num_experts_per_tok", "experts_per_token")
"""The same of the experts per token."""
GROUPS = tuple(ExpertGroups(count, "topk_group") for count in ("n_group", "num_expert_group"))
"""Keys of groups of experts."""
ROOTS = (
    "model.layers",
    "model.language_model.layers",
    "language_model.model.layers",
    "backbone.layers",
    "mtp.layers",
    "model.mtp.layers",
    "model.mtp_block",
)
"""Lists of the layers of a language model in files: one text model has several, with images or alone, and those that
predict further tokens."""

LANGUAGE_MODEL = Mixture(
    tuple(f"{root}.{{layer}}.mlp" for root in ROOTS),
    ("gate.weight",),
    ALIASES,
    TOP_K_ALIASES,
    stacked=STACKED,
    predicting=("mtp.", "model.mtp.", "model.mtp_"),
)
BLOCK_SPARSE = replace(LANGUAGE_MODEL, blocks=("model.layers.{layer}.block_sparse_moe",))
DEEPSEEK = replace(
    LANGUAGE_MODEL,
    counts=("n_routed_experts", *ALIASES),
    vectors={"gate.e_score_correction_bias": 0},
    groups=GROUPS[0],
)
DEEPSEEK_V2 = replace(
    DEEPSEEK, vectors={}, groups=replace(GROUPS[0], least=1, condition="topk_method:group_limited")
)
SWITCH = Mixture(
    ("encoder.block.{layer}.layer.1.mlp", "decoder.block.{layer}.layer.2.mlp"),
    ("router.classifier.weight",),
    ("num_experts",),
    1,
    expert="experts.expert_{expert}",
    depth="num_layers",
    capacity="expert_capacity",
)


def within(mixture: Mixture, outer: str) -> Mixture:
    """Return a mixture whose keys lie within another key of config.json: a language model with an image part."""

    def inner(keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{outer}.{key}" for key in keys)

    groups = mixture.groups and replace(
        mixture.groups, count=f"{outer}.{mixture.groups.count}", chosen=f"{outer}.{mixture.groups.chosen}"
    )
    return replace(
        mixture,
        counts=inner(mixture.counts),
        top_k=mixture.top_k if isinstance(mixture.top_k, int) else inner(mixture.top_k),
        groups=groups,
        depth=f"{outer}.{mixture.depth}",
        predicted=inner(mixture.predicted),
    )


def experts_alone(
    model_type: str, model_class: str, mixture: Mixture, *, top_k: int | None = None, opened_by: str = CAUSAL
) -> Architecture:
    """The record of a family of which the experts alone are known.

    Args:
        top_k: transformers' default of the experts per token; None: as `mixture` says.
    """
    mixture = mixture if top_k is None else replace(mixture, default_top_k=top_k)
    return Architecture(model_type, model_class, opened_by, mixture=mixture)


EXPERTS_ONLY = {
    family.model_type: family
    for family in (
        experts_alone("minimax_m1", "MiniMaxM1ForCausalLM", BLOCK_SPARSE, top_k=2),
        experts_alone("kimi_k2", "DeepseekV3ForCausalLM", DEEPSEEK, top_k=8),
        replace(
            experts_alone("deepseek_v2", "DeepseekV2ForCausalLM", DEEPSEEK_V2),
            attributes={"topk_method": "greedy"},
        ),
        experts_alone(
            "hunyuan",
            "HunYuanMoEV1ForCausalLM",
            replace(LANGUAGE_MODEL, router=("gate.wg.weight",), top_k=("moe_topk", *TOP_K_ALIASES)),
        ),
        experts_alone(
            "switch_transformers",
            "SwitchTransformersForConditionalGeneration",
            SWITCH,
            opened_by="AutoModelForSeq2SeqLM",
        ),
    )
}
"""Model type -> its record; the numbers are transformers' defaults of the experts per token."""

ONE_COUNT = ("switch_transformers", "kimi_k2", "minimax_m1", "hunyuan")
"""Types of which every layer has the same number of experts: Switch draws experts, and counts the tokens that each
takes, by one number; of the others transformers has no class, so that prunecli cannot give layers their own."""
