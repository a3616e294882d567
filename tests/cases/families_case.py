"""Tiny models of every known family, and a list of what each part fuses in them."""

import warnings
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
import transformers
from cases.peft_models import set_weights
from peft import LoraConfig, get_peft_model

from fused_lora import Fusion, fuse, unfuse
from fused_lora.adopt.switches import SWITCHES

# The modules in every layer, unless a family names others.
USUAL = {
    "mlp": ("mlp",),
    "attention": ("self_attn", "self_attn.o_proj"),
    "rope": ("self_attn",),
    "rms_norm": ("input_layernorm", "post_attention_layernorm"),
}
OF_HEADS = (*USUAL["rms_norm"], "self_attn.q_norm", "self_attn.k_norm")
OUTPUT_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm",
                "self_attn.q_norm", "self_attn.k_norm")  # fmt: skip
AROUND = (*USUAL["rms_norm"], "pre_feedforward_layernorm", "post_feedforward_layernorm")
GLM_NORMS = (*USUAL["rms_norm"], "post_self_attn_layernorm", "post_mlp_layernorm")
PARTS = tuple(part for part in SWITCHES if part != "fp8_lm_head")  # fused_lora/docs/support.md's
OF_ATTENTION = ("LoRA_Attention", "LoRA_QKV", "LoRA_W", "RoPE")
ONE, APART = {"LoRA_Attention": 2}, {"LoRA_QKV": 2, "LoRA_W": 2, "RoPE": 2}
TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
# Every token takes all experts. With more of them, bf16 would choose by luck.
TOP_2 = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 2,
           "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
           "experts_implementation": "eager"}  # fmt: skip
LATENT = {
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 2,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
THREE_QUARTERS = HALF | {"partial_rotary_factor": 0.75}
SCALED = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5,
          "original_max_position_embeddings": 2}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "intermediate_size": 48,
          "out_hidden_size": 32, "deepstack_visual_indexes": [0]}  # fmt: skip
SIGLIP = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
          "intermediate_size": 48, "image_size": 28, "patch_size": 14}  # fmt: skip


# have a configuration without vision
OF_TEXT = ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe")
ZERO_CENTERED = ("GemmaR", "Gemma2R", "Gemma3R", "Qwen3_5R", "Qwen3_5MoeR", "Qwen3NextR",
                 "MuseGlimmerTextCentered")  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model family.

    classes: how the names of its configuration and its model begin.
    config: changes to TEXT. vision: the vision tower's configuration, if it is multimodal.
    fused: the modules that a part fuses in each layer, if not the USUAL ones. A layer's number in
        front means that layer alone.
    last_norm: the name of the norm behind the layers.
    others: modules that a part fuses outside the text tower's layers.
    left: the other modules, or parts without any, and what the report says about them.
    functions: how often attention's functions appear in the graph of the loss.
    lora: changes to LoraConfig.
    in_layers: how often functions appear in whole layers beside one DecoderLayer for each.
    not_whole: why its layers do not run whole, if they do not. in_parts: why one does not, if
        another does.
    image_token: given if we test the model on an image of four patches.
    """

    classes: str
    config: dict = field(default_factory=dict)
    vision: dict | None = None
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    last_norm: str = "norm"
    others: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    functions: dict[str, int] = field(default_factory=lambda: ONE)
    in_layers: dict[str, int] = field(default_factory=dict)
    lora: dict = field(default_factory=dict)
    not_whole: str = ""
    in_parts: str = ""
    image_token: int | None = None

    @property
    def tower(self) -> str:
        return "model.language_model" if self.vision else "model"

    def base_model(self, dtype=torch.float32):
        config = TEXT | self.config
        if self.vision:
            config = {"text_config": config, "vision_config": self.vision}
            if self.image_token:
                config["image_token_index"] = self.image_token
        text = "Text" if self.classes in OF_TEXT and not self.vision else ""
        config = getattr(transformers, f"{self.classes}{text}Config")(**config)
        kind = "ForConditionalGeneration" if self.vision else "ForCausalLM"
        model = getattr(transformers, self.classes + kind)(config)
        set_weights(model, "cpu")
        for module in model.modules():
            if type(module).__name__.startswith(ZERO_CENTERED) and hasattr(module, "_norm"):
                module.weight.data.sub_(1)  # the norm adds 1 back
            if hasattr(module, "layer_scalar"):
                module.layer_scalar.fill_(0.75)
        return model.to(dtype)

    def peft_model(self, device, dtype=torch.float32, **lora):
        model = self.base_model(dtype)
        options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"} | self.lora | lora
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns about tied layers
            model = get_peft_model(
                model, LoraConfig(**options, task_type="CAUSAL_LM"), autocast_adapter_dtype=False
            )
        set_weights(model, device, only=".lora_")
        for name, parameter in model.named_parameters():
            if ".q_proj.base_layer" in name or ".q_proj.lora_B" in name:
                parameter.data.mul_(0.25)  # unit scores: at a scale of 4 they choose one token
        return model.to(device)

    def fused_modules(self) -> dict[str, list[str]]:
        """Return what the report says of all parts, with modules in its order."""
        prefix = f"base_model.model.{self.tower}"
        found = {}
        for part, usual in USUAL.items():
            names = self.fused.get(part, usual)
            found[part] = [
                f"{prefix}.layers.{layer}.{name.removeprefix(f'{layer}:')}"
                for layer in "01"
                for name in names
                if ":" not in name or name.startswith(layer)
            ]
        if self.fused.get("rms_norm", USUAL):
            found["rms_norm"].append(f"{prefix}.{self.last_norm}")
        for part, names in self.others.items():
            found[part] += [f"base_model.model.{name}" for name in names]
        found["cross_entropy"] = ["base_model.model"]
        return {
            part: sorted(names)
            for part, names in found.items()
            if names and part not in self.left and not (LOSS in self.left and LOSS in names)
        }


def outcome(model, part):
    """Return how many of the part's modules run fused, as fused_lora/docs/support.md says it."""
    try:
        found = fuse(model, Fusion(**{part: True}))
    except ValueError:
        return "–"
    unfuse(model)
    # a recurrence is always the library's, here a slow one
    left = [name for name in found.left if not name.endswith(".recurrence")]
    return "some" if left else "fused"


