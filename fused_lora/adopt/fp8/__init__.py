"""Base weights in FP8: as PEFT and others see them, and as checkpoints have them."""
