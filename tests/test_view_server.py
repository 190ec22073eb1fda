"""The page and its server: what a model wrote stays text, and a request reaches nothing but the runs."""

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from unmask.view import export, page
from unmask.view.server import HEADERS, Viewer
from wording import mentions

HOSTILE = "</script><script>alert(1)</script><!--\u2028\u2029&lt; \ud800 ]]>"
TEMPLATE = "<!doctype html><p>\u00e9<!--unmask-data--></p><b></b><!--unmask-traces--><i></i>"


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    path.write_text(TEMPLATE, encoding="utf-8")
    return path


def made(folder: Path, name: str = "t1-0") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("task: sudoku\nmethod: agrpo\nupdates: 2\n")
    rollouts = [{"tokens": [HOSTILE], "reward": 1.0, "solved": True}]
    line = {"v": 1, "id": name, "kind": "train", "step": 1, "prompt": HOSTILE, "rollouts": rollouts}
    (folder / "traces.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "train/reward": 0.25}\n')
    return folder


class Blocks(HTMLParser):
    """The scripts of a page by id, as a browser tells them apart, and everything else."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=False)
        self.scripts: dict[str | None, str] = {}
        self.tags: list[str] = []
        self.inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            assert dict(attrs)["type"] == "application/json"
            self.inside = dict(attrs)["id"]

    def handle_endtag(self, tag: str) -> None:
        self.inside = None

    def handle_data(self, data: str) -> None:
        if self.inside is not None:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data


# --- the exported page --------------------------------------------------------------------------------------


def test_an_exported_page_holds_the_runs_and_no_word_of_a_model_is_markup(template: Path, tmp_path: Path) -> None:
    runs = [made(tmp_path / "a"), made(tmp_path / "b", "e0-0")]
    out = export(runs, tmp_path / "out.html", page=template)
    text = out.read_text(encoding="utf-8")
    blocks = Blocks(text)
    assert blocks.tags == ["p", "script", "b", "script", "script", "i"]
    assert list(blocks.scripts) == ["unmask-data", "trace-0-t1-0", "trace-1-e0-0"]
    assert not re.search(r"[<>&\u2028\u2029]", "".join(blocks.scripts.values()))
    index = json.loads(blocks.scripts["unmask-data"])
    assert [run["name"] for run in index["runs"]] == ["a", "b"] and index["live"] is False
    assert index["runs"][0]["traces"][0]["prompt"] == HOSTILE
    assert json.loads(blocks.scripts["trace-1-e0-0"])["rollouts"][0]["tokens"] == [HOSTILE]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "out.html", "page.html"]


def test_a_run_without_groups_is_exported_with_its_samples(template: Path, tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    (folder / "traces.jsonl").unlink()
    (folder / "samples.jsonl").write_text('{"step": 3, "row": {}, "completion": "</script>", "reward": 0.5}\n')
    blocks = Blocks(export(folder, tmp_path / "out.html", page=template).read_text()).scripts
    assert list(blocks) == ["unmask-data", "trace-0-t3-0"]
    assert json.loads(blocks["trace-0-t3-0"])["rollouts"] == [{"tokens": ["</script>"], "reward": 0.5}]


def test_one_run_may_be_given_alone_and_a_page_is_written_whole_or_not_at_all(template: Path, tmp_path: Path) -> None:
    made(tmp_path / "a")
    (tmp_path / "out.html").write_text("before")
    with pytest.raises(ValueError, match="not a run folder"):
        export([tmp_path / "a", tmp_path / "none"], tmp_path / "out.html", page=template)
    assert (tmp_path / "out.html").read_text() == "before"
    assert "unmask-data" in export(str(tmp_path / "a"), str(tmp_path / "out.html"), page=template).read_text()
    with pytest.raises(ValueError, match="is a folder"):
        export(tmp_path / "a", tmp_path, page=template)
    for broken in ("", TEMPLATE.replace("<!--unmask-traces-->", ""), TEMPLATE * 2):
        template.write_text(broken)
        with pytest.raises(ValueError, match="make web"):
            export(tmp_path / "a", tmp_path / "out.html", page=template)
    with pytest.raises(ValueError, match="make web"):
        export(tmp_path / "a", tmp_path / "out.html", page=tmp_path / "none.html")


def samples(step: int) -> str:
    return json.dumps({"step": step, "row": {}, "completion": "x" * 50, "reward": 0.5}) + "\n"


def test_what_is_left_out_are_whole_steps_of_samples_too_and_runs_share_the_room(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [made(tmp_path / name) for name in "ab"]
    line, names = json.loads((runs[0] / "traces.jsonl").read_text()), ("t{}-0", "e{}-0", "e{}-1")
    named = [(step, name.format(step)) for step in range(10, 18) for name in names]
    many = [json.dumps({**line, "id": name, "step": step}) + "\n" for step, name in named]
    for run in runs:
        (run / "traces.jsonl").write_text("".join(many))
    monkeypatch.setattr(page, "LARGEST", 24 * len(many[0]))  # one run's
    with pytest.warns(UserWarning, match="12 of 24 groups"):
        blocks = Blocks(export(runs, tmp_path / "out.html", page=template).read_text()).scripts
    kept = [name for step, name in named if step % 2 == 0]
    assert list(blocks) == ["unmask-data", *(f"trace-{run}-{name}" for run in (0, 1) for name in kept)]
    (runs[0] / "traces.jsonl").unlink()
    (runs[0] / "samples.jsonl").write_text("".join(samples(step) for step in range(10, 20)))
    whole = Blocks(export(runs[0], tmp_path / "out.html", page=template).read_text()).scripts
    monkeypatch.setattr(page, "LARGEST", 5 * len(whole["trace-0-t10-0"]))
    with pytest.warns(UserWarning, match="5 of 10 groups"):
        blocks = Blocks(export(runs[0], tmp_path / "out.html", page=template).read_text()).scripts
    assert list(blocks) == ["unmask-data", *(f"trace-0-t{step}-0" for step in range(10, 20, 2))]
    assert len(json.loads(blocks["unmask-data"])["runs"][0]["traces"]) == 5


def test_a_page_that_would_be_too_large_leaves_groups_out_evenly(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "a")
    line = json.loads((folder / "traces.jsonl").read_text())
    many = [json.dumps({**line, "id": f"t{n}-0", "step": n}) + "\n" for n in range(10, 40)]
    (folder / "traces.jsonl").write_text("".join(many))
    monkeypatch.setattr(page, "LARGEST", 10 * len(many[0]))
    with pytest.warns(UserWarning, match="10 of 30 groups"):
        blocks = Blocks(export(folder, tmp_path / "out.html", page=template).read_text()).scripts
    assert list(blocks) == ["unmask-data", *(f"trace-0-t{n}-0" for n in range(10, 40, 3))]
    assert len(json.loads(blocks["unmask-data"])["runs"][0]["traces"]) == 10
    monkeypatch.setattr(page, "LARGEST", 30 * len(many[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(Blocks(export(folder, tmp_path / "out.html", page=template).read_text()).scripts) == 31


# --- the server ---------------------------------------------------------------------------------------------


@pytest.fixture
def viewer(template: Path, tmp_path: Path) -> Iterator[Viewer]:
    (tmp_path / "secret.txt").write_text("secret")
    with Viewer([made(tmp_path / "a"), made(tmp_path / "b", "e0-0")], page=template) as viewer:
        threading.Thread(target=viewer.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield viewer
        viewer.shutdown()


def asked(
    viewer: Viewer, target: str, method: str = "GET", host: str | None = "localhost", root: bool = True, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """As it is put on the wire: no client library tidies the target. It begins with the server's own name."""
    target = viewer.root[:-1] + target if root else target
    line = [f"{method} {target} HTTP/1.1", *([f"Host: {host}"] if host is not None else [])]
    line += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    with socket.create_connection(viewer.server_address[:2], timeout=10) as connection:
        connection.sendall("\r\n".join([*line, "", ""]).encode())
        answer = http.client.HTTPResponse(connection, method=method)
        answer.begin()
        return answer.status, dict(answer.getheaders()), answer.read()


def test_the_three_addresses(viewer: Viewer, tmp_path: Path) -> None:
    status, headers, body = asked(viewer, "/")
    index = json.loads(Blocks(body.decode()).scripts["unmask-data"])
    assert status == 200 and index["live"] and [run["name"] for run in index["runs"]] == ["a", "b"]
    assert headers["Content-Type"] == "text/html; charset=utf-8" and "trace-0" not in body.decode()
    assert HEADERS.items() <= headers.items() and "Access-Control-Allow-Origin" not in headers
    status, headers, body = asked(viewer, "/api/index")
    assert (status, headers["Content-Type"], json.loads(body)) == (200, "application/json", index)
    tag = headers["ETag"]
    status, headers, body = asked(viewer, "/api/index", If_None_Match=tag)
    assert (status, headers["ETag"], body) == (304, tag, b"")
    status, headers, body = asked(viewer, "/api/trace?run=1&id=e0-0")
    assert (status, body) == (200, (tmp_path / "b" / "traces.jsonl").read_bytes().strip())
    assert headers["Content-Type"] == "application/json" and headers["X-Content-Type-Options"] == "nosniff"
    assert viewer.server_address[0] == "127.0.0.1"
    assert viewer.address == f"http://127.0.0.1:{viewer.server_address[1]}{viewer.root}"


def test_without_the_name_of_the_server_nothing_is_told(viewer: Viewer, template: Path, tmp_path: Path) -> None:
    root = viewer.root
    with Viewer([tmp_path / "a"], page=template) as other:
        assert other.root != root and len(root) == len(other.root) == 24
        wrong = ["", "/", root[:-1], root[:-2] + "/", root.swapcase(), other.root, "/\u00e9" + root[2:]]
    for start in wrong:
        for rest in ("", "api/index", "api/trace?run=0&id=t1-0"):
            if start + rest:  # without a target it is no request
                status, headers, body = asked(viewer, start + rest, root=False)
                assert status == 403 and b"sudoku" not in body and HEADERS.items() <= headers.items()


def test_a_log_that_was_cut_is_read_again_when_a_group_is_asked_for(viewer: Viewer, tmp_path: Path) -> None:
    log = tmp_path / "a" / "traces.jsonl"
    line, tag = json.loads(log.read_text()), asked(viewer, "/api/index")[1]["ETag"]
    lines = [json.dumps({**line, "id": name}) for name in ("e0-0", "t1-0")]
    log.write_text("\n".join([*lines, ""]))
    status, _, body = asked(viewer, "/api/trace?run=0&id=t1-0")
    assert (status, body.decode()) == (200, lines[1])
    status, _, body = asked(viewer, "/api/index", If_None_Match=tag)
    assert status == 200 and [group["id"] for group in json.loads(body)["runs"][0]["traces"]] == ["e0-0", "t1-0"]
    log.unlink()
    assert asked(viewer, "/api/trace?run=0&id=t1-0")[0] == 404
    assert json.loads(asked(viewer, "/api/index", If_None_Match=tag)[2])["runs"][0]["traces"] == []


def test_completions_are_searched_in_all_runs(viewer: Viewer) -> None:
    for text, groups in (("ALERT(1)", [[0, "t1-0"], [1, "e0-0"]]), ("nowhere", [])):
        status, headers, body = asked(viewer, f"/api/search?text={text}")
        assert (status, headers["Content-Type"], json.loads(body)) == (200, "application/json", groups)


def test_a_folder_that_is_served_shows_runs_that_start_later(template: Path, tmp_path: Path) -> None:
    made(tmp_path / "runs" / "b")
    with Viewer([tmp_path / "runs"], page=template) as viewer:
        made(tmp_path / "runs" / "a")
        names = [run["name"] for run in json.loads(viewer.fresh_index()[0])["runs"]]
        assert names == ["b", "a"]  # the numbers of runs do not change
        shutil.rmtree(tmp_path / "runs")
        assert len(json.loads(viewer.fresh_index()[0])["runs"]) == 2


def test_the_index_grows_with_the_run_until_it_is_finished(viewer: Viewer, tmp_path: Path) -> None:
    tag = asked(viewer, "/api/index")[1]["ETag"]
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "train/reward": 0.5}\n')
    status, headers, body = asked(viewer, "/api/index", If_None_Match=tag)
    assert status == 200 and headers["ETag"] != tag
    assert json.loads(body)["runs"][0]["metrics"]["train/reward"] == {"x": [1, 2], "y": [0.25, 0.5]}
    for run in "ab":
        assert json.loads(asked(viewer, "/api/index")[2])["live"]
        (tmp_path / run / "finished.json").write_text("{}")
    assert not json.loads(asked(viewer, "/api/index")[2])["live"]


