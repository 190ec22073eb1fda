"""Tokenizers of released checkpoints, read from their files. Tokenizers that are Python code are not run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.models.trial import check_template, render
from unmask.util.turns import Turns, plain_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

UNKNOWN = "\ufffd"
SHOWN_MASK, SHOWN_END, SHOWN_LINE = "\u00b7", "\u00b6", "\u21b5"
ANSWERED = "[/Answer]"  # BERT-Chat ends an answer with this plain text


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
        turns = [{"role": "system", "content": system}] if system else []
        turns += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.encode(self.rendered(turns))  # the rendered text contains the special tokens

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
