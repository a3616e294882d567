"""The MLP of a LoRA-adapted transformer as one autograd function. Needs only torch and triton.

Copy this folder into your own project and call `LoRA_MLP.apply` (see `fast_lora.py`), or let
`fused_lora.fuse` put it into a PEFT model for you. Read in this order:

    utils.py       matmul_lora: a frozen matmul with its low-rank adapter added
    dropout.py     dropout before an adapter, with masks of one bit per element
    launching.py   launch: starts a Triton kernel in less host time
    swiglu.py      silu(gate) * up and its gradient, two Triton kernels
    geglu.py       gelu(gate) * up, likewise
    fast_lora.py   LoRA_MLP: the three adapted matmuls around SwiGLU, with a backward by hand
"""

from .dropout import draw_seed
from .fast_lora import FrozenMLP, LoRA_MLP
from .geglu import geglu_backward, geglu_forward
from .swiglu import swiglu_backward, swiglu_forward
from .utils import matmul_lora

__all__ = [
    "FrozenMLP",
    "LoRA_MLP",
    "draw_seed",
    "geglu_backward",
    "geglu_forward",
    "matmul_lora",
    "swiglu_backward",
    "swiglu_forward",
]
