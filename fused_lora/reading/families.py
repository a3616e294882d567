"""A table of the model families whose classes we know, and of how each computes.

We list a class once we have read its forward, in the oldest and the newest transformers that we
support (5.17, 5.24), and it computes what its form (`forms.py`) says and nothing else. The forwards
in `forwards/` read the forms; none asks for a family by name.
"""

from typing import Any, NamedTuple

from .forms import (
    AttentionForm,
    ExpertsForm,
    LayerForm,
    LossForm,
    MixerForm,
    MixtureForm,
    MLPForm,
    NormForm,
)


class Family(NamedTuple):
    """Classes of one transformers module, and their forms. None: no such class that we know.

    prefix: the beginning of its classes' names. names: classes named otherwise, by kind (a key of
    `KINDS`).
    whole: we have read its layers for `layer` as well, which runs them as one function.
    projections: the linear layers that run fused, each as a function on its own, in a convolution,
        a recurrence, or an attention that we do not know whole, which stays the library's.
    """

    module: str
    prefix: str
    attention: AttentionForm | None = AttentionForm()
    mlp: MLPForm | None = MLPForm()
    norm: NormForm | None = NormForm()
    layer: LayerForm | None = LayerForm()
    loss: LossForm | None = LossForm()
    delta_net: MixerForm | None = None
    gated_norm: NormForm | None = None
    short_conv: MixerForm | None = None
    experts: ExpertsForm | None = None
    mixture: MixtureForm | None = None
    projections: tuple[str, ...] | None = None
    names: dict[str, str] = {}  # noqa: RUF012
    whole: bool = False

    def class_of(self, kind: str) -> str:
        """Return the full name of its class of a kind."""
        _, end = KINDS[kind]
        name = self.names.get(kind, self.prefix + end)
        return f"transformers.models.{self.module}.modeling_{self.module}.{name}"

    def why_not_whole(self) -> str:
        """Return the reason why `layer` does not take its layers, "" if it does."""
        return "" if self.whole else "its layers are not known to run as one"


