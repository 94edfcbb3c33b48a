"""Tables 2, 4, 5, 7 and 8 and figure 5: speed over plain decoding, in turns with it."""

from __future__ import annotations

from benchmarks.paper.experiment import Experiment, Lines, Row, Setup, each, kept, number
from triforce.bench.speed import Cell, speedup
from triforce.kvcache import Budget

TABLE2 = {
    0.0: (2.31, 0.9234, 1.56, 0.4649),
    0.2: (2.25, 0.9203, 1.54, 0.4452),
    0.4: (2.20, 0.9142, 1.47, 0.4256),
    0.6: (2.19, 0.9137, 1.42, 0.4036),
    0.8: (2.08, 0.8986, 1.34, 0.3131),
    1.0: (2.08, 0.9004, 1.29, 0.2872),
    1.2: (2.02, 0.8902, 1.27, 0.2664),
}
"""By temperature: speedup and acceptance of TriForce, and of the naive draft model."""

HIERARCHY = {"retrieval": ("without hierarchy", 1.80, 0.9126), "streaming": ("StreamingLLM with it", 1.90, 0.8745)}
TABLE4 = {
    (2, 57_344): (1024, {0.0: (1.89, 1.46), 0.6: (1.75, 1.35)}),
    (6, 19_456): (768, {0.0: (1.90, 1.39), 0.6: (1.76, 1.28)}),
    (10, 12_288): (768, {0.0: (1.72, 1.34), 0.6: (1.61, 1.21)}),
}
"""By batch and context: the budget, and by temperature the speedups of TriForce and of the naive draft model."""

TABLE7 = {256: 2.31, 512: 2.28, 768: 2.34, 1024: 2.32, 1536: 2.28, 2048: 2.29}
GAMMA_1 = {1: 2.30, 2: 2.31, 3: 2.24, 4: 2.17, 5: 2.09, 6: 2.01, 7: 1.92, 8: 1.83}
GAMMA_2 = {1: 1.62, 2: 1.90, 3: 2.13, 4: 2.22, 5: 2.26, 6: 2.31, 7: 2.24, 8: 2.20}
CONTEXTS = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
LONG, EIGHTH = 2048, 256
"""New tokens, and a budget that they are eight times as many as."""


def table2(setup: Setup) -> list[Row]:
    rows = []
    for temperature in [0.0, 0.6, 1.2] if setup.quick else TABLE2:
        modes = ["triforce", "draft", *(HIERARCHY if temperature == 0.6 else [])]
        rows += setup.speed(Cell(setup.context, 1, temperature, "books"), modes)
    return rows


def table2_line(row: Row) -> list[str]:
    published = TABLE2[row["temperature"]]
    names = {"triforce": ("TriForce", *published[:2]), "draft": ("naive", *published[2:])} | HIERARCHY
    name, fast, share = names[row["mode"]]
    return [f"T = {row['temperature']:g}, {name}", speedup(row), number(fast), number(kept(row), 4), number(share, 4)]


