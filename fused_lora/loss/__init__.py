"""The loss without logits: cross-entropy and log-probabilities, chunk by chunk, on a head in bf16
or FP8.

A precision is a subclass of `Head`, which the losses choose by a flag. Functions know tensors
alone.
"""
