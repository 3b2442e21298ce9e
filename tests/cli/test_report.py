"""`jaxinf report`: one page that opens offline, whatever a log says."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from jaxinf.cli import main, run_logs

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def line_of(step, **more):
    line = {"step": step, "loss": 5 / step, "tokens": 64, "step_s": 0.1}
    line |= {"phases": {"read": 0.02, "program": 0.07}, "rss_bytes": 1 << 28}
    line |= {"memory": {"host": 1 << 28, "device": None}, "drive_read_bytes": 1 << 20}
    return json.dumps(line | more) + "\n"


@pytest.fixture
def log_dir(tmp_path):
    folder = tmp_path / "run-log"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(map(line_of, range(1, 6))))
    rows = ((0, 0.5, 0.1), (2, 1.25, 0.5), (5, 1.5, 0.25))
    text = '{"step": %s, "loss": %s, "accuracy": %s}\n'
    (folder / "validation.jsonl").write_text("".join(text % row for row in rows))
    config = {"steps": 5, "data": ["a.txt"], "versions": {"jaxinf": "0.1.0"}}
    config |= {"seq_len": 8, "memory": None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Page(HTMLParser):
    """A page's scripts, references to other places, headings, and cells."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.places, self.scripts, self.texts = [], [], [], []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._inside = tag
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "action"):
                self.places.append(value)

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        (self.scripts if self._inside == "script" else self.texts).append(data)


def page_of(folder):
    assert main(["report", str(folder)]) == 0
    text = (folder / "report.html").read_text()
    return text, Page(text)


def test_a_page_says_it_all_and_loads_nothing(log_dir, capsys):
    text, page = page_of(log_dir)
    assert capsys.readouterr().out == f"{log_dir / 'report.html'}\n"
    assert all(place.startswith("#") for place in page.places)
    assert "default-src 'none'" in text.replace("&#x27;", "'")
    said = " ".join(" ".join(page.texts).split())
    for row in (
        *("steps 5", "last loss 1", "throughput, median 640 tokens a second"),
        *("held-out accuracy 25.0%", "best step, held out 2, with a loss of 1.25"),
    ):
        assert f" {row} " in said
    assert "null" not in said
    assert text.count('class="plotly-graph-div"') == 5
    assert len(page.scripts) == page.tags.count("script") == 2
    assert "displayModeBar: false" in page.scripts[1]
    figures = json.loads(page.scripts[1].split(" = ", 1)[1].split(";\n")[0])
    [loss, held_out], _ = figures[0]
    assert (loss["x"], loss["y"][1:4:2]) == ([1, 2, 3, 4, 5], [2.5, 1.25])
    assert (held_out["x"][2], held_out["y"][2], held_out["mode"]) == (5, 1.5, "markers")
    assert figures[-1][1] == "MiB"
    for script in page.scripts:  # the browser runs those of these digests alone
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"sha256-{digest}" in text


def test_what_a_log_says_is_never_a_script(log_dir):
    scripts = page_of(log_dir)[1].tags.count("script")
    evil = {"step": 6, "phases": {EVIL: 1.0}, "memory": {EVIL: 0.5}}
    with (log_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(evil) + "\n")
    config = {"data": EVIL, EVIL: 1, "versions": {EVIL: EVIL}}
    (log_dir / "config.json").write_text(json.dumps(config))
    folder = log_dir.rename(log_dir.with_name("run <script>alert(3)"))
    text, page = page_of(folder)
    assert page.tags.count("script") == scripts
    assert "img" not in page.tags
    assert EVIL not in text
    assert EVIL in page.texts  # shown as it is


def test_steps_of_a_run_that_went_on(log_dir):
    (log_dir / "metrics.jsonl").write_text("".join(map(line_of, range(21, 41))))
    assert "21 to 40" in page_of(log_dir)[1].texts


def test_damaged_logs_are_shown_as_far_as_they_go(log_dir):
    deep = b"[" * 100_000 + b"\n"
    with (log_dir / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n{}\n7\n" + deep + b"9" * 5000 + b"\n")
        file.write(line_of(6, loss=10**400, rss_bytes="many", phases=[1]).encode())
        file.write(b"x" * (3 << 20) + b"\n")
        file.write(line_of(7).encode()[:40])
    (log_dir / "metrics.last.json").write_text("{}")
    many = {f"{n}": 1 for n in range(50_000)}  # columns, of which few are kept
    metrics = log_dir / "metrics.jsonl"
    metrics.write_bytes(line_of(1, phases=many).encode() + metrics.read_bytes())
    assert len(run_logs.read_logs(log_dir).columns) < 70
    config = {"steps": 5, "versions": {"jaxinf": "99.0.0"}}
    (log_dir / "config.json").write_text(json.dumps(config))
    said = " ".join(page_of(log_dir)[1].texts)
    assert re.search(r"\d lines are no steps", said)
    assert "the last line is cut off" in said
    assert "the run had not ended" in said
    assert "version of jaxinf" in said


@pytest.mark.parametrize("content", [None, "", "{}\n"])
def test_logs_without_a_step_are_refused(tmp_path, content, capsys):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    assert re.search(r"expected a (log directory|line)", capsys.readouterr().err)
    assert not (tmp_path / "report.html").exists()
