"""CUDA graphs in a `Trainer`, in one call."""

import copy
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..causal_lm.documents import decoders
from ..foreign import checkpointing
from ..foreign.trl_head import is_flat_collator
from ..packing import FilledRows
from ..step.checkpoint import TILE_ROWS_IN_GRAPHS, Checkpoint
from ..step.flat_gradients import FlatGradients
from ..step.graphed_module import GraphedModule
from ..telling import warn
from ..weights.borders import borders_of
from ..weights.four_bit_parts import memories_of


def graph_steps(trainer: Any, *, max_graphs: int = 8) -> "GraphedSteps":
    """Run a trainer's decoder as CUDA graphs in every training step, from now on.

        trainer = SFTTrainer(model, SFTConfig(packing=True), train_dataset=data)
        fuse(trainer.model)
        graph_steps(trainer)
        trainer.train()

    A short step waits for Python, which launches thousands of kernels; a graph is one launch. We
    capture the decoder's forward, also those of a reference pass, and its backward
    (`step/graphed_module.py`). Everything else stays the trainer's own and runs as before: loss,
    metrics, accumulation, clipping, schedule, logging, evaluation, saving, resuming and stopping.
    Losses and weights are those without graphs.

    It is a call and no mixin, because a trainer is often somebody else's: TRL's, a subclass in your
    script, one that a framework makes. We set `training_step` on this instance, never on a class,
    and the decoder's forward only within a step. `remove` undoes all of it. What cannot be captured
    runs eagerly, and a warning names it once.

    Batches of one shape share a graph, so we keep their lengths to max_graphs. A trainer that packs
    (TRL's packing=True) gets a `FilledRows` in place of TRL's collator. A collator that pads,
    yours too, is copied with a `pad_to_multiple_of`, unless you have set that. With any other, keep
    the number of lengths small yourself.

    Graphs hold the activations of the largest shape until `remove`, also while you evaluate or a
    new shape runs eagerly, which needs memory on top. They compute all tokens of a batch, padding
    and those without labels included. Hooks on modules in the decoder are called when it is
    captured, and by no replay.

    Checkpointed layers get the policy "offload" of `Fusion`, unless they have one: PyTorch's own
    checkpoints cannot be captured. It recomputes the same numbers, and graphs then hold no more
    than a few layers' activations.

    Under torchrun the trainer wraps its model in DistributedDataParallel, whose hooks a replayed
    backward does not call. So every step runs in its `no_sync`, and we average the gradients after
    the last micro-batch of an update, once and with the same result. Shapes may differ between
    ranks. It also holds the nodes that accumulate gradients, so we capture new parameters on the
    same memory instead (`new_leaves`).

    With args.logging_nan_inf_filter, a Trainer's default, the host reads every loss. We do the same
    on the GPU, and the host no longer waits: the trainer gets a copy of its arguments without it.
    Batches go to the GPU with accelerate's non_blocking=True. Otherwise the host waits for the last
    update before it collates the next batch, and the GPU idles meanwhile.

    Args:
        trainer: transformers' Trainer or a subclass, with a PEFT model, on one GPU per rank.
        max_graphs: how many shapes may be captured with gradients, and how many without.

    Raises:
        ValueError: the trainer has no training_step or no model; max_graphs is below 1; or in a
            step on several ranks, a trained parameter got no gradient, or DistributedDataParallel
            has static_graph=True or a communication hook.
    """
    if not callable(getattr(trainer, "training_step", None)) or not isinstance(
        getattr(trainer, "model", None), nn.Module
    ):
        raise ValueError(
            f"graph_steps needs a trainer with a model, got {type(trainer).__name__}: pass a "
            "transformers.Trainer"
        )
    if not isinstance(max_graphs, int) or max_graphs < 1:
        raise ValueError(f"graph_steps needs max_graphs of at least 1, got {max_graphs!r}")
    earlier = vars(trainer).get("training_step")
    if isinstance(owner := getattr(earlier, "__self__", None), GraphedSteps):
        owner.remove()
    return GraphedSteps(trainer, max_graphs)


LONGEST = 1024  # tokens of a row, if the trainer does not say
MULTIPLE = 64  # of tokens, which suit matmuls


