"""Decoder layers and models on bordered weights, their vanilla PEFT twins, and the gradients of one
layer."""

import copy

import torch
from cases.fused_case import beside
from cases.peft_models import LAYERS, adapt, base_model
from cases.reference import assert_within_budget, over_draws, random

from fused_lora import Fusion, host_base
from fused_lora.forwards import layer as adopted
from fused_lora.forwards.layer_reading import read_running
from fused_lora.layer.decoder_layer import DecoderLayer, LoRA_Attention
from fused_lora.reading.known import inner_norm

LAYER = Fusion(layer=True)
EVERYTHING = Fusion(
    mlp=True, attention=True, rope=True, rms_norm=True, cross_entropy=True, layer=True
)
NAMES = [f"{LAYERS}.{index}" for index in range(2)]
FAMILIES = ("Qwen2", "Llama", "Mistral", "Qwen3")
BF16 = {"dtype": torch.bfloat16, "autocast_adapter_dtype": False}
DTYPES = {
    "bf16": BF16,
    "fp32": {"dtype": torch.float32},
    "fp16": {"dtype": torch.float16, "autocast_adapter_dtype": False},
    "bf16 with fp32 adapters": {"dtype": torch.bfloat16},
}


def peft_model(
    device, family="Qwen2", dtype=torch.float32, config=None, change=lambda base: base, **lora
):
    """Return peft_models' model with PyTorch's attention, no cache, and `config` changed. change:
    what becomes of the base model before it gets adapters."""
    base = base_model(device, family, dtype, **({"attn_implementation": "sdpa"} | (config or {})))
    base.config.use_cache = False
    _quarter(base, ".q_proj.")
    model = adapt(change(base), device, **lora)
    _quarter(model, ".q_proj.lora_B")
    return model.train()


def on_host(base):
    """Move a base model's layers into host memory."""
    host_base(base.requires_grad_(False), layers_on_gpu=0)
    return base


def _quarter(model, named):
    """Bring logits to unit scale. At a scale of 4, rounding decides a token here and there, and its
    error hides all others."""
    for name, parameter in model.named_parameters():
        if named in name:
            parameter.data.mul_(0.25)


def pair(device, fusion=LAYER, **options):
    return beside(peft_model(device, **options), fusion)


def operands_of(layer):
    """Return what this fused layer trains, and its blocks, as it is now. Moves weights that lie
    elsewhere into new buffers."""
    found = adopted.read_operands(layer, read_running(layer))
    return *found.trained, (found.mixing, found.mlp)


def in_a_call(blocks, cos, sin):
    """Return an attention and an MLP for a call with these angles, and a seed for dropout."""
    seed = torch.tensor([5], device=cos.device)
    attention, mlp = (block._replace(frame=block.frame._replace(seed=seed)) for block in blocks)
    return attention._replace(positions=cos.shape[1], cos=cos, sin=sin), mlp


def operands_of_calls(monkeypatch):
    """Record the operands of every call of DecoderLayer from now on."""
    seen = []
    applied_by = {function: function.apply for function in (DecoderLayer, LoRA_Attention)}

    def seen_apply(function, *inputs):
        if function is DecoderLayer:  # and not an attention alone
            seen.append(inputs)
        return applied_by[function](*inputs)

    monkeypatch.setattr(DecoderLayer, "apply", classmethod(seen_apply))
    return seen


def layer_of(model, index=0):
    return model.get_submodule(f"{LAYERS}.{index}")


def tokens(shape, dtype, device, draw=0, hidden=52):
    """Return hidden and the gradient of a layer's output."""
    seeds = 2 * draw + 1, 2 * draw + 2
    return [random(*shape, hidden, seed=seed, dtype=dtype, device=device) for seed in seeds]


def run(model, hidden, grad, mask=None, layout=None):
    """Return one layer's output and every gradient, by name."""
    layer = layer_of(model)
    layer.zero_grad()
    leaf = hidden.detach().clone().requires_grad_()
    x = leaf if layout is None else layout(leaf)
    rotary = model.get_submodule(LAYERS.removesuffix(".layers")).rotary_emb
    positions = torch.arange(x.shape[1], device=x.device)[None]
    # a model with windowed and full layers has different angles for each
    layer_type = [layer.self_attn.layer_type] if hasattr(rotary, "layer_types") else []
    # in a vision-language family a position has three numbers
    axes = positions.expand(3, 1, -1) if hasattr(rotary, "mrope_section") else positions
    angles = rotary(x, axes, *layer_type)
    output = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
    output.backward(grad)
    gradients = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "hidden": leaf.grad, **gradients}


def assert_layer_right(fused, plain, shape, dtype, grad_layout=None, **options):
    """Check the layers of two models in their dtype, with vanilla PEFT in float64 as the truth.
    Return how often each ran."""
    exact = copy.deepcopy(plain).double()
    device = next(plain.parameters()).device
    width = inner_norm(layer_of(plain)).weight.shape[0]

    def check():
        hidden, grad = tokens(shape, dtype, device, hidden=width)
        grad = grad if grad_layout is None else grad_layout(grad)
        got, eager = (run(model, hidden, grad, **options) for model in (fused, plain))
        truth = run(exact, hidden.double(), grad.double(), **options)
        assert got.keys() == eager.keys() == truth.keys() and len(truth) > 2
        for name in truth:
            assert got[name].dtype == eager[name].dtype, name
            assert_within_budget(name, got[name], eager[name], truth[name])

    return over_draws(check)


def operands(device, shape=(2, 9), **options):
    """Return the model, the operands for DecoderLayer.apply, and the gradient of its output."""
    fused, _, _ = pair(device, **options)
    hidden, grad = tokens(shape, options.get("dtype", torch.float32), device)
    cos, sin = (
        random(1, shape[1], 26, seed=seed, dtype=hidden.dtype, device=device) for seed in (7, 8)
    )
    *trained, blocks = operands_of(layer_of(fused))
    inputs = [hidden.requires_grad_(), None, None, *trained, in_a_call(blocks, cos, sin)]
    return fused, inputs, grad


def leaves(inputs):
    """Return the operands that require a gradient."""
    return [t for t in inputs[:-1] if t is not None and t.requires_grad]
