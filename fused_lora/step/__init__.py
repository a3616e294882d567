"""What happens to a whole step: CUDA graphs, checkpointing, recomputation, offload, several ranks.

It takes any module, and knows nothing of PEFT or transformers.
"""
