"""Gradient checkpointing, layer by layer: what a layer keeps for its backward, and where.

    none        keep everything a layer saves, even if the model was told to checkpoint
    full        keep each layer's input and recompute the layer in backward
    offload     like full, with the inputs in pinned host memory (`offload.py`). They are copied out
                while the layer runs, and back while the next layer runs backward. That leaves time
                for more: attention in a whole layer and the output of o go the same way, and are
                not recomputed, if a limit of host memory holds those of all layers
    selective   keep the first layers whole, as many as a memory budget holds, and checkpoint the
                others. We measure a layer the first time it is recomputed, so the first step of
                every shape checkpoints them all

Keeping a layer whole costs about 1 GiB at 32 x 512 tokens of Qwen2.5-3B and saves its recompute.
We keep whole layers, because every part of one costs about as much to recompute per byte. On an
H200 the matmuls of gate and up take 2.1 ms for 688 MiB; q, k, v, attention and o take 0.5 ms for
about 230. The budget only decides how many layers.

With a fused loss the last layer keeps what it saves under every policy, unless its MLP goes through
tiles of rows. Its backward comes next, so checkpointing it would save little but memory that the
loss has just freed. Longer rows hold more than that.

A layer is recomputed (`recompute.py`) for what its functions save, not for its output. The second
run stops at the last missing tensor. In most layers LoRA_MLP is the last to save one. `saving_last`
tells it so, and it skips its down projection, 29% of the layer's matmuls.

A layer calls a `LayerPolicy` instead of its forward. `foreign/checkpointing.py` sets it.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from fused_mlp.launching import is_capturing

from .hooks import Bystander
from .module_ref import ModuleRef
from .offload import Offload
from .recompute import recomputed

POLICIES = ("none", "full", "offload", "selective")
# The rows of a tile, if an MLP that is recomputed has at least twice that (`layer/tiles.py`). On
# an H200, six layers of Llama-3.1-8B's sizes take 20.44 GiB at 65,536 tokens in one piece and
# 14.68 in tiles of 2,048 rows, as of 4,096 and 8,192: attention makes the peak. Up to 16,384 tokens
# such tiles gain nothing (9.42 GiB with and without: the loss and the last layer), and their
# launches cost an eager step 1.4% at 32 x 512 of Qwen2.5-3B's. A whole last layer holds 70 kB a
# row there and 100 KiB at an 8B's, which is 1.1 and 1.6 GiB at 16,384 rows; the loss takes 0.15
# GiB for a chunk of logits at any number of rows. Recomputing one layer of 36 is 0.6% of a step of
# 32 x 512 tokens, where 35 take 100 of 479 ms.
TILE_ROWS = 8224  # 32 x 512 tokens are in one piece
# In graphs launches cost little. A trainer's rows are short, and MLPs and the last layer would make
# the peak: a row of Qwen2.5-3B's takes 110 KiB of a tile.
TILE_ROWS_IN_GRAPHS = 1024


class Checkpoint:
    """One policy for the layers of one model.

    Args:
        policy: one of POLICIES.
        memory_gib: for "selective", the memory that the layers kept whole may hold together.
        host_gib: for "offload", the host memory that it may pin. None: half of what is available
            when the first forward starts, divided by the ranks on this host.

    Raises:
        ValueError: the policy is unknown; or memory_gib is missing; or one of the two is negative,
            not a finite number, or given for another policy.
    """

    def __init__(
        self,
        policy: str,
        memory_gib: float | None = None,
        host_gib: float | None = None,
        tile_rows: int = TILE_ROWS,
    ):
        given = policy or "checkpoint=''"
        if policy != "selective" and memory_gib is not None:
            raise ValueError(f"checkpoint: checkpoint_gib is for selective, not for {given}")
        if policy != "offload" and host_gib is not None:
            raise ValueError(f"checkpoint: host_gib is for offload, not for {given}")
        if policy not in POLICIES:
            raise ValueError(
                f"checkpoint: {policy!r} is unknown; give one of {', '.join(POLICIES)}"
            )
        if policy == "selective" and not _is_size(memory_gib):
            raise ValueError(
                "checkpoint: selective needs checkpoint_gib, the memory for the layers it keeps, "
                f"as a number of GiB; got {memory_gib!r}"
            )
        if host_gib is not None and not _is_size(host_gib):
            raise ValueError(
                "checkpoint: host_gib, the host memory that offload may pin, should be a number of "
                f"GiB; got {host_gib!r}"
            )
        self.policy, self.tile_rows = policy, tile_rows
        self.budget_bytes = int((memory_gib or 0.0) * 2**30)
        self.layer_bytes: dict[tuple, int] = {}  # by input shape and layer index
        self.kept_bytes = 0  # held by the layers kept so far in this forward
        self.offload = Offload(None if host_gib is None else int(host_gib * 2**30))

    def run(self, on: "LayerPolicy", forward: Callable, *inputs):
        """Run a layer's forward under this policy."""
        first, *others = inputs
        is_made = first.is_leaf and not isinstance(first, nn.Parameter)
        if is_made and is_capturing(first):
            # TRL calls enable_input_require_grads. Nobody can read this gradient after a replay,
            # and the graphs would hold it and the input
            inputs = first.detach(), *others
        if self.policy == "offload" and not on.following:
            self.offload.reach_last()
        in_tiles = first.shape[:-1].numel() >= 2 * self.tile_rows
        if self.policy == "none" or (on.is_kept_last and not in_tiles):
            return forward(*inputs)
        if self.policy == "selective":
            return self._selective(on.layer(), on.index, forward, *inputs)
        if self.policy == "offload":
            if on.index == 0:
                self.offload.start()
            if on.following:  # the last one's backward would start before its input is copied out
                keep = self.offload.keep(inputs[0], on.following)
                with self.offload.hooks():
                    return self._checkpointed(on.layer(), forward, *inputs, keep=keep)
        return self._checkpointed(on.layer(), forward, *inputs)

    def _checkpointed(self, layer: nn.Module, forward: Callable, *inputs, **options):
        """Run `recomputed` with these options, in a capture without the random state."""
        options |= {"module": layer, "tile_rows": self.tile_rows}
        if not is_capturing(inputs[0]):
            return recomputed(forward, *inputs, **options)
        with ExitStack() as hooks:
            _refuse_dropout(layer, hooks)
            return recomputed(forward, *inputs, keep_random_state=False, **options)

    # --- selective --------------------------------------------------------------------------------

    def _selective(self, layer: nn.Module, index: int, forward: Callable, *inputs):
        if index == 0:
            self.kept_bytes = 0
        place = inputs[0].shape, index
        if place not in self.layer_bytes:
            see = partial(self._measure, layer, place)
            return self._checkpointed(layer, forward, *inputs, see=see)
        if self.kept_bytes + self.layer_bytes[place] > self.budget_bytes:
            return self._checkpointed(layer, forward, *inputs)
        self.kept_bytes += self.layer_bytes[place]
        return forward(*inputs)

    def _measure(self, layer: nn.Module, place: tuple, saved: list[Tensor]) -> None:
        known = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        storages = [tensor.untyped_storage() for tensor in saved]
        found = {
            storage.data_ptr(): storage.nbytes()
            for storage in storages
            if storage.data_ptr() not in known
        }
        self.layer_bytes[place] = sum(found.values())


