"""Puts the generated parts (`committed.py`) into README.md and docs/*.md: no GPU, no torch.

A part stands between <!-- name:begin --> and <!-- name:end -->, in whichever of them has those.
"""

from __future__ import annotations

from pathlib import Path

from bench.results import write_atomically


def update(root: Path, parts: dict[str, str]) -> list[Path]:
    """Put each part between its markers, wherever those are; returns the files that changed.

    Raises:
        ValueError: a part has no place, or several, or a place has no part.
    """
    paths = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    texts = {path: path.read_bytes().decode() for path in paths}
    after = dict(texts)
    for name, part in parts.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        places = [path for path in paths if begin in after[path]]
        text = after[places[0]] if len(places) == 1 else ""
        if not (text.count(begin) == text.count(end) == 1 and text.find(begin) < text.find(end)):
            raise ValueError(
                f"README.md and docs/*.md want {begin} and then {end}, once among them: add them"
            )
        head, tail = text.split(begin)[0], text.split(end)[1]
        after[places[0]] = f"{head}{begin}\n\n{part}\n\n{end}{tail}"
    changed = [path for path in paths if after[path] != texts[path]]
    for path in changed:
        write_atomically(path, after[path].encode())
    return changed
