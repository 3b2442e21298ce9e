"""Every model against its PyTorch original in `transformers`, on the same weights.

The originals are made here from small configs with random weights; nothing is
downloaded. They are saved as a checkpoint and read as any checkpoint is.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hub_folders import write_pictures
from jaxinf_models import abstract_params, pretrained, score, task_loss

from jaxinf.cli import main as jaxinf_main
from jaxinf.train.__main__ import main as train

pytestmark = pytest.mark.optimized

EXTRA = "needs the extra 'test-models': pip install '.[test-models]'"
torch = pytest.importorskip("torch", reason=EXTRA)
transformers = pytest.importorskip("transformers", reason=EXTRA)

# Of logits and of gradients, beside the largest of each: float32 in another order.
TOLERANCE = 2e-5
LOSS_TOLERANCE = 1e-5
BATCH, SEQ, VOCAB = 2, 12, 257  # bytes, and an end
LM = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = LM | SMALL | {"intermediate_size": 48, "max_position_embeddings": 64}
GROUPED = LLAMA | {"num_key_value_heads": 2}
BERT = LLAMA | {"type_vocab_size": 3}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
T5 |= {"num_heads": 3, "relative_attention_max_distance": 9, "num_decoder_layers": 1}
T5 |= {"relative_attention_num_buckets": 8, "decoder_start_token_id": 0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}

GPT2 = {**LM, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
VIT = {**SMALL, "intermediate_size": 48, "image_size": 12, "patch_size": 4}
GATED = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
TIED = {**GROUPED, "tie_word_embeddings": True}
FIVE, PADDED = {"num_labels": 5}, {"pad_token_id": 0}

TASKS = {
    "LMHeadModel": "causal-lm",
    "ForCausalLM": "causal-lm",
    "ForMaskedLM": "masked-lm",
    "ForSequenceClassification": "classification",
    "ForImageClassification": "classification",
    "ForConditionalGeneration": "seq2seq",
}
CLASSES = "ForSequenceClassification"
CASES = {
    "gpt2": ("GPT2", "LMHeadModel", GPT2),
    "gpt2-classes": ("GPT2", CLASSES, GPT2 | FIVE | PADDED),
    "bert": ("Bert", "ForMaskedLM", BERT),
    "bert-classes": ("Bert", CLASSES, BERT | FIVE),
    "t5": ("T5", "ForConditionalGeneration", T5),
    "t5-gated": ("T5", "ForConditionalGeneration", GATED),
    "vit": ("ViT", "ForImageClassification", VIT | {"num_labels": 7}),
    "bloom": (
        "Bloom",
        "ForCausalLM",
        LM | {"hidden_size": 36, "n_layer": 2, "n_head": 6},
    ),
    "llama": ("Llama", "ForCausalLM", LLAMA),
    "llama-3": ("Llama", "ForCausalLM", TIED | {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", "ForCausalLM", GROUPED | {"rope_parameters": LINEAR}),
    "llama-classes": ("Llama", CLASSES, GROUPED | FIVE | PADDED),
    "mistral": ("Mistral", "ForCausalLM", GROUPED | {"sliding_window": 5}),
    "qwen2": ("Qwen2", "ForCausalLM", GROUPED),
    "qwen3": ("Qwen3", "ForCausalLM", TIED | {"head_dim": 12}),
}
"""By name: the family of classes, the head's, and the config's arguments."""


def task_of(case):
    return TASKS[CASES[case][1]]


def original(case):
    """Makes their model, with weights so large that every term affects the logits."""
    kind, head, arguments = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**arguments)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, kind + head)(config).eval()
    if case == "t5-gated":  # version 1.1's own head, which this class ties
        model.lm_head.weight = torch.nn.Parameter(model.shared.weight.detach().clone())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            is_norm = "norm" in name.lower() or ".ln_" in name
            weight.copy_(0.2 * noise + (is_norm and name.endswith("weight")))
    return model


def batch_for(case, model):
    """Makes a batch with padding and weights, in our form and in theirs."""
    rng = np.random.default_rng(1)
    task = task_of(case)
    if case == "vit":
        images = rng.standard_normal((BATCH, 12, 12, 3), np.float32)
        batch = {"images": images, "labels": rng.integers(0, 7, BATCH)}
        return batch, {"pixel_values": torch.tensor(images.transpose(0, 3, 1, 2))}
    tokens = rng.integers(0, VOCAB, (BATCH, SEQ))
    segments = (np.arange(SEQ) < [[SEQ], [SEQ - 4]]).astype(np.int64)
    if case in ("gpt2-classes", "llama-classes"):  # find the last token by the pad's id
        tokens = np.where(segments, np.maximum(tokens, 1), 0)
    batch = {"tokens": tokens, "segments": segments}
    theirs = {"input_ids": tokens, "attention_mask": segments}
    if "bert" in case:
        batch["token_types"] = theirs["token_type_ids"] = rng.integers(0, 3, (2, SEQ))
    if task == "classification":
        batch["labels"] = rng.integers(0, 5, BATCH)
    elif task == "seq2seq":
        answer = rng.integers(0, VOCAB, (BATCH, 7))
        batch["decoder_tokens"] = theirs["decoder_input_ids"] = answer
        batch["targets"] = rng.integers(0, VOCAB, answer.shape)
        batch["weights"] = rng.integers(0, 2, answer.shape)
    else:
        batch["targets"] = rng.integers(0, VOCAB, tokens.shape)
        batch["weights"] = segments * rng.integers(0, 2, tokens.shape)
    return batch, {name: torch.tensor(value) for name, value in theirs.items()}


def loss_of(logits, batch):
    targets = batch["labels"] if "labels" in batch else batch["targets"]
    weights = batch.get("weights", np.ones(len(targets)))
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), torch.tensor(targets).flatten(), reduction="none"
    )
    weights = torch.tensor(weights).flatten()
    return (losses * weights).sum() / weights.sum()


def flat(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in leaves}


def read(folder, task):
    model = pretrained(folder, task)
    graphdef, _ = abstract_params(model.config)
    return model.config, graphdef, jax.tree.map(jnp.asarray, model.params)


def difference(ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    return np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs))


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_agree(case, tmp_path):
    model, task = original(case), task_of(case)
    model.save_pretrained(tmp_path)
    _, graphdef, params = read(tmp_path, task)
    batch, their_batch = batch_for(case, model)
    logits = model(**their_batch).logits
    loss = loss_of(logits, batch)
    loss.backward()
    batch = jax.tree.map(jnp.asarray, batch)
    inputs = {k: v for k, v in batch.items() if k not in ("targets", "weights")}
    inputs.pop("labels", None)

    @jax.jit
    def ours(params):
        def value(params):
            return task_loss(nnx.merge(graphdef, params), task, batch)

        built = nnx.merge(graphdef, params)
        return built(**inputs), jax.value_and_grad(value)(params)

    our_logits, (our_loss, gradients) = ours(params)
    counted = np.ones(logits.shape[:-1], bool)
    if "segments" in batch and task != "seq2seq" and logits.ndim == 3:
        counted = np.asarray(batch["segments"], bool)  # results for padding are ignored
    theirs = logits.detach().numpy()[counted]
    assert theirs.std() > 0.2  # otherwise agreement would mean little
    in_logits = difference(np.asarray(our_logits)[counted], theirs)
    assert in_logits < TOLERANCE
    in_loss = abs(float(our_loss) - loss.item())
    assert in_loss < LOSS_TOLERANCE
    in_gradients = compare_gradients(
        flat(gradients), model, task, tmp_path / "gradients"
    )
    assert max(in_gradients.values()) < TOLERANCE, in_gradients
    print(
        f"| {case} | {in_logits:.1e} | {in_loss:.1e} | {max(in_gradients.values()):.1e}"
        f" of {len(in_gradients)} leaves |"
    )


def compare_gradients(gradients, model, task, folder):
    """The largest difference of each leaf's gradient, beside the largest gradient."""
    with torch.no_grad():
        for weight in model.parameters():  # saved and read by the names of the weights
            weight.copy_(
                torch.zeros_like(weight) if weight.grad is None else weight.grad
            )
    model.save_pretrained(folder)
    theirs = flat(read(folder, task)[2])
    largest = max(np.max(np.abs(g)) for g in theirs.values())
    return {
        path: np.max(np.abs(np.asarray(g) - theirs[path])) / largest
        for path, g in gradients.items()
    }


