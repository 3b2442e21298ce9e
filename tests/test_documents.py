"""The code of every document runs as printed, in order.

Each page has a reader: one namespace and one empty directory, in which its blocks run
one after another, Python by `exec`, commands by the same functions as from a shell.
Some sections have readers of their own. Tables say what a reader has beforehand, what
must hold at the end, and what is not run, with the reason.
"""

import functools
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from jaxinf_models import PRESETS, GPT2Config

from jaxinf.cli import main as jaxinf_main
from jaxinf.train.__main__ import main as train_main

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "hls/**/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)

SIZES = {
    r"^jaxinf train\b": "python -m jaxinf.train",
    r"-m jaxinf\.train\b": "-m jaxinf.train --steps 2 --batch-size 2",
    r"(-m jaxinf\.train\b)(?!.*--model vit)": r"\1 --seq-len 16",
    r"(-m jaxinf\.train\b)(?!.*(--data|run-log))": (r"\1 --data 'corpus/**/*.txt'"),
    r"--preset [\w.-]+": "--preset nano",
    r"--steps [1-9]\d*": "--steps 2",
    r"--batch-size \d+": "--batch-size 2",
    r"--seq-len \d+": "--seq-len 16",
    r"--eval-every \d+": "--eval-every 1",
    r"--size \d+[KMG]iB": "--size 8MiB",
    r" 'h1\[0-9\]/\*' 'h2\[0-3\]/\*'": "",
    r"keep_steps=100": "keep_steps=2",
    r"(range\((?:stream\.)?store\.step), \d+": r"\1, 2",
    r"% 100 == 0": "% 2 == 0",
    r"make_mesh\(\(2, 2\)": "make_mesh((1, 1)",
}
"""What a test has in place of printed steps, models, data, meshes and processes."""

NANO = GPT2Config(256, 16, num_layers=1, num_heads=2, num_features=16)
"""GPT-2's smallest preset, made smaller."""

NOT_RUN = {
    "jaxinf store copy PATH PATH --processes": "tests/store/test_copying.py runs it",
    "jaxinf store copy /mnt/nvme0/run /mnt/nvme": "tests/store/test_copying.py runs it",
    "jaxinf checkpoint export /mnt/nvme0/run s3": "tests/object_store runs it",
    "jaxinf store copy s3": "tests/object_store runs it",
    "python -m jaxinf.train --store /mnt/nvme0/run --checkpoint-every": "S3; "
    "tests/train/test_modes.py runs it with file",
    "make test": "the suite itself",
    "make lint": "the suite itself",
    "make docs": "time: a minute",
    "make coverage": "the suite itself",
    "make faults": "time: an hour",
    ".ci/run": "the suite itself",
    "pip install": "network",
    "make -C hls hw": "needs Vitis",
    "export JAXINF_XCLBIN=": "needs a SmartSSD",
    "python -m jaxinf.train --store runs/cards/store": "needs a SmartSSD",
    "python -m jaxinf.train --config docs/": "time: tests/train/test_recipes.py",
    "python scripts/recipe_sizes.py": "time: tests/train/test_recipes.py",
    "make csim": "time: make test-hls runs it",
    "make ports": "time: make test-hls runs it",
    "make hw": "needs Vitis",
    "make generated/": "writes into the checkout; tests/hls runs it",
    "python scripts/bench_": "time: tests/repro/test_scripts.py runs them small",
    "python scripts/repro/": "time: hours",
}
"""Beginnings of commands that are not run, with the reason."""

RUN_BY_THE_SITE = ("{code-cell} python", "{eval-rst}")
"""Cells of notebooks and the reference, which `make docs` runs."""

SHARED = {
    "docs/integrations.md": "In your own program",
    "docs/streaming.md": "In each library",
}
"""Sections whose subsections have readers of their own, who run its blocks first."""

ALONE = {
    ("docs/finetune.md", "A loss of your own: DPO"),
    ("docs/checkpoints.md", "With your own Orbax loop"),
    ("docs/checkpoints.md", "A program's own checkpoints"),
}
"""Other sections that have a reader of their own."""

ALL = """
import jax, jax.numpy as jnp, numpy as np, optax, jaxinf
import equinox as eqx, flax.linen as nn, haiku as hk
from flax import nnx

params = {"w": jnp.ones((8, 4)), "b": jnp.zeros((4,))}
key, tx = jax.random.key(0), optax.adamw(3e-4)
x, y = jax.random.normal(key, (2, 4, 8))
batch = x

def init_fn(key):
    return {"w": jax.random.normal(key, (8, 4)), "b": jnp.zeros((4,))}

def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"] - 1.0) ** 2)

class Data:  # an endless stream, in pieces of three batches
    def __iter__(self):
        return iter([batch] * 3)

    def __next__(self):
        return batch

data = Data()

Path("corpus/one").mkdir(parents=True)
Path("corpus/one/two.txt").write_text("def f(x): return x\\n" * 500)
"""
"""The names that all readers have."""

