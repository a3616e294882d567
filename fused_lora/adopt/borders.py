"""Bordered weights: a frozen weight and its adapter in one buffer, so that LoRA needs no pass of
its own over a large tensor.

For a frozen W [out, in] with adapter A [r, in], B [out, r] and scale s the buffer is

    M = [[W, s B],      [out + r, in + r], row-major, in W's dtype
         [A,  0 ]]      its rows on whole lines of the L2 cache (`rows.empty_rows`)

Projections that share an input share a buffer (q, k, v; gate, up): W and A are stacked, B is block
diagonal. PEFT's `base_layer.weight` and `.bias` become views of it and work as before; the adapters
stay PEFT's own parameters, of which the border holds casted copies.
The products are in `bordered_linear.py`.

LoRA: Hu et al., arXiv 2106.09685. The bordered form is our own.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..bordered import Bordered
from ..kernels.many_copies import ManyCopies
from ..kernels.rows import Handover, empty_rows
from .projection import Projection, read_projection
from .site import is_kind

SHARED_INPUT = {"Attention": ("q_proj", "k_proj", "v_proj"), "MLP": ("gate_proj", "up_proj")}
WIDTH_MULTIPLE = 8  # of bf16 are 16 bytes, to which cuBLAS wants every row aligned


# --- the buffers of a model -----------------------------------------------------------------------


class _Source(NamedTuple):
    """What a block of the border was copied from."""

    A: Tensor  # kept alive, so that no later tensor can have its address
    B: Tensor
    state: tuple

    @staticmethod
    def of(A: Tensor, B: Tensor, scaling: float) -> "_Source":
        return _Source(A, B, _Source.state_of(A, B, scaling))

    @staticmethod
    def state_of(A: Tensor, B: Tensor, scaling: float) -> tuple:
        return A.data_ptr(), A._version, A.shape, B.data_ptr(), B._version, B.shape, scaling


class _Copies(NamedTuple):
    """Adapters and where they go: first each A, then each B."""

    targets: tuple[Tensor, ...]
    sources: tuple[Tensor, ...]  # detached: what a parameter's `.data` was
    scalings: tuple[float, ...]
    places: list[tuple["Group", int]]


@dataclass(eq=False)
class Group:
    """Projections that share an input and a buffer.

    names: of the projections, as in `model.named_modules()`. bordered: the buffer. base_views: the
    memory of each base weight [out, in] and bias [out]. adapter_views: of each A [block, in] and
    s B [out, block].
    """

    names: tuple[str, ...]
    projections: tuple[nn.Module, ...]
    bordered: Bordered
    sources: list[_Source | None] = field(repr=False)
    base_views: list[tuple[Tensor, Tensor | None]] = field(init=False, repr=False)
    adapter_views: list[tuple[Tensor, Tensor]] = field(init=False, repr=False)

    def __post_init__(self):
        matrix, bias, in_features, outs, blocks, _ = self.bordered
        self.base_views, self.adapter_views = [], []
        row = block_start = 0
        for out, block in zip(outs, blocks, strict=True):
            rows = slice(row, row + out)
            columns = slice(in_features + block_start, in_features + block_start + block)
            A_start = self.bordered.out + block_start
            self.base_views.append(
                (matrix[rows, :in_features], None if bias is None else bias[rows])
            )
            self.adapter_views.append(
                (matrix[A_start : A_start + block, :in_features], matrix[rows, columns])
            )
            row, block_start = row + out, block_start + block

    def read(self, index: int, own_forward: bool = False) -> Projection | str:
        """One projection as it is now, or why its part of the buffer does not stand for it."""
        read = read_projection(self.projections[index], own_forward)
        if isinstance(read, str):
            return read
        weight, bias = self.base_views[index]
        for kind, tensor, view in (("weight", read.weight, weight), ("bias", read.bias, bias)):
            if tensor is not None and (view is None or not _is_same_memory(tensor, view)):
                return (
                    f"its base {kind} has been moved, cast or replaced and lies no longer in the "
                    "buffer: call border(model) again"
                )
        rank, block = read.A.shape[0], self.bordered.blocks[index]
        if rank > block:
            return (
                f"its adapter has rank {rank} and the border was made for {block}: call "
                "border(model) again"
            )
        return read


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.device == other.device
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


class Borders:
    """All buffers of one model, made by `border`.

    groups: the buffers. left: module name -> why it has no part in one.

    The adapters are copied into all stale borders at once, by `refresh_stale` or by the first
    `read` that finds its own stale. Noticed is: a change in place, by load_state_dict, by any
    torch.optim.Optimizer's step, of `.data` to another tensor, of the parameter itself, of the
    active adapter and of the scaling. NOT noticed, so call `refresh` after it: a change in place
    through `.data` (`parameter.data.mul_(2)`), which PyTorch does not count, and what a replayed
    CUDA graph does (capture `refresh` in it). After a refresh, backward through a graph from
    before it is autograd's error about an operation in place.
    """

    def __init__(self, groups: list[Group], left: dict[str, str]):
        self.groups, self.left = groups, left
        self._group_of = {one: group for group in groups for one in group.projections}
        self.handover = Handover()
        self._optimizer_stepped = False
        self._copies = ManyCopies()
        self._latest: _Copies | None = None  # the last time, if that was of all adapters
        # fused=True optimizers change parameters without PyTorch counting it (torch 2.13)
        hook = register_optimizer_step_post_hook(partial(_note_step, weakref.ref(self)))
        weakref.finalize(self, hook.remove)

    def __str__(self) -> str:
        lines = [", ".join(group.names) for group in self.groups]
        lines += [f"left to PEFT: {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)

    def __reduce__(self):
        # of a copied or unpickled model no weight lies in a buffer
        return Borders, ([], {})

    def group_of(self, projection: nn.Module) -> Group | None:
        return self._group_of.get(projection)

    def refresh(self) -> int:
        """Copy every adapter into its border; returns the number of projections."""
        self._forget()
        return self.refresh_stale()

    @torch.no_grad()
    def refresh_stale(self) -> int:
        """Copy the adapters that changed since they were last copied; returns how many did.

        Equivalent PyTorch, for each: ``A_view.copy_(A); B_view.copy_(scaling * B)``. Those that
        cannot be read now (merged or disabled, say) are looked at again the next time.
        """
        if self._optimizer_stepped:
            self._forget()
        copies = self._stale()
        return self._copy(copies) if copies.places else 0

    @torch.no_grad()
    def _refresh_after_step(self) -> None:
        """As `refresh_stale`, for a step of an optimizer alone: it leaves other values in the same
        tensors, so that PEFT's layers are not read for them. What else changed is stale then."""
        if self._latest is None:
            self.refresh_stale()
        else:
            self._forget()
            self._copy(self._latest)

    def _forget(self) -> None:
        self._optimizer_stepped = False
        for group in self.groups:
            group.sources = [None] * len(group.sources)

    def _stale(self) -> _Copies:
        views: list[Tensor] = []
        unused: list[Tensor] = []
        A: list[Tensor] = []
        B: list[Tensor] = []
        scalings = []
        places = []
        for group in self.groups:
            for index in range(len(group.names)):
                read = group.read(index)
                if isinstance(read, str) or _is_fresh(group, index, read):
                    continue
                A_view, B_view = group.adapter_views[index]
                rank = read.A.shape[0]
                if rank < A_view.shape[0]:  # than that of another adapter, which may have been here
                    unused += [A_view[rank:], B_view[:, rank:]]
                views += [A_view[:rank], B_view[:, :rank]]
                A.append(read.A.detach())
                B.append(read.B.detach())
                scalings.append(read.scaling)
                places.append((group, index))
        if unused:
            torch._foreach_zero_(unused)
        targets = *views[::2], *views[1::2]
        return _Copies(targets, (*A, *B), (*(1.0 for _ in A), *scalings), places)

    def _copy(self, copies: _Copies) -> int:
        targets, sources, scalings, places = copies
        # scaled before they are cast: one rounding, not two
        self._copies.copy(targets, sources, scalings)
        count = len(places)
        for place, A, B, scaling in zip(
            places, sources[:count], sources[count:], scalings[count:], strict=True
        ):  # not before: what runs out of memory stays stale
            group, index = place
            group.sources[index] = _Source.of(A, B, scaling)
        self._latest = copies if count == len(self._group_of) else None
        return count

    def read(self, group: Group, own_forward: bool = True) -> "tuple[Any, ...] | str":
        """What BorderedLinear takes after x to stand in for `group` as it is now, or why it may
        not. `own_forward`: whether the projections must still have their class's forward."""
        reads = [group.read(index, own_forward) for index in range(len(group.names))]
        for name, read in zip(group.names, reads, strict=True):
            if isinstance(read, str):
                return f"{name.rpartition('.')[2]}: {read}"
        found = [read for read in reads if isinstance(read, Projection)]
        if self._optimizer_stepped:
            self._refresh_after_step()
        if not all(_is_fresh(group, index, read) for index, read in enumerate(found)):
            self.refresh_stale()
        scalings = tuple(read.scaling for read in found)
        adapters = chain.from_iterable((read.A, read.B) for read in found)
        return *adapters, group.bordered._replace(scalings=scalings)


