"""A graphed step with or without a GPU, the eager loop that it stands for, and a small model.

Without a GPU a "graph" is the list of PyTorch's operations and of our interpreted kernels that the
step ran, with the tensors that they ran on. As with a CUDA graph, capturing changes nothing, a
replay runs operations and no Python, every result lies where it lay at capture, and an operation
that would wait for the device is an error. So a number that was baked in, or a gradient at another
address, shows on the CPU too.
"""

import copy
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import torch
from cases.peft_models import ids
from cases.reference import seeded
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from fused_lora import fuse
from fused_lora.step.graph import GraphedStep
from fused_mlp.launching import is_capturing

RUN_KERNEL = InterpretedFunction.run
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []
        self.overwritten = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "profiler":  # marks, of the host alone
            return func(*args, **kwargs)
        if WAITS & set(func.tags) and not _is_index_by_numbers(func, args):
            raise RuntimeError(f"called a synchronizing CUDA operation: {func}")
        written = []
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        self.overwritten += [(tensor, tensor.detach().clone()) for tensor in written]
        result = func(*args, **kwargs)
        is_view = any(one.alias_info is not None for one in func._schema.returns)
        if written or not is_view:
            self.operations.append((func, args, kwargs, None if written else result))
        return result

    def run_kernel(self, kernel, *given, **options):
        """Run a kernel, which may write anywhere in the memory of the tensors that it is given."""
        tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
        run = partial(RUN_KERNEL, kernel)
        with _disable_current_modes():
            memory = {one.data_ptr(): one for one in (x.untyped_storage() for x in tensors)}
            self.overwritten += [(one, one.clone()) for one in memory.values()]
            run(*given, **options)
        self.operations.append((run, given, options, None))

    @torch.no_grad()
    def undo(self):
        """Restore what was written, except what an operation here has made: nothing lay there."""
        results = tree_leaves([result for *_, result in self.operations])
        tensors = [result for result in results if isinstance(result, torch.Tensor)]
        made = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for written, value in reversed(self.overwritten):
            is_tensor = isinstance(written, torch.Tensor)
            memory = written.untyped_storage() if is_tensor else written
            if memory.data_ptr() not in made:
                # .data: backward, which is captured next, takes no other version of a tensor
                (written.data if is_tensor else written).copy_(value)

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # it has cast when it was captured
    def replay(self):
        for func, args, kwargs, result in self.operations:
            again = func(*args, **kwargs)
            if result is not None:
                for at, value in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(at, torch.Tensor):
                        at.copy_(value)


@contextmanager
def seen_as_captured():
    """Have our code run as in a capture."""
    users = [one for name, one in sys.modules.items() if name.startswith("fused_")]
    with ExitStack() as stack:
        for module in users:
            if getattr(module, "is_capturing", None) is is_capturing:
                stack.enter_context(patch.object(module, "is_capturing", lambda tensor: True))
        yield


@contextmanager
def _capturing(recorder):
    """Record what runs, which sees that it is captured."""

    def run(kernel, *given, **options):
        recorder.run_kernel(kernel, *given, **options)

    is_on = patch("torch.cuda.is_current_stream_capturing", return_value=True)
    with seen_as_captured(), is_on, patch.object(InterpretedFunction, "run", run), recorder:
        yield