BEFORE = {
    "docs/checkpoints.md: With your own Orbax loop": """
num_steps = 3
init_params = lambda: init_fn(key)
numbers = iter(range(3))
batch = lambda number: jax.random.normal(jax.random.key(next(numbers)), (4, 8))
def step(tx, params, state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss
""",
    "docs/checkpoints.md: A program's own checkpoints": """
store = jaxinf.open_store("run")
tx = jaxinf.smart_update(tx, store)
state = tx.init(params)
""",
    "docs/checkpoints.md": """
import orbax.checkpoint as ocp
from safetensors.numpy import save_file
plain, step = optax.adamw(1e-2), 6
params = {"out": jnp.arange(7.0), "h": {"kernel": jnp.ones((3, 5))}}
def train(tx, params):
    state = tx.init(params)
    update, add = jax.jit(tx.update), jax.jit(optax.apply_updates)
    for _ in range(step):
        updates, state = update(jax.tree.map(jnp.sin, params), state, params)
        params = add(params, updates)
    return params, state
trained = train(plain, params)
saved = {"params": trained[0], "opt_state": trained[1]}
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(Path("ckpts/plain/6").absolute(), saved)
out, kernel = map(np.asarray, (trained[0]["out"], trained[0]["h"]["kernel"]))
Path("weights/folder").mkdir(parents=True)
weights = {"out": out, "h.kernel": kernel}
save_file(weights, "weights/folder/model.safetensors")
with jaxinf.open_store("mnt/nvme0/run") as store:
    train(jaxinf.smart_update(plain, store), params)
    assert store.checkpoint() == "6"
tx = plain
""",
    "docs/compression.md": "store = jaxinf.open_store('store')",
    "docs/finetune.md": """
import json
record = json.dumps({"prompt": "one", "response": "two"})
Path("pairs.jsonl").write_text((record + "\\n") * 50)
sh("python -m jaxinf.train --store first --model llama\\n"
   "jaxinf checkpoint export first Llama-2-7b-hf --format huggingface")
""",
    "docs/finetune.md: A loss of your own: DPO": """
sh("python -m jaxinf.train --store first --model llama\\n"
   "jaxinf checkpoint export first Llama-2-7b-hf --format huggingface")
texts = np.arange(64).reshape(2, 2, 16)
batches = [{kind: texts[n] + n for n, kind in enumerate(("better", "worse"))}] * 2
batches = [b | {f"{kind}_answer": b[kind] % 2 for kind in b} for b in batches]
""",
    "docs/integrations.md": "STORE = str(Path('STORE').absolute())",
    "docs/models.md": "sh('python -m jaxinf.train --store first\\n"
    "jaxinf checkpoint export first DIR --format huggingface')",
    "docs/performance.md": "store = jaxinf.open_store('store')",
    "docs/streaming.md": "path, score_fn = Path('store'), loss_fn",
    "docs/training.md": """
import json, pyarrow, pyarrow.parquet
from PIL import Image
from small_tokenizers import word_level
pair = {"prompt": "one", "response": "two"}
said = [{"role": r, "content": c} for r, c in (("user", "one"), ("assistant", "two"))]
for name, record in (("pairs.jsonl", pair), ("chat.jsonl", {"messages": said})):
    Path(name).write_text((json.dumps(record) + "\\n") * 50)
form = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
word_level(
    Path("tokenizer"), ["one", "two"], "</s>", eos_token="</s>", chat_template=form
)
record = json.dumps({"text": "one", "label": 1})
Path("labels.jsonl").write_text((record + "\\n") * 50)
texts = pyarrow.table({"text": ["one two three"] * 50})
pyarrow.parquet.write_table(texts, "wiki.parquet")
for number in range(40):
    picture = Path("pictures", "odd" if number % 2 else "even", f"{number}.png")
    picture.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (number, 0, 0)).save(picture)
Path("run.toml").write_text('store = "runs/file/store"\\n')
""",
}
"""What else a reader of a page, or of a section, has: Python, and `sh` for commands."""

AFTER = {
    "docs/checkpoints.md: With your own Orbax loop": """
assert jaxinf.store_of("mnt/nvme0/run").step == 3
""",
    "docs/checkpoints.md": """
found = params, state
jax.tree.map(np.testing.assert_array_equal, found, trained)
imported = store.params(like=params)
jax.tree.map(np.testing.assert_array_equal, imported, trained[0])
""",
    "docs/compression.md": "tx.update(params, tx.init(params), params)",
    "docs/integrations.md": "opened = jaxinf.store_of(STORE); opened.wait()\n"
    "assert opened.step >= 1 or 'held' in globals()",
    "docs/performance.md": "tx.update(params, tx.init(params), params)",
    "docs/streaming.md": "assert float(loss) > 0",
}
"""What must hold when the last block of a page, or of a section, has run."""


