"""The MLP of a decoder layer as a block.

The residual plus the MLP of its norm. With the ends as `block.py` has them,

    gu      = [m | zm] M'                          gate and up side by side
    h, zh   = silu(gate) up, h A'                  as [h | zh], in one pass

and backward, for the gradient dh of h and ph = g sB,

    dgu     = SwiGLU backward                      into [dgu | pm], and from the same pass
    dA, dB  = ph' h, s dgu' zm                     of down, and of gate and up

So the adapters' only pass over [T, intermediate] tensors is the one over dgu, for pm. All matmuls
grow in K and have no more columns than without adapters. On an H200 at 16,384 tokens, pm and dm
take 2.27 ms. As [dm | pm], which is 64 columns wider, with pm A added to it afterwards, they take
2.35.

Per token of Qwen2.5-3B (hidden 2,048, intermediate 11,008; r = 32, bf16) it saves 52.4 kB: its
input 4.1, [m|zm] 4.2, gu 44.0, zh and rstd 0.1. Under checkpointing the forward runs twice, and
keeps zh from the first time (`rerun.once`). That is 64 bytes a token, and saves the second SwiGLU.
With a magnitude (DoRA) it also keeps what down gives, 4.1 kB, because its matmul is 8% of a step.
Tiles repeat it.

The gate's activation may be GELU by tanh (Gemma): a flag of the same kernels.

While the MLP of a long row runs backward, gu, dgu, h and dh would be most of what a checkpointed
layer needs: 129 kB a token here, 168 KiB of Llama-3.1-8B. As each row is by itself, they exist for
one tile of rows at a time. The block then saves x and zh alone, its second forward computes
nothing, and backward goes from tile to tile: what the forward saves of these rows, and their
gradients at once. Gradients of what is trained add up over tiles in fp32, in the order of the rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fused_mlp import geglu_forward, swiglu_forward
from fused_mlp.utils import check_activation

from ..rerun import keeps_elsewhere, once, rows_of_a_tile
from .adapter_sums import new_swiglu_gradients
from .block import (
    Added,
    BlockBackward,
    Entered,
    Gradient,
    add_projection,
    adds_to_copy,
    enter,
)
from .buffer import Activation, Dropout
from .filling import Adapter
from .operands import Dropouts, Frame
from .tiles import TiledBackward, tiles_of


class SavedMLP(NamedTuple):
    """Results of an MLPBlock's forward that its backward needs."""

    entered: Entered
    gate_up: Tensor
    added: Added  # of down


class SavedTiles(NamedTuple):
    """Instead, where backward goes through tiles of rows."""

    z_down: Tensor
    tiles: Sequence[slice]