def everywhere(*names: str, tower: str = "model") -> list[str]:
    return [f"base_model.model.{tower}.layers.{layer}.{name}" for layer in "01" for name in names]


def not_known(attention: str, tower: str = "model") -> dict[str, str]:
    """Return what stays with PEFT in layers with this unknown attention class."""
    names = everywhere("self_attn", tower=tower)
    return dict.fromkeys(names, f"{attention} is not an attention class")


LOSS = "base_model.model"
NOT_READ = "its layers are not known to run as one"
QWEN_3_5 = {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "rope_parameters": HALF}  # fmt: skip
QWEN_3_5_PARTS = {
    "fused": {"attention": ("0:linear_attn", "0:linear_attn.out_proj", "1:self_attn",
                            "1:self_attn.o_proj"),
              "rope": ("1:self_attn",),
              "rms_norm": (*USUAL["rms_norm"], "0:linear_attn.norm", "1:self_attn.q_norm",
                           "1:self_attn.k_norm")},
    "functions": {"LoRA_Attention": 1, "LoRA_QKV": 1, "LoRA_W": 1},
    "in_layers": {"BeforeMixer": 1},
}  # fmt: skip


def slow_parts(tower: str) -> dict[str, str]:
    """Return what transformers' own code computes here, if fla is not installed."""
    net = f"base_model.model.{tower}.layers.0.linear_attn"
    left = {f"{net}.recurrence": "in PyTorch: install flash-linear-attention"}
    return {} if find_spec("fla") else left


# transformers 5.24 takes no sdpa for it, which would not cap its scores
SOFT_CAPPED = ("" if transformers.Gemma2PreTrainedModel._supports_sdpa
               else "self_attn: its attention is eager, which soft-caps its scores")  # fmt: skip