@dataclass(frozen=True)
class Block:
    """Code of a page, below headings."""

    page: str
    headings: tuple[str, ...]
    line: int
    language: str
    text: str


@functools.cache
def blocks_of(page):
    found, levels, opened, held = [], [], None, []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        fence = re.match(r" *```(.*)", line)
        if opened and fence:
            text = textwrap.dedent("\n".join(held))
            headings = tuple(title for _, title in levels)
            found.append(Block(page, headings, *opened, text))
            opened = None
        elif fence:
            opened, held = (number, fence[1]), []
        elif opened:
            held.append(line)
        elif heading := re.match(r"(#+) (.*)", line):
            level = len(heading[1])
            levels = [*(one for one in levels if one[0] < level), (level, heading[2])]
    return found


def readers():
    """Returns by name the blocks that a reader runs; the name begins with the page."""
    found = {}
    for page in PAGES:
        shared = SHARED.get(page)
        for block in blocks_of(page):
            if block.language not in ("python", "sh"):
                continue
            *_, above, title = ("", *block.headings)
            if shared is not None and above == shared:
                name, first = f"{page}: {title}", block.headings[:-1]
                start = [b for b in blocks_of(page) if b.headings == first]
                found.setdefault(name, start).append(block)
            elif (page, title) in ALONE:
                found.setdefault(f"{page}: {title}", []).append(block)
            elif title != shared:
                found.setdefault(page, []).append(block)
    return found


READERS = readers()


def commands(text):
    return [s for s in re.sub(r"\\\n", " ", text).split("\n") if s.strip()]


def run_command(words):
    """Runs what a shell would, in this process."""
    match words:
        case [python, "-m", "jaxinf.train", *rest] if python.endswith("python"):
            assert train_main(rest) == 0, words
        case ["python", script, *rest]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "argv", [script, *rest])
                runpy.run_path(str(ROOT / script), run_name="__main__")
        case ["jaxinf", *rest]:
            assert jaxinf_main(rest) == 0, words
        case ["make", target]:
            built = ["-o", ".venv/package", "-o", ".venv/installed"]
            made = ["make", "-n", *built, target]
            own = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
            done = subprocess.run(
                made, cwd=ROOT, env=own, capture_output=True, text=True, check=True
            )
            run_commands(done.stdout)
        case _:
            pytest.fail(f"{words}: no such program here; see NOT_RUN")


def run_commands(text):
    for command in commands(text):
        if not command.startswith(tuple(NOT_RUN)):
            run_command(shlex.split(sized(command), comments=True))


def sized(text):
    """Returns the text with sizes for a test, and places in its directory."""
    for printed, replacement in SIZES.items():
        text = re.sub(printed, replacement, text)
    places = r"(?<=[\"'\s=])/(?=(mnt|exports|ckpts|weights)/)"
    return re.sub(places, f"{Path.cwd()}/", text)


def run_block(block, names):
    if block.language == "sh":
        run_commands(block.text)
        return
    code = "\n" * block.line + sized(block.text)  # a traceback has the page's lines
    exec(compile(code, str(ROOT / block.page), "exec"), names)


@pytest.mark.long
@pytest.mark.parametrize("reader", READERS)
def test_a_document_runs_as_printed(reader, place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setitem(PRESETS, "nano", NANO)
    for drive in ("mnt/nvme0", "mnt/nvme1"):
        Path(drive).mkdir(parents=True)
    page = reader.partition(":")[0]
    kind = page if page in SHARED else reader
    names = {"Path": Path, "ROOT": ROOT, "re": re, "sh": run_commands}
    try:
        exec(ALL + BEFORE.get(kind, ""), names)
        for block in READERS[reader]:
            run_block(block, names)
        exec(AFTER.get(kind, ""), names)
    finally:
        for one in reversed([*names.values()]):
            if type(one).__module__.startswith("jaxinf.") and hasattr(one, "close"):
                one.close()


@pytest.mark.parametrize("page", PAGES)
def test_a_fence_has_a_language(page):
    others = {
        f"{page}:{block.line}"
        for block in blocks_of(page)
        if block.language not in ("python", "sh", "text", *RUN_BY_THE_SITE)
    }
    assert not others, "expected ```python, ```sh, or ```text for what is no code"
    text = re.sub(r"(?ms)^ *```.*?^ *```$", "", (ROOT / page).read_text())
    indented = re.findall(r"(?m)^\n {4}(?![-*\d ]).*", text)
    assert not indented, "expected code between fences"


@pytest.mark.parametrize("page", PAGES)
def test_a_link_leads_to_a_file(page):
    path = ROOT / page
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", path.read_text())
    assert not [x for x in targets if not (path.parent / x).exists()]
