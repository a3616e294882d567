"""Base weights in FP8: how PEFT and others see them, and how checkpoints store them."""
