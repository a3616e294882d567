"""Triton's interpreter, which runs the kernels without a GPU, made to round as hardware does."""


def round_bf16_as_hardware_does() -> None:
    """Let the interpreter round fp32 to bf16 to nearest even. It truncates, an error twice as large
    as the hardware's, and error budgets are the hardware's (seen in triton 3.7.1)."""
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float
    if original.__name__ == "convert_float":  # it does already
        return

    def convert_float(values, source, target, rounding_mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return original(values, source, target, rounding_mode)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()

    interpreter._convert_float = convert_float
