"""A weight that lies in a buffer, as `state_dict` returns it.

accelerate, safetensors and transformers need a copy: they take weights that share a storage for
tied ones and drop all but one, or they refuse rows with gaps. DCP and PEFT need no copy: DCP loads
into the very tensors that `state_dict` returns, and PEFT asks for all of them just to save an
adapter. So we return the weight itself, with a copy for code that asks about its memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .parallel import FLATTENED, is_flattened


class BufferedWeight(torch.Tensor):
    """A view of a weight. Code that computes with it or writes to it gets the weight itself. Code
    that asks for its memory, and pickle, get a contiguous copy, allocated on the first request."""

    # results are plain tensors
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def _copy(self) -> Tensor:
        if "_held" not in vars(self):
            self._held = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self._held.copy_(self)  # every time: the weight may have changed

    def detach(self) -> "BufferedWeight":  # nn.Parameter needs the same class
        return super().detach().as_subclass(BufferedWeight)

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, _: bool) -> None:
        """Become a plain parameter. nn.Parameter sets this, as in load_state_dict(assign=True)."""
        self.__class__ = nn.Parameter  # type: ignore[assignment]


def _forwarded_to_copy(name: str) -> Callable:
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(self._copy(), name)(*arguments, **options)

    return method


for _name in (
    "__deepcopy__", "__reduce_ex__", "contiguous", "data_ptr", "is_contiguous", "storage",
    "storage_offset", "stride", "untyped_storage",
):  # fmt: skip
    setattr(BufferedWeight, _name, _forwarded_to_copy(_name))


def hand_out_buffered(base: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace the tensors in `state` that lie in this linear layer's buffer by BufferedWeights.
    With keep_vars=True they are the parameters, and stay."""
    if is_flattened(base):
        raise RuntimeError(f"a fused model cannot be saved: {FLATTENED}")
    for name in base._parameters:
        value = state.get(prefix + name)
        if type(value) is Tensor and value.untyped_storage().nbytes() != value.nbytes:
            state[prefix + name] = value.as_subclass(BufferedWeight)
