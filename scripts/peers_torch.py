"""DeepSpeed as a contender of scripts/bench_peers.py.

It runs in an environment of its own, with torch and deepspeed; jaxinf is not there. It
is ZeRO stage 3 with what it offers for drives: the optimizer's state, and for a whole
step the params, too; on the processor, with all cores that the process may use.

Invariant: the model has the shapes of `jaxinf_models.GPT2`, float32, and the same batch
sizes; its numbers are others.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import contextlib
import os
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peer_turns import Contender, serve

NUM_CORES = len(os.sched_getaffinity(0))
os.environ.setdefault("OMP_NUM_THREADS", str(NUM_CORES))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# DeepSpeed builds its C++ with the ninja that stands beside this Python.
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

LEARNING_RATE = 3e-4
SUBGROUP_PARAMS = 1 << 24
UPDATE_TOKENS = 8


class Block(nn.Module):
    """A layer of a GPT-2."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, seq, width] to the same shape."""
        heads = (*x.shape[:2], self.num_heads, -1)
        parts = self.qkv(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.view(heads).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """A GPT-2 whose head is its table of tokens; calls return the loss."""

    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        width = shape["num_features"]
        self.wte = nn.Embedding(shape["vocab_size"], width)
        self.wpe = nn.Embedding(shape["num_positions"], width)
        self.blocks = nn.ModuleList(
            Block(width, shape["num_heads"]) for _ in range(shape["num_layers"])
        )
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, shape["vocab_size"], bias=False)
        for module in (self.wte, self.wpe):
            nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Maps two int [batch, seq] to a scalar."""
        positions = torch.arange(tokens.shape[1])
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class DeepSpeed:
    """ZeRO stage 3, its optimizer's state on the drive, and for a step its params.

    The update alone is what is timed of a step of few tokens if only that is asked for:
    the call of `step`, and the writing of gradients, which ends the backward pass.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        import deepspeed

        _keep_dtype()
        _join_alone()
        deepspeed.init_distributed("gloo")
        self._is_whole = given["contender"] == "deepspeed step"
        self._parts = _parts(given, is_whole=self._is_whole)
        model = GPT2(given["shape"])
        sizes = [param.numel() for param in model.parameters()]
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=self._config(given, max(sizes)),
        )
        self._written_s = 0.0
        if not self._is_whole:
            self._time_gradients()
        if wrong := {param.dtype for param in model.parameters()} - {torch.float32}:
            raise TypeError(f"expected float32 params, found {wrong}")
        names = ("deepspeed", "torch")
        self.about = {"params": sum(sizes), **{name: version(name) for name in names}}

    def _config(self, given: dict[str, Any], largest: int) -> dict[str, Any]:
        drive = {"device": "nvme", "nvme_path": given["place"]}
        ways = {"pipeline_read": True, "pipeline_write": True}
        zero = {
            "stage": 3,
            "sub_group_size": SUBGROUP_PARAMS,
            "contiguous_gradients": True,
            "overlap_comm": False,
            "reduce_bucket_size": 10_000_000,
            "stage3_prefetch_bucket_size": 10_000_000,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {**drive, **ways, "buffer_count": 12},
        }
        if self._is_whole:
            beside = {"buffer_count": 8, "buffer_size": max(largest, 50_000_000)}
            zero["offload_param"] = {**drive, **beside, "max_in_cpu": 0}
            zero["stage3_max_live_parameters"] = 100_000_000
            zero["stage3_max_reuse_distance"] = 100_000_000
        return {
            "train_micro_batch_size_per_gpu": len(self._parts[0][0]),
            "gradient_accumulation_steps": len(self._parts),
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
            "zero_optimization": zero,
            "steps_per_print": 1_000_000,
            "aio": {
                "block_size": 1 << 20,
                "queue_depth": 16,
                "intra_op_parallelism": 1,
                "single_submit": False,
                "overlap_events": True,
            },
        }

    def _time_gradients(self) -> None:
        write = self._optimizer._swap_out_offload_fp32_gradients

        def timed(*arguments: Any, **named: Any) -> None:
            began = time.perf_counter()
            write(*arguments, **named)
            self._written_s += time.perf_counter() - began

        self._optimizer._swap_out_offload_fp32_gradients = timed

    def step(self) -> float:
        """The whole of it, or its update."""
        began, self._written_s = time.perf_counter(), 0.0
        for number, (tokens, targets) in enumerate(self._parts):
            self._engine.backward(self._engine(tokens, targets))
            if number == len(self._parts) - 1 and not self._is_whole:
                began = time.perf_counter() - self._written_s
            self._engine.step()
        return time.perf_counter() - began


def _keep_dtype() -> None:
    """Keeps the params of a model float32 as they are divided.

    DeepSpeed 0.19.8 makes them bfloat16 on a processor without products of float16,
    whatever dtype it is told, and such products are slow there.
    """
    from deepspeed.runtime.zero import partition_parameters

    def set_dtype(self: Any, ds_config: Any, dtype: Any) -> None:
        self.dtype = torch.float32

    inserted = partition_parameters.InsertPostInitMethodToModuleSubClasses
    inserted._set_dtype = set_dtype


def _join_alone() -> None:
    """Says to torch.distributed that this process is the only one."""
    torch.manual_seed(0)
    torch.set_num_threads(NUM_CORES)
    with contextlib.closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}


def _parts(given: dict[str, Any], *, is_whole: bool) -> list[tuple[torch.Tensor, ...]]:
    """Tokens and targets of each part of a batch; for an update alone a few."""
    sizes = given["micro_batches"], given["batch_size"], given["seq_len"]
    count, batch_size, seq_len = sizes if is_whole else (1, 1, UPDATE_TOKENS)
    size = count, batch_size, seq_len + 1
    tokens = torch.randint(given["shape"]["vocab_size"], size)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens]


def contender(given: dict[str, Any]) -> Contender:
    """DeepSpeed; at rest nothing is left, as a step waits for its writes."""
    made = DeepSpeed(given)
    return Contender(made.about, made.step)


if __name__ == "__main__":
    serve(contender)
