"""Examples in the help of every command; docs/reference/cli.md prints them too, and the tests run them."""

EXAMPLES = {
    "train": (
        "unmask train",
        "unmask train --task countdown --method agrpo --with dispo updates=200 optimizer.lr=1e-4",
        "unmask train my.yaml --seed 1 --out runs/second",
    ),
    "compare": (
        "unmask compare --task sudoku --methods diffu_grpo,agrpo --with none,daca --seeds 3 --budget forwards=2e5 "
        "--out runs/compared",
        "unmask compare --redraw runs/compared",
    ),
    "audit": (
        "unmask audit tiny --task sudoku",
        "unmask audit tiny --methods diffu_grpo,agrpo:draws=2,daca --problems 4 --out runs/audit",
        "unmask audit tiny-two --task sudoku --credit --out runs/credit",
    ),
    "bench": ("unmask bench credit", "unmask bench credit my_rule.py --out runs/credit-bench"),
    "eval": (
        "unmask eval runs/first",
        "unmask eval tiny --task countdown --problems 64 --samples 4",
        "unmask eval tiny --task sudoku --steps 4,8,16 --out scores.json",
    ),
    "view": (
        "unmask view runs/first",
        "unmask view runs/first runs/second",
        "unmask view runs/first --export page.html",
    ),
    "sample": (
        "unmask sample tiny 12+30= --task arithmetic",
        "unmask sample runs/first ..3...2.....34..= --steps",
    ),
    "generate": (
        "unmask generate tiny prompts.jsonl --task sudoku --out completions.jsonl",
        "unmask generate runs/first prompts.jsonl --greedy --traces",
    ),
    "methods": ("unmask methods", "unmask methods agrpo", "unmask methods --json"),
    "tasks": ("unmask tasks", "unmask tasks gsm8k", "unmask tasks my_task.py"),
    "recipes": (
        "unmask recipes",
        "unmask recipes d1_gsm8k",
        "unmask train recipe:d1_gsm8k --dry-run",
    ),
    "schema": ("unmask schema > schema.json", "unmask schema sft > sft_schema.json"),
    "doctor": (
        "unmask doctor",
        "unmask doctor --json",
        "unmask doctor JetLM/SDAR-4B-Chat-b16",
        "unmask doctor JetLM/SDAR-30B-A3B-Chat causal_block=4",
    ),
    "merge": ("unmask merge runs/first --out merged", "unmask merge runs/first/checkpoint --out merged"),
    "push": ("unmask push runs/first ORG/NAME --dry-run", "unmask push runs/first ORG/NAME --private"),
    "pretrain": (
        "unmask pretrain recipe:pretrain_tiny --out tiny-again",
        "unmask pretrain my_mixture.yaml --out my_model --device cuda",
    ),
    "fetch": ("unmask fetch smollm2", "unmask fetch model.gguf --out model"),
    "adapt": (
        "unmask adapt smollm2 --data sudoku_text --data countdown_text",
        "unmask adapt --resume runs/adapt-smollm2",
    ),
    "sft": ("unmask sft tiny --data rows.jsonl --full updates=200", "unmask sft --resume runs/sft-tiny"),
    "grade": (
        "unmask grade generations.jsonl --task gsm8k",
        "unmask grade generations.jsonl --task gsm8k --protocol d1 --out verdicts.jsonl",
    ),
}
"""Command -> lines."""
