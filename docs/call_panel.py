"""A panel of lora.excalidraw: text at the left, beside it boxes that stand for calls on the GPU.

A card is a line "calls | what they compute | what they read | what they write". A call is "number
name reads > writes", a tensor its rows and columns, then 4 if it is fp32 (else bf16) and * if it is
saved for the backward. "-" stands for a read that gets no box. A line "= gate TI; up TI" below
cards gives what they write as boxes across the whole row.
"""

from collections import Counter
from typing import NamedTuple

from excalidraw import CALL_KINDS, STYLES, Canvas, wrap

# T tokens, hidden size H, intermediate size I, rank r; R is the rank of gate and up together
DIMENSIONS = {"T": 16384, "H": 2048, "I": 11008, "r": 32, "R": 64}
LEFT, WORDS, RIGHT, SPAN, WIDTH = 20, 335, 380, 680, 1080
CHIP, BOX, LANE = 30, 52, 30  # heights, and the room for an arrow between boxes


class Call(NamedTuple):
    name: str
    reads: list[str]
    writes: list[str]

    @property
    def kind(self) -> str:
        product, cast, elementwise, triton = CALL_KINDS
        kinds = dict.fromkeys(("mm", "addmm", "addmm_"), product)
        kinds |= dict.fromkeys(("cast", "_foreach_copy_"), cast)
        return kinds.get(self.name, triton if "kernel" in self.name else elementwise)

    @property
    def moved_bytes(self) -> int:
        return sum(nbytes(tensor) for tensor in self.reads + self.writes)


def nbytes(tensor: str) -> int:
    return DIMENSIONS[tensor[0]] * DIMENSIONS[tensor[1]] * (4 if "4" in tensor else 2)


def size(count: int) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


# for the words beside the cards: {TI} is the size of a tensor [tokens, intermediate] in bf16
SIZES = {rows + columns: size(nbytes(rows + columns)) for rows in "TI" for columns in "HIrR"}
SIZES |= {
    "two_TI": size(2 * nbytes("TI")),
    "three_TH": size(3 * nbytes("TH")),
    "three_TI": size(3 * nbytes("TI")),
}
SIZES |= {"nine_TI": size(9 * nbytes("TI")), "tokens": f"{DIMENSIONS['T']:,}"}
SIZES |= {"adapters": size(sum(map(nbytes, ("RH", "Ir", "Ir", "rI", "Hr"))))}


def totals(calls: dict[int, Call]) -> str:
    """As the README has them: "29: 9 GEMMs, 12 casts, 8 passes" and below it "11.4 GB"."""
    count = Counter(call.kind for call in calls.values())
    words = zip(CALL_KINDS, ("GEMMs", "casts", "passes", "Triton kernel"), strict=True)
    parts = ", ".join(f"{count[kind]} {word}" for kind, word in words if count[kind])
    return f"{len(calls)}: {parts}\n{sum(c.moved_bytes for c in calls.values()) / 1e9:.1f} GB"


def describe_tensor(name: str, tensor: str, between: str) -> str:
    rows, columns = ("T" if letter == "T" else DIMENSIONS[letter] for letter in tensor[:2])
    saved = ", saved" * ("*" in tensor)
    dtype = "fp32" if "4" in tensor else "bf16"
    return f"{name}{saved}\n[{rows}, {columns}]{between}{dtype}, {size(nbytes(tensor))}"


def style_of(name: str, tensor: str = "") -> str:
    if name[0] in "ABW":
        return "frozen weight" if name[0] == "W" else "adapter"
    if name[0] == "d" or name.split(",")[0] == "p":
        return "gradient"
    kept = "recomputed" if "again" in name else "saved" if "*" in tensor else "not saved"
    return f"activation, {kept}"


