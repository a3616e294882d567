"""Count words and numbers on each page, and lines that read as if translated. It fails nothing.

    python dev/words.py
    python dev/words.py --lines    # the lines to read aloud

Words are a page's own: no tables, no code, no generated blocks.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHRASES = r"""\b(of|for) which\b  , too\b  \bso that\b  \b(for|by) the sake of\b  \btold apart\b
    \btimes as fast\b  \bas (it|they) comes?\b  \bcomputed again\b  \bruns? again\b  \btakes? off\b
    \bof (its|their|one's|our) own\b  \bone of its own\b  \bthat there (is|are)\b  \bbut for\b
    \bwhat (is|are|it|was) \w+ (that|of|for)\b  \bso (many|long|much)\b(?! (as|for))
    (?<!you )\bwants? (an?|no|one)\b  \bis (told|known to)\b  \bin the place of\b  \bdef _?of_\w+
    \b_?of_[a-z]\w* =  ^\W*Of (an?|the|such|all|each|these|those)\b"""
STIFF = re.compile("|".join(re.split(r"\s{2,}", PHRASES)))
BLOCKS, TABLES = r"<!-- ([\w ]+):begin -->.*?<!-- \1:end -->|```.*?```", r"^\s*\|[^\n]*$"
PICTURES_AND_TARGETS = r"!\[[^\]]*\]\([^)]*\)|<img[^>]*>|\]\([^)]*\)"
NOT_OWN = re.compile(f"{BLOCKS}|{TABLES}|{PICTURES_AND_TARGETS}", re.DOTALL | re.MULTILINE)


def main() -> None:
    command = [
        "git",
        "ls-files",
        "-co",
        "--exclude-standard",
        "*.py",
        "README.md",
        "docs/*.md",
        "fused_lora/docs/*.md",
    ]
    names = {*subprocess.check_output(command, cwd=ROOT, text=True).split()} - {"dev/words.py"}
    in_all, stiff = 0, Counter[str]()
    for name in sorted(name for name in names if (ROOT / name).is_file()):
        kind, text = "pages" if name.endswith(".md") else "code", (ROOT / name).read_text()
        if kind == "pages":
            text = NOT_OWN.sub(" ", text)
            words, numbers = len(text.split()), re.findall(r"(?<![\w.,-])\d", text)
            in_all += words
            print(f"{name}: {words} words, {100 * len(numbers) / max(words, 1):.1f} numbers in 100")
        found = [f"    {name}: {line[:120]}" for line in text.splitlines() if STIFF.search(line)]
        stiff[kind] += len(found)
        if found and "--lines" in sys.argv:
            print(*found, sep="\n")
    print(f"{in_all} words. Lines to read aloud: {dict(stiff)}")


if __name__ == "__main__":
    main()
