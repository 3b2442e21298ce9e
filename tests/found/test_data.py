"""The trainer's data: what a file or a record means."""

import bz2
import gzip
import json
import lzma
import re

import pytest
from families import family
from jaxinf_models import PRESETS, GPT2Config
from small_llama import write_llama, write_tokenizer

from jaxinf.cli import main

RECORDS = [{"text": f"line {n} def return x"} for n in range(300)]
LINES = "".join(json.dumps(one) + "\n" for one in RECORDS)
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.fixture
def look(capsys, place, monkeypatch):
    """Says what a run would train on: the exit status, and what is printed."""
    tiny = GPT2Config(256, 16, num_layers=1, num_heads=2, num_features=16)
    monkeypatch.setitem(PRESETS, "nano", tiny)

    def call(data, *words, seq_len=8):
        capsys.readouterr()
        words = ("plan", "--data", data, "--store", place / "s", *words)
        words = (*words, "--batch-size", 2, "--seq-len", seq_len, "--steps", 1)
        status = main([str(word) for word in words])
        assert not (place / "s").exists()
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return call


def counts(printed):
    """The rows, bytes or tokens to train on and to validate."""
    found = re.search(r"([\d,]+) \w+ to train on, ([\d,]+) to validate", printed)
    assert found is not None, printed
    return found.groups()


def check_read_or_refused(look, plain, packed, name):
    """The same data as that of the plain file, or a refusal that names the kind."""
    status, printed = look(packed)
    if status:
        assert name in printed
    else:
        assert counts(printed) == counts(look(plain)[1])


@pytest.mark.parametrize("suffix", family([".gz", ".bz2", ".xz"], short=[".gz"]))
def test_a_compressed_file_is_unpacked_or_refused(look, tmp_path, suffix):
    (tmp_path / "corpus.jsonl").write_text(LINES)
    packed = tmp_path / f"corpus.jsonl{suffix}"
    module = {".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix]
    packed.write_bytes(module.compress(LINES.encode()))
    check_read_or_refused(look, tmp_path / "corpus.jsonl", packed, suffix)


def test_a_file_of_zstandard_is_unpacked_or_refused(look, tmp_path):
    """A frame of one raw block, as the format describes it."""
    (tmp_path / "corpus.jsonl").write_text(LINES)
    raw = LINES.encode()
    size = len(raw).to_bytes(4, "little")
    block = (len(raw) << 3 | 1).to_bytes(3, "little")
    packed = tmp_path / "corpus.jsonl.zst"
    packed.write_bytes(b"\x28\xb5\x2f\xfd\xa0" + size + block + raw)
    check_read_or_refused(look, tmp_path / "corpus.jsonl", packed, ".zst")


def test_a_file_of_a_folder_that_is_left_out_is_named(look, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text(LINES)
    packed = tmp_path / "data" / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(LINES.encode()))
    status, printed = look(tmp_path / "data")
    if "b.jsonl.gz" not in printed:
        assert status == 0
        packed.unlink()
        assert counts(printed) != counts(look(tmp_path / "data")[1])


def test_a_suffix_in_capitals_is_the_same_format(look, tmp_path):
    for name in ("corpus.jsonl", "CORPUS.JSONL"):
        (tmp_path / name).write_text(LINES)
    loud = look(tmp_path / "CORPUS.JSONL")[1]
    assert counts(loud) == counts(look(tmp_path / "corpus.jsonl")[1])


def test_a_byte_order_mark_is_no_part_of_the_data(look, tmp_path):
    text = json.dumps(RECORDS).encode()
    (tmp_path / "plain.json").write_bytes(text)
    (tmp_path / "marked.json").write_bytes(b"\xef\xbb\xbf" + text)
    marked = look(tmp_path / "marked.json")[1]
    assert counts(marked) == counts(look(tmp_path / "plain.json")[1])


def test_text_in_utf_16_is_decoded_or_refused(look, tmp_path):
    text = "hello world, this is text\n" * 100
    (tmp_path / "plain.txt").write_text(text)
    (tmp_path / "wide.txt").write_text(text, encoding="utf-16")
    check_read_or_refused(look, tmp_path / "plain.txt", tmp_path / "wide.txt", "UTF-16")


@pytest.mark.parametrize("field", ["tools", "tool_calls"])
def test_calls_without_a_template_are_refused_by_record(look, tmp_path, field):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant"}]
    messages[1]["content"] = "it is 3"
    record = {"messages": messages}
    if field == "tools":
        record["tools"] = [{"type": "function", "function": {"name": "f"}}]
    else:
        messages[1]["tool_calls"] = [CALL]
    write_llama(tmp_path / "hf")
    (tmp_path / "calls.jsonl").write_text((json.dumps(record) + "\n") * 100)
    model = ("--preset", tmp_path / "hf" / "config.json")
    status, printed = look(tmp_path / "calls.jsonl", *model, seq_len=60)
    assert status != 0
    assert "calls.jsonl:1" in printed
    assert "chat_template.jinja" in printed


def test_calls_reach_the_template(look, tmp_path):
    template = (
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] or '' }}"
        "{% for c in m['tool_calls'] or [] %}[{{ c['function']['name'] }}]{% endfor %}"
        "{% endfor %}{{ tools | length }}"
    )
    write_llama(tmp_path / "hf")
    write_tokenizer(tmp_path / "hf", chat_template=template)
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ]
    record = {"messages": messages, "tools": [CALL]}
    (tmp_path / "calls.jsonl").write_text((json.dumps(record) + "\n") * 100)
    # 21 tokens of text: user:hi assistant:[f] 1
    data, model = tmp_path / "calls.jsonl", ("--from", tmp_path / "hf")
    assert "longer than" in look(data, *model, seq_len=19)[1]
    assert "longer than" not in look(data, *model, seq_len=30)[1]


def test_a_text_begins_as_its_tokenizer_begins_it(look, tmp_path):
    """Each document of a folder has one token more where the tokenizer adds one."""
    text = "".join(json.dumps({"text": f"line {n:03}"}) + "\n" for n in range(300))
    (tmp_path / "text.jsonl").write_text(text)
    found = []
    for name, begins in (("plain", False), ("begins", True)):
        write_llama(tmp_path / name)
        write_tokenizer(tmp_path / name, begins=begins)
        printed = look(tmp_path / "text.jsonl", "--from", tmp_path / name)[1]
        found.append(sum(int(one.replace(",", "")) for one in counts(printed)))
    assert found[1] - found[0] == 300


def test_a_prompt_begins_as_its_tokenizer_begins_it(look, tmp_path):
    record = {"prompt": "abcd", "response": "xyz"}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(record) + "\n") * 100)
    said = []
    for name, begins in (("plain", False), ("begins", True)):
        write_llama(tmp_path / name)
        write_tokenizer(tmp_path / name, begins=begins)
        words = ("--from", tmp_path / name)
        said.append(
            [
                "longer than" in look(tmp_path / "pairs.jsonl", *words, seq_len=n)[1]
                for n in (6, 7, 8)
            ]
        )
    assert sum(said[1]) == sum(said[0]) + 1  # one token more
