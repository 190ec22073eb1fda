"""Chat templates run in a process with bounds: the text is that of transformers, and no conversation passes a bound."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from checkpoints import LLADA_TEMPLATE, QWEN_SPECIALS, QWEN_TEMPLATE, QWEN_TEXT, SDAR, qwen, with_tokenizer
from unmask.models import load_model, trial
from unmask.models.tokenizer import HubTokenizer
from unmask.util.json_process import Process
from wording import naming

TURNS = [
    {"role": "system", "content": "Be <brief> & ä."},
    {"role": "user", "content": " 2 + 2?\n"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "\u2028 next {{ not a template }}"},
]
TEMPLATES = {
    "qwen": QWEN_TEMPLATE,
    "llada": LLADA_TEMPLATE,
    "generation": "{% for m in messages %}\n{% generation %}\n{{ m.content }}\n{% endgeneration %}\n{% endfor %}",
    "blocks": "{%- for m in messages %}\n    {%- if loop.first %}\n  {{ m.role }}\n    {% endif %}\n{%- endfor %}\n",
    "controls": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=true) }}",
    "names": "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}",
    "tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ unk_token is defined }}",
    "macro": "{% macro turn(m) %}<{{ m.content }}>{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "tools": "{% if tools is defined and tools %}tools{% endif %}{{ documents is none }}{{ add_generation_prompt }}",
    "date": "{{ strftime_now('%Y') }}{{ dict(a=1)['a'] }}",
}


def tokenizer_with(folder: Path, template: str) -> HubTokenizer:
    made, _, _ = qwen(folder, SDAR, **QWEN_TEXT)
    tokens = {"eos_token": "<|endoftext|>", "bos_token": "<|beginoftext|>"}
    found = load_model(with_tokenizer(made, QWEN_SPECIALS, chat_template=template, **tokens)).tokenizer
    assert isinstance(found, HubTokenizer)
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(tmp_path, name):
    tokenizer = tokenizer_with(tmp_path, TEMPLATES[name])
    for turns in (TURNS, TURNS[1:2]):
        theirs = tokenizer.fast.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert tokenizer.rendered(turns) == theirs
    assert tokenizer.prompt("hi") == tokenizer.encode(tokenizer.rendered([{"role": "user", "content": "hi"}]))


BAD = {
    "text": ("{{ 'a' * 300000 }}", "300000 characters"),
    "growth": ("{{ messages[0].content * 100000 }}", "characters"),
    "memory": ("{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "512 MB"),
    "width": ("{{ '%9999999999d' | format(1) }}", "512 MB"),
    "power": ("{{ messages[0].content | length ** (9 ** 9) }}", "0.2 s"),
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "0.2 s"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_template_that_goes_wrong_for_some_prompts_only_is_refused_there(tmp_path, monkeypatch, name):
    body, bound = BAD[name]
    start = "{% if 'now' in messages[0].content %}" + body + "{% else %}{{ messages[0].content }}{% endif %}"
    tokenizer = tokenizer_with(tmp_path, start)  # no conversation that a load tries has the word
    monkeypatch.setattr(trial, "SECONDS", 0.2)
    with pytest.raises(ValueError, match=naming("chat template", "chat_template", bound)):
        tokenizer.prompt("do it now")
    assert tokenizer.prompt("later") == tokenizer.encode("later")  # the process is there again


def test_a_template_may_refuse_a_conversation_with_a_sentence(tmp_path):
    tokenizer = tokenizer_with(tmp_path, "{% if messages|length > 1 %}{{ raise_exception('one turn') }}{% endif %}a")
    assert tokenizer.prompt("x") == tokenizer.encode("a")
    with pytest.raises(ValueError, match=naming("chat template", "fails", "one turn")):
        tokenizer.prompt(TURNS)


def conversations(*prompts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


@pytest.fixture
def requests(monkeypatch) -> list[int]:
    """The number of conversations in every request to the worker."""
    sizes, plain = list[int](), Process.ask

    def counted(process, request, seconds):
        sizes.append(len(request["conversations"]))
        return plain(process, request, seconds)

    monkeypatch.setattr(Process, "ask", counted)
    return sizes


@pytest.mark.parametrize("name", TEMPLATES)
def test_many_conversations_are_rendered_in_few_requests_as_one_by_one(monkeypatch, requests, name):
    many = [TURNS, TURNS[1:2], *conversations("", " ", "\u2028", "{{ messages }}", "a\nb"), TURNS[3:], TURNS]
    values = {"bos_token": "<|beginoftext|>", "eos_token": "<|endoftext|>"}
    alone = [trial.render(TEMPLATES[name], turns, values) for turns in many]
    assert len(set(alone)) > 1 or name in ("names", "tools", "date")
    requests.clear()
    assert trial.render_all(TEMPLATES[name], many, values) == alone
    monkeypatch.setattr(trial, "TOGETHER", 200)  # characters
    assert trial.render_all(TEMPLATES[name], many, values) == alone
    assert requests == [9, 1, 5, 2, 1] and len(json.dumps(TURNS)) > 200
    assert trial.render_all(TEMPLATES[name], [], values) == []


@pytest.mark.parametrize("name", [*BAD, "refused"])
def test_among_many_conversations_the_error_is_that_of_the_one_that_fails(monkeypatch, name):
    body, _ = BAD.get(name, ("{{ raise_exception('not ' ~ messages[0].content) }}", ""))
    template = "{% if 'now' in messages[0].content %}" + body + "{% else %}{{ messages[0].content }}{% endif %}"
    good, bad, worse = conversations("later", "do it now", "now at once")
    monkeypatch.setattr(trial, "SECONDS", 0.2)
    with pytest.raises(ValueError, match="chat template") as alone:
        trial.render(template, bad, {})
    with pytest.raises(ValueError, match="chat template") as among:
        trial.render_all(template, [good, bad, good, worse], {})
    assert (type(among.value), str(among.value)) == (type(alone.value), str(alone.value))
    assert trial.render_all(template, [good, good], {}) == ["later", "later"]  # the process is there again


def test_every_conversation_has_the_whole_time_if_many_have_too_little(monkeypatch, requests):
    """A loop of some milliseconds, three hundred times in one request."""
    slow = "{% for i in range(99999) %}{% endfor %}{{ messages[0].content }}"
    prompts = [f"prompt {number}" for number in range(300)]
    monkeypatch.setattr(trial, "SECONDS", 0.2)
    assert trial.render_all(slow, conversations(*prompts), {}) == prompts
    assert requests == [300] + [1] * 300


def test_long_prompts_are_no_fault_of_the_template(tmp_path):
    tokenizer = tokenizer_with(tmp_path, QWEN_TEMPLATE)
    assert len(tokenizer.rendered([{"role": "user", "content": "a" * 500_000}])) > 500_000


def test_many_long_prompts_are_no_fault_of_the_template():
    """Together they would need more memory than the process has."""
    text = "\u00e4" * 1_000_000
    assert trial.render_all("{{ messages[0].content }}", conversations(*[text] * 40), {}) == [text] * 40


def test_a_forked_process_has_a_worker_of_its_own():
    worker = trial._worker()
    assert trial.render("a", TURNS, {}) == "a" and isinstance(worker, Process) and worker.running is not None
    pid, read = worker.running.pid, os.pipe()
    child = os.fork()
    if not child:
        try:
            text = trial.render("{{ messages[0].role }}", TURNS, {})
            assert worker.running is not None and worker.running.pid != pid
            os.write(read[1], text.encode())
            worker.end()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(read[1])
    assert os.read(read[0], 100) == b"system"
    os.close(read[0])
    assert trial.render("b", TURNS, {}) == "b" and worker.running is not None and worker.running.pid == pid


def rendered() -> str:
    return trial.render("{{ messages[0].content }}", TURNS, {})


def test_a_worker_that_something_else_ends_is_asked_once_more(monkeypatch):
    """An out-of-memory killer, say: the template is not to blame."""
    assert rendered() == "Be <brief> & ä."
    worker, asked, plain = trial._worker(), [], Process._reply

    def killed(process, line, seconds):
        asked.append(line)
        if line is not None and len(asked) == 1:
            os.kill(process.running.pid, signal.SIGKILL)
            process.running.wait()
        return plain(process, line, seconds)

    monkeypatch.setattr(Process, "_reply", killed)
    assert rendered() == "Be <brief> & ä."
    assert len(asked) == 3 and worker.running.poll() is None  # the request, the start, the request


def test_a_forked_process_that_ends_leaves_the_worker_running():
    rendered()
    worker = trial._worker().running
    if not (child := os.fork()):
        trial._worker().end()
        os._exit(0)
    os.waitpid(child, 0)
    assert worker.poll() is None and rendered() == "Be <brief> & ä."


def test_a_worker_finds_packages_that_only_the_environment_names():
    """As with PYTHONPATH, which Python's -I hides."""
    command = [sys.executable, "-I", "-S", str(trial.WORKER)]
    process = Process([*command, *trial._worker().command[3:]], 60.0, bare=True)
    request = {"template": "{{ messages[0] }}", "conversations": [["a"]], "values": {}, "longest": [9], "seconds": 2.0}
    assert process.ask(request, 60.0) == {"texts": ["a"]}
    process.end()
    without = Process(command, 60.0, bare=True)
    assert "jinja2" in without.ask(request, 60.0)["missing"]
    without.end()
