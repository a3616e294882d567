"""The computation of a class, in the words that `forwards/` reads.

A form's fields name the attributes and modules of a class. Anything that a form does not mention
works as in Llama. `families.py` says which class has which form.
"""

from typing import NamedTuple


class AttentionForm(NamedTuple):
    """An attention: q, k and v from its input, RoPE, attention, o."""

    # its layers for q, k and v. If there is only one, its outputs hold all three side by side
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"  # its layer for o
    norms: str = ""  # those of q and k act on "heads" or on all "features"; "": there are none
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    # the attribute that says whether this layer rotates q and k at all: true or "rope". It rotates
    # as many features of each head as there are angles
    rotates: str = ""
    interleaved: bool = False  # RoPE pairs neighbours of a head, not its halves
    # q_proj gives q and a gate for each head. The gate's sigmoid multiplies what o gets
    has_gate: bool = False
    # v has a norm too, k may be v's input as well, and a layer may take k and v from an earlier
    # one, as in Gemma 4
    shares_kv: bool = False
    separates_documents: bool = True  # transformers' masks separate the documents of packed rows
    scales_q: bool = False  # it multiplies q by a scale that grows with the position, as Llama 4
    # the attribute with one more score for each head's softmax, whose value is 0; "": none
    sinks: str = ""
    shares_angles: bool = False  # cos and sin hold the angles of one half, which the other shares
    # options of the attention function, each with the attribute passed for it. That of
    # sliding_window is its window. Transformers' sdpa reads no softcap, so fused attention caps no
    # scores either
    passes: tuple[tuple[str, str], ...] = ()


class MLPForm(NamedTuple):
    """An MLP: down(activation(gate(x)) * up(x))."""

    projections: tuple[str, ...] = ("gate_proj", "up_proj")  # one or two, as for attention
    activation: str = "act_fn"  # the attribute that holds it; "": it calls F.silu
    output: str = "down_proj"


class ExpertsForm(NamedTuple):
    """The experts of a mixture: down(activation(gate(x)) * up(x)) each, of gate_up_proj [experts,
    2 intermediate, hidden] and down_proj, and a sum by routing weights."""

    # computes as gpt-oss, with biases and a clamped gate. gate_up_proj is [experts, hidden,
    # 2 intermediate], and gate and up alternate in its columns
    is_clamped: bool = False


class NormForm(NamedTuple):
    """An RMSNorm: x / rms(x) times its weight, or times 1 + weight if zero_centered. With a gate
    it multiplies that by silu(gate), and has the name "silu" as `activation`."""

    zero_centered: bool = False
    eps: str = "variance_epsilon"  # the attribute that holds it


class MixtureForm(NamedTuple):
    """A mixture of experts in an MLP's place: experts(x, chosen, weights) plus
    sigmoid(shared_gate(x)) shared(x). router(x) returns its logits, weights and chosen.

    The names are modules of it, but for bias and jitter, which are attributes; "" for none.
    bias: the router's second argument, None if it is missing.
    jitter: the noise that it multiplies x with in training, which must be 0.
    """

    router: str = "gate"
    experts: str = "experts"
    shared: str = ""
    shared_gate: str = ""
    bias: str = ""
    jitter: str = ""


class MixerForm(NamedTuple):
    """A mixer in place of attention. In parts `Family.projections` names its layers.

    A gated delta net: in-projections, a causal convolution of [q | k | v], the recurrence on q, k,
    v, sigmoid(b) and -exp(A_log) softplus(a + dt_bias), its norm with the gate z, output. A short
    convolution: output(c conv(b x)), with [b | c | x] from its projection and a causal convolution
    of each feature, without activation.

    projections: a net's layers for [q | k | v], z, b and a, which run as one. If there are two,
        their outputs hold [q | k | v | z] and [b | a] head by head, as in Qwen3-Next.
    """

    projections: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    output: str = "out_proj"


class LayerForm(NamedTuple):
    """A decoder layer:

        total = x + m after_attention(attention(before_attention(x)))
        output = total + m after_mlp(mlp(before_mlp(total)))

    The names are modules, "" for none. m is the attribute `multiplier`; "" means 1. All modules but
    `mlp` and `mixer` are norms, except that with has_dropout those after attention and the MLP are
    nn.Dropout. Attention is self_attn. Some layers have a `mixer` in its place, of a `mixer_kind`:
    a key of `families.KINDS`.

    In Gemma 4, each of these is an attribute of a layer, "" for none:
    own_input: the width of per_layer_input, 0 for none. After the MLP the layer adds
        post_per_layer_input_norm(per_layer_projection(act_fn(per_layer_input_gate(total)) *
        per_layer_input)).
    scale: multiplies its output.
    mixture: true if it adds a mixture of experts to its MLP.
    """

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    mlp: str = "mlp"
    mixer: str = "linear_attn"
    mixer_kind: str = "GatedDeltaNet"
    multiplier: str = ""
    has_dropout: bool = False
    own_input: str = ""
    scale: str = ""
    mixture: str = ""


class LossForm(NamedTuple):
    """A causal language model's loss, from lm_head's logits."""

    # attributes of the text's config that scale or soft-cap the logits
    divided_by: str = ""
    multiplied_by: str = ""
    capped_by: str = ""
    has_router: bool = False  # its decoder is a mixture of experts, and may add its routers' loss
