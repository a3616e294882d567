"""Adoption: one file per switch of `Fusion`, with the modules that it concerns, the reasons why one
may not run fused, and the forward that is set. Alone knows the classes of PEFT and transformers."""