@pytest.mark.parametrize(
    "target",
    [
        "/secret.txt",
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "//secret.txt",
        "/a/config.yaml",
        "/page.html",
        "/api/",
        "/api/index/",
        "/api/trace",
        "/api/trace?run=0&id=../../secret.txt",
        "/api/trace?run=0&id=%2e%2e%2fsecret.txt",
        "/api/trace?run=0&id=t1-0%00",
        "/api/trace?run=../a&id=t1-0",
        "/api/trace?run=-1&id=t1-0",
        "/api/trace?run=00&id=t1-0",
        "/api/trace?run=0&id=e0-0",  # of the other run
        "/api/trace?run=0&id=" + "9" * 60_000,
        "/api/trace?run=" + "9" * 5_000 + "&id=t1-0",
        "/api/trace?" + "a=b&" * 5_000,
    ],
    ids=lambda target: target[:40],
)
def test_what_is_no_address_is_not_found(viewer: Viewer, target: str) -> None:
    status, headers, body = asked(viewer, target)
    assert status == 404 and b"secret" not in body and len(body) < 100
    assert headers["Content-Type"].startswith("text/plain") and HEADERS.items() <= headers.items()


@pytest.mark.parametrize("target", ["http://elsewhere/secret.txt", "http://[", "//[", "*", "secret.txt"])
def test_what_is_no_path_is_refused(viewer: Viewer, target: str, capfd: pytest.CaptureFixture[str]) -> None:
    status, headers, body = asked(viewer, target, root=False)
    assert status == 403 and b"secret" not in body and HEADERS.items() <= headers.items()
    assert capfd.readouterr().err == ""


