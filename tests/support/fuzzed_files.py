"""Small whole files for each reader of `reader_fuzzing`, and hostile changes of them.

A seed is a folder: content by relative path. The first cases are the seeds themselves;
each later one is a seed with a changed file, of the form that its reader parses.
"""

import functools
import gzip
import io
import json
import struct
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import tokenizers
from fuzzing import NUMBERS, OTHERS, TEXTS, changed, nested
from jaxinf_models import (
    BertConfig,
    LlamaConfig,
    T5Config,
    ViTConfig,
    abstract_params,
    config_to_json,
    family_of,
)
from PIL import Image
from safetensors.numpy import save

from jaxinf.exchange import Architecture, write_config

_LENGTHS = (0, 1, 2, 7, 255, 2**15, 2**16 - 1, 2**20, 2**27, 2**31 - 1, 2**31,
            2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1)  # fmt: skip
_EXTRAS = (b"\0" * 9, b"\xff" * 9, b"[" * 100_000, b'{"a":' * 50_000, b"\n", b'"',
           b"\\", b"1" * 5000, b'"\\ud800"', b"NaN", b"\x1b[2J")  # fmt: skip
_DTYPES = ("|u1", "<f4", "<f8", "<i8", "<f16", "|V0", "|O", "<U9", "|S0", "<M8[s]",
           "<c8", ">f4", [("a", "|u1")])  # fmt: skip
_INDEX, _FILE = "model.safetensors.index.json", "model.safetensors"


def write(reader, number, rng, place):
    """Writes the files of a case into a new folder."""
    whole = seeds(reader)
    files = dict(
        whole[number % len(whole)] if number < len(whole) else _drawn(reader, rng)
    )
    for name, content in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _drawn(reader, rng):
    files = dict(rng.choice(seeds(reader)))
    names = [name for name in files if name.endswith(_CHANGED[reader])]
    name = rng.choice(names)
    change = rng.choice(_CHANGES.get(reader, (mangled,)))
    files[name] = change(rng, files[name])
    return files


