"""Tokenizers of released checkpoints, read from their files. Tokenizers that are Python code are not run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.models.trial import check_template, render, render_all
from unmask.util.portions import portions
from unmask.util.turns import Turns, plain_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from unmask.core.policy import Tokenizer

UNKNOWN = "\ufffd"
SHOWN_MASK, SHOWN_END, SHOWN_LINE = "\u00b7", "\u00b6", "\u21b5"
ANSWERED = "[/Answer]"  # BERT-Chat ends an answer with this plain text
TOGETHER = 2**18
"""Characters of the texts in a call of the tokenizer. Before it returns, a token needs more than 100 bytes."""


def has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in ("tokenizer.json", "vocab.json", "vocab.txt"))


def read_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """The class is chosen by the files, not by tokenizer_config.json, which may name remote code."""
    import transformers

    kinds = (
        (("tokenizer.json",), transformers.PreTrainedTokenizerFast),
        (("vocab.json", "merges.txt"), transformers.Qwen2Tokenizer),
        (("vocab.txt",), transformers.BertTokenizer),
    )
    for files, kind in kinds:
        if all((folder / file).is_file() for file in files):
            try:
                fast = kind.from_pretrained(folder, local_files_only=True)
                fast.encode("a")
                return fast
            except Exception as error:  # damaged files also fail in Rust
                raise ValueError(f"The tokenizer in {folder} cannot be read: {' '.join(str(error).split())}") from error
    raise ValueError(
        f"There is no tokenizer in {folder}: neither tokenizer.json, nor vocab.json and merges.txt, nor vocab.txt."
    )


def encode_all(tokenizer: "Tokenizer", texts: Sequence[str]) -> list[list[int]]:
    """`tokenizer.encode` of every text. The tokenizer of a released checkpoint works on many texts on all cores."""
    if isinstance(tokenizer, HubTokenizer):
        return tokenizer.encode_all(texts)
    return [tokenizer.encode(text) for text in texts]


def prompt_all(tokenizer: "Tokenizer", prompts: Sequence[tuple[str | Turns, str]]) -> list[list[int]]:
    """`tokenizer.prompt` of every prompt with its system turn."""
    if isinstance(tokenizer, HubTokenizer):
        return tokenizer.prompt_all(prompts)
    return [tokenizer.prompt(prompt, system) for prompt, system in prompts]


def _turns(prompt: str | Turns, system: str) -> list[dict[str, str]]:
    """A prompt as a conversation, after a system turn if there is one."""
    turns = [{"role": "system", "content": system}] if system else []
    return turns + ([{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt))


class HubTokenizer:
    """Implements Tokenizer around a fast tokenizer of transformers."""

    def __init__(
        self, fast: "PreTrainedTokenizerFast", mask_id: int, end_ids: frozenset[int], template: Mapping[str, Any]
    ) -> None:
        self.fast = fast
        self.mask_id, self.end_ids, self.template = mask_id, end_ids, dict(template)
        self.size: int = max(fast.get_vocab().values()) + 1
        self.anchor = self.encode("a")
        if fast.chat_template:
            check_template(fast.get_chat_template(), self._values())
        if mask_id in self.prompt("a"):  # a chat template with an error fails here
            raise ValueError(
                f"The chat template of this tokenizer writes the mask token {mask_id} into a prompt of one letter; "
                "correct mask_token_id in config.json."
            )

    def encode(self, text: str) -> list[int]:
        return self.fast.encode(text, add_special_tokens=False)

    def prompt(self, prompt: str | Turns, system: str = "") -> list[int]:
        """The turns in the chat template, up to the start of the answer; without a template, the plain text."""
        if not self.fast.chat_template:
            return self.encode(plain_text(prompt, system))
        return self.encode(self.rendered(_turns(prompt, system)))  # the rendered text contains the special tokens

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text."""
        settings = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        return [ids for some in portions(texts, len, TOGETHER) for ids in self.fast(some, **settings)["input_ids"]]

    def prompt_all(self, prompts: Sequence[tuple[str | Turns, str]]) -> list[list[int]]:
        """`prompt` of every prompt with its system turn."""
        if not self.fast.chat_template:
            return self.encode_all([plain_text(prompt, system) for prompt, system in prompts])
        conversations = [_turns(prompt, system) for prompt, system in prompts]
        return self.encode_all(render_all(self.fast.get_chat_template(), conversations, self._values()))

    def rendered(self, turns: Turns, **settings: Any) -> str:
        """The text that the chat template makes of a conversation; `settings` are for the template."""
        return render(self.fast.get_chat_template(), turns, {**self._values(), **settings})

    def _values(self) -> dict[str, Any]:
        """What the chat template reads beside the turns."""
        return json.loads(json.dumps({**self.fast.special_tokens_map, **self.template}, default=str))

    def decode(self, ids: list[int]) -> str:
        """The text up to the first token that ends a turn; a MASK becomes a replacement character."""
        end = next((place for place, token in enumerate(ids) if token in self.end_ids), len(ids))
        text = self._read(ids[:end], skip=True)
        return text.partition(ANSWERED)[0] if ANSWERED in str(self.fast.chat_template) else text

    def raw(self, ids: list[int]) -> str:
        """The whole text with special tokens; a MASK becomes a replacement character."""
        return self._read(ids, skip=False)

    def _read(self, ids: list[int], skip: bool) -> str:
        runs: list[list[int]] = [[]]
        for token in ids:
            if token == self.mask_id or token >= self.size:
                runs.append([])
            else:
                runs[-1].append(token)
        return UNKNOWN.join(self._text(run, skip) for run in runs)

    def show(self, ids: list[int]) -> str:
        """A canvas on one line."""
        return "".join(self.pieces(ids))

    def pieces(self, ids: list[int]) -> list[str]:
        """The text of each token: MASK is a middle dot, an end token a pilcrow, a newline an arrow."""
        return [self._piece(token) for token in ids]

    def _piece(self, token: int) -> str:
        if token == self.mask_id:
            return SHOWN_MASK
        if token in self.end_ids:
            return SHOWN_END
        if token >= self.size:
            return UNKNOWN
        # Decoded after another token, because the first token of a text may lose its leading space.
        text = self._text([*self.anchor, token]).removeprefix(self._text(self.anchor))
        return text.replace("\n", SHOWN_LINE) or UNKNOWN

    def _text(self, ids: list[int], skip: bool = False) -> str:
        return self.fast.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
