"""A panel of lora.excalidraw: text at the left, beside it boxes that stand for calls on the GPU.

A card is a line "calls | computes | reads | writes". A call is "number name reads > writes". A
tensor is its rows and columns, then 4 if it is fp32 (otherwise bf16) and * if it is saved for the
backward. "-" stands for a read that gets no box. Two calls are "first; second", and what they
compute is "first / second". A comma there begins a new line. A line "= gate TI; up TI" below cards
draws what they write as boxes across the whole row.

Each result's box says which calls read it. Arrows lead to those in the row below and to the next in
its own row. Both follow from the cards.
"""

from collections import Counter
from typing import NamedTuple

from excalidraw import CALL_KINDS, GRAY, STYLES, Canvas, line_width, wrap
from lora_times import SOURCE, layer_times

# T tokens, hidden size H, intermediate size I, rank r; R is the rank of gate and up together
DIMENSIONS = {"T": 16384, "H": 2048, "I": 11008, "r": 32, "R": 64}
LEFT, WORDS, RIGHT, SPAN, WIDTH = 20, 335, 380, 680, 1080
CHIP, RESULT, LANE = 30, 68, 42  # heights, and the room for an arrow between boxes
HEAD = 32  # the last stretch of an arrow, long enough for a whole head
CAST_WIDTH = 66  # of a cast beside the matmul that needs it
UNNAMED = STYLES["a program"][:3], STYLES["plain"][:3]  # their text says it: no legend
HALVES = {"zg": "z", "zu": "z"}  # names of parts of a tensor


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


class Result(NamedTuple):
    """A box of what a call writes. Its text waits until all its readers are known."""

    box: str
    text: str
    names: list[str]
    row: int
    number: int  # of the call
    read_by: list[int]


class Read(NamedTuple):
    name: str
    box: str
    row: int
    number: int  # of the call


def nbytes(tensor: str) -> int:
    return DIMENSIONS[tensor[0]] * DIMENSIONS[tensor[1]] * (4 if "4" in tensor else 2)


def size(count: int) -> str:
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


# for texts beside the cards: {TI} is the size of a bf16 tensor [tokens, intermediate]
SIZES = {rows + columns: size(nbytes(rows + columns)) for rows in "TI" for columns in "HIrR"}
SIZES |= {
    "two_TI": size(2 * nbytes("TI")),
    "three_TH": size(3 * nbytes("TH")),
    "nine_TI": size(9 * nbytes("TI")),
    "x_A": size(nbytes("TH") + nbytes("RH") + nbytes("TR")),
    "hidden_Ad": size(nbytes("TI") + nbytes("rI") + nbytes("Tr")),
    "tokens": f"{DIMENSIONS['T']:,}",
}
ADAPTERS_NBYTES = sum(map(nbytes, ("RH", "Ir", "Ir", "rI", "Hr")))
SIZES |= {"adapters": size(ADAPTERS_NBYTES), "adapter_casts": size(3 * ADAPTERS_NBYTES)}
SIZES |= {"three_TI": size(3 * nbytes("TI")), "six_TI": size(6 * nbytes("TI"))}
SIZES |= layer_times(DIMENSIONS["T"])


