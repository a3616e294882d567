"""The MLP of a LoRA-adapted transformer as one autograd function. Needs torch and triton alone.

Copy this folder into your own project and call `LoRA_MLP.apply` (see `fast_lora.py`), or let
`fused_lora.fuse` put it into a PEFT model for you. Read in this order:

    utils.py       matmul_lora: a frozen product with its low-rank adapter added
    dropout.py     dropout before an adapter, its masks one bit an element
    launching.py   launch: a Triton kernel, in less of the host's time
    swiglu.py      silu(gate) * up and its gradient, two Triton kernels
    geglu.py       gelu(gate) * up, likewise
    fast_lora.py   LoRA_MLP: the three adapted products around SwiGLU, with the backward by hand
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
