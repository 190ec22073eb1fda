"""The tokenizers of released checkpoints."""

from pathlib import Path

import pytest

from checkpoints import (
    A2D,
    DREAM,
    LLADA_SPECIALS,
    LLADA_TEMPLATE,
    LLADA_TEXT,
    QWEN_SPECIALS,
    QWEN_TEMPLATE,
    QWEN_TEXT,
    SDAR,
    bert,
    llada,
    modernbert,
    qwen,
    said,
    with_tokenizer,
    write,
)
from unmask.models import load_model, save, tiny_policy, tokenizer
from unmask.models.tokenizer import encode_all, prompt_all
from unmask.tasks import own
from wording import mentions, naming


def test_lladas_prompt_is_its_template_once(tmp_path):
    settings = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "chat_template": LLADA_TEMPLATE}
    folder = with_tokenizer(llada(tmp_path / "theirs", **LLADA_TEXT)[0], LLADA_SPECIALS, **settings)
    policy = load_model(folder)
    tokenizer, byte = policy.tokenizer, policy.tokenizer.encode
    assert byte("a<|eot_id|>") == byte("a") + [261]
    header = [259, *byte("user"), 260, *byte("\n\n")], [259, *byte("assistant"), 260, *byte("\n\n")]
    assert tokenizer.prompt("  2 + 2? ") == [256, *header[0], *byte("2 + 2?"), 261, *header[1]]
    assert (policy.mask_id, policy.eos_id, policy.pad_id) == (258, 257, 257)
    four = byte("4 ä")
    assert tokenizer.decode([*four, 257, 9, 9]) == tokenizer.decode([*four, 261, 9]) == "4 ä"  # both end a turn
    assert tokenizer.decode([259, *four[:2], 258, *four[2:], 260, 270]) == "4 \ufffdä\ufffd"
    assert tokenizer.decode([257]) == tokenizer.decode([]) == ""
    assert tokenizer.show([*byte("4 a\n"), 258, 258, 257, four[2], 270]) == "4 a\u21b5\u00b7\u00b7\u00b6\ufffd\ufffd"
    save(policy, tmp_path / "ours")
    assert load_model(tmp_path / "ours").tokenizer.prompt("2 + 2?") == tokenizer.prompt("2 + 2?")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (folder / name).read_bytes()


def test_dreams_tokenizer_is_read_without_its_code(tmp_path):
    folder, _, _ = qwen(tmp_path, DREAM, **QWEN_TEXT)
    settings = {"tokenizer_class": "DreamTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_dream.Dream", None]}}
    settings |= {"eos_token": "<|endoftext|>", "mask_token": "<|mask|>", "chat_template": QWEN_TEMPLATE}
    with_tokenizer(folder, QWEN_SPECIALS, fast=False, **settings)
    (folder / "tokenization_dream.py").write_text("raise SystemExit")
    policy = load_model(folder)
    byte = policy.tokenizer.encode
    turn = [257, *byte("user\nhi"), 258, *byte("\n"), 257, *byte("assistant\n")]
    assert policy.tokenizer.prompt("hi") == turn
    assert policy.tokenizer.decode([*byte("so"), 258, 256]) == policy.tokenizer.decode([*byte("so"), 256, 258]) == "so"
    assert policy.mask_id == policy.tokenizer.fast.mask_token_id == 260


def test_a2d_takes_the_tokenizers_mask_and_never_thinks(tmp_path):
    folder, _, _ = qwen(tmp_path, A2D, **{**QWEN_TEXT, "mask_token_id": "absent", "eos_token_id": [258, 256]})
    with_tokenizer(folder, QWEN_SPECIALS, mask_token="<|mask|>", eos_token="<|im_end|>")
    (folder / "chat_template.jinja").write_text(QWEN_TEMPLATE)
    policy = load_model(folder)
    assert (policy.mask_id, policy.eos_id, policy.pad_id) == (260, 258, 256)
    assert policy.tokenizer.decode(policy.tokenizer.prompt("hi")[-20:]) == "\n<think>\n\n</think>\n\n"
    assert policy.tokenizer.end_ids == {256, 258}


def test_without_a_template_a_prompt_is_the_text(tmp_path):
    folder = with_tokenizer(qwen(tmp_path, SDAR, **QWEN_TEXT)[0], QWEN_SPECIALS)
    tokenizer = load_model(folder).tokenizer
    assert tokenizer.prompt("2 + 2?") == tokenizer.encode("2 + 2?")
    assert tokenizer.decode(tokenizer.encode("2 + 2?")) == "2 + 2?"


def test_bert_chat_is_a_template_and_a_closing_word(tmp_path):
    template = "{% for m in messages %}[Question]\n{{ m['content'] | trim }}\n[/Question]\n\n{% endfor %}[Answer]\n"
    folder = modernbert(tmp_path, vocab_size=272)
    (folder / "chat_template.jinja").write_text(template + "{# closed by [/Answer] #}")
    with_tokenizer(folder, ["[PAD]", "[MASK]"], pad_token="[PAD]", mask_token="[MASK]")
    tokenizer = load_model(folder).tokenizer
    assert tokenizer.prompt(" two ") == tokenizer.encode("[Question]\ntwo\n[/Question]\n\n[Answer]\n")
    assert tokenizer.decode(tokenizer.encode("four\n[/Answer]\n[Question]")) == "four\n"


