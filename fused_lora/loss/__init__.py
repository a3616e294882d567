"""The loss without logits: cross-entropy and log-probabilities, chunk by chunk, on a head in bf16
or FP8.

Add a precision as a subclass of `Head`. Functions know tensors alone.
"""