class Panel(Canvas):
    """A canvas that is filled downwards and knows the calls its boxes stand for."""

    def __init__(self, place: int, title: str, intro: str):
        super().__init__(place)
        self.title = title
        self.calls: dict[int, Call] = {}  # by their place in the order of execution
        self.kept: list[tuple[str, int]] = []  # what is saved for the backward, and its bytes
        self.styles: dict[str, str] = {}  # of the tensors drawn so far, by name
        self.meanings: dict[str, str] = {}  # of styles in the legend, where not as in STYLES
        self.written: list[list[str]] = [[]]  # by row, the boxes of what its calls write
        self.text(LEFT, 20, title, 28)
        intro = wrap(intro.format_map(SIZES), WIDTH - 2 * LEFT)
        self.text(LEFT, 66, intro)
        self.legend = 80 + 22 * len(intro.split("\n"))
        self.down = self.legend + 84  # where the next band begins

    def words(self, code: str, why: str) -> int:
        """Begin a band with its code and a sentence at the left; returns where it begins."""
        top = self.down
        if code:
            text = self.text(LEFT, self.down, code, 14, is_code=True)
            self.down += text["height"] + 6
        text = self.text(LEFT, self.down, wrap(why.format_map(SIZES), WORDS))
        self.down = round(self.down + text["height"])
        return top

    def end(self, bottom: int) -> None:
        self.down = max(self.down, bottom) + 36

    def starts(self, why: str, *rows: str) -> None:
        """A band of the tensors that the calls begin with: "x TH*; Wg, gate_weight IH"."""
        y = self.words("", why)
        for row in rows:
            y = self.tensors(y, row, 68, "\n") + 10
        self.end(y - 10)
        self.written = [[]]  # nothing is drawn from there: a call names what it reads

    def tensors(self, y: int, row: str, height=BOX, between=" ", gap=10) -> int:
        parts = [part.strip().rpartition(" ") for part in row.split(";")]
        width = (SPAN + gap) // len(parts) - gap
        for n, (name, _, tensor) in enumerate(parts):
            self.tensor(RIGHT + n * (width + gap), y, width, height, name, [tensor], between)
        return y + height

    def tensor(self, x, y, width, height, name: str, parts: list[str], between=" ", group=None):
        """A box of what a call writes; one of the adapters that a call casts together."""
        symbol, style = name.split(",")[0], style_of(name, parts[0])
        text = describe_tensor(name, parts[0], between)
        if len(parts) > 1:
            text = f"{name}\nbf16, {size(sum(map(nbytes, parts)))} in all"
        elif "*" in parts[0]:
            self.kept.append((symbol, nbytes(parts[0])))
        self.styles[symbol] = style
        id = f"{symbol} from {len(self.written)} at {x}"
        self.written[-1].append(self.box(id, x, y, width, height, style, text, group, 14))

    def band(self, code: str, why: str, *rows: str) -> None:
        """Code and a sentence, and at their right rows of cards."""
        y = self.words(code, why)
        for row in rows:
            y = self.row(y, row) + LANE
        self.end(y - LANE)

    def row(self, y: int, row: str) -> int:
        cards = row.split("\n")
        below = cards.pop()[1:] if cards[-1].startswith("=") else ""
        self.written.append([])
        width = (SPAN + LANE) // len(cards) - LANE
        for n, card in enumerate(cards):
            self.card(RIGHT + n * (width + LANE), y, width, card)
        y += CHIP + BOX
        return self.tensors(y, below, gap=0) if below else y + BOX

    def card(self, x, y, width, line: str) -> None:
        """One box for "7 mm TH IH > TI; 8 ...", what it reads above it, what it writes below."""
        texts, formula, reads, writes = (part.strip() for part in line.split("|"))
        calls = {}
        for text in texts.split(";"):
            (number, name, *read), write = (part.split() for part in text.split(">"))
            calls[int(number)] = Call(name, read, write)
        self.calls |= calls
        last, moved = calls[max(calls)], sum(call.moved_bytes for call in calls.values())
        names = ", ".join(dict.fromkeys(call.name for call in calls.values()))
        names = "" if names == formula else f"{names}, "
        title = f"{', '.join(map(str, calls))}  {formula}\n{names}moves {size(moved)}"
        group = f"call {min(calls)}"
        call = self.box(group, x, y + CHIP, width, BOX, last.kind, title, group, 15)
        all_reads = [tensor for each in calls.values() for tensor in each.reads]
        shown = [s for s, _ in zip(reads.split(", "), all_reads, strict=True) if s != "-"]
        for n, symbol in enumerate(shown):
            place = x + n * width // len(shown), y, width // len(shown), CHIP
            # zg and zu are halves of z
            style = self.styles.get(symbol) or self.styles.get(symbol[:-1]) or style_of(symbol)
            chip = self.box(f"{group} {symbol}", *place, style, symbol, group, 14)
            self.arrow_from(symbol, chip, call)
        if writes:
            self.tensor(x, y + CHIP + BOX, width, BOX, writes, last.writes, group=group)

    def arrow_from(self, symbol: str, chip: str, call: str) -> None:
        """An arrow to the next call in the row, or down to what the row below it reads."""
        to, at = self.elements[call], self.elements[chip]
        for id in self.written[-1][-1:]:
            if id.startswith(f"{symbol} from "):
                lane, from_ = to["x"] - LANE / 2, self.elements[id]
                self.arrow(
                    id, call, (lane, from_["y"] + BOX / 2), (lane, to["y"] + to["height"] / 2)
                )
                return
        for id in self.written[-2]:
            from_ = self.elements[id]
            left = max(from_["x"], at["x"])
            right = min(from_["x"] + from_["width"], at["x"] + at["width"])
            if id.startswith(f"{symbol} from ") and right - left > 20:
                self.arrow(id, chip)

    def saved(self, why: str, rows: list[tuple[str, "Panel"]]) -> None:
        """A band of what is saved for the backward, to scale but for what would be too thin."""
        y = self.words("", why)
        self.text(RIGHT, y, "Saved for the backward, the small ones drawn wider", 18)
        for whose, panel in rows:
            total = sum(count for _, count in panel.kept)
            thin = [item for item in panel.kept if item[1] < 1e7]
            kept = [item for item in panel.kept if item[1] > 1e7]
            kept += [("3 x a", sum(count for _, count in thin))] if len(thin) == 3 else thin
            parts = [("activation, saved", f"{name}\n{size(count)}", count) for name, count in kept]
            y += 40 if panel is rows[0][1] else 74
            self.text(RIGHT, y + 8, f"{whose}\n{total / 1e9:.2f} GB")
            self.strip(RIGHT + 100, y, 3.6e6, parts)
        self.end(y + 60)

    def compare(self, why: str, rows: list[tuple[str, list[tuple[int, Call]]]]) -> None:
        """A band of strips as wide as what calls move."""
        y = self.words("", why)
        for whose, calls in rows:
            parts = []
            for n, call in calls:
                name = "Triton kernel" if "kernel" in call.name else call.name
                parts.append((call.kind, f"{n} {name}\n{size(call.moved_bytes)}", call.moved_bytes))
            total = size(sum(count for *_, count in parts))
            self.text(RIGHT, y + 8, f"{whose}\n{total}")
            self.strip(RIGHT + 100, y, 3.8e6, parts)
            y += 74
        self.end(y - 14)

    def totals(self, phase: str, *columns: tuple[str, str]) -> None:
        """The last band: what the calls come to."""
        self.text(LEFT, self.down, f"\ncalls in a {phase}\nmemory traffic", 18)
        for n, (whose, total) in enumerate(columns):
            self.text(RIGHT + n * SPAN // 2, self.down, f"{whose}\n{total}", 18)
        self.down += 90

    def framed(self) -> list[dict]:
        """The elements in a frame of their own, with a legend of the styles among them."""
        looks = {(e["backgroundColor"], e["strokeColor"], e["strokeStyle"]) for e in self.boxes()}
        used = [style for style, look in STYLES.items() if look[:3] in looks]
        width = (WIDTH - 2 * LEFT + 8) // len(used) - 8
        for n, style in enumerate(used):
            place = LEFT + n * (width + 8), self.legend, width, 48
            text = self.meanings.get(style, style.replace(", ", ",\n"))
            self.box(f"legend {style}", *place, style, text, None, 14)
        frame = self.add("frame", "frame", 0, 0, WIDTH, self.down, name=self.title)
        for element in self.elements.values():
            element["x"] += self.place * (WIDTH + 60)
            element["frameId"] = None if element is frame else frame["id"]
        return list(self.elements.values())

    def boxes(self) -> list[dict]:
        return [element for element in self.elements.values() if element["type"] == "rectangle"]