TEXTS = ["", " ", "a", "4 \u00e4\n", "<|endoftext|> [SEP]", "two and four " * 60, "\u2028 a", "two"]


def with_bytes(folder: Path, fast: bool, template: str | None = None) -> Path:
    tokens = {"eos_token": "<|endoftext|>", "mask_token": "<|mask|>", "model_max_length": 100}
    settings = tokens if template is None else {**tokens, "chat_template": template}
    return with_tokenizer(qwen(folder, DREAM, **QWEN_TEXT)[0], QWEN_SPECIALS, fast=fast, **settings)


KINDS = {
    "tokenizer.json": lambda folder: with_bytes(folder, fast=True),
    "with a template": lambda folder: with_bytes(folder, fast=True, template=QWEN_TEMPLATE),
    "vocab.json": lambda folder: with_bytes(folder, fast=False),
    "vocab.txt": bert,
}


@pytest.mark.parametrize("kind", KINDS)
def test_many_texts_and_prompts_have_the_tokens_of_each_alone(tmp_path, monkeypatch, kind):
    hub, tiny = load_model(KINDS[kind](tmp_path)).tokenizer, tiny_policy().tokenizer
    calls, plain = list[int](), type(hub.fast)._encode_plus

    def counted(fast, text, *args, **settings):
        calls.append(len(text))
        return plain(fast, text, *args, **settings)

    turns = [{"role": "user", "content": "2"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "4"}]
    prompts = [("two", "a"), (turns, "and"), (turns, ""), *((text, "") for text in TEXTS[::-1])]
    alone = [hub.encode(text) for text in TEXTS], [hub.prompt(*prompt) for prompt in prompts]
    monkeypatch.setattr(type(hub.fast), "_encode_plus", counted)
    assert (encode_all(hub, TEXTS), prompt_all(hub, prompts)) == alone
    monkeypatch.setattr(tokenizer, "TOGETHER", 100)  # characters
    assert (encode_all(hub, TEXTS), prompt_all(hub, prompts)) == alone
    assert calls[:5] == [8, 11, 5, 1, 2] and encode_all(hub, []) == prompt_all(hub, []) == []
    words, asked = ["12", "3"], [("12", ""), ("3", "4")]
    assert encode_all(tiny, words) == [tiny.encode(text) for text in words]
    assert prompt_all(tiny, asked) == [tiny.prompt(*prompt) for prompt in asked]


def test_tokenizers_have_to_be_there_and_fit(tmp_path):
    folder, weights, config = llada(tmp_path, **LLADA_TEXT)
    assert mentions(said(folder, load_model), "FOLDER", "tokenizer.json", "vocab.json", "merges.txt", "vocab.txt")
    (folder / "tokenizer.json").write_text("{}")
    assert mentions(said(folder, load_model), "tokenizer", "FOLDER")
    with_tokenizer(folder, LLADA_SPECIALS)
    write(folder, {**config, "mask_token_id": 272}, weights)
    assert mentions(said(folder, load_model), "FOLDER/config.json", "mask token", 272)
    write(folder, {**config, "eos_token_id": -1}, weights)
    assert mentions(said(folder, load_model), "FOLDER/config.json", "end token", -1, 272)
    folder, _, _ = llada(tmp_path, **{**LLADA_TEXT, "embedding_size": 260, "mask_token_id": 258})
    assert mentions(said(folder, load_model), "tokenizer", "FOLDER", 262, 260)


def test_a_conversation_keeps_its_turns_from_the_row_to_the_template(tmp_path):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    turns += [{"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3 + 3?"}]
    folder, _, _ = qwen(tmp_path / "model", DREAM, **QWEN_TEXT)
    settings = {"eos_token": "<|endoftext|>", "mask_token": "<|mask|>", "chat_template": QWEN_TEMPLATE}
    tokenizer = load_model(with_tokenizer(folder, QWEN_SPECIALS, **settings)).tokenizer
    template = tokenizer.fast.apply_chat_template
    wanted = template(turns, add_generation_prompt=True, return_dict=False)
    (tmp_path / "chat.py").write_text("def reward(completion): return 1.0\n")
    task = own.task(str(tmp_path / "chat.py"))
    assert task.prompt_ids(tokenizer, {"prompt": turns}) == tokenizer.prompt(turns) == wanted
    assert tokenizer.prompt(turns[1:], system="Be brief.") == wanted
    assert wanted.count(257) == 5  # four turns, and the answer's
    for wrong, names in (
        (turns[:3], ("turn", "assistant")),
        ([], ("list of turns",)),
        ([{"role": "user"}], ("content",)),
    ):
        with pytest.raises(ValueError, match=naming("chat.py", *names)):
            task.prompt_ids(tokenizer, {"prompt": wrong})
