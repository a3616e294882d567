"""What has to be clever about other people's code, a file for each reason.

forwards.py       a module's forward may be replaced: by us, by accelerate, by TRL
originals.py      a library's own function may be patched, which a fused one would override
hooks.py          a fused function does not call the hooks of the modules in it
versions.py       what transformers 5.24 does otherwise than 5.17
checkpointing.py  transformers has its own switch for checkpointing
no_logits.py      whoever computes with an output's logits has to learn that there are none
saved_weights.py  whoever saves a weight asks how it lies in memory
parallel.py       DataParallel and FSDP take a model's modules and weights apart
"""
