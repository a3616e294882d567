"""Every part of a model that can run fused, by its switch in `Fusion`: its sites, and what shows in
a profile.

The report lists them in this order. It has no other meaning.
"""

from functools import partial

from ..causal_lm import cross_entropy
from ..forwards import attention, delta_net, experts, layer, layer_reading, linear, mlp, rms_norm
from ..reading.four_bit import why_not_norms
from ..reading.site import Evidence, Part, Site
from ..weights.borders import Border
from ..weights.fp8_border import Fp8Border

# --- sites ----------------------------------------------------------------------------------------

MLP = Site(
    mlp.mlps, mlp.read_mlp, mlp.mlp_forward, units=mlp.projections_of,
    left=lambda reads: reads.left, why_not_there=why_not_norms,
)  # fmt: skip
EXPERTS = Site(
    experts.experts,
    experts.read_experts,
    experts.experts_forward,
    units=lambda wrapper: experts.PARAMETERS,
)
QKV = Site(
    attention.qkv_attentions, attention.read_qkv, attention.self_attention_forward,
    units=attention.projections_of_qkv, left=lambda reads: reads.left,
    why_not_there=why_not_norms,
)  # fmt: skip
OUTPUT = Site(
    attention.output_projections, linear.read_output, linear.output_forward,
    why_not_there=why_not_norms,
)  # fmt: skip
DELTA_NET = Site(
    delta_net.delta_nets, delta_net.read_delta_net, delta_net.delta_net_forward,
    units=lambda net: set(delta_net.in_projections(net)), left=lambda read: read.left,
    why_not_there=why_not_norms,
)  # fmt: skip
LONE_PROJECTION = OUTPUT._replace(candidates=attention.lone_projections)
ROTATING = Site(
    attention.rotating_attentions, attention.read_rotating, attention.self_attention_forward
)
NORM = Site(rms_norm.norms, rms_norm.read_norm, rms_norm.norm_forward)
GATED_NORM = Site(
    partial(rms_norm.norms, kind="RMSNormGated"), rms_norm.read_gated_norm,
    rms_norm.gated_norm_forward,
)  # fmt: skip
NORMED_LAYER = Site(
    rms_norm.normed_layers, rms_norm.read_normed_layer, rms_norm.normed_layer_forward,
    gives_way_to="layer",
)  # fmt: skip
LOSS = Site(
    cross_entropy.causal_lms, cross_entropy.read_answered_head, cross_entropy.causal_lm_forward
)
FP8_LOSS = LOSS._replace(read=cross_entropy.read_fp8_head)
LAYER = Site(
    rms_norm.normed_layers, layer_reading.read_layer, layer.layer_forward, left=lambda slow: slow
)

# --- parts ----------------------------------------------------------------------------------------

NO_MLP = "it has no MLP with gate_proj, up_proj and down_proj, and no experts that we know"
NO_ATTENTION = "it has no attention with q_proj, k_proj and v_proj"
NO_HEAD = "it has no lm_head, or PEFT computes its own loss from the logits (CPT)"
NO_LAYER = "it has no decoder layer that we know"
SWIGLU = ("_swiglu_forward_kernel", "_swiglu_backward_kernel")
NORMS = ("_rms_norm_forward_kernel", "_rms_norm_backward_kernel")
UNPACKS = ("_dequantize_4bit_kernel",)
LAYERS = (
    "_qkv_rope_kernel", "_swiglu_backward_products_kernel|_routed_swiglu_backward_kernel",
)  # fmt: skip
LAYERS_RAN = Evidence({"DecoderLayer": 1}, (*LAYERS, *NORMS), UNPACKS)
FP8_LAYERS_RAN = Evidence(
    {"DecoderLayer": 1}, (*LAYERS, NORMS[1], "_fp8_rows_kernel", "_fp8_borders_kernel")
)
SWITCHES = {
    "mlp": Part(
        (MLP, EXPERTS), NO_MLP, "projections", Evidence({"LoRA_MLP": 1}, SWIGLU, UNPACKS),
        kinds={"adapter": ("_drop", "_keep_bits")},
    ),
    "attention": Part(
        (QKV, OUTPUT, DELTA_NET, LONE_PROJECTION), NO_ATTENTION, "projections",
        # with rope, one function stands for q, k, v and o
        Evidence({"LoRA_QKV": 1, "LoRA_W": 1, "LoRA_Attention": 2}, (), UNPACKS),
        kinds={"activation": ("_causal_conv", "_output_gate")},
    ),
    "rope": Part(
        (ROTATING,), NO_ATTENTION, "attentions",
        Evidence({"RoPE": 1, "LoRA_Attention": 1}, ("_rope_kernel",)),
    ),
    "rms_norm": Part(
        (NORM, GATED_NORM, NORMED_LAYER), "it has no RMSNorm", "norms",
        Evidence({"RMSNorm": 1, "AddRMSNorm": 1}, NORMS, without_backward=1),
    ),
    "cross_entropy": Part(
        (LOSS,), NO_HEAD, "losses", Evidence({"LinearCrossEntropy": 1}, ("_cross_entropy_kernel",)),
        kinds={"loss": ("_log_probs", "_wrong_label")},
    ),
    "fp8_lm_head": Part(
        (FP8_LOSS,), NO_HEAD, "losses", Evidence({}, ("_logit_codes_kernel",)),
        kinds={"loss": ("_logit_codes",), "copy": ("_transpose",)},
    ),
    "layer": Part(
        (LAYER,), NO_LAYER, "layers", LAYERS_RAN,
        kinds={
            "adapter": (
                "_extend_rows", "_sum", "_border", "_fp8_borders", "_coded", "_magnitude", "_scale",
            ),
            "norm": ("_qkv_norm_backward",),
            "activation": ("_guess", "_repair"),
            "copy": ("_fp8_rows",),
        },
    ),
}  # fmt: skip
# The switches that choose the kind of buffer for the weights of layers.
BORDERS: dict[str, type[Border]] = {"fp8": Fp8Border}


def switches_for(kind: type[Border] | None) -> dict[str, Part]:
    """Return SWITCHES for layers in buffers of this kind. None: keep the kind they have."""
    site = LAYER._replace(read=partial(layer_reading.read_layer, kind=kind))
    evidence = FP8_LAYERS_RAN if kind is Fp8Border else LAYERS_RAN
    return SWITCHES | {"layer": SWITCHES["layer"]._replace(sites=(site,), evidence=evidence)}