def test_a_request_line_without_an_end_is_cut_off(viewer: Viewer) -> None:
    status, headers, _ = asked(viewer, "/" + "a" * 70_000)
    assert status == 414 and headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.1:80", "[::1]:8080"])
def test_this_machine_may_ask_by_any_of_its_names(viewer: Viewer, host: str) -> None:
    assert asked(viewer, "/api/index", host=host)[0] == 200


@pytest.mark.parametrize(
    "host", [None, "", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "me@localhost", "0.0.0.0"]
)
def test_another_host_is_refused(viewer: Viewer, host: str | None) -> None:
    for target in ("/", "/api/index", "/api/trace?run=0&id=t1-0"):
        status, _, body = asked(viewer, target, host=host)
        assert status == 403 and b"sudoku" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_sent(viewer: Viewer, method: str) -> None:
    status, headers, body = asked(viewer, "/api/index", method)
    assert status == 405 and headers["Allow"] == "GET, HEAD" and b"sudoku" not in body
    assert asked(viewer, "/api/index", "TRACE")[0] == 501


def test_a_head_is_an_answer_without_a_body(viewer: Viewer) -> None:
    status, headers, body = asked(viewer, "/api/index", "HEAD")
    assert (status, body) == (200, b"") and int(headers["Content-Length"]) == len(asked(viewer, "/api/index")[2])