def _note_step(borders: "weakref.ref[Borders]", *_: Any) -> None:
    if (alive := borders()) is not None:
        alive._optimizer_stepped = True


def _is_fresh(group: Group, index: int, read: Projection) -> bool:
    source = group.sources[index]
    return source is not None and source.state == _Source.state_of(read.A, read.B, read.scaling)


@torch.no_grad()
def border(model: nn.Module) -> Borders:
    """Move the base weights of a PEFT model's LoRA layers into bordered buffers.

    Group by group, so that at most one group's weights exist twice; after it the model is larger
    by the borders alone, and by what fills each row up to a multiple of 128 bytes. Parameters stay
    the same objects, with other memory; state_dict, loading, adapters' `save_pretrained`, merging
    and unmerging go on working (`safe_merge` replaces the weights, which is noticed). A base model
    is saved after `unborder`: transformers and safetensors raise for weights that share memory. A
    deepcopy has weights of its own and no buffers. Where there are several adapters, the border has
    room for the largest rank. Call it again after weights were moved, cast or replaced.

    Args:
        model: a PEFT model (or any module that holds PEFT's LoRA layers), on any device.

    Returns:
        The buffers, refreshed, and the LoRA layers that are in none, with the reasons. Its
        buffers live as long as it or a weight in them does.

    Raises:
        ValueError: no LoRA layer of the model can be bordered.
    """
    groups: list[Group] = []
    left: dict[str, str] = {}
    devices = set()
    for candidates in _sharing_an_input(model):
        alike: dict[tuple, list[tuple[str, nn.Module, Projection]]] = {}
        for name, projection in candidates:
            read = read_projection(projection, own_forward=False)
            if isinstance(read, str):
                left[name] = read
            else:
                key = read.weight.dtype, read.weight.device, read.weight.shape[1]
                alike.setdefault(key, []).append((name, projection, read))
        for (_, device, _), members in alike.items():
            groups.append(_make_group(members))
            devices.add(device.type)
    if not groups:
        reason = next(iter(left.values()), "it has no LoRA layers of PEFT")
        raise ValueError(f"border: no LoRA layer of this model can be bordered: {reason}")
    if "cuda" in devices:
        torch.cuda.empty_cache()  # the freed pieces are each too small for what comes
    borders = Borders(groups, left)
    borders.refresh_stale()
    return borders


