"""Every part of a model that can run fused: its sites, by the switch of `Fusion` that it is."""

from . import cross_entropy as loss_site
from . import layer as bordered_sites
from . import parts as layer_sites
from .site import Part, Site, having, reason_in, why_not_class

SWITCHES = {
    "mlp": Part(
        (
            Site(
                having("gate_proj", "up_proj", "down_proj"),
                lambda module: reason_in(layer_sites.read_mlp(module)),
                layer_sites.mlp_forward,
            ),
        ),
        "it has no MLP with gate_proj, up_proj and down_proj",
    ),
    "attention": Part(
        (
            Site(
                having("q_proj", "k_proj", "v_proj"),
                lambda module: reason_in(layer_sites.read_qkv(module)),
                layer_sites.self_attention_forward,
            ),
            Site(
                layer_sites.output_projections,
                lambda module: reason_in(layer_sites.read_output(module)),
                layer_sites.output_forward,
            ),
        ),
        "it has no attention with q_proj, k_proj and v_proj",
    ),
    "rope": Part(
        (
            Site(
                having("q_proj", "k_proj", "v_proj"),
                lambda module: why_not_class(module, "Attention"),
                layer_sites.self_attention_forward,
            ),
        ),
        "it has no attention with q_proj, k_proj and v_proj",
    ),
    "rms_norm": Part(
        (
            Site(layer_sites.norms, layer_sites.why_not_norm, layer_sites.norm_forward),
            Site(
                having("self_attn", "post_attention_layernorm", "mlp"),
                layer_sites.why_not_normed_layer,
                layer_sites.normed_layer_forward,
                is_listed=False,
            ),
        ),
        "it has no RMSNorm",
    ),
    "cross_entropy": Part(
        (
            Site(
                having("lm_head", "model"),
                lambda module: reason_in(loss_site.read_head(module)),
                loss_site.causal_lm_forward,
            ),
        ),
        "it has no lm_head",
    ),
    # last, for where a layer runs this part and rms_norm, this one's forward is the one that is set
    "layer": Part(
        (
            Site(
                having("self_attn", "post_attention_layernorm", "mlp"),
                bordered_sites.why_not_layer,
                bordered_sites.layer_forward,
            ),
        ),
        "it has no decoder layer with self_attn, post_attention_layernorm and mlp",
    ),
}
