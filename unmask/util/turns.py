"""Conversations: prompts that are lists of turns, {"role": ..., "content": ...}."""

from collections.abc import Sequence
from typing import Any

Turns = Sequence[dict[str, str]]


def checked_turns(value: Any) -> list[dict[str, str]]:
    """The role and content of each turn; ValueError unless it is a conversation that the assistant answers next."""
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of turns")
    for turn in value:
        if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
            raise ValueError('must have turns of the form {"role": "user", "content": "..."}')
    if value[-1]["role"] == "assistant":
        raise ValueError("ends with a turn of the assistant, which is what the model writes")
    return [{"role": turn["role"], "content": turn["content"]} for turn in value]


def plain_text(prompt: str | Turns, system: str = "") -> str:
    """A prompt without a conversation format: its turns with blank lines between them."""
    texts = [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]
    return "\n\n".join([system, *texts] if system else texts)