CONV = {"layer_types": ["conv", "full_attention"]}
LFM2_PARTS = {
    "fused": {"mlp": ("0:feed_forward",), "rope": ("1:self_attn",),
              "attention": ("0:conv.in_proj", "0:conv.out_proj", "1:self_attn",
                            "1:self_attn.out_proj"),
              "rms_norm": ("operator_norm", "ffn_norm", "1:self_attn.q_layernorm",
                           "1:self_attn.k_layernorm")},
    "last_norm": "embedding_norm",
    "functions": {"LoRA_Attention": 1, "LoRA_W": 2},
    "in_layers": {"BeforeMixer": 1, "CausalConv": 1},
}  # fmt: skip
GEMMA_4 = {
    "final_logit_softcapping": 2.0,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 96,
}
GEMMA_4_NORMS = (*AROUND, "post_per_layer_input_norm", *OF_HEADS[2:], "self_attn.v_norm")
PER_LAYER = {"rms_norm": ("model.per_layer_projection_norm",)}
# which PEFT takes for Qwen3-MoE's and Mixtral's gate_proj, up_proj and down_proj
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
MIXTURES = {"LoRA_Experts": 2}
SHARED_EXPERTS = {"mlp": ("0:mlp", "1:mlp.shared_experts", "1:mlp.experts")}
LATENT_PARTS = {
    "fused": SHARED_EXPERTS
    | {
        "attention": (
            "self_attn.q_a_proj",
            "self_attn.q_b_proj",
            "self_attn.kv_a_proj_with_mqa",
            "self_attn.kv_b_proj",
            "self_attn.o_proj",
        ),
        "rms_norm": (*USUAL["rms_norm"], "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
    },
    "left": {"rope": "it has no attention with q_proj"},
    "functions": {"LoRA_W": 10},
    "not_whole": NOT_READ,
    "lora": EXPERTS,
}
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "Llama": Family("Llama"),
    "Mistral": Family("Mistral", {"sliding_window": 4}),
    "Ministral": Family("Ministral", WINDOW),
    "Ministral 3": Family(
        "Ministral3", {"rope_parameters": SCALED, "sliding_window": 4},
    ),
    "GLM": Family("Glm", {"rope_parameters": HALF}),
    "ERNIE 4.5": Family("Ernie4_5"),
    "GLM-4": Family("Glm4", {"rope_parameters": HALF}, fused={"rms_norm": GLM_NORMS}),
    "CWM": Family("Cwm", WINDOW),
    "Qwen2": Family("Qwen2"),
    "Qwen3": Family("Qwen3", fused={"rms_norm": OF_HEADS}),
    "Qwen3.5": Family("Qwen3_5", QWEN_3_5, left=slow_parts("model"), **QWEN_3_5_PARTS),
    "SmolLM3": Family(
        "SmolLM3", {"no_rope_layers": [1, 0]}, fused={"rope": ("0:self_attn",)},
    ),
    "Granite": Family(
        "Granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.3, "logits_scaling": 3.0,
                    "embedding_multiplier": 2.0},
    ),
    "Granite 4, hybrid": Family(
        "GraniteMoeHybrid",
        TOP_2 | {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4,
                   "mamba_d_state": 8, "mamba_chunk_size": 4, "shared_intermediate_size": 24,
                   "position_embedding_type": "rope", "attention_multiplier": 0.3,
                   "residual_multiplier": 0.3, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
        lora=EXPERTS,
        fused={"mlp": ("shared_mlp", "block_sparse_moe.experts"), "rope": ("1:self_attn",),
               "attention": ("0:mamba.in_proj", "0:mamba.out_proj", "1:self_attn",
                             "1:self_attn.o_proj")},
        left={"base_model.model.model.layers.0.mamba.norm": "is not a gated norm class"},
        functions={"LoRA_Attention": 1, "LoRA_W": 2}, not_whole="it has no decoder layer",
    ),
    "LFM2": Family(
        "Lfm2", CONV | {"block_auto_adjust_ff_dim": False},
        **LFM2_PARTS | {"fused": LFM2_PARTS["fused"] | {"mlp": ("feed_forward",)}},
    ),
    "LFM2-MoE": Family(
        "Lfm2Moe", TOP_2 | CONV | {"num_dense_layers": 1}, lora=EXPERTS,
        **LFM2_PARTS | {
            "fused": LFM2_PARTS["fused"] | {"mlp": ("0:feed_forward", "1:feed_forward.experts")},
            "in_layers": LFM2_PARTS["in_layers"] | {"LoRA_Experts": 1},
        },
    ),
    "OLMo 2": Family("Olmo2", fused={"rms_norm": OUTPUT_NORMS}),
    "OLMo 3": Family("Olmo3", WINDOW, fused={"rms_norm": OUTPUT_NORMS}),
    "Qwen3-MoE": Family(
        "Qwen3Moe", TOP_2, fused={"mlp": ("mlp.experts",), "rms_norm": OF_HEADS},
        in_layers=MIXTURES,
    ),
    "Qwen2-MoE": Family(
        "Qwen2Moe", TOP_2, fused={"mlp": ("mlp.shared_expert", "mlp.experts")}, lora=EXPERTS,
        in_layers=MIXTURES | {"LoRA_MLP": 2},
    ),
    "Mixtral": Family(
        "Mixtral", TOP_2 | {"sliding_window": 4}, fused={"mlp": ("mlp.experts",)},
        in_layers=MIXTURES,
    ),
    "Qwen3.5-MoE": Family(
        "Qwen3_5Moe", TOP_2 | QWEN_3_5, lora=EXPERTS, **QWEN_3_5_PARTS | {
            "fused": QWEN_3_5_PARTS["fused"] | {"mlp": ("mlp.shared_expert", "mlp.experts")},
            "in_layers": QWEN_3_5_PARTS["in_layers"] | MIXTURES | {"LoRA_MLP": 2},
        }, left=slow_parts("model"),
    ),
    "Qwen3-Next": Family(
        "Qwen3Next", TOP_2 | QWEN_3_5, lora=EXPERTS, **QWEN_3_5_PARTS | {
            "fused": QWEN_3_5_PARTS["fused"] | {"mlp": ("mlp.shared_expert", "mlp.experts")},
            "not_whole": "Qwen3NextDecoderLayer is not a layer class",
        }, left=slow_parts("model"),
    ),
    "ERNIE 4.5, mixture": Family(
        "Ernie4_5_Moe",
        TOP_2 | {"moe_num_experts": 2, "moe_k": 2, "moe_layer_start_index": 1,
                 "moe_num_shared_experts": 1},
        lora=EXPERTS, fused=SHARED_EXPERTS, in_layers={"LoRA_Experts": 1, "LoRA_MLP": 1},
    ),
    "Mistral 4": Family(
        "Mistral4", TOP_2 | LATENT | {"rope_parameters": SCALED}, **LATENT_PARTS,
    ),
    "GLM-4.7-Flash": Family("Glm4MoeLite", TOP_2 | LATENT, **LATENT_PARTS),
    "gpt-oss": Family(
        "GptOss", TOP_2 | WINDOW | {"head_dim": 32}, lora=EXPERTS, fused={"mlp": ("mlp.experts",)},
        functions=APART if torch.cuda.is_available() else ONE,  # in fp32
        in_layers={"DecoderLayer": 0} if torch.cuda.is_available() else MIXTURES,
    ),
    "Gemma": Family("Gemma"),
    "Gemma 2": Family(
        "Gemma2",
        WINDOW | {"query_pre_attn_scalar": 16, "final_logit_softcapping": 2.0},
        fused={"rms_norm": AROUND}, not_whole=SOFT_CAPPED,
        functions=APART if SOFT_CAPPED else ONE,
    ),
    "Gemma 3": Family(
        "Gemma3", WINDOW | {"query_pre_attn_scalar": 16},
        fused={"rms_norm": (*AROUND, *OF_HEADS[2:])},
    ),
    "Gemma 4": Family(
        "Gemma4", WINDOW | GEMMA_4, fused={"rms_norm": GEMMA_4_NORMS}, others=PER_LAYER,
    ),
    "Gemma 4, k as v": Family(
        "Gemma4", WINDOW | GEMMA_4 | {"attention_k_eq_v": True, "global_head_dim": 8},
        fused={"rms_norm": GEMMA_4_NORMS}, others=PER_LAYER,
        functions={"LoRA_Attention": 1, "LoRA_W": 3, "RoPE": 1},
        in_parts="self_attn: its k is its v as well",
    ),
    "Gemma 4, k and v shared": Family(
        "Gemma4", GEMMA_4 | {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1},
        fused={"rms_norm": tuple(
            f"0:{name}" if name.endswith(("k_norm", "v_norm")) else name for name in GEMMA_4_NORMS
        )},
        others=PER_LAYER, functions={"LoRA_QKV": 1, "LoRA_W": 3, "RoPE": 2},
        not_whole="self_attn: later layers take its k and v as well",
    ),
    "Gemma 4, mixture": Family(
        "Gemma4",
        TOP_2 | WINDOW | GEMMA_4 | {"enable_moe_block": True, "top_k_experts": 2,
                                    "global_head_dim": 8, "hidden_size_per_layer_input": 0},
        fused={"rms_norm": (*AROUND, *OF_HEADS[2:], "self_attn.v_norm", "router.norm",
                            "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1",
                            "post_feedforward_layernorm_2")},
        left=dict.fromkeys(everywhere("experts"), "its activation is GELUTanh, not SiLU"),
        lora=EXPERTS, not_whole="it adds a mixture of experts to its MLP",
    ),
    "Gemma 4 Unified": Family(
        "Gemma4Unified", WINDOW | GEMMA_4 | {"global_head_dim": 8},
        fused={"rms_norm": tuple(one for one in GEMMA_4_NORMS if "per_layer" not in one)},
    ),
    "Phi-3": Family("Phi3", {"sliding_window": 4}),
    "Phi-4-mini": Family("Phi3", {"rope_parameters": THREE_QUARTERS}),
    "Qwen2-VL": Family("Qwen2VL", {"rope_parameters": SECTIONS}, VISION, not_whole=NOT_READ),
    "Qwen2.5-VL": Family(
        "Qwen2_5_VL", {"rope_parameters": SECTIONS}, VISION,
        others={"rms_norm": ("model.visual.blocks.0.norm1", "model.visual.blocks.0.norm2",
                             "model.visual.merger.ln_q")},
        left={"base_model.model.model.visual.blocks.0.mlp": "Qwen2_5_VLMLP is not an MLP class"},
        not_whole=NOT_READ,
    ),
    "Qwen3-VL": Family(
        "Qwen3VL", {"rope_parameters": SECTIONS}, VISION, fused={"rms_norm": OF_HEADS},
        not_whole=NOT_READ,
    ),
    "Gemma 4, multimodal": Family(
        "Gemma4", WINDOW | GEMMA_4, SIGLIP | {"head_dim": 16}, fused={"rms_norm": GEMMA_4_NORMS},
        others={"rms_norm": (
            "model.language_model.per_layer_projection_norm",
            "model.embed_vision.embedding_pre_projection_norm",
            *(f"model.vision_tower.encoder.layers.0.{name}" for name in GEMMA_4_NORMS
              if "per_layer" not in name),
        )},
        left={
            f"base_model.model.model.vision_tower.encoder.layers.0.{name}": reason
            for name, reason in {
                "mlp": "Gemma4VisionMLP is not an MLP class",
                "self_attn": "Gemma4VisionAttention is not an attention class",
                "self_attn.o_proj": "its base layer is Gemma4ClippableLinear",
            }.items()
        },
        in_parts="Gemma4VisionEncoderLayer is not a layer class",
    ),
    "Qwen3.5, multimodal": Family(
        "Qwen3_5", QWEN_3_5, VISION, left=slow_parts("model.language_model"),
        **QWEN_3_5_PARTS,
    ),
    "Gemma 3, multimodal": Family(
        "Gemma3", WINDOW | {"query_pre_attn_scalar": 16}, SIGLIP,
        fused={"rms_norm": (*AROUND, *OF_HEADS[2:])},
        others={"rms_norm": ("model.multi_modal_projector.mm_soft_emb_norm",)},
    ),
    "Mistral Small 3, multimodal": Family(
        "Mistral3", {"model_type": "mistral"},
        {"model_type": "pixtral", "head_dim": 16, **SIGLIP},
        others={"attention": ("model.vision_tower.transformer.layers.0.attention.o_proj",),
                "rms_norm": ("model.multi_modal_projector.norm",)},
        left={
            f"base_model.model.model.vision_tower.{name}": f"Pixtral{kind} class"
            for name, kind in {
                "ln_pre": "RMSNorm is not a norm",
                "transformer.layers.0.attention_norm": "RMSNorm is not a norm",
                "transformer.layers.0.ffn_norm": "RMSNorm is not a norm",
                "transformer.layers.0.attention": "Attention is not an attention",
                "transformer.layers.0.feed_forward": "MLP is not an MLP",
            }.items()
        },
    ),
    "Muse Glimmer": Family(
        "MuseGlimmer",
        WINDOW | {"final_logit_softcapping": 2.0, "output_multiplier": 0.5, "qk_scale_factor": 1.5},
        VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "pos_emb_height": 2,
                  "pos_emb_width": 2},
        fused={"attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                             "self_attn.gate_proj", "self_attn.o_proj"),
               "rms_norm": (*AROUND, "self_attn.qk_norm"), "rope": ()},
        others={"rms_norm": ("model.language_model.embed_tokens.embed_norm",
                             "model.perception_emb_norm")},
        left=not_known("MuseGlimmerTextAttention", tower="model.language_model"),
        functions={"LoRA_W": 10}, not_whole=NOT_READ,
    ),
    "LFM2-VL": Family(
        "Lfm2Vl", CONV | {"model_type": "lfm2", "block_auto_adjust_ff_dim": False}, SIGLIP,
        **LFM2_PARTS | {"fused": LFM2_PARTS["fused"] | {"mlp": ("feed_forward",)}},
    ),
    "Llava": Family(
        "Llava", {"model_type": "llama"}, {"model_type": "clip_vision_model", **SIGLIP},
        image_token=95,
    ),
}  # fmt: skip


UNKNOWN = Family(
    "Helium",
    fused=dict.fromkeys(USUAL, ()) | {"attention": ("self_attn.o_proj",)},
    left={
        **not_known("HeliumAttention"),
        **dict.fromkeys(everywhere("mlp"), "HeliumMLP is not an MLP class"),
        **dict.fromkeys(
            (
                *everywhere("input_layernorm", "post_attention_layernorm"),
                "base_model.model.model.norm",
            ),
            "HeliumRMSNorm is not a norm class",
        ),
        LOSS: "HeliumForCausalLM is not a class",
    },
)  # fmt: skip
