"""Draws the pictures of docs/concepts and docs/design: python scripts/docs_pictures.py [--check].

--check writes nothing, and fails where a picture is not what this makes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.docs_drawing import Drawing

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"


def tiers() -> Drawing:
    d = Drawing(
        820, 250, "Three tiers: the draft model proposes to the retrieval tier, which proposes to the full tier"
    )
    d.box(20, 50, 200, 90, ["draft", "a small model", "sees sinks and a window"], "draft")
    d.box(310, 50, 200, 90, ["retrieval", "the target model", "sees 2,048 chosen KV tokens"], "retrieval")
    d.box(600, 50, 200, 90, ["full", "the target model", "sees the whole KV cache"], "full")
    d.arrow((220, 80), (310, 80), label="2 tokens")
    d.arrow((510, 80), (600, 80), label="6 or more")
    d.arrow((700, 140), (700, 178), dashed=False)
    d.box(600, 178, 200, 34, "text: 1 to 9 tokens a pass", "plain")
    d.arrow((310, 118), (220, 118))
    d.arrow((600, 118), (510, 118))
    d.text(265, 134, "accepts or", anchor="middle", soft=True)
    d.text(265, 150, "corrects", anchor="middle", soft=True)
    d.text(555, 134, "accepts or", anchor="middle", soft=True)
    d.text(555, 150, "corrects", anchor="middle", soft=True)
    d.text(20, 28, "cheap pass, rough guess", soft=True)
    d.text(800, 28, "expensive pass, exact", anchor="end", soft=True)
    d.text(20, 200, "No token leaves the engine that the full tier has not verified:", soft=False)
    d.text(20, 220, "for a seed, the text is that of plain decoding.", soft=False)
    return d


def verification() -> Drawing:
    d = Drawing(820, 270, "Verifying a draft of four tokens: accepted while equal to the verifier's own pick")
    words = [("the", "full"), ("old", "full"), ("castle", "bad"), ("gate", "plain")]
    d.text(20, 60, "draft tokens")
    d.text(20, 130, "the verifier's picks")
    d.text(20, 148, "(one pass, same noise)", soft=True)
    for i, (word, kind) in enumerate(words):
        d.box(190 + 120 * i, 35, 100, 40, word, kind)
    for i, (word, kind) in enumerate((("the", "full"), ("old", "full"), ("tower", "retrieval"))):
        d.box(190 + 120 * i, 105, 100, 40, word, kind)
        d.arrow((240 + 120 * i, 75), (240 + 120 * i, 105))
    d.box(550, 105, 100, 40, "not used", "plain")
    d.box(670, 105, 100, 40, "not used", "plain")
    d.text(240, 170, "equal: accepted", anchor="middle", soft=True)
    d.text(360, 170, "equal: accepted", anchor="middle", soft=True)
    d.text(480, 170, "differs: rejected,", anchor="middle", soft=True)
    d.text(480, 186, "the pick replaces it", anchor="middle", soft=True)
    d.text(660, 170, "behind a rejection", anchor="middle", soft=True)
    d.text(20, 226, "The step gives: the old tower. With all four accepted, the fifth pick is the bonus token.")
    d.text(20, 248, "The noise depends on seed and position alone, so these picks are plain decoding's.", soft=True)
    return d


def pages() -> Drawing:
    d = Drawing(820, 330, "One pool of pages; three views of it")
    d.text(20, 34, "one row's page table: 16 tokens a page", soft=True)
    for i in range(12):
        kind = "full" if i < 10 else "plain"
        d.box(20 + 65 * i, 48, 58, 36, f"{i}", kind)
    d.text(20, 104, "committed: exact values, written once", soft=True)
    d.text(800, 104, "working space", anchor="end", soft=True)
    rows = [
        ("full", "full", set(range(10)), "FullView reads every committed page"),
        ("retrieval", "retrieval", {0, 3, 6, 9}, "RetrievalView: sinks, chosen, recent; the same pages by index"),
    ]
    for n, (name, kind, seen, said) in enumerate(rows):
        y = 140 + 70 * n
        d.text(20, y - 8, f"{name}: {said}", soft=True)
        for i in range(12):
            d.box(20 + 65 * i, y, 58, 30, f"{i}" if i in seen else "", kind if i in seen else "plain")
    d.text(20, 272, "draft: StreamingView has a ring of the draft model's own KV: sinks and a window", soft=True)
    for i in range(4):
        d.box(20 + 65 * i, 280, 58, 30, "sinks" if i == 0 else "ring", "draft")
    d.text(800, 300, "Lengths move, data does not: a rejection is a smaller length.", anchor="end")
    return d


def selection() -> Drawing:
    d = Drawing(820, 250, "Selection: the attention of a verification decides which chunks the next proposals read")
    mass = [9, 2, 1, 7, 1, 2, 8, 1, 2, 1, 3, 6]
    d.text(20, 30, "attention mass of each chunk in the latest verification", soft=True)
    for i, m in enumerate(mass):
        kind = "retrieval" if i in (0, 3, 6) else "full" if i >= 10 else "plain"
        d.box(20 + 65 * i, 130 - 10 * m, 58, 10 * m + 4, "", kind)
    marks = {0: "sinks", 3: "chosen", 6: "chosen", 10: "recent", 11: "recent"}
    for i, name in marks.items():
        d.text(49 + 65 * i, 152, name, anchor="middle", soft=True)
    d.box(20, 176, 230, 48, ["full tier verifies", "its kernel reports the mass"], "full")
    d.box(295, 176, 230, 48, ["policy picks chunks", "per layer and KV head"], "plain")
    d.box(570, 176, 230, 48, ["retrieval tier proposes", "reads the budget, no more"], "retrieval")
    d.arrow((250, 200), (295, 200))
    d.arrow((525, 200), (570, 200))
    return d


def auto() -> Drawing:
    d = Drawing(820, 220, "Mode auto: observe, forecast, choose, apply")
    steps = [
        ("observe", "seconds of passes,", "acceptance of tiers"),
        ("forecast", "cost and acceptance", "of each plan"),
        ("choose", "tokens per second,", "with a margin"),
        ("apply", "wire tiers, set gammas", "and budget"),
    ]
    for i, lines in enumerate(steps):
        d.box(20 + 205 * i, 40, 165, 80, lines, "plain")
        if i:
            d.arrow((185 + 205 * (i - 1), 80), (20 + 205 * i, 80))
    d.arrow((717, 120), (717, 160), (102, 160), (102, 120))
    d.text(410, 152, "next proposals of the full tier", anchor="middle", soft=True)
    d.text(
        20,
        196,
        "Slower than plain decoding, as measured? Plain decoding for 4 proposals, then 8, up to 1,024.",
        soft=True,
    )
    return d


def request() -> Drawing:
    d = Drawing(820, 420, "The life of a request, from HTTP to tokens and back")
    left = [
        ("HTTP guards", "keys, hosts, body size", "plain"),
        ("RequestParser", "fields to GenerationRequest", "plain"),
        ("Engine.submit", "token ids, params, mode", "plain"),
        ("EngineCore: waiting", "rows and pages for all it may become", "plain"),
    ]
    for i, (name, said, kind) in enumerate(left):
        d.box(20, 30 + 95 * i, 260, 60, [name, said], kind)
        if i:
            d.arrow((150, 90 + 95 * (i - 1)), (150, 30 + 95 * i))
    d.box(340, 315, 210, 60, ["prefilling", "in parts, between steps"], "plain")
    d.arrow((280, 345), (340, 345))
    d.box(340, 190, 210, 70, ["running, step by step", "one proposal of the full tier"], "full")
    d.arrow((445, 315), (445, 260))
    d.box(600, 190, 200, 70, ["swapped", "its turn is over, others wait"], "plain")
    d.arrow((550, 210), (600, 210))
    d.arrow((700, 260), (700, 400), (150, 400), (150, 375), dashed=True)
    d.box(340, 30, 210, 60, ["OutputStream", "tokens to text, stop strings"], "plain")
    d.arrow((445, 190), (445, 90))
    d.text(455, 145, "StepOutput of each step", soft=True)
    d.box(600, 30, 200, 60, ["ResponseWriter", "JSON or events"], "plain")
    d.arrow((550, 60), (600, 60))
    return d


def offload() -> Drawing:
    d = Drawing(820, 260, "KV offload: what stays in memory, and how the rest is read ahead of attention")
    d.box(20, 40, 220, 180, "", "plain")
    d.text(130, 62, "memory: --kv-memory", anchor="middle", bold=True)
    d.box(35, 78, 190, 36, "whole layers", "full")
    d.box(35, 122, 190, 36, "pages with most mass", "retrieval")
    d.box(35, 166, 190, 36, "ring of read buffers", "draft")
    d.box(
        320,
        85,
        200,
        135,
        ["two reader threads", "one head's split of", "1,024 tokens at a time,", "in ascending order"],
        "plain",
    )
    d.box(
        600, 40, 200, 180, ["store", "a file, or host memory", "layer, KV head, page", "committed pages only"], "plain"
    )
    d.arrow((600, 130), (520, 130))
    d.arrow((320, 184), (225, 184))
    d.arrow((240, 60), (600, 60), dashed=True)
    d.text(410, 34, "pages leave when they are full of committed tokens", anchor="middle", soft=True)
    d.text(20, 244, "Attention takes splits as they come, always in the same order: bits do not change.", soft=True)
    return d


def processes() -> Drawing:
    d = Drawing(820, 250, "Tensor parallelism: ranks share the target; replicas: whole engines behind one server")
    d.text(20, 32, "--tp 2: one engine in two processes", bold=True)
    for i in range(2):
        d.box(20 + 190 * i, 50, 170, 90, [f"rank {i}", "half of heads, weights, KV", "same text, same noise"], "full")
    d.arrow((190, 95), (210, 95))
    d.arrow((210, 95), (190, 95))
    d.text(20, 166, "Activations are gathered; each output is summed", soft=True)
    d.text(20, 183, "by one rank, so bits are those of one process.", soft=True)
    d.text(450, 32, "--replicas 2: engines on Ray", bold=True)
    d.box(450, 70, 130, 50, ["server", "no weights"], "plain")
    for i in range(2):
        d.box(640, 50 + 70 * i, 160, 50, [f"replica {i}", "a whole engine"], "retrieval")
        d.arrow((580, 95), (640, 75 + 70 * i))
    d.text(450, 200, "A request goes where its beginning was read.", soft=True)
    return d


ALL: tuple[Callable[[], Drawing], ...] = (tiers, verification, pages, selection, auto, request, offload, processes)


def stale(folder: Path = PICTURES) -> dict[Path, str]:
    """Return the files that are missing or differ, and what they should be."""
    wanted = {folder / f"{draw.__name__}.svg": draw().svg() for draw in ALL}
    return {file: text for file, text in wanted.items() if not file.exists() or file.read_text("utf-8") != text}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a picture is stale")
    check = parser.parse_args(arguments).check
    found = stale()
    for file, text in found.items():
        print(f"{file.name} is stale: python scripts/docs_pictures.py" if check else f"{file.name} is written")
        if not check:
            file.write_text(text, encoding="utf-8")
    return int(check and bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
