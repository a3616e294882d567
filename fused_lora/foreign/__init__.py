"""What has to be clever about other people's code: PEFT, transformers, TRL, accelerate, FSDP.

If a library's new release breaks something, the repair goes here, with the version in a comment.
"""