def _is_size(gib: object) -> bool:
    return isinstance(gib, int | float) and 0 <= gib < float("inf")


@dataclass(eq=False)
class LayerPolicy:
    """The policy of one layer, which calls this instead of its forward.

    index: the layer's place in a forward. following: how many layers follow it. is_kept_last: it is
    the last, and checkpointed on long rows alone. before: the values of its attributes without the
    policy, for whoever sets it.
    """

    policy: Checkpoint
    layer: ModuleRef
    index: int
    following: int
    is_kept_last: bool
    before: dict[str, Any] = field(default_factory=dict)

    def __call__(self, forward: Callable, *inputs):
        return self.policy.run(self, forward, *inputs)


def policies_in(model: nn.Module) -> set[Checkpoint]:
    """Return the policies that the layers of a model run under."""
    values = (value for module in model.modules() for value in vars(module).values())
    return {value.policy for value in values if isinstance(value, LayerPolicy)}


class _NoDropout(Bystander):
    """A hook that refuses dropout in a captured layer that is recomputed: a capture cannot read the
    random state. Dropout in a fused function is fine: it draws masks from a seed that `once` keeps,
    and calls no module."""

    def __call__(self, module: nn.Module, *_) -> None:
        raise ValueError(
            "checkpoint: in a CUDA graph a layer that does not run fused cannot repeat its "
            "dropout when it is recomputed; set dropout to 0, or do not checkpoint"
        )


def _refuse_dropout(layer: nn.Module, hooks: ExitStack) -> None:
    """Hook the dropouts in a layer until these hooks are closed."""
    refuse = _NoDropout()
    for module in layer.modules():
        if module.training and getattr(module, "attention_dropout", False):
            refuse(module)
        if isinstance(module, nn.Dropout) and module.training and module.p:
            if layer._compiled_call_impl is not None:  # it would not see a new hook
                refuse(module)
            hooks.enter_context(module.register_forward_pre_hook(refuse))
