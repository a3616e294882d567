"""Chats that call tools, written by the model's own chat template.

The template writes the whole chat with tools, calls and answers. We read its ChatML back into
messages and train on them like on any others.
"""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from batches import ROLES

TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\s*", re.DOTALL)
TO_DO = "give --model a checkpoint whose template does (Qwen's, say), or drop such chats"


class BrokenTokenizer(ValueError):
    """The error of a model's own files, whatever the data."""


def written_by(model: Path | None) -> Callable[[list[dict], list[dict]], list[dict[str, str]]]:
    """Return a function that writes chats by the template of a checkpoint's folder.

    Random weights have no folder: without one the function refuses such chats.
    """

    def write(messages: list[dict], tools: list[dict]) -> list[dict[str, str]]:
        if model is None:
            raise ValueError(f"it calls tools, and random weights have no chat template; {TO_DO}")
        tokenizer = _tokenizer(model)
        if not tokenizer.chat_template:
            raise ValueError(f"it calls tools, and {model.name} has no chat template; {TO_DO}")
        try:
            text = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
        except Exception as error:  # templates raise what they like
            reason = " ".join(str(error).split())[:150] or type(error).__name__
            raise ValueError(f"the chat template does not take its tools ({reason})") from None
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        for one in (*tools, *calls):
            if (name := one["function"]["name"]) not in text:
                raise ValueError(f"the chat template leaves its tool {name} out; {TO_DO}")
        turns = TURN.findall(text)
        if TURN.sub("", text).strip() or not {role for role, _ in turns} <= set(ROLES):
            raise ValueError(f"the chat template does not write its tools as ChatML; {TO_DO}")
        return [{"role": role, "content": said} for role, said in turns]

    return write


@cache
def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer  # takes seconds

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # of many kinds
        reason = " ".join(str(error).split())[:150] or type(error).__name__
        torn = next((path for path in sorted(model.glob("*.json")) if not _is_json(path)), None)
        said = f"{torn}: not JSON" if torn else f"{model}: its tokenizer does not load ({reason})"
        raise BrokenTokenizer(f"--model {said}; save the tokenizer there again") from None


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return True