class MLPBlock(NamedTuple):
    """An MLP between a norm and the residual.

    Equivalent PyTorch, where norms and projections are the layer's own::

        m = norm(x)  # a norm that the layer lacks returns its input
        activated = activation(gate_proj(m)) * up_proj(m)  # F.silu, or F.gelu by tanh
        total = x + norm_after(multiplier * down_proj(activated))
    """

    frame: Frame  # inputs: gate and up. output: down
    activation: str = "silu"  # as LoRA_MLP has it: "gelu_tanh" for GELU by tanh
    # False while checkpointing runs a layer again only for what it saves: no total is computed
    output_needed: bool = True

    def check(self, name: str, hidden: Tensor) -> None:
        check_activation(name, self.activation)

    def forward(
        self, x: Tensor, output: Tensor | None, dropouts: Dropouts
    ) -> tuple[Tensor | None, SavedMLP | SavedTiles]:
        """Return total, in output if that is given and else not at all, and what backward needs."""
        tiles = tiles_of(len(x), rows_of_a_tile())
        if len(tiles) > 1:
            return output, self._forward_in_tiles(x, output, dropouts, tiles)
        gate_up, entered = self._enter(x, output, dropouts)

        def add() -> Added:
            return self._add_activated(entered, gate_up, x, output, dropouts.output)

        if self.frame.norm_after is not None:
            return output, SavedMLP(entered, gate_up, add())
        stays = self.frame.output.scale is None or not keeps_elsewhere()
        if output is None:
            added = Added(*once(add, is_small=stays))
        else:
            added = add()
            # a recompute without output: no SwiGLU then
            added = Added(*once(lambda: added, is_small=stays))
        return output, SavedMLP(entered, gate_up, added)

    def _enter(
        self, x: Tensor, output: Tensor | None, dropouts: Dropouts
    ) -> tuple[Tensor, Entered]:
        """Return gate and up of the norm of x, and that. x also goes into output, if down adds to
        it there."""
        copy = output if adds_to_copy(self.frame, dropouts.output) else None
        # SwiGLU's kernels scale, but not with dropout
        return enter(self.frame, x, dropouts.inputs, copy, scales=any(dropouts))

    def _add_activated(
        self, entered: Entered, gate_up: Tensor, x: Tensor, output: Tensor | None,
        dropout: Dropout | None,
    ) -> Added:  # fmt: skip
        """Write x plus down of the activated gate_up into output, if it is given."""
        frame, down, dropped = self.frame, self.frame.output, None
        if dropout is not None and down.scale is not None:
            activated = swiglu_forward if self.activation == "silu" else geglu_forward
            dropped = down.dropped_base(activated(*gate_up.chunk(2, 1)), dropout)

        def project(residual: Tensor | None, total: Tensor | None, multiplier: float) -> Tensor:
            return down.buffer.add_swiglu(
                gate_up, residual, total, down.base_bias, multiplier, self._activation(entered),
                dropout,
            )  # fmt: skip

        if output is None and frame.norm_after is None and down.scale is None:
            return Added(project(x, None, frame.multiplier), None, None)
        total = torch.empty_like(x) if output is None else output
        return add_projection(frame, x, total, project, dropped)

    def _activation(self, entered: Entered) -> Activation:
        scale = self.frame.inputs.scale if entered.unscaled is None else None
        return Activation(self.activation, scale)

    def _forward_in_tiles(
        self, x: Tensor, output: Tensor | None, dropouts: Dropouts, tiles: Sequence[slice]
    ) -> SavedTiles:
        def add(rows: slice) -> Tensor:
            assert output is not None
            its_dropouts = dropouts.at(rows)
            gate_up, entered = self._enter(x[rows], output[rows], its_dropouts)
            return self._add_activated(
                entered, gate_up, x[rows], output[rows], its_dropouts.output
            ).z

        every_z = [] if output is None else [add(rows) for rows in tiles]
        (z_down,) = once(lambda: (torch.cat(every_z),), is_small=True)
        return SavedTiles(z_down, tiles)

    def backward(
        self, run: BlockBackward, x: Tensor, saved: SavedMLP | SavedTiles, gradient: Gradient,
        need_x: bool, before: BlockBackward | None,
    ) -> tuple[Gradient | None, tuple]:  # fmt: skip
        """Return the gradients of x, None if nothing needs it, and of what the block trains."""
        if isinstance(saved, SavedMLP):
            return self._backward(run, x, saved, gradient, need_x, before)
        tiled = TiledBackward(run, x, gradient, before)
        for rows in saved.tiles:
            tile, its_gradient = tiled.at(rows)
            tiled.add(self._backward_tile(tile, x[rows], saved.z_down[rows], its_gradient, need_x))
        return tiled.grad_x if need_x else None, tiled.trained()

    def _backward_tile(
        self, run: BlockBackward, x: Tensor, z_down: Tensor, gradient: Gradient, need_x: bool
    ) -> tuple:
        """Compute what `backward` reads, and return the gradients of what the block trains."""
        gate_up, entered = self._enter(x, None, run.dropouts)
        added = Added(z_down, None, None)
        if self.frame.norm_after is not None or self.frame.output.scale is not None:
            added = self._add_activated(entered, gate_up, x, None, run.dropouts.output)
        saved = SavedMLP(entered, gate_up, added)
        _, gradients = self._backward(run, x, saved, gradient, need_x, None)
        run.sums.compute()
        return gradients

    def _backward(
        self, run: BlockBackward, x: Tensor, saved: SavedMLP, gradient: Gradient, need_x: bool,
        before: BlockBackward | None,
    ) -> tuple[Gradient | None, tuple]:  # fmt: skip
        gate_up, down, dropouts = self.frame.inputs, self.frame.output, run.dropouts
        entered, need = saved.entered, run.need
        is_apart = entered.unscaled is not None
        if is_apart:  # what SwiGLU's backward gives is scaled after it
            need = [one._replace(B=False) for one in need]
        g = run.output_gradient(gradient, saved.added)
        assert g.rows is not None
        dh, ph = down.buffer.gradient(g, None, dropouts.output)
        with_swiglu = new_swiglu_gradients(
            saved.gate_up, gate_up, ph, entered.n.z, (*run.adapters, run.last_adapter),
            (*need, run.need_last), dropouts.output,
        )  # fmt: skip
        products = with_swiglu.products
        if not is_apart:
            products = products._replace(magnitudes=run.magnitude_grads)
        trains_biases = any(grad is not None for grad in run.bias_grads)
        dgu = gate_up.buffer.swiglu_backward(  # and what is in with_swiglu
            dh, saved.gate_up, products, self._activation(entered),
            is_read=dropouts.inputs is None and not trains_biases and not is_apart and need_x,
        )  # fmt: skip
        del dh  # at 16,384 tokens a [T, intermediate] is 361 MB: let it go early
        (down_B,) = run.sums.add_B(
            down, (run.last_adapter,), (run.need_last,), g.rows, saved.added.z
        )
        grad_x, pm = run.input_gradient(dgu, gradient.total, x, entered, need_x, before)
        if is_apart:
            assert dgu.rows is not None
            gate, up = run.sum_inputs(entered, pm, dgu.rows)
            run.sums.compute()  # lets dgu go
        else:
            gate_A, up_A = run.sum_A(entered, pm)
            gate, up = Adapter(gate_A, with_swiglu.gate_B), Adapter(up_A, with_swiglu.up_B)
        return grad_x, run.flat(gate, up, Adapter(with_swiglu.down_A, down_B))