def totals(calls: dict[int, Call]) -> str:
    """Return the counts and bytes as the README has them: "29: 9 GEMMs, 12 casts, 8 passes" and
    below it "11.4 GB"."""
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
    """A canvas that fills downwards and knows the calls its boxes stand for."""

    def __init__(self, place: int, title: str, intro: str):
        super().__init__(place)
        self.title = title
        self.calls: dict[int, Call] = {}  # by their place in execution order
        self.kept: list[tuple[str, int]] = []  # saved tensors and their bytes
        self.styles: dict[str, str] = {}  # of the tensors drawn so far, by name
        self.meanings: dict[str, str] = {}  # of styles in the legend that differ from STYLES
        self.rows = 0  # of cards, so far
        self.results: list[Result] = []
        self.reads: list[Read] = []
        self.text(LEFT, 20, title, 28)
        intro = wrap(intro.format_map(SIZES), WIDTH - 2 * LEFT)
        self.text(LEFT, 66, intro)
        self.legend = 80 + 22 * len(intro.split("\n"))
        self.down = self.legend + 84  # where the next band begins

    def words(self, code: str, why: str, where: str = "") -> int:
        """Begin a band with its code, files, times and sentences at the left. Return where it
        begins."""
        top = self.down
        if code:
            text = self.text(LEFT, self.down, code, 14, is_code=True)
            self.down += text["height"] + 6
        if where:
            lines = [wrap(line, WORDS, 14) for line in where.format_map(SIZES).split("\n")]
            text = self.text(LEFT, self.down, "\n".join(lines), 14, color=GRAY)
            self.down += text["height"] + 6
        text = self.text(LEFT, self.down, wrap(why.format_map(SIZES), WORDS))
        self.down = round(self.down + text["height"])
        return top

    def end(self, bottom: int) -> None:
        self.down = max(self.down, bottom) + LANE

    def starts(self, why: str, *rows: str) -> None:
        """Draw a band of the tensors that the calls start with: "x TH*; Wg, gate_weight IH"."""
        y = self.words("", why)
        for row in rows:
            y = self.tensors(y, row) + 10
        self.end(y - 10)

    def tensors(self, y: int, row: str, number=0, gap=10) -> int:
        parts = [part.strip().rpartition(" ") for part in row.split(";")]
        width = (SPAN + gap) // len(parts) - gap
        for n, (name, _, tensor) in enumerate(parts):
            self.tensor(RIGHT + n * (width + gap), y, width, name, [tensor], number)
        return y + RESULT

    def tensor(self, x, y, width, name: str, parts: list[str], number=0, group=None) -> None:
        """Draw a box of what call `number` writes, or of a tensor the calls start with, which has
        no number. Adapters that one call casts together share a box."""
        names, style = name.split(", "), style_of(name, parts[0])
        text = describe_tensor(name, parts[0], " " if number else "\n")
        if len(parts) > 1:
            text = f"{name}\nbf16, {size(sum(map(nbytes, parts)))} in all"
        elif "*" in parts[0]:
            self.kept.append((names[0], nbytes(parts[0])))
        self.styles[names[0]] = style
        id = f"{names[0]} from {self.rows} at {x}"
        self.box(id, x, y, width, RESULT, style, "" if number else text, group, 14)
        if number:
            self.results.append(Result(id, text, names, self.rows, number, []))

    def band(self, code: str, where: str, why: str, *rows: str) -> None:
        """Draw a band: code, its files and why, and rows of cards at their right."""
        y = self.words(code, why, where)
        for row in rows:
            y = self.row(y, row) + LANE
        self.end(y - LANE)

    def row(self, y: int, row: str) -> int:
        cards = row.split("\n")
        below = cards.pop()[1:] if cards[-1].startswith("=") else ""
        self.rows += 1
        width = (SPAN + LANE) // len(cards) - LANE
        bottom = max(
            self.card(RIGHT + n * (width + LANE), y, width, card) for n, card in enumerate(cards)
        )
        return self.tensors(bottom, below, max(self.calls), gap=0) if below else bottom

    def card(self, x, y, width, line: str) -> int:
        """Draw a box for each call of "7 mm TH IH > TI; 8 ...", and below them what they write."""
        texts, formulas, reads, writes = (part.strip() for part in line.split("|"))
        calls, names = {}, iter(reads.split(", "))
        for text in texts.split(";"):
            (digits, name, *read), write = (part.split() for part in text.split(">"))
            calls[int(digits)] = Call(name, read, write)
        self.calls |= calls
        group, widths = f"call {min(calls)}", [width]
        if len(calls) == 2:
            cast, kinds = CALL_KINDS[1], [call.kind for call in calls.values()]
            left = width // 2 if len({*kinds}) == 1 else CAST_WIDTH
            widths = [left, width - left] if kinds[0] == cast else [width - left, left]
        left, bottom = x, y
        for number, formula, wide in zip(calls, formulas.split(" / "), widths, strict=True):
            shown = [name for _, name in zip(calls[number].reads, names, strict=False)]
            bottom = self.call(number, formula, shown, left, y, wide, group)
            left += wide
        if writes:
            last = max(calls)
            self.tensor(x, bottom, width, writes, calls[last].writes, last, group)
            bottom += RESULT
        return bottom

    def call(self, number: int, formula: str, reads: list[str], x, y, width, group: str) -> int:
        """Draw the box of a call under what it reads."""
        call, id = self.calls[number], f"call {number}"
        name = "" if call.name in (*formula.split(), "cast") else f"{call.name}, "
        moved = size(call.moved_bytes)
        is_wide = width > max(SPAN / 4, 14 * line_width(f"{name}moves {moved}") + 10)
        lines = [*f"{number}  {formula}".split(", "), name + "moves " * is_wide + moved]
        height = 12 + 20 * len(lines)
        self.box(id, x, y + CHIP, width, height, call.kind, "\n".join(lines), group, 14)
        shown = [name for name in reads if name != "-"]
        parts = [width // len(shown)] * len(shown) if shown else []
        texts = [14 * line_width(name) + 10 for name in shown]
        if any(text > part for text, part in zip(texts, parts, strict=True)):
            parts = [int(width * text / sum(texts)) for text in texts]
        for n, (name, part) in enumerate(zip(shown, parts, strict=True)):
            tensor, left = HALVES.get(name, name), x + sum(parts[:n])
            style = self.styles.get(tensor) or style_of(name)
            chip = self.box(f"{id} {name}", left, y, part, CHIP, style, name, group, 14)
            self.reads.append(Read(tensor, chip, self.rows, number))
        return y + CHIP + height

    def connect(self) -> None:
        """Write below each result which calls read it, and draw arrows to those nearby."""
        for read in sorted(self.reads, key=lambda read: read.number):
            written = [r for r in self.results if read.name in r.names and r.number < read.number]
            if written:
                result = max(written, key=lambda result: result.number)
                result.read_by.append(read.number)
                self.arrow_to(read, result)
        for result in self.results:
            readers = ", ".join(map(str, result.read_by))
            readers = f"read by {readers}" if readers else "returned"
            self.label(result.box, f"{result.text}\n{readers}", 14)

    def arrow_to(self, read: Read, result: Result) -> None:
        """Draw an arrow: straight down to the row below, otherwise around a corner. It goes up the
        lane to the next card."""
        to, from_ = self.elements[read.box], self.elements[result.box]
        end, middle = from_["x"] + from_["width"], to["x"] + to["width"] / 2
        if result.row + 1 == read.row:
            if min(end, to["x"] + to["width"]) - max(from_["x"], to["x"]) > 20:
                return self.arrow(result.box, read.box)
            turn = to["y"] - HEAD
            start = from_["x"] + from_["width"] / 2
            self.arrow(result.box, read.box, (start, turn), (middle, turn))
        elif result.row == read.row and to["x"] == end + LANE:
            lane, down = to["x"] - HEAD, to["y"] + CHIP / 2
            start = from_["y"] + RESULT / 2
            self.arrow(result.box, read.box, (lane, start), (lane, down))

    def saved(self, why: str, rows: list[tuple[str, "Panel"]]) -> None:
        """Draw a band of the activations saved for the backward, to scale unless too thin."""
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
        """Draw a band of strips as wide as the bytes that calls move."""
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

    def totals(self, phase: str, peft: str, lora_mlp: str) -> None:
        """Draw the last band: the totals of the calls."""
        less = f"{SIZES[phase + '_ms']} ms a layer less than PEFT"
        self.text(LEFT, self.down, f"\nlaunches in a {phase}\nmemory traffic\ntime, on an H200", 18)
        self.text(RIGHT, self.down, f"PEFT\n{peft}", 18)
        self.text(RIGHT + SPAN // 2, self.down, f"LoRA_MLP\n{lora_mlp}\n{less}", 18)
        self.down += 110
        self.source()

    def source(self) -> None:
        source = self.text(LEFT, self.down, wrap(SOURCE, WIDTH - 2 * LEFT, 14), 14, color=GRAY)
        self.down = round(self.down + source["height"]) + 16

    def framed(self, x: int, y: int) -> list[dict]:
        """Return the elements in a new frame, with a legend of the styles they use."""
        self.connect()
        looks = {(e["backgroundColor"], e["strokeColor"], e["strokeStyle"]) for e in self.boxes()}
        looks.difference_update(UNNAMED)
        used = [style for style, look in STYLES.items() if look[:3] in looks]
        width = (WIDTH - 2 * LEFT + 8) // len(used) - 8
        for n, style in enumerate(used):
            place = LEFT + n * (width + 8), self.legend, width, 48
            text = self.meanings.get(style, style.replace(", ", ",\n"))
            self.box(f"legend {style}", *place, style, text, None, 14)
        return self.frame(self.title, x, y, WIDTH, self.down)

    def boxes(self) -> list[dict]:
        return [element for element in self.elements.values() if element["type"] == "rectangle"]