def mangled(rng, raw):
    """Changes bytes, whatever they mean."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        place, kind = rng.randrange(len(raw) + 1), rng.randrange(6)
        if kind < 2 and place < len(raw):
            raw = (
                raw[:place]
                + bytes([raw[place] ^ 1 << rng.randrange(8)])
                + raw[place + 1 :]
            )
        elif kind == 2:
            number = rng.choice(_LENGTHS) + rng.choice((0, 0, -1, 1))
            form = rng.choice("<>") + rng.choice("HIQ")
            new = struct.pack(form, number % 256 ** struct.calcsize(form))
            raw = raw[:place] + new + raw[place + len(new) :]
        elif kind == 3:
            raw = raw[:place] if rng.random() < 0.5 else raw[place:] or raw
        elif kind == 4:
            raw = raw[:place] + rng.choice(_EXTRAS) + raw[place:]
        else:
            start = rng.randrange(len(raw) + 1)
            raw = (
                raw[:place] + raw[start : start + rng.choice((1, 8, 400))] + raw[place:]
            )
    return raw


def edited(rng, raw):
    """Changes values and keys of a JSON object."""
    kinds = ("put", "put", "put", "drop", "twice", "swap", "add")
    values = (*TEXTS, *NUMBERS, *OTHERS, nested(90), nested(200))
    edits = [
        (
            rng.choice(kinds),
            [rng.randrange(10**6) for _ in range(rng.randint(1, 6))],
            rng.choice(values),
        )
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    return changed(raw, edits, False)


def _edited_line(rng, raw):
    lines = raw.splitlines()
    number = rng.randrange(len(lines))
    line = edited(rng, lines[number])
    lines[number] = json.dumps(json.loads(line)).encode()
    return b"\n".join(lines)


def _lying_size(rng, raw):
    """Changes width and height, with a checksum that is right again."""
    size = [rng.choice((0, 1, 8, 5000, 20_000, 65_500, 65_535)) for _ in range(2)]
    if raw.startswith(b"\x89PNG"):
        head = raw[12:16] + struct.pack(">II", *size) + raw[24:29]
        return raw[:12] + head + struct.pack(">I", zlib.crc32(head)) + raw[33:]
    for mark in (b"\xff\xc0", b"\xff\xc2"):
        if raw.startswith(b"\xff\xd8") and mark in raw:
            at = raw.index(mark) + 5
            return raw[:at] + struct.pack(">HH", *size) + raw[at + 4 :]
    if raw.startswith(b"GIF"):
        return raw[:6] + struct.pack("<HH", *size) + raw[10:]
    if raw.startswith(b"BM"):
        return raw[:18] + struct.pack("<ii", *size) + raw[26:]
    if raw.startswith(b"P6"):
        return b"P6\n%d %d\n255\n" % (size[0], size[1]) + raw[-48:]
    return mangled(rng, raw)


_CHANGES = {
    "jsonl": (mangled, _edited_line, _edited_line),
    "images": (mangled, mangled, _lying_size),
    "tokenizer": (mangled, edited, edited, edited),
    "config": (mangled, edited, edited, edited),
    "safetensors": (mangled, edited),
    "index": (mangled, edited, edited),
}
_CHANGED = {  # the ends of the names of the files that are changed
    "text": ".txt",
    "jsonl": ".jsonl",
    "json": "a.json",
    "parquet": ".parquet",
    "packed": ".gz",
    "images": (".png", ".jpg", ".gif", ".bmp", ".tiff", ".ppm", ".webp"),
    "tokenizer": "tokenizer.json",
    "config": "config.json",
    "safetensors": ".safetensors",
    "index": _INDEX,
}


@functools.cache
def seeds(reader):
    """Returns whole folders for a reader."""
    return _SEEDS[reader]()


def _rows():
    """Returns tables of each form of records, and the tasks that they suit."""
    words = ["one two three four", "two three ü one two", "nine one two 🙂", "one " * 9]
    turns = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    forms = {
        "causal-lm": [
            {"text": w, "note": n, "other": None} for n, w in enumerate(words)
        ],
        "seq2seq": [{"prompt": w, "response": "two " + w} for w in words],
        "classification": [{"text": w, "label": n % 2} for n, w in enumerate(words)],
    }
    return [*forms.items(), ("causal-lm", [{"messages": turns, "id": 1}] * 4)]


def _text_seeds():
    plain = ("one two three\n" * 20).encode()
    word = {"a.txt": plain, "tokenizer.json": _tokenizer_json("word")}
    return [{"a.txt": plain, "b/c.txt": "ünï 🙂\n".encode() * 20}, word]


def _jsonl_seeds():
    return [
        {"a.jsonl": "\n".join(map(json.dumps, rows)).encode(), "task": task.encode()}
        for task, rows in _rows()
    ]


def _json_seeds():
    return [
        {"a.json": json.dumps(rows).encode(), "task": task.encode()}
        for task, rows in _rows()
    ]


def _tables():
    return [(task, pa.Table.from_pylist(rows)) for task, rows in _rows()]


def _parquet_seeds():
    found = []
    for (task, table), compression in zip(
        _tables(), ("none", "snappy") * 2, strict=True
    ):
        file = io.BytesIO()
        pyarrow.parquet.write_table(table, file, compression=compression)
        found.append({"a.parquet": file.getvalue(), "task": task.encode()})
    return found


def _packed_seeds():
    lines = "\n".join(json.dumps(row) for row in _rows()[0][1]).encode()
    return [{"a.jsonl.gz": gzip.compress(lines)}]


def _image_seeds():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    image = Image.fromarray(pixels)
    kinds = [("png", {}), ("jpg", {}), ("jpg", {"progressive": True}), ("gif", {}),
             ("bmp", {}), ("tiff", {"compression": "tiff_lzw"}), ("ppm", {}),
             ("webp", {}), ("tiff", {}), ("png", {"mode": "P"})]  # fmt: skip
    found = []
    for suffix, options in kinds:
        file, mode = io.BytesIO(), options.pop("mode", "RGB")
        form = {"jpg": "jpeg"}.get(suffix, suffix)
        image.convert(mode).save(file, form, **options)
        raw = file.getvalue()
        found.append({f"p/cat/1.{suffix}": raw, f"p/dog/2.{suffix}": raw})
    return found


def _tokenizer_json(kind):
    words = {
        w: i for i, w in enumerate(["[UNK]", "one", "two", "three", "</s>", "[PAD]"])
    }
    if kind == "word":
        tokenizer = tokenizers.Tokenizer(
            tokenizers.models.WordLevel(words, unk_token="[UNK]")
        )
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["</s>", "[PAD]"])
        tokenizer.enable_padding(length=9)
        return tokenizer.to_str().encode()
    trainers, models = tokenizers.trainers, tokenizers.models
    model, trainer = {
        "bpe": (models.BPE(), trainers.BpeTrainer),
        "unigram": (models.Unigram(), trainers.UnigramTrainer),
        "piece": (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer),
    }[kind]
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.NFKC(), tokenizers.normalizers.Replace(" ", "_")]
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    named = {"initial_alphabet": list("abc_one")}
    if kind == "unigram":
        named = {"unk_token": "[UNK]"}
    tokenizer.train_from_iterator(
        ["one two three", "three two"] * 9,
        trainer(vocab_size=60, show_progress=False, special_tokens=["[UNK]"], **named),
    )
    return tokenizer.to_str().encode()


def _tokenizer_seeds():
    return [
        {"tokenizer.json": _tokenizer_json(kind), "tokenizer_config.json": b"{}"}
        for kind in ("word", "bpe", "piece", "unigram")
    ]


def _weight_seeds(num_files=1):
    configs = (
        LlamaConfig(64, 16, 1, 4, 2, 16, 24, window=7),
        BertConfig(1, 2, 16, 24, 64, 16, head="classification", num_labels=3),
        T5Config(65, 1, 2, 2, 16, 8, 24, mlp="gated-gelu", tied_embeddings=False),
        ViTConfig(1, 2, 16, 24, 8, 4, num_labels=3),
    )
    return [_weight_folder(config, num_files) for config in configs]


def _weight_folder(config, num_files):
    family = family_of(config)
    found = Architecture(family.name, config_to_json(config), "")
    task = getattr(config, "head", family.tasks[0])
    tensors = {}
    for path, leaf in _flat(abstract_params(config)[1]):
        name, axes = found.family.find(path)
        shape = [leaf.shape[a] for a in np.argsort(axes)] if axes else leaf.shape
        tensors[name] = np.ones(shape, np.float16)
    files = {"config.json": json.dumps(write_config(found, task, "float16")).encode()}
    if num_files == 1:
        return {**files, _FILE: save(tensors)}
    places = {name: f"m-{n % num_files}.safetensors" for n, name in enumerate(tensors)}
    for file in set(places.values()):
        members = {name: x for name, x in tensors.items() if places[name] == file}
        files[file] = save(members)
    return {**files, _INDEX: json.dumps({"weight_map": places}).encode()}


def _flat(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


_SEEDS = {
    "text": _text_seeds,
    "jsonl": _jsonl_seeds,
    "json": _json_seeds,
    "parquet": _parquet_seeds,
    "packed": _packed_seeds,
    "images": _image_seeds,
    "tokenizer": _tokenizer_seeds,
    "config": _weight_seeds,
    "safetensors": _weight_seeds,
    "index": lambda: _weight_seeds(2),
}