@pytest.mark.parametrize("case", ["bert", "t5", "mistral"])
def test_packed_documents_are_as_if_alone(case, tmp_path):
    """Documents in one row, with their own segments, have the scores of single rows."""
    model, task = original(case), task_of(case)
    model.save_pretrained(tmp_path)
    _, graphdef, params = read(tmp_path, task)
    batch, _ = batch_for(case, model)
    names = {"segments": 0, "decoder_segments": 0}
    if task == "seq2seq":
        batch["decoder_segments"] = np.ones_like(batch["decoder_tokens"])
    numbers = np.asarray([[1], [2]])

    def packed(name, value):
        value = value * numbers if name in names else value
        return value.reshape(1, -1)

    together = {name: packed(name, value) for name, value in batch.items()}
    built = nnx.merge(graphdef, params)
    apart = score(built, task, jax.tree.map(jnp.asarray, batch))
    packed_scores = score(built, task, jax.tree.map(jnp.asarray, together))
    np.testing.assert_allclose(packed_scores, apart, rtol=1e-5)


CLASSIFIERS = ["gpt2-classes", "bert-classes", "llama-classes"]


@pytest.mark.parametrize("case", [*CLASSIFIERS, "t5-gated", "vit", "llama-3"])
def test_transformers_loads_an_export_with_the_same_bits(case, place):
    """In bfloat16, through sharded files, a store, and back."""
    model = original(case).to(torch.bfloat16)
    model.save_pretrained(place / "hf", max_shard_size="20KB")
    data, records = place / "data", [{"text": "a", "label": n} for n in range(5)]
    if case not in CLASSIFIERS:
        records = [{"prompt": "a", "response": "b"}]
    if case == "vit":
        write_pictures(data, num_classes=7, size=12)
    else:
        data.mkdir()
        (data / "records.jsonl").write_text("\n".join(map(json.dumps, 8 * records)))
    words = ("--from", place / "hf", "--task", task_of(case), "--data", data)
    words += ("--store", place / "s", "--steps", 0)
    assert train([str(word) for word in words]) == 0
    words = ("checkpoint", "export", place / "s", place / "out")
    words += ("--format", "huggingface", "--dtype", "bfloat16")
    assert jaxinf_main([str(word) for word in words]) == 0
    again, report = type(model).from_pretrained(
        place / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    theirs, ours = model.state_dict(), again.state_dict()
    assert theirs.keys() == ours.keys()
    for name, values in theirs.items():
        assert torch.equal(values.view(torch.int16), ours[name].view(torch.int16)), name


@pytest.mark.parametrize("case", ["bert", "t5-gated", "vit", "qwen3"])
def test_bfloat16_and_dropout_and_remat(case, tmp_path):
    model, task = original(case), task_of(case)
    model.save_pretrained(tmp_path)
    config, graphdef, params = read(tmp_path, task)
    config = dataclasses.replace(config, dtype="bfloat16", dropout=0.5)
    mixed, _ = abstract_params(config)
    batch, _ = batch_for(case, model)
    batch = jax.tree.map(jnp.asarray, batch)

    @jax.jit
    def losses(params):
        def value(graphdef, **options):
            return task_loss(nnx.merge(graphdef, params), task, batch, **options)

        keys = jax.random.split(jax.random.key(0), 2)
        plain = value(mixed, key=keys[0])
        return (
            value(graphdef),
            value(mixed),
            plain,
            value(mixed, key=keys[0], remat=jax.checkpoint),
            value(mixed, key=keys[1]),
        )

    exact, rounded, dropped, again, other = map(float, losses(params))
    assert 0 < abs(rounded - exact) < 0.1 * exact
    assert dropped == pytest.approx(again, rel=1e-2)
    assert len({rounded, dropped, other}) == 3
    names = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
    assert names == {"float32"}
