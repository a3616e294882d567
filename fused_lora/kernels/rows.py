"""Tensors [rows, columns] whose rows may lie any stride apart: making and checking them.

A bordered matmul reads [x | x A'] and writes [y | y A']. That makes x and y the first columns of
wider buffers. The kernels between the matmuls therefore take a row stride for every tensor.
"""

from torch import Tensor

from fused_mlp.launching import check_runnable, next_power_of_2

# A line of the L2 cache. A matmul's tile is as wide: where a row begins elsewhere, each of the
# tile's rows lies in two lines. Triton also loads 16 bytes at once if it knows a stride's divisor.
ROW_BYTES = 128


def block_of(hidden: int) -> tuple[int, int]:
    """Return (BLOCK, num_warps) for a kernel that takes a row of `hidden` elements."""
    block = next_power_of_2(hidden)
    # 8 bf16 values, one 16-byte load, per thread and tensor
    return block, min(max(block // 256, 1), 16)


def empty_rows(like: Tensor, rows: int, columns: int) -> Tensor:
    """Return a new [rows, columns] like `like`, with its rows a multiple of 128 bytes apart.

    On the CPU it is zeros. There, bf16 matmuls of PyTorch 2.13 read past the end of a row and
    multiply what they find by zero. In fresh memory that may be NaN, and so is the result.
    """
    multiple = ROW_BYTES // like.element_size()
    stride = -(-columns // multiple) * multiple
    buffer = (like.new_zeros if like.is_cpu else like.new_empty)(rows, stride)
    return buffer if stride == columns else buffer[:, :columns]


def as_rows(x: Tensor) -> Tensor:
    """Return x [..., columns] as [rows, columns], elements side by side; a view if possible."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


class Handover:
    """Wide rows that one backward leaves for the next.

    A backward that returns a gradient in the first columns of wider rows `offer`s these rows. The
    backward that receives the gradient `take`s them, and may write into the other columns, which
    nobody else knows of. That saves a copy into wider rows, 134 MB at 16,384 tokens of 2,048.
    Anything in between (a sum with another gradient, a hook, another graph) makes the gradient
    another tensor, and then nothing is taken. Each model has one; a copy of it is empty.
    """

    def __reduce__(self):
        return Handover, ()

    def __init__(self) -> None:
        # kept alive until taken: no other tensor can get its memory
        self._rows: Tensor | None = None

    def offer(self, rows: Tensor) -> None:
        self._rows = rows

    def take(self, gradient: Tensor, columns: int) -> Tensor | None:
        """Return the offered rows if they are this wide and gradient [..., n] is their first n."""
        rows, self._rows = self._rows, None
        count = gradient.shape[:-1].numel()
        if rows is None or rows.shape != (count, columns):
            return None
        first = rows[:, : gradient.shape[-1]].view(gradient.shape)
        is_same = (gradient.data_ptr(), gradient.stride()) == (first.data_ptr(), first.stride())
        return rows if is_same and gradient.dtype == rows.dtype else None


def check_rows(name: str, kernel, shape: tuple[int, ...], **tensors: Tensor) -> None:
    """Raise ValueError unless `kernel` can run on the tensors and all are of this shape, of one
    dtype and device, with the elements of a row side by side."""
    first = next(iter(tensors.values()))
    check_runnable(name, kernel, first)
    for key, tensor in tensors.items():
        # asked first because it nearly always is right, and asked for 40 times a layer
        is_alike = tensor is first or (
            tensor.dtype == first.dtype and tensor.device == first.device
        )
        if is_alike and tensor.shape == shape and tensor.ndim == 2 and tensor.stride(1) == 1:
            continue
        if tensor.ndim != 2:
            raise ValueError(f"{name}: {key} is {list(tensor.shape)}, should be [rows, columns]")
        if tensor.shape != shape:
            raise ValueError(f"{name}: {key} is {list(tensor.shape)}, should be {list(shape)}")
        check_alike(name, key, tensor, first)
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{name}: {key} has elements {tensor.stride(-1)} apart, should have them side by "
                "side: make it contiguous first"
            )


def rows_and_intermediate(name: str, kernel, gate_up: Tensor) -> tuple[int, int]:
    """Return (rows, intermediate) of gate_up [rows, 2 intermediate], or raise ValueError."""
    check_rows(name, kernel, gate_up.shape, gate_up=gate_up)
    rows, columns = gate_up.shape
    if columns % 2:
        raise ValueError(
            f"{name}: gate_up is {list(gate_up.shape)}, should be [rows, 2 intermediate]"
        )
    return rows, columns // 2


def check_alike(name: str, key: str, tensor: Tensor, first: Tensor) -> None:
    """Raise ValueError unless the tensor has the dtype and the device of the first."""
    if tensor.dtype != first.dtype or tensor.device != first.device:
        raise ValueError(
            f"{name}: {key} is {tensor.dtype} on {tensor.device}, should be {first.dtype} on "
            f"{first.device} as the others are"
        )