def test_a_taken_port_is_told(viewer: Viewer, template: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose another --port"):
        Viewer([tmp_path / "a"], viewer.server_address[1], page=template)


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_refuses_what_is_no_run_and_exports(unmask, tmp_path: Path) -> None:
    made(tmp_path / "a")
    code, out, err = unmask("view", "nowhere")
    assert (code, out) == (2, "") and mentions(err, "nowhere") and err.count("\n") == 1
    code, _, err = unmask("view", "a", "--port", "99999")
    assert code == 2 and "--port" in err and err.count("\n") == 1
    code, out, _ = unmask("view", "a", "--export", "shown.html")
    assert code == 0 and out.startswith("shown.html: ")
    text = (tmp_path / "shown.html").read_text(encoding="utf-8")
    assert 'id="unmask-data"' in text and 'id="trace-0-t1-0"' in text and "<!--unmask" not in text
    code, out, err = unmask("view", "a", "--export", "none/shown.html")
    assert (code, out) == (2, "") and mentions(err, "none", "shown.html") and err.count("\n") == 1


def test_the_command_says_in_a_sentence_what_it_left_out(
    unmask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made(tmp_path / "a") / "traces.jsonl").unlink()
    (tmp_path / "a" / "samples.jsonl").write_text(samples(1) + samples(2))
    monkeypatch.setattr(page, "LARGEST", 1)
    code, out, err = unmask("view", "a", "--export", "shown.html")
    assert code == 0 and out.startswith("shown.html: ")
    assert mentions(err, "a", "1 of 2 groups") and err.count("\n") == 1


def test_the_command_serves_until_it_is_interrupted_and_then_is_quiet(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unmask", "view", str(made(tmp_path / "a")), "--no-open"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # a suite that a script has put into the background hands on that Ctrl-C is ignored
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, **pipes, **heard) as process:
        assert process.stdout is not None and process.stderr is not None
        printed = re.match(r"http://127\.0\.0\.1:(\d+)(/\S+/) shows .*; Ctrl-C ends it\n", process.stdout.readline())
        assert printed is not None
        connection = http.client.HTTPConnection("127.0.0.1", int(printed[1]), timeout=10)
        connection.request("GET", printed[2])
        assert b"unmask-data" in connection.getresponse().read()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0 and process.stderr.read() == ""
