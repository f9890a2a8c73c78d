"""Mixture-of-experts language models, their experts alone: all else is carried along as it is.

Of three of them the rest is declared too, in files of their own, which take the mixture from here (`WHOLE_MIXTURES`).

Their stock classes run them, routers and all, so that nothing of a routing is said here. Of the families in
transformers that are left out, DeepSeek-V4 keeps ids of experts in a table of its tokens, and Gemma 4 keeps routers
and experts in the layer itself.
"""

from __future__ import annotations

from dataclasses import replace

from prunecli.architectures.records import Architecture, ExpertGroups, Mixture

CAUSAL, IMAGES = "AutoModelForCausalLM", "AutoModelForImageTextToText"
STACKED = ("experts.gate_up_proj", "experts.down_proj")
ALIASES = ("num_local_experts", "num_experts")

_MLP = "model.layers.{layer}.mlp"
_SPARSE = "model.layers.{layer}.block_sparse_moe"
_FEED_FORWARD = "model.layers.{layer}.feed_forward"
_CORRECTION = "gate.e_score_correction_bias"
_TOP_K = ("num_experts_per_tok",)
_GROUPS = ExpertGroups("n_group", "topk_group")

ROOTS = (
    "model.layers",
    "model.language_model.layers",
    "language_model.model.layers",
    "backbone.layers",
    "mtp.layers",
    "model.mtp.layers",
    "model.mtp_block",
)
PREDICTING = ("mtp.", "model.mtp.", "model.mtp_")
GROUPS = (ExpertGroups("n_group", "topk_group"), ExpertGroups("num_expert_group", "topk_group"))
FOUND = Mixture((), (), (), (), predicting=PREDICTING)

