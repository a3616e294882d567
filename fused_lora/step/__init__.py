"""The whole step: CUDA graphs, checkpointing, recomputation and offload."""
