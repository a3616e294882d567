"""Tensors [rows, columns] whose rows may lie any stride apart.

A bordered matmul reads [x | x A'] and writes [y | y A']. That makes x and y the first columns of
wider buffers. The kernels between the matmuls therefore take a row stride for every tensor.
"""

from torch import Tensor

from fused_mlp.launching import next_power_of_2

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
