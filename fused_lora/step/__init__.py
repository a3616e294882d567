"""A whole step: CUDA graphs, checkpointing, recomputation, offload, several ranks.

Change here how often something runs and where its memory lies. A step takes any module: it imports
neither PEFT nor transformers.
"""