class GraphedSteps:
    """The training steps of one trainer, whose decoder runs as CUDA graphs.

    why_not: the reason if they all run eagerly, "" otherwise. decoder: made in the first step.
    """

    def __init__(self, trainer: Any, max_graphs: int):
        self.trainer, self.max_graphs = trainer, max_graphs
        self.decoder: GraphedModule | None = None
        self._held: FlatGradients | None = None  # on several ranks
        self.why_not = self._why_not()
        if self.why_not:
            warn(f"graph_steps: all steps run eagerly: {self.why_not}")
            return
        args = trainer.args
        self._own_step, self._filters_nan = trainer.training_step, args.logging_nan_inf_filter
        self._own = {name: vars(trainer).get(name) for name in ("args", "data_collator")}
        self._own["training_step"] = vars(trainer).get("training_step")
        trainer.training_step = self.training_step
        if self._filters_nan:
            trainer.args = copy.copy(args)
            trainer.args.logging_nan_inf_filter = False
        self._own_loading = trainer.accelerator.dataloader_config
        trainer.accelerator.dataloader_config = copy.copy(self._own_loading)
        trainer.accelerator.dataloader_config.non_blocking = True
        trainer.data_collator = self._collator_of_few_lengths()
        self._checkpoints = self._checkpoint_in_graphs()

    def __str__(self) -> str:
        if self.why_not:
            return f"graph_steps: all steps run eagerly: {self.why_not}"
        if self.decoder is None:
            return "graph_steps: no step has run yet"
        count = f"graph_steps: {self.decoder.captured} forwards captured"
        return "\n".join([count, *sorted(self.decoder.told)])

    def remove(self) -> None:
        """Give the trainer its own step, arguments and collator back, and drop all graphs."""
        if not self.why_not:
            for name, own in self._own.items():
                delattr(self.trainer, name)
                if own is not None:
                    setattr(self.trainer, name, own)
            self.trainer.accelerator.dataloader_config = self._own_loading
            if self._checkpoints:
                for _, layer in checkpointing.layers_of(self.trainer.model):
                    checkpointing.remove(layer)
                checkpointing.let_go(self.trainer.model)
        self.decoder = self._held = None

    def training_step(self, *inputs: Any, **options: Any) -> Tensor:
        """Run the trainer's own step, its decoder as graphs. Returns the loss, detached."""
        model = self.trainer.model
        module = _decoder_in(model)
        assert module is not None
        if self.decoder is None or self.decoder.module is not module:
            self.decoder = GraphedModule(module, partial(_forget_memory, module), self.max_graphs)
        wrapped = next((one for one in inputs if isinstance(one, DistributedDataParallel)), None)
        with self.decoder.in_place(), _without_sync(wrapped):
            loss = self._own_step(*inputs, **options)
        if wrapped is not None and self.trainer.accelerator.sync_gradients:
            self._average(wrapped)
        if not self._filters_nan:
            return loss
        trainer = self.trainer  # as it would, but the host does not wait
        since_logged = 1 + trainer.state.global_step - trainer._globalstep_last_logged
        return torch.where(loss.isfinite(), loss, trainer._tr_loss / since_logged)

    def _collator_of_few_lengths(self) -> Any:
        """Return the trainer's collator, or one whose batches have at most max_graphs lengths."""
        args, own = self.trainer.args, self.trainer.data_collator
        is_flat = getattr(own, "padding_free", False)
        longest = getattr(args, "max_length", None) or LONGEST
        if is_flat:
            longest *= args.train_batch_size
        multiple = -(-longest // (MULTIPLE * self.max_graphs)) * MULTIPLE
        if getattr(args, "packing", False) and is_flat_collator(own):
            return FilledRows(min(multiple, longest))
        if getattr(own, "pad_to_multiple_of", 1) is not None:
            return own
        padded = copy.copy(own)
        padded.pad_to_multiple_of = multiple
        return padded

    def _average(self, wrapped: DistributedDataParallel) -> None:
        """Average the gradients over all ranks, at the end of an update."""
        trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        if without := sum(one.grad is None for one in trained):
            raise ValueError(
                f"graph_steps: {without} of {len(trained)} trained parameters get no gradient: "
                "freeze them"
            )
        held = self._held
        if held is None or [*map(id, held.trained)] != [*map(id, trained)]:
            held = self._held = FlatGradients(trained, wrapped.process_group)
        held.hold()
        held.average()

    def _checkpoint_in_graphs(self) -> bool:
        """Checkpoint layers under our policy if they are checkpointed. Return whether it is new.

        PyTorch's own checkpoints read the random state, which no capture allows.
        """
        model = self.trainer.model
        layers = [layer for _, layer in checkpointing.layers_of(model)]
        is_on = any(getattr(layer, checkpointing.ENABLED) for layer in layers)
        if not (is_on or self.trainer.args.gradient_checkpointing):
            return False
        if any(map(checkpointing.policy_of, layers)):
            return False
        policy = Checkpoint("offload", tile_rows=TILE_ROWS_IN_GRAPHS)
        checkpointing.install(policy, layers)
        checkpointing.hold(model)
        return True

    def _why_not(self) -> str:
        args, model = self.trainer.args, self.trainer.model
        wanted = GraphedModule._backend.device_type
        devices = {str(parameter.device) for parameter in model.parameters()}
        reasons = {
            f"the model is on {', '.join(sorted(devices))}, not on one {wanted} device": (
                len(devices) != 1 or torch.device(min(devices)).type != wanted
            ),
            "it needs one GPU for each process: start them with torchrun": args.n_gpu > 1,
            "FSDP and DeepSpeed move the weights": (
                self.trainer.is_fsdp_enabled or self.trainer.is_deepspeed_enabled
            ),
            "torch_compile=True captures its own graphs": args.torch_compile,
            "activation_offloading=True copies within a forward; fuse has checkpoint='offload'": (
                getattr(args, "activation_offloading", False)
            ),
            "the model has no decoder with embed_tokens, layers and norm": (
                _decoder_in(model) is None
            ),
        }
        return next((reason for reason, holds in reasons.items() if holds), "")


def _without_sync(wrapped: DistributedDataParallel | None) -> AbstractContextManager[None]:
    """Return the context in which DistributedDataParallel leaves gradients to us."""
    if wrapped is None:
        return nullcontext()
    if wrapped.static_graph or wrapped._comm_hooks:
        raise ValueError(
            "graph_steps averages gradients itself, got DistributedDataParallel with "
            "static_graph=True or a communication hook: leave them out"
        )
    return wrapped.no_sync()


def _decoder_in(model: nn.Module) -> nn.Module | None:
    return next((module for _, module in decoders(model)), None)


def _forget_memory(decoder: nn.Module) -> None:
    """Have the next backward write again what its forward wrote into memory that others use."""
    for borders in filter(None, map(borders_of, decoder.modules())):
        borders.forget()
    memories_of(decoder).forget()