QWEN = Mixture((_MLP, "mtp.layers.{layer}.mlp"), ("gate.weight",), ALIASES, _TOP_K, predicting=("mtp.",))
QWEN_STACKED = replace(
    QWEN,
    blocks=(*QWEN.blocks, "model.language_model.layers.{layer}.mlp"),
    stacked=STACKED,
)
MIXTRAL = replace(QWEN, blocks=(_SPARSE,), predicting=())
DEEPSEEK = replace(
    QWEN,
    blocks=(*QWEN.blocks, "model.mtp.layers.{layer}.mlp"),
    counts=("n_routed_experts", "num_local_experts"),
    vectors={_CORRECTION: 0},
    groups=_GROUPS,
    predicting=("mtp.", "model.mtp."),
)
DEEPSEEK_V2 = replace(
    DEEPSEEK,
    counts=("n_routed_experts", "num_experts"),
    vectors={},
    groups=ExpertGroups("n_group", "topk_group", least=1, condition="topk_method:group_limited"),
)
EXAONE = replace(QWEN, vectors={"e_score_correction_bias": 0}, groups=_GROUPS)
MINIMAX_M2 = replace(MIXTRAL, vectors={"e_score_correction_bias": 0})
KIMI_LINEAR = replace(
    MIXTRAL,
    top_k=("num_experts_per_token", *_TOP_K),
    vectors={_CORRECTION: 0},
    groups=ExpertGroups("num_expert_group", "topk_group"),
)
GPT_OSS = replace(
    QWEN,
    blocks=(_MLP,),
    router=("router.weight", "router.bias"),
    top_k=(*_TOP_K, "experts_per_token"),
    expert=None,
    stacked=STACKED,
    predicting=(),
)
GRANITE = replace(
    MIXTRAL,
    router=("router.layer.weight",),
    expert=None,
    stacked=("input_linear.", "output_linear."),
)
ERNIE = replace(
    QWEN,
    blocks=(*QWEN.blocks, "model.mtp_block.{layer}.mlp"),
    counts=("moe_num_experts", "num_experts"),
    top_k=("moe_k", *_TOP_K),
    vectors={"moe_statics.e_score_correction_bias": 1},
    predicting=("mtp.", "model.mtp_"),
)
HUNYUAN_3 = replace(QWEN, router=("router.gate.weight",), vectors={"expert_bias": 0})
LAGUNA = replace(QWEN, vectors={"experts.e_score_correction_bias": 0})
LFM2 = replace(QWEN, blocks=(_FEED_FORWARD,), vectors={"expert_bias": 0}, predicting=())
JAMBA = replace(QWEN, blocks=(_FEED_FORWARD,), router=("router.weight",), predicting=())
HUNYUAN_1 = replace(QWEN, router=("gate.wg.weight",), top_k=("moe_topk", *_TOP_K))
NEMOTRON = replace(
    DEEPSEEK,
    blocks=tuple(f"{stack}.layers.{{layer}}.mixer" for stack in ("backbone", "model", "mtp")),
    predicting=("mtp.",),
)
GLM_V = replace(DEEPSEEK, blocks=("model.language_model.layers.{layer}.mlp",), predicting=())
ARIA = Mixture(
    (f"language_model.{_MLP}", "model.language_model.layers.{layer}.mlp"),
    ("router.weight",),
    ("moe_num_experts",),
    ("moe_topk",),
    expert=None,
    stacked=("experts.fc1.", "experts.fc2."),
)
LLAMA_4 = replace(
    JAMBA,
    blocks=(_FEED_FORWARD, f"language_model.{_FEED_FORWARD}"),
    expert=None,
    stacked=STACKED,
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


def within(mixture: Mixture, outer: str = "text_config") -> Mixture:
    """The same where config.json keeps the keys under another, as that of the language model of one of images."""

    def inner(keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{outer}.{key}" for key in keys)

    groups = mixture.groups and replace(
        mixture.groups,
        count=f"{outer}.{mixture.groups.count}",
        chosen=f"{outer}.{mixture.groups.chosen}",
    )
    return replace(
        mixture,
        counts=inner(mixture.counts),
        top_k=mixture.top_k if isinstance(mixture.top_k, int) else inner(mixture.top_k),
        groups=groups,
        depth=f"{outer}.{mixture.depth}",
        predicted=inner(mixture.predicted),
    )


def _family(
    model_type: str, model_class: str, mixture: Mixture, top_k: int | None = None, opened_by: str = CAUSAL
) -> Architecture:
    return Architecture(
        model_type,
        model_class,
        opened_by,
        extras=("",),
        mixture=mixture if top_k is None else replace(mixture, default_top_k=top_k),
    )


EXPERTS_ONLY: dict[str, Architecture] = {
    family.model_type: family
    for family in (
        _family("qwen3_moe", "Qwen3MoeForCausalLM", QWEN, 8),
        _family("qwen2_moe", "Qwen2MoeForCausalLM", QWEN, 4),
        _family("qwen3_next", "Qwen3NextForCausalLM", QWEN, 10),
        _family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", QWEN_STACKED, 8),
        _family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", within(QWEN_STACKED), 8, IMAGES),
        _family("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", within(QWEN_STACKED), 8, IMAGES),
        _family("glm4_moe", "Glm4MoeForCausalLM", DEEPSEEK, 8),
        _family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", DEEPSEEK, 4),
        _family("glm_moe_dsa", "GlmMoeDsaForCausalLM", DEEPSEEK, 8),
        _family("deepseek_v3", "DeepseekV3ForCausalLM", DEEPSEEK, 8),
        _family("kimi_k2", "DeepseekV3ForCausalLM", DEEPSEEK, 8),
        _family("deepseek_v32", "DeepseekV32ForCausalLM", DEEPSEEK, 8),
        _family("dots1", "Dots1ForCausalLM", DEEPSEEK),
        _family("solar_open", "SolarOpenForCausalLM", DEEPSEEK, 8),
        _family("mimo_v2_flash", "MiMoV2FlashForCausalLM", DEEPSEEK, 8),
        replace(
            _family("deepseek_v2", "DeepseekV2ForCausalLM", DEEPSEEK_V2), attributes={"topk_method": "greedy"}
        ),
        _family("exaone_moe", "ExaoneMoeForCausalLM", EXAONE, 8),
        _family("minimax_m2", "MiniMaxM2ForCausalLM", MINIMAX_M2, 8),
        _family("mixtral", "MixtralForCausalLM", MIXTRAL, 2),
        _family("minimax", "MiniMaxForCausalLM", MIXTRAL, 2),
        _family("minimax_m1", "MiniMaxM1ForCausalLM", MIXTRAL, 2),
        _family("phimoe", "PhimoeForCausalLM", MIXTRAL, 2),
        _family("kimi_linear", "KimiLinearForCausalLM", KIMI_LINEAR, 8),
        _family("olmoe", "OlmoeForCausalLM", QWEN, 8),
        _family("flex_olmo", "FlexOlmoForCausalLM", QWEN, 5),
        _family("cohere2_moe", "Cohere2MoeForCausalLM", QWEN, 2),
        _family("gpt_oss", "GptOssForCausalLM", GPT_OSS, 4),
        _family("granitemoe", "GraniteMoeForCausalLM", GRANITE, 2),
        _family("granitemoeshared", "GraniteMoeSharedForCausalLM", GRANITE, 2),
        _family("granitemoehybrid", "GraniteMoeHybridForCausalLM", GRANITE, 2),
        _family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", ERNIE, 6),
        _family("hy_v3", "HYV3ForCausalLM", HUNYUAN_3, 8),
        _family("afmoe", "AfmoeForCausalLM", HUNYUAN_3, 6),
        _family("laguna", "LagunaForCausalLM", LAGUNA, 8),
        _family("lfm2_moe", "Lfm2MoeForCausalLM", LFM2, 4),
        _family("jamba", "JambaForCausalLM", JAMBA, 2),
        _family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", HUNYUAN_1, 1),
        _family("hunyuan", "HunYuanMoEV1ForCausalLM", HUNYUAN_1),
        _family("glm4v_moe", "Glm4vMoeForConditionalGeneration", within(GLM_V), 8, IMAGES),
        _family("aria", "AriaForConditionalGeneration", within(ARIA), 6, IMAGES),
        _family("nemotron_h", "NemotronHForCausalLM", NEMOTRON, 2),
        _family("llama4_text", "Llama4ForCausalLM", LLAMA_4, 1),
        _family("llama4", "Llama4ForConditionalGeneration", within(LLAMA_4), 1, IMAGES),
        _family(
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

BY_LAYER = (
    "qwen3_moe",
    "qwen2_moe",
    "qwen3_next",
    "qwen3_5_moe_text",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "deepseek_v3",
    "dots1",
    "solar_open",
    "mimo_v2_flash",
    "deepseek_v2",
    "exaone_moe",
    "minimax_m2",
    "mixtral",
    "minimax",
    "phimoe",
    "olmoe",
    "flex_olmo",
    "cohere2_moe",
    "gpt_oss",
    "granitemoe",
    "granitemoeshared",
    "granitemoehybrid",
    "ernie4_5_moe",
    "hy_v3",
    "afmoe",
    "laguna",
    "lfm2_moe",
    "jamba",
    "hunyuan_v1_moe",
    "nemotron_h",
)
"""Types of model that are seen to run layer by layer as they do in memory, to the last bit."""
