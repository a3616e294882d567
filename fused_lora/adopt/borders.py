"""Bordered weights: a frozen weight and its adapter in one buffer, so that LoRA needs no pass of
its own over a large tensor.

For a frozen W [out, in] with adapter A [r, in], B [out, r] and scale s the buffer is

    M = [[W, s B],      [out + r, in + r], row-major, in W's dtype
         [A,  0 ]]      its rows on whole lines of the L2 cache (`rows.empty_rows`)

Projections that share an input share a buffer (q, k, v; gate, up): W and A are stacked, B is block
diagonal. PEFT's `base_layer.weight` and `.bias` become views of it and work as before. The adapters
stay PEFT's own parameters: the border is scratch memory, into which every forward of a layer copies
the adapters that it runs with, all in one launch. So nothing has to be told that they changed.

Nothing here keeps a buffer alive but the weights in it, and a graph that needs it for backward. A
weight that lies elsewhere (moved, cast, assigned, unpickled, copied with its model) is moved into a
new buffer by the next forward, and the memory of the old one is free once all have left it.

The products are in `layer/buffer.py`. LoRA: Hu et al., arXiv 2106.09685. The bordered form is our
own.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fused_mlp.launching import is_capturing

from ..kernels.rows import empty_rows
from ..layer.buffer import Bordered, Buffer, PlacedWeight
from ..layer.filling import Filling
from .foreign.saved_weights import hand_out_buffered
from .projection import Projection, why_not_base

# Of bf16 are 16 bytes, to which cuBLAS wants every row aligned. Without any adapter the border is
# as wide, and zero.
WIDTH_MULTIPLE = 8
GROUPS = 4  # q, k and v; o; gate and up; down


# --- one buffer -----------------------------------------------------------------------------------


class Layout(NamedTuple):
    """A buffer's: outputs of each part, room for the rank of each, and columns of the border."""

    outs: tuple[int, ...]
    blocks: tuple[int, ...]
    width: int

    @property
    def rows(self) -> int:
        return sum(self.outs) + self.width

    def has_room(self, parts: Sequence[Projection]) -> bool:
        return all(len(part.A) <= block for part, block in zip(parts, self.blocks, strict=True))

    def bordered(
        self, buffer: Buffer, reads: Sequence[Projection], parts: Sequence[Projection]
    ) -> Bordered:
        scalings = tuple(part.scaling for part in parts)
        return Bordered(buffer, reads[0].weight.shape[1], self.outs, self.blocks, scalings)


class _Made(NamedTuple):
    """A buffer: where the weights and biases were put, and how it is laid out."""

    places: tuple
    layout: Layout
    stride: int


class Border:
    """The buffer of projections that share an input, for as long as their weights lie in it.

    A kind of weights that is kept otherwise has a subclass, and a switch (`switches.KINDS`).
    """

    precision = ""  # said of a layer that runs on such buffers
    is_traced = True  # torch.compile can trace a forward on them

    @staticmethod
    def why_not(layer: Any) -> str | None:
        """Return the reason if a layer's weights cannot lie in such buffers."""
        return None

    @staticmethod
    def why_not_base(base: nn.Module) -> str | None:
        """Return the reason if a base layer's weight is of no form that such a buffer takes."""
        return why_not_base(base)

    @staticmethod
    def take_in(base: nn.Linear) -> None:
        """Prepare a linear layer whose weight is to lie in such a buffer."""
        let_save(base)

    @staticmethod
    def settle(model: nn.Module) -> None:
        """Do to a model, whose forwards are set, what others have to find where weights are so."""

    def __init__(self) -> None:
        self._made: _Made | None = None
        self._buffer: weakref.ref[Buffer] | None = None

    def __reduce__(self):
        # of a copied or unpickled model no weight lies in a buffer
        return type(self), ()

    def find_or_make(
        self,
        reads: Sequence[Projection],
        parts: Sequence[Projection],
        ranks: Sequence[int],
        dtype: torch.dtype,
    ) -> tuple[Bordered, bool]:
        """Return the buffer, with room for adapters of these ranks, and whether it had to be made.

        parts: the projections, or what they are split in, each with an adapter and a rank.

        Made are: one [out + width, in + width] tensor, a second one for biases that are not
        trained, if there are any, and views of them in the place of the memory of each. Parameters
        stay the same objects.
        """
        made = self._made
        fits = made is not None and made.places == _places_of(reads) and made.layout.has_room(parts)
        if not fits:
            made = self._made = _make(reads, parts, ranks)
        assert made is not None
        buffer = None if self._buffer is None or not fits else self._buffer()
        if buffer is None:
            buffer = _buffer_of(made, reads)
            self._buffer = weakref.ref(buffer)
        return made.layout.bordered(buffer, reads, parts), not fits


def _places_of(reads: Sequence[Projection]) -> tuple:
    """The places of the weights and biases: they differ once one lies elsewhere, even if that is an
    address of before."""
    return tuple(
        (w.data_ptr(), w.stride(), w.dtype, w.device, None if bias is None else bias.data_ptr())
        for w, bias in ((read.weight, held_bias(read)) for read in reads)
    )


def held_bias(read: Projection) -> Tensor | None:
    """A projection's bias, if the buffer holds it. One that is trained stays where it is, for its
    optimizer may hold that memory, and is given to each forward."""
    return None if read.bias is None or read.bias.requires_grad else read.bias