def table4(setup: Setup) -> list[Row]:
    rows = []
    for (batch, context), (budget, published) in TABLE4.items():
        size = min(context, 4 * setup.context // batch) if setup.quick else context
        how = {"tokens": min(128, setup.tokens), "retrieval": setup.retrieval(budget=Budget(budget))}
        for temperature in published:
            outputs = setup.speed(Cell(size, batch, temperature, "books"), ["triforce", "draft"], **how)
            rows += [row | {"budget": budget, "paper_context": context} for row in outputs]
    return rows


def table4_line(row: Row) -> list[str]:
    published = TABLE4[row["batch"], row["paper_context"]][1][row["temperature"]]
    name, fast = ("TriForce", published[0]) if row["mode"] == "triforce" else ("naive", published[1])
    where = f"{row['batch']} x {row['context']:,}, T = {row['temperature']:g}, {name}"
    return [where, speedup(row), number(fast), number(kept(row), 3)]


def table5(setup: Setup) -> list[Row]:
    return setup.speed(Cell(setup.context, 1, 0.0, "books"), ["triforce", "ngram"])


def table5_lines(rows: list[Row]) -> Lines:
    mode_rows = {row["mode"]: row for row in rows}
    return ["", "speedup", "paper"], [
        ["TriForce", speedup(mode_rows.get("triforce")), "2.31"],
        ["n-gram lookup in the text itself, under retrieval", speedup(mode_rows.get("ngram")), "-"],
        ["REST", "absent", "1.47"],
        ["skipping layers", "absent", "1.36"],
    ]


def table7(setup: Setup) -> list[Row]:
    rows = []
    for tokens in [256, 512] if setup.quick else TABLE7:
        outputs = setup.speed(Cell(setup.context, 1, 0.0, "books"), ["triforce"], tokens=tokens)
        rows += [row | {"budget": None} for row in outputs]
    long_context, budget = (512, 64) if setup.quick else (LONG, EIGHTH)
    eighth = setup.retrieval(budget=Budget(budget))
    for temperature in (0.0, 0.6):
        cell = Cell(setup.context, 1, temperature, "books")
        rows += [
            row | {"budget": budget} for row in setup.speed(cell, ["triforce"], tokens=long_context, retrieval=eighth)
        ]
    return rows


def table7_line(row: Row) -> list[str]:
    what = f"{row['tokens']} tokens, T = {row['temperature']:g}"
    what += f", budget {row['budget']}" if row["budget"] else ""
    published = None if row["budget"] else TABLE7.get(row["tokens"])
    return [what, speedup(row), number(published), number(kept(row), 3), number(row["repeated_8_grams"])]


def table8(setup: Setup) -> list[Row]:
    cell = Cell(setup.context, 1, 0.0, "books")
    rows = list[Row]()
    grid = [(g1, 6) for g1 in GAMMA_1] + [(2, g2) for g2 in GAMMA_2 if g2 != 6]
    for gammas in [(1, 6), (2, 6), (2, 3)] if setup.quick else grid:
        how = dict(zip(("draft_tokens", "speculative_tokens"), gammas, strict=True))
        rows += [row | how for row in setup.speed(cell, ["triforce"], **how)]
    return rows


def table8_line(row: Row) -> list[str]:
    pair = row["draft_tokens"], row["speculative_tokens"]
    published = GAMMA_1[pair[0]] if pair[1] == 6 else GAMMA_2[pair[1]]
    return [f"{pair[0]}, {pair[1]}", speedup(row), number(published), number(kept(row), 3)]


def figure5(setup: Setup) -> list[Row]:
    limit = setup.llm.target.config.context
    contexts = [setup.context // 2, setup.context] if setup.quick else [c for c in CONTEXTS if c <= limit]
    return [row for c in contexts for row in setup.speed(Cell(c, 1, 0.0, "books"), ["triforce", "draft"])]


def figure5_lines(rows: list[Row]) -> Lines:
    mode_rows = {(row["context"], row["mode"]): row for row in rows}
    return ["context", "TriForce", "naive"], [
        [f"{context:,}", *(speedup(mode_rows.get((context, mode))) for mode in ("triforce", "draft"))]
        for context in sorted({context for context, _ in mode_rows})
    ]


MODEL = (
    "On a CPU, with the shipped pair (7 M and 1.4 M parameters) instead of Llama2-7B-128K and a 68M draft on an A100. "
    "After 32,000 tokens of a novel instead of 122K of PG-19; budget and gammas are the defaults here (2048; 2 and 6)."
)
EXPERIMENTS = {
    "table2": Experiment(
        "Table 2: speedup by temperature, and what the hierarchy is worth",
        f"{MODEL} `naive` is the draft model verified by the target. Coupling `seeded`, unless --coupling was given.",
        table2,
        each(["", "speedup", "paper", "acceptance", "paper"], table2_line),
    ),
    "table4": Experiment(
        "Table 4: batching",
        f"{MODEL} Budgets are the paper's.",
        table4,
        each(["batch x context", "speedup", "paper", "acceptance"], table4_line),
    ),
    "table5": Experiment(
        "Table 5: other ways to draft",
        f"{MODEL} REST needs a datastore and layer skipping a search for layers to skip; neither is built here, so "
        "they are absent. Draft tokens from the text itself are the nearest relative of REST's.",
        table5,
        table5_lines,
    ),
    "table7": Experiment(
        "Table 7: output length, and eight times the budget",
        f"{MODEL} Greedy texts of a small model go round in circles, as the last column says, which makes them easy to "
        "predict. The selection is renewed at each verification.",
        table7,
        each(["", "speedup", "paper", "acceptance", "8-grams that came before"], table7_line),
    ),
    "table8": Experiment(
        "Table 8: gamma",
        MODEL,
        table8,
        each(["draft_tokens, speculative_tokens", "speedup", "paper", "acceptance"], table8_line),
    ),
    "figure5": Experiment(
        "Figure 5: speedup by context",
        f"{MODEL} The paper's curve grows from 32K to 128K within 1.2 and 2.4 (read off the axis).",
        figure5,
        figure5_lines,
    ),
}

ABSENT = {
    "table3": "Table 3: offloading to host memory (7.78x on two RTX 4090): without a GPU there is nothing to offload.",
    "table6": "Table 6: 256K and 512K tokens, offloaded, on an L40 (11.81x, 12.10x): the shipped pair ends at 128K.",
    "figure6c": "Figure 6c: trees of draft tokens: estimated in the paper, not run; not built here.",
    "REST": "Table 5's REST (1.47x): needs a datastore of texts; not built here.",
    "layer skipping": "Table 5's layer skipping (1.36x): needs a search for layers to skip; not built here.",
}
"""Parts of the paper that cannot be run here, and why."""
