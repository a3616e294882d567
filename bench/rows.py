"""A row of a data set -> a chat: the role and the text of each message.

Rows have "messages" (each with "role" and "content"), ShareGPT's "conversations" (each with "from"
and "value"), a "prompt" with its "completion", or Alpaca's "instruction" (and "input") with its
"output", optionally after a "system" and a "history" of pairs. A content may be a list of text
parts. A chat template writes rows with tools or tool calls (`tool_calls.py`).
"""

import json
from collections.abc import Callable
from typing import Any

ROLES = ("system", "user", "assistant")
ALSO_CALLED = {
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "developer": "system",
    "function_call": "assistant",
    "function": "tool",
    "observation": "tool",
}
CHAT = ("messages", "conversations", "conversation")
QUESTIONS = (
    ("prompt", None, ("completion", "response")),
    ("instruction", "input", ("output", "response")),
)
WANTED = '{"messages": [{"role": "user", "content": "..."}, ...]}'

Messages = list[dict[str, Any]]
WithTools = Callable[[Messages, list[dict[str, Any]]], list[dict[str, str]]]


def chat_of(row: object, with_tools: WithTools) -> list[dict[str, str]]:
    """Return the role and content of each message. `with_tools` writes chats that call tools.

    Raises ValueError if the row is no chat: what is wrong, what is wanted, what to do.
    """
    columns = {"messages": row} if isinstance(row, list) else row if isinstance(row, dict) else {}
    entries = _first_of(columns, *CHAT)
    if entries is None:
        entries = _question_and_answer(columns)
    if not isinstance(entries, list):
        raise ValueError(f'no "messages" list; wanted {WANTED}; put the chat under "messages"')
    messages = [_message(entry, place) for place, entry in enumerate(entries, start=1)]
    system = columns.get("system")
    if isinstance(system, str) and system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, _message({"role": "system", "content": system}, 1))
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(
            "no assistant message; wanted one at least, as the loss is on what the assistant says; "
            "add one or drop the chat"
        )
    tools = _tools(columns.get("tools"))
    if tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        return with_tools(messages, tools)
    return messages


def _first_of(columns: dict[str, Any], *names: str) -> Any:
    return next((columns[name] for name in names if columns.get(name) is not None), None)


def _question_and_answer(columns: dict[str, Any]) -> list[Any] | None:
    for question, context, answers in QUESTIONS:
        asked, said = columns.get(question), _first_of(columns, *answers)
        if isinstance(asked, list) and isinstance(said, list):  # TRL's messages
            return asked + said
        if asked is not None and said is not None:
            if context and columns.get(context):
                asked = f"{asked}\n\n{columns[context]}"
            return [*_history(columns.get("history")), *_turn(asked, said)]
    return None


def _history(pairs: Any) -> list[dict[str, Any]]:
    """Return the messages of Alpaca's earlier turns: pairs of question and answer."""
    try:
        return [message for asked, said in pairs or () for message in _turn(asked, said)]
    except (TypeError, ValueError):
        raise ValueError(
            '"history" is no list of pairs; wanted [["question", "answer"], ...]; mend or drop it'
        ) from None


def _turn(asked: Any, said: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def _message(entry: object, place: int) -> dict[str, Any]:
    fields = entry if isinstance(entry, dict) else {}
    given = _first_of(fields, "role", "from")
    content = _text(_first_of(fields, "content", "value"), place)
    calls = _calls(fields, given, content, place)
    if not isinstance(given, str) or (content is None and not calls):
        raise ValueError(
            f'message {place} lacks a "role" or a "content" string; wanted both; '
            "write the text of the message as one string"
        )
    role = ALSO_CALLED.get(given, given)
    if role not in (*ROLES, "tool"):
        raise ValueError(
            f"message {place} has the role {json.dumps(given)}; wanted one of {', '.join(ROLES)}, "
            "tool; rename the role or drop the message"
        )
    if calls:
        said = "" if given == "function_call" else content or ""
        return {"role": role, "content": said, "tool_calls": calls}
    name = {"name": fields["name"]} if role == "tool" and fields.get("name") else {}
    return {"role": role, "content": content, **name}


def _text(content: Any, place: int) -> str | None:
    """Return a message's text, its parts joined, or None without one."""
    if isinstance(content, list):
        for part in content:
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            text = part.get("text") if isinstance(part, dict) else part
            if kind != "text" or not isinstance(text, str):
                raise ValueError(
                    f"message {place} has a part of type {json.dumps(kind)}; wanted text parts "
                    "alone; drop the others or the chat"
                )
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    if not isinstance(content, str):
        return None
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"message {place} has half a surrogate pair at character {error.start + 1}; wanted "
            "Unicode text; write the character whole"
        ) from None
    return content


def _calls(fields: dict[str, Any], role: Any, content: str | None, place: int) -> list[Any]:
    """Return the tool calls of a message, as chat templates take them."""
    found = _parsed(fields.get("tool_calls"))
    if not found and fields.get("function_call"):  # OpenAI's earlier name for one
        found = [_parsed(fields["function_call"])]
    if role == "function_call":
        found = _parsed(content)
    calls = []
    for one in found if isinstance(found, list) else [found] if found else []:
        call = one.get("function") or one if isinstance(one, dict) else {}
        if not _has_name(call):
            raise ValueError(
                f"message {place} has a tool call without a name; wanted "
                '{"function": {"name": "...", "arguments": {...}}}; mend or drop it'
            )
        arguments = _parsed(call.get("arguments"))
        if isinstance(arguments, dict):  # datasets adds the arguments of other calls as None
            arguments = {key: value for key, value in arguments.items() if value is not None}
        function = {"name": call["name"], "arguments": {} if arguments is None else arguments}
        calls.append({"type": "function", "function": function})
    return calls


def _tools(tools: Any) -> list[dict[str, Any]]:
    found = _parsed(tools) or []
    schemas = [_parsed(one) for one in found] if isinstance(found, list) else [None]
    wrapped = [
        one
        if isinstance(one, dict) and one.get("function")
        else {"type": "function", "function": one}
        for one in schemas
    ]
    if not all(_has_name(one["function"]) for one in wrapped):
        raise ValueError(
            '"tools" is no list of functions with names; wanted their schemas; mend or drop it'
        )
    return wrapped


def _has_name(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _parsed(value: Any) -> Any:
    """Return the value in a string of JSON, which many data sets write, or the value itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value.strip()