@torch.inference_mode(False)
@torch.no_grad()
def _make(reads: Sequence[Projection], parts: Sequence[Projection], ranks: Sequence[int]) -> _Made:
    first = reads[0].weight
    in_features = first.shape[1]
    layout = layout_of(first, parts, ranks)
    matrix = empty_rows(first, layout.rows, in_features + layout.width).zero_()
    row = 0
    for read in reads:
        out = read.weight.shape[0]
        _move(read.weight, matrix[row : row + out, :in_features])
        row += out
    move_biases(reads, layout)
    return _Made(_places_of(reads), layout, matrix.stride(0))


def layout_of(weight: Tensor, parts: Sequence[Projection], ranks: Sequence[int]) -> Layout:
    if is_capturing(weight):
        raise RuntimeError(
            "a fused layer's weights have moved since its last eager forward: run one step "
            "eagerly, then capture the CUDA graph"
        )
    outs = tuple(part.weight.shape[0] for part in parts)
    blocks = tuple(max(rank, part.A.shape[0]) for rank, part in zip(ranks, parts, strict=True))
    width = -(-max(sum(blocks), 1) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    return Layout(outs, blocks, width)


def move_biases(reads: Sequence[Projection], layout: Layout) -> Tensor | None:
    """Put the biases that a buffer holds side by side, each in its projection's rows."""
    if all(held_bias(read) is None for read in reads):
        return None
    first = next(held for held in map(held_bias, reads) if held is not None)
    bias, row = first.new_zeros(layout.rows), 0
    for read in reads:
        out = read.weight.shape[0]
        if (held := held_bias(read)) is not None:
            _move(held, bias[row : row + out])
        row += out
    return bias


def _move(parameter: Tensor, memory: Tensor) -> None:
    parameter.data = memory.copy_(parameter)


def _buffer_of(made: _Made, reads: Sequence[Projection]) -> Buffer:
    """The whole of what the weights are views of."""
    # .data, with a version of its own: a plain function that saved a weight does not mind borders
    weight, layout = reads[0].weight.data, made.layout
    inputs = weight.shape[1]
    matrix = weight.as_strided((layout.rows, inputs + layout.width), (made.stride, 1), 0)
    bias = next((held for held in map(held_bias, reads) if held is not None), None)
    if bias is not None:
        bias = bias.data.as_strided((layout.rows,), (1,), 0)
    return Buffer(matrix, bias, sum(layout.outs), inputs)


class LayerBorders(Filling):
    """The borders of one decoder layer.

    replica_of: the name of an earlier layer that has the same base weights (PEFT's
    layer_replication), in whose buffers they lie.
    """

    def __init__(self, kind: type[Border] = Border):
        super().__init__()
        self.kind = kind
        self.borders = tuple(kind() for _ in range(GROUPS))
        self.replica_of: str | None = None

    def find_or_make(
        self,
        groups: Sequence[Sequence[Projection]],
        parts: Sequence[Sequence[Projection]],
        ranks: Sequence[Sequence[int]],
        dtype: torch.dtype,
    ) -> list[Bordered]:
        """Return the buffers of these projections, made where weights lie elsewhere.

        One after the other, so that at most one group's weights exist twice. dtype: the model's,
        which weights may not tell.
        """
        found = [
            border.find_or_make(reads, split, of, dtype)
            for border, reads, split, of in zip(self.borders, groups, parts, ranks, strict=True)
        ]
        device = found[0][0].A.device
        if device.type == "cuda" and any(was_made for _, was_made in found):
            torch.cuda.empty_cache()  # the freed pieces are each too small for what comes
        return [bordered for bordered, _ in found]


# --- weights in a buffer and out of it ------------------------------------------------------------


def let_save(base: nn.Linear) -> None:
    """Let this linear layer, whose weight is to lie in a buffer, be saved, also once it stands in a
    model of its own (`_leave_peft`)."""
    if _leave_peft not in base._state_dict_pre_hooks.values():
        base.register_state_dict_pre_hook(_leave_peft)
        base.register_state_dict_post_hook(hand_out_buffered)


def _leave_peft(base: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Give a linear layer memory of its own when its state is asked for and it is no longer within
    a layer or a model of PEFT's, after `merge_and_unload` or `unload`: safetensors refuses weights
    that share memory or are not contiguous."""
    if not prefix.endswith("base_layer.") and "base_model." not in prefix:
        _give_own_memory(base)


HOOKS = (_leave_peft, hand_out_buffered)


def _give_own_memory(base: Any) -> list[str]:
    """Move weight and bias out of their buffer, whatever their names are now (weight_orig, once it
    is pruned); returns the names of those that lay in one."""
    moved = []
    for name, parameter in base.named_parameters():
        if isinstance(parameter, PlacedWeight):
            parameter.leave_buffer()
            moved.append(name)
        elif type(parameter) is nn.Parameter and not (
            parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes
        ):
            parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)
            moved.append(name)
    return moved


def unborder(model: nn.Module) -> list[str]:
    """Give every weight and bias of `model` that lies in a buffer contiguous memory of its own
    again, as it is now; returns the names. The buffers are freed with that."""
    names = []
    for name, module in model.named_modules():
        for hooks in (module._state_dict_pre_hooks, module._state_dict_hooks):
            for key in [key for key, hook in hooks.items() if hook in HOOKS]:
                del hooks[key]
                names += [f"{name}.{kind}" for kind in _give_own_memory(module)]
    return names
