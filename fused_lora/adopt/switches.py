"""Every part of a model that can run fused: its sites, by the switch of `Fusion` that it is.

The report lists them in this order, which has no other meaning.
"""

from . import attention, cross_entropy, layer, linear, mlp, rms_norm
from .refusal import refuse
from .site import Part, Site, having

NO_ATTENTION = "it has no attention with q_proj, k_proj and v_proj"
NO_HEAD = "it has no lm_head, or PEFT makes a loss of its own of the logits (CPT)"
layers = having("self_attn", "post_attention_layernorm", "mlp")

SWITCHES = {
    "mlp": Part(
        (
            Site(
                mlp.mlps,
                mlp.read_mlp,
                mlp.mlp_forward,
                units=mlp.projections_of,
                left=lambda reads: reads.left,
            ),
        ),
        "it has no MLP with gate_proj, up_proj and down_proj (a mixture's experts stay PEFT's)",
        "projections",
    ),
    "attention": Part(
        (
            Site(
                attention.qkv_attentions,
                attention.read_qkv,
                attention.self_attention_forward,
                units=attention.projections_of_qkv,
                left=lambda reads: reads.left,
            ),
            Site(attention.output_projections, linear.read_output, linear.output_forward),
        ),
        NO_ATTENTION,
        "projections",
    ),
    "rope": Part(
        (
            Site(
                attention.turning_attentions,
                attention.read_turning,
                attention.self_attention_forward,
            ),
        ),
        NO_ATTENTION,
        "attentions",
    ),
    "rms_norm": Part(
        (
            Site(rms_norm.norms, rms_norm.read_norm, rms_norm.norm_forward),
            Site(
                layers,
                rms_norm.read_normed_layer,
                rms_norm.normed_layer_forward,
                gives_way_to="layer",
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
                cross_entropy.read_head,
                cross_entropy.causal_lm_forward,
            ),
        ),
        NO_HEAD,
        "losses",
    ),
    "fp8_lm_head": Part(
        (
            Site(
                cross_entropy.causal_lms,
                cross_entropy.read_fp8_head,
                cross_entropy.causal_lm_forward,
            ),
        ),
        NO_HEAD,
        "losses",
    ),
    "layer": Part(
        (Site(layers, lambda one: refuse(layer.why_not_layer(one)), layer.layer_forward),),
        "it has no decoder layer with self_attn, post_attention_layernorm and mlp",
        "layers",
    ),
}