OWN_WINDOW = (("sliding_window", "sliding_window"),)
CONFIGS_WINDOW = (("sliding_window", "config.sliding_window"),)
WINDOWED = AttentionForm(passes=OWN_WINDOW)
NORMED_HEADS = AttentionForm(norms="heads", passes=OWN_WINDOW)
GATE_UP = MLPForm(("gate_up_proj",), "activation_fn")
MIXTURE = LossForm(has_router=True)
EXPERTS = ExpertsForm()
SHARED_EXPERT = MixtureForm(shared="shared_expert", shared_gate="shared_expert_gate")
GEMMA_NORM = NormForm(zero_centered=True, eps="eps")
GEMMA_LAYER = LayerForm(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)  # fmt: skip
GEMMA_4_LAYER = GEMMA_LAYER._replace(
    own_input="hidden_size_per_layer_input", scale="layer_scalar", mixture="enable_moe_block"
)
GLM_LAYER = LayerForm(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
OUTPUT_NORMS = LayerForm("", "post_attention_layernorm", "", "post_feedforward_layernorm")
GEMMA_LOSS = LossForm(capped_by="final_logit_softcapping")
LFM2_LAYER = LayerForm("operator_norm", before_mlp="ffn_norm", mlp="feed_forward", mixer="conv",
                       mixer_kind="ShortConv")  # fmt: skip
LFM2_ATTENTION = AttentionForm(
    output="out_proj", norms="heads", norm_names=("q_layernorm", "k_layernorm")
)
LFM2_MLP = MLPForm(("w1", "w3"), "", "w2")
# latent attention's
LATENTS = "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
DELTA_OUTPUT = ("out_proj",)
IN_AND_OUT = "in_proj", "out_proj"
SHORT_CONV = MixerForm(("in_proj",))
SINKS = AttentionForm(separates_documents=False, sinks="sinks", shares_angles=True,
                      passes=(*OWN_WINDOW, ("s_aux", "sinks")))  # fmt: skip
SOFT_CAP = ("softcap", "attn_logit_softcapping")


def _around(module: str, prefix: str, **forms: Any) -> Family:
    """Return a model around towers of other families: its own classes, its loss above all."""
    names = {"ForCausalLM": f"{prefix}ForConditionalGeneration"}
    none: dict[str, Any] = dict.fromkeys(("attention", "mlp", "norm", "layer"))
    return Family(module, prefix, names=names, **none | forms)


FAMILIES = (
    Family("llama", "Llama", whole=True),
    Family("mistral", "Mistral", AttentionForm(passes=CONFIGS_WINDOW), whole=True),
    Family("ministral", "Ministral", WINDOWED, whole=True),
    Family("ministral3", "Ministral3", AttentionForm(scales_q=True, passes=CONFIGS_WINDOW),
           whole=True),
    Family("qwen2", "Qwen2", WINDOWED, whole=True),
    Family("qwen3", "Qwen3", NORMED_HEADS, whole=True),
    # most of its layers have a gated delta net instead
    Family("qwen3_5", "Qwen3_5", AttentionForm(norms="heads", has_gate=True), norm=GEMMA_NORM,
           delta_net=MixerForm(), gated_norm=NormForm(), projections=DELTA_OUTPUT,
           names={"Projections": "Qwen3_5GatedDeltaNet"}, whole=True),
    Family("cwm", "Cwm", WINDOWED, whole=True),
    Family("smollm3", "SmolLM3", AttentionForm(rotates="use_rope", passes=OWN_WINDOW), whole=True),
    Family("granite", "Granite", layer=LayerForm(multiplier="residual_multiplier"),
           loss=LossForm(divided_by="logits_scaling"), whole=True),
    Family("granitemoehybrid", "GraniteMoeHybrid",
           AttentionForm(rotates="config.position_embedding_type", separates_documents=False),
           MLPForm(("input_linear",), "activation", "output_linear"), layer=None,
           loss=LossForm(divided_by="logits_scaling", has_router=True), projections=IN_AND_OUT,
           experts=EXPERTS, names={"Projections": "GraniteMoeHybridMambaLayer"}),
    Family("lfm2", "Lfm2", LFM2_ATTENTION, LFM2_MLP, layer=LFM2_LAYER,
           short_conv=SHORT_CONV, projections=IN_AND_OUT,
           names={"Projections": "Lfm2ShortConv"}, whole=True),
    Family("lfm2_moe", "Lfm2Moe", LFM2_ATTENTION, LFM2_MLP, layer=LFM2_LAYER,
           short_conv=SHORT_CONV, projections=IN_AND_OUT, experts=EXPERTS,
           mixture=MixtureForm(bias="expert_bias"), names={"Projections": "Lfm2MoeShortConv"},
           whole=True),
    Family("glm4", "Glm4", AttentionForm(interleaved=True), GATE_UP, layer=GLM_LAYER, whole=True),
    Family("glm", "Glm", AttentionForm(interleaved=True), GATE_UP, whole=True),
    Family("ernie4_5", "Ernie4_5", AttentionForm(interleaved=True), whole=True),
    Family("olmo2", "Olmo2", AttentionForm(norms="features"), layer=OUTPUT_NORMS, whole=True),
    Family("olmo3", "Olmo3", AttentionForm(norms="features", passes=OWN_WINDOW),
           layer=OUTPUT_NORMS, whole=True),
    Family("qwen3_moe", "Qwen3Moe", NORMED_HEADS, loss=MIXTURE, experts=EXPERTS,
           mixture=MixtureForm(), whole=True),
    Family("qwen2_moe", "Qwen2Moe", loss=MIXTURE, experts=EXPERTS, mixture=SHARED_EXPERT,
           whole=True),
    Family("mixtral", "Mixtral", AttentionForm(passes=CONFIGS_WINDOW), mlp=None, loss=MIXTURE,
           experts=EXPERTS, mixture=MixtureForm(jitter="jitter_noise"), whole=True),
    Family("qwen3_5_moe", "Qwen3_5Moe", AttentionForm(norms="heads", has_gate=True),
           norm=GEMMA_NORM, loss=MIXTURE, experts=EXPERTS, mixture=SHARED_EXPERT,
           delta_net=MixerForm(), gated_norm=NormForm(), projections=DELTA_OUTPUT,
           names={"Projections": "Qwen3_5MoeGatedDeltaNet"}, whole=True),
    Family("qwen3_next", "Qwen3Next", AttentionForm(norms="heads", has_gate=True), norm=GEMMA_NORM,
           layer=None, loss=MIXTURE, experts=EXPERTS, gated_norm=NormForm(),
           delta_net=MixerForm(("in_proj_qkvz", "in_proj_ba")), projections=DELTA_OUTPUT,
           names={"Projections": "Qwen3NextGatedDeltaNet"}),
    Family("ernie4_5_moe", "Ernie4_5_Moe", AttentionForm(interleaved=True), loss=MIXTURE,
           experts=EXPERTS, mixture=MixtureForm(shared="shared_experts"), whole=True),
    Family("mistral4", "Mistral4", None, experts=EXPERTS, projections=LATENTS,
           names={"Projections": "Mistral4Attention"}),
    Family("glm4_moe_lite", "Glm4MoeLite", None, experts=EXPERTS, projections=LATENTS,
           names={"Projections": "Glm4MoeLiteAttention"}),
    Family("gpt_oss", "GptOss", SINKS, None, loss=MIXTURE, experts=ExpertsForm(is_clamped=True),
           mixture=MixtureForm(router="router"), names={"Mixture": "GptOssMLP"}, whole=True),
    Family("gemma", "Gemma", norm=GEMMA_NORM, whole=True),
    Family("gemma2", "Gemma2", AttentionForm(passes=(*OWN_WINDOW, SOFT_CAP)), norm=GEMMA_NORM,
           layer=GEMMA_LAYER, loss=GEMMA_LOSS, whole=True),
    Family("gemma3", "Gemma3", NORMED_HEADS, norm=GEMMA_NORM, layer=GEMMA_LAYER, loss=GEMMA_LOSS,
           whole=True),
    Family("gemma4", "Gemma4Text", NORMED_HEADS._replace(shares_kv=True),
           norm=NormForm(eps="eps"), layer=GEMMA_4_LAYER, loss=GEMMA_LOSS, experts=EXPERTS,
           whole=True, names={"RMSNorm": "Gemma4RMSNorm", "ForCausalLM": "Gemma4ForCausalLM"}),
    Family("gemma4_unified", "Gemma4UnifiedText", NORMED_HEADS._replace(shares_kv=True),
           norm=NormForm(eps="eps"), layer=GEMMA_LAYER._replace(scale="layer_scalar"),
           loss=GEMMA_LOSS, whole=True, names={"RMSNorm": "Gemma4UnifiedRMSNorm",
                                               "ForCausalLM": "Gemma4UnifiedForCausalLM"}),
    # its attention has a layer for its gate, and a norm without weight
    Family("muse_glimmer", "MuseGlimmerText", None, norm=GEMMA_NORM, layer=GEMMA_LAYER,
           loss=GEMMA_LOSS._replace(multiplied_by="output_multiplier"),
           projections=("q_proj", "k_proj", "v_proj", "gate_proj"),
           names={"RMSNorm": "MuseGlimmerTextCenteredRMSNorm",
                  "Projections": "MuseGlimmerTextAttention",
                  "ForCausalLM": "MuseGlimmerForConditionalGeneration"}),
    Family("muse_glimmer", "MuseGlimmer", None, None, NormForm(eps="eps"), None, None),
    Family("phi3", "Phi3", AttentionForm(("qkv_proj",), passes=CONFIGS_WINDOW),
           GATE_UP,
           layer=LayerForm(after_attention="resid_attn_dropout", after_mlp="resid_mlp_dropout",
                           has_dropout=True), whole=True),
    # Text towers. q and k are rotated by one angle per position, as everywhere. Their multimodal
    # embedding has assembled it.
    Family("qwen2_vl", "Qwen2VL", WINDOWED,
           names={"MLP": "Qwen2MLP", "ForCausalLM": "Qwen2VLForConditionalGeneration"}),
    Family("qwen2_5_vl", "Qwen2_5_VL", WINDOWED,
           names={"MLP": "Qwen2MLP", "ForCausalLM": "Qwen2_5_VLForConditionalGeneration"}),
    Family("qwen3_vl", "Qwen3VLText", AttentionForm(norms="heads"),
           names={"ForCausalLM": "Qwen3VLForConditionalGeneration"}),
    _around("gemma4", "Gemma4", loss=GEMMA_LOSS),
    _around("gemma4_unified", "Gemma4Unified", loss=GEMMA_LOSS),
    _around("lfm2_vl", "Lfm2Vl"),
    _around("gemma3", "Gemma3"),
    _around("qwen3_5", "Qwen3_5"),
    _around("mistral3", "Mistral3", norm=NormForm()),
    _around("llava", "Llava"),
)  # fmt: skip

# For each kind of class: the field of Family with its form, and the end of its name.
KINDS = {
    "Attention": ("attention", "Attention"),
    "MLP": ("mlp", "MLP"),
    "Experts": ("experts", "Experts"),
    "Mixture": ("mixture", "SparseMoeBlock"),
    "RMSNorm": ("norm", "RMSNorm"),
    "Layer": ("layer", "DecoderLayer"),
    "ForCausalLM": ("loss", "ForCausalLM"),
    "GatedDeltaNet": ("delta_net", "GatedDeltaNet"),
    "ShortConv": ("short_conv", "ShortConv"),
    "RMSNormGated": ("gated_norm", "RMSNormGated"),
    "Projections": ("projections", "Projections"),
}
# The words for such a class in a refusal.
KNOWN_TO = {
    "MLP": "an MLP class that we know, down(activation(gate) * up)",
    "Experts": "an experts class that we know, down(activation(gate) * up) each",
    "Mixture": "a mixture of experts that we know",
    "Attention": "an attention class that we know",
    "RMSNorm": "a norm class that we know, weight * (x / rms(x))",
    "NormedLayer": "a layer class that we know",
    "Layer": "a layer class whose parts we know",
    "ForCausalLM": "a class that we know, with its loss from lm_head alone",
    "GatedDeltaNet": "a gated delta net that we know",
    "ShortConv": "a short convolution that we know",
    "RMSNormGated": "a gated norm class that we know, weight * (x / rms(x)) * silu(gate)",
}
# Functions and methods that the forwards of these classes call, and that fused ones compute
# themselves.
CALLED = {"Attention": ("apply_rotary_pos_emb", "rotate_half", "_apply_rotary_emb")}
METHODS = {"RMSNorm": "_norm"}
FORMS: dict[str, dict[str, Any]] = {
    kind: {
        family.class_of(kind): getattr(family, field)
        for family in FAMILIES
        if getattr(family, field) is not None
    }
    for kind, (field, _) in KINDS.items()
}
# Why `layer` does not take a layer class that FORMS["Layer"] has; "": it does.
WHY_NOT_WHOLE = {
    family.class_of("Layer"): family.why_not_whole()
    for family in FAMILIES
    if family.layer is not None
}  # fmt: skip
# Layers in which a norm follows the residual addition and can be fused with it.
FORMS["NormedLayer"] = {name: form for name, form in FORMS["Layer"].items() if form.before_mlp}
