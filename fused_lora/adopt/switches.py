"""Every part of a model that can run fused: its sites, by the switch of `Fusion` that it is."""

from . import attention, cross_entropy, layer, linear, mlp, rms_norm
from .site import Part, Site, having, left_in, reason_in

SWITCHES = {
    "mlp": Part(
        (
            Site(
                mlp.mlps,
                lambda module: reason_in(mlp.read_mlp(module)),
                mlp.mlp_forward,
                units=mlp.projections_of,
                left=lambda module: left_in(mlp.read_mlp(module)),
            ),
        ),
        "it has no MLP with gate_proj, up_proj and down_proj (a mixture's experts stay PEFT's)",
        "projections",
    ),
    "attention": Part(
        (
            Site(
                attention.qkv_attentions,
                lambda module: reason_in(attention.read_qkv(module)),
                attention.self_attention_forward,
                units=attention.projections_of_qkv,
                left=lambda module: left_in(attention.read_qkv(module)),
            ),
            Site(
                attention.output_projections,
                lambda module: reason_in(linear.read_output(module)),
                linear.output_forward,
            ),
        ),
        "it has no attention with q_proj, k_proj and v_proj",
        "projections",
    ),
    "rope": Part(
        (
            Site(
                attention.turning_attentions,
                attention.why_not_turning,
                attention.self_attention_forward,
            ),
        ),
        "it has no attention with q_proj, k_proj and v_proj",
        "attentions",
    ),
    "rms_norm": Part(
        (
            Site(rms_norm.norms, rms_norm.why_not_norm, rms_norm.norm_forward),
            Site(
                having("self_attn", "post_attention_layernorm", "mlp"),
                rms_norm.why_not_normed_layer,
                rms_norm.normed_layer_forward,
                is_listed=False,
            ),
        ),
        "it has no RMSNorm",
        "norms",
    ),
    "cross_entropy": Part(
        (
            Site(
                cross_entropy.causal_lms,
                lambda module: reason_in(cross_entropy.read_head(module)),
                cross_entropy.causal_lm_forward,
            ),
        ),
        "it has no lm_head, or PEFT makes a loss of its own of the logits (CPT)",
        "losses",
    ),
    "fp8_lm_head": Part(
        (
            Site(
                cross_entropy.causal_lms,
                cross_entropy.why_not_fp8_head,
                cross_entropy.causal_lm_forward,
            ),
        ),
        "it has no lm_head, or PEFT makes a loss of its own of the logits (CPT)",
        "losses",
    ),
    # last, for where a layer runs this part and rms_norm, this one's forward is the one that is set
    "layer": Part(
        (
            Site(
                having("self_attn", "post_attention_layernorm", "mlp"),
                layer.why_not_layer,
                layer.layer_forward,
            ),
        ),
        "it has no decoder layer with self_attn, post_attention_layernorm and mlp",
        "layers",
    ),
}