def unborder(model: nn.Module) -> list[str]:
    """Give every bordered weight and bias of `model` contiguous memory of its own again, as it is
    now; returns the names. The buffers are freed once the `Borders` is gone, too."""
    names = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        for kind, parameter in (("weight", module.weight), ("bias", module.bias)):
            if getattr(parameter, "bordered", False):
                delattr(parameter, "bordered")
                parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)
                names.append(f"{name}.{kind}")
    return names


def _sharing_an_input(model: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """LoRA layers with their names, those that share an input together, the others alone."""
    seen: set[nn.Module] = set()
    for name, module in model.named_modules():
        for kind, parts in SHARED_INPUT.items():
            if is_kind(module, kind):
                found = [(f"{name}.{part}", module.get_submodule(part)) for part in parts]
                together = [(part, one) for part, one in found if _has_lora(one)]
                seen.update(projection for _, projection in together)
                yield together
        if _has_lora(module) and module not in seen:
            yield [(name, module)]


def _has_lora(module: nn.Module) -> bool:
    return isinstance(module, LoraLayer)


def _make_group(members: list[tuple[str, nn.Module, Projection]]) -> Group:
    names, projections, reads = zip(*members, strict=True)
    first = reads[0].weight
    in_features = first.shape[1]
    outs = tuple(read.weight.shape[0] for read in reads)
    blocks = tuple(max(A.weight.shape[0] for A in one.lora_A.values()) for one in projections)
    width = -(-sum(blocks) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    matrix = empty_rows(first, sum(outs) + width, in_features + width).zero_()
    bias = None
    if any(read.bias is not None for read in reads):
        bias = first.new_zeros(sum(outs) + width)
    scalings = tuple(read.scaling for read in reads)
    bordered = Bordered(matrix, bias, in_features, outs, blocks, scalings)
    group = Group(names, projections, bordered, [None] * len(names))
    for index, read in enumerate(reads):
        for parameter, view in zip((read.weight, read.bias), group.base_views[index], strict=True):
            if parameter is not None and view is not None:
                view.copy_(parameter)
                parameter.data = view
                parameter.bordered = True  # for unborder
    return group
