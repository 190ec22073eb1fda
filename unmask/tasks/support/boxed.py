r"""What GSM8K and MATH500 ask in the same words: a problem, and an answer in a \boxed{...}."""

from unmask.tasks.support.protocol import SKELETON


def boxed_prompt(problem: str, alone: str) -> str:
    """Ours; `alone` is what the box is to hold."""
    form = SKELETON.format(reasoning="your reasoning, step by step", answer=f"\\boxed{{{alone}}}")
    return f"{problem}\n\nSolve this problem. Write your answer in exactly this form:\n{form}"


def d1_boxed_prompt(problem: str, stray: str = "") -> str:
    """Reconstructed from a description of d1's prompt, not copied: its hash differs from d1's. `stray` is what stands
    behind the sentence about the box."""
    return (
        "You are a math expert. You will be given a question to solve. Solve it step by step. "
        f"Wrap the final answer in a \\boxed{{}}.{stray} \nRespond in the following format:\n"
        + SKELETON.format(reasoning="Your reasoning here", answer="\\boxed{...}")
        + f"\n\n{problem}"
    )