def _is_index_by_numbers(func, args):
    """Of `x[index]` the shape depends on values only where the index is a mask."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(arg is None or arg.dtype == torch.int64 for arg in args[1])


class Recorded:
    """What stands in for CUDA in `GraphedStep`."""

    device_type = "cpu"

    def __init__(self, device):
        self.device = device

    def run(self, body):
        return body()

    def capture(self, body):
        recorder, random = _Recorder(), torch.get_rng_state()
        try:
            with _capturing(recorder):
                result = body()
        finally:
            recorder.undo()
            torch.set_rng_state(random)
        return recorder.replay, result

    def synchronize(self):
        pass


class RecordedStep(GraphedStep):
    _backend = Recorded


def graphed(model, optimizer, **options):
    on_gpu = next(model.parameters()).is_cuda
    return (GraphedStep if on_gpu else RecordedStep)(model, optimizer, **options)


class Tiny(nn.Module):
    """A frozen embedding and two trained layers; the mean squared distance to `labels`."""

    def __init__(self, dropout=0.0, waits=False):
        super().__init__()
        self.embedding = nn.Embedding(16, 8).requires_grad_(False)
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 1)
        self.dropout = nn.Dropout(dropout)
        self.waits = waits

    def forward(self, input_ids, labels, scale=None):
        hidden = self.dropout(self.first(self.embedding(input_ids)).tanh())
        if self.waits and hidden.sum().item() > 1e9:
            raise ArithmeticError
        loss = (self.second(hidden).squeeze(-1) - labels).square().mean()
        return loss if scale is None else loss * scale


def tiny(device, **options):
    torch.manual_seed(0)
    return Tiny(**options).to(device)


def batch(seed, length=5, device="cpu"):
    """On the CPU unless said otherwise: that a batch is copied to the GPU is part of the step."""
    generator = seeded(seed)
    input_ids = torch.randint(16, (3, length), generator=generator)
    labels = torch.randn(3, length, generator=generator)
    return {"input_ids": input_ids.to(device), "labels": labels.to(device)}


def adamw(model, lr=2**-6):
    """Two groups with other options. Learning rates that are powers of two are the same in fp32 and
    in Python."""
    first, *others = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [first]}, {"params": others, "lr": lr / 2, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, fused=True, capturable=True)


def halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5 ** (done // 3))


class EagerStep:
    """The loop in GraphedStep's docstring, with its interface."""

    def __init__(
        self, model, optimizer, autocast=nullcontext, max_grad_norm=None, accumulation_steps=1
    ):
        self.model, self.optimizer, self.autocast = model, optimizer, autocast
        self.max_grad_norm, self.accumulation_steps = max_grad_norm, accumulation_steps

    def accumulate(self, **inputs):
        device = next(self.model.parameters()).device
        on_device = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }
        with self.autocast():
            output = self.model(**on_device)
        loss = getattr(output, "loss", output)
        (loss / self.accumulation_steps).backward()
        return loss.detach()

    def __call__(self, **inputs):
        loss = self.accumulate(**inputs)
        if self.max_grad_norm is not None:
            trained = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(trained, self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def held_nodes(module):
    """Return the nodes that accumulate the gradients of a module's parameters, to hold them as
    DistributedDataParallel does. A capture that runs one would wait for the stream it was made on.
    CUDA refuses that, and Recorded does by these hooks."""

    def refuse(*_):
        if isinstance(_get_current_dispatch_mode(), _Recorder):
            raise RuntimeError("a capture would wait for another stream")

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    nodes = [get_gradient_edge(parameter).node for parameter in trained]
    for node in nodes:
        node.register_prehook(refuse)
    return nodes


def captured(step):
    """How many graphs are captured, and not only started."""
    return sum(graph.captured is not None for graph in step._graphs.values())


def assert_same(got, want):
    """Bit by bit on the CPU. On a GPU a kernel may sum in another order from one run to the next,
    so within 1e-5, which a step too many or a wrong gradient exceeds a hundred times."""
    got, want = [torch.stack([*one]) if isinstance(one, list) else one for one in (got, want)]
    assert got.dtype == want.dtype and got.isfinite().all()
    bound = 1e-5 if got.is_cuda else 0.0
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def assert_same_training(step, eager):
    """Parameters, their gradients and the optimizer's state."""
    pairs = zip(step.model.parameters(), eager.model.parameters(), strict=True)
    for got, want in pairs:
        assert_same(got.detach(), want.detach())
        assert (got.grad is None) == (want.grad is None)
        if got.grad is not None:
            assert_same(got.grad, want.grad)
        if want.requires_grad:
            kept, wanted = step.optimizer.state[got], eager.optimizer.state[want]
            assert kept.keys() == wanted.keys()
            for name in wanted:
                assert_same(kept[name], wanted[name])


def steps(model, lr=2**-6, fusion=None, **options):
    """A graphed step of `model`, and the eager loop with a copy of it."""
    twin = copy.deepcopy(model)
    if fusion is not None:
        fuse(model, fusion), fuse(twin, fusion)
    shared = {name: value for name, value in options.items() if name != "max_graphs"}
    return graphed(model, adamw(model, lr), **options), EagerStep(twin, adamw(twin, lr), **shared)


def train(step, calls):
    """The losses of `calls`: (batch, whether to update)."""
    return [step(**inputs) if update else step.accumulate(**inputs) for inputs, update in calls]


def chat(seed, device, length=17):
    """Both rows end in padding; of the first, six labels more are ignored."""
    input_ids = ids(device, seed)[:, :length]
    attention_mask = torch.ones_like(input_ids)
    attention_mask[:, -3:] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[0, :6] = -100
    return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}
