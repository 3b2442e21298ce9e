"""The sources in hls/: up to date, and in the form that a synthesiser needs."""

import importlib
import re
import subprocess
from pathlib import Path

import pytest

from jaxinf.kernels import card_source, named_card_kernel

HLS = Path(__file__).parents[2] / "hls"
HEADERS = sorted((HLS / "include").glob("*.hpp"))


def listed():
    lines = (HLS / "kernels.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_generated_kernels_are_up_to_date():
    remedy = "run `python scripts/generate_kernels.py` and commit what it writes"
    found = {path.stem: path.read_text() for path in (HLS / "generated").glob("*.cpp")}
    expected = {name: card_source([named_card_kernel(name)]) for name in listed()}
    assert found == expected, remedy


def test_every_family_is_listed():
    bodies = {named_card_kernel(name).body for name in listed()}
    assert bodies == {"adagrad", "adam", "adamw", "lion", "sgd_momentum"}


@pytest.mark.parametrize("name", listed())
def test_a_kernel_is_short_and_every_stream_has_two_ends(name):
    text = (HLS / "generated" / f"{name}.cpp").read_text()
    assert len(text.splitlines()) < 100
    head, stages = text.split("#pragma HLS DATAFLOW")
    declared = re.findall(r"^  (?:\w+) ([^;]+);$", head, re.MULTILINE)[1:]
    for stream in ", ".join(declared).split(", "):
        plain, _, count = stream.rstrip("]").partition("[")
        single = len(re.findall(rf"\b{plain}\b(?!\[)", stages))
        parts = len(re.findall(rf"\b{plain}\[\d+\]", stages))
        expected = (1, int(count)) if count else (2, 0)
        assert (single, parts) == expected, stream


def test_a_port_has_one_reader_and_one_writer():
    for name in listed():
        card = named_card_kernel(name)
        text = (HLS / "generated" / f"{name}.cpp").read_text()
        ports = re.findall(
            r"m_axi port=(\w+) bundle=(\w+) offset=slave depth=\d+", text
        )
        assert [port for port, _ in ports] == [p.name for p in card.pointers]
        writes = {p.name: p.is_output for p in card.pointers}
        users = [(bundle, writes[port]) for port, bundle in ports]
        assert len(set(users)) == len(users), name


def make(*arguments):
    command = ["make", "-C", HLS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_which_kernels_fit_one_card():
    """AdamW dense and top-k: 5 ports each, where a bank takes 15."""
    pair = "jaxinf_adamw_f32_update_f32_topk jaxinf_adamw_bf16_bf16_f32"
    found = make("ports", f"KERNELS={pair}")
    assert found.returncode == 0, found.stdout
    assert "2 kernels, 10 ports" in found.stdout
    for kernels, message in (("", "name the kernels"), (None, "interconnect takes 15")):
        given = [] if kernels is None else [f"KERNELS={kernels}"]
        refused = make("hw", *given)
        assert refused.returncode
        assert message in refused.stdout


def test_lint_finds_what_synthesis_forbids(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(HLS / "lint"))
    forbidden = importlib.import_module("forbidden")
    bad = tmp_path / "bad.cpp"
    bad.write_text(
        "struct S {\n  const Word* table;\n};\n"
        "#ifdef JAXINF_CSIM\nvoid f() { new int; }\n#else\nvoid g() { throw 1; }\n"
        "#endif\nint n = __builtin_clzll(x);  // new\n"
        "#pragma HLS INTERFACE m_axi port=a bundle=p depth=1 num_read_outstanding=16\n"
        "#pragma HLS INTERFACE m_axi port=b bundle=p depth=1 num_read_outstanding=16\n"
        "#pragma HLS INTERFACE m_axi port=c bundle=q num_write_outstanding=16\n"
    )
    found = "\n".join([*forbidden.found_in(bad), *forbidden.ports_in(bad)])
    for part in ("2: a pointer member", "7: exceptions", "9: 64-bit counts"):
        assert f"bad.cpp:{part}" in found
    assert "bundle p has two processes that read" in found
    assert "without bundle= or depth=" in found
    assert len(found.splitlines()) == 5


@pytest.mark.parametrize("path", HEADERS, ids=lambda path: path.name)
def test_every_labelled_loop_has_its_pragma_inside(path):
    lines = [line.strip() for line in path.read_text().splitlines()]
    labels = [i for i, line in enumerate(lines) if re.fullmatch(r"[a-z_]+:", line)]
    for i in labels:
        assert lines[i + 1].startswith("for ("), f"{path.name}: {lines[i]}"
        pragma = lines[i + 2]
        wanted = ("#pragma HLS PIPELINE II=1", "#pragma HLS UNROLL")
        assert pragma in wanted, f"{path.name}: {lines[i]}"
