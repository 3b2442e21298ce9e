"""Peak host memory of training with the optimizer state in memory and on a drive.

For each preset, a few steps of the trainer in a process of its own:

    sgd in memory      the model alone: params, gradients, activations, XLA
    adamw in memory    plain optax
    adamw on a drive   `--mode update`, with the budget that `--memory` sets

    python scripts/measure_memory.py --store /mnt/nvme0/tmp --presets small medium
"""

import argparse
import json
import multiprocessing
import resource
import shutil
import subprocess
import sys
from pathlib import Path


def peak_rss_bytes(arguments, queue):
    """Runs the trainer; puts (exit status, peak RSS of the process, its output)."""
    command = [sys.executable, "-m", "jaxinf.train", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    queue.put((done.returncode, peak_kib * 1024, done.stdout))


def measure(arguments):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=peak_rss_bytes, args=(arguments, queue))
    process.start()
    status, peak_bytes, said = queue.get()
    process.join()
    if status:
        raise SystemExit(f"the trainer failed with exit status {status}: {arguments}")
    buffers = [line for line in said.splitlines() if line.startswith("buffers")]
    return peak_bytes, " ".join(buffers)


def measure_preset(preset, options):
    common = ["--preset", preset, "--steps", str(options.steps)]
    common += ["--batch-size", "1", "--seq-len", str(options.seq_len)]
    common += ["--sample-bytes", "0"]
    root = Path(options.store) / f"measure-memory-{preset}"
    shutil.rmtree(root, ignore_errors=True)
    logs = ["--log-dir", str(root / "logs")]
    state = ["--store", str(root / "store"), "--memory", options.memory]
    try:
        sgd = ["--optimizer", "sgd", "--momentum", "0", "--learning-rate", "1e-3"]
        own, _ = measure([*common, *logs, "--mode", "memory", *sgd])
        shutil.rmtree(root / "logs", ignore_errors=True)
        memory, _ = measure([*common, *logs, "--mode", "memory"])
        shutil.rmtree(root / "logs", ignore_errors=True)
        update, buffers = measure([*common, *logs, *state, "--mode", "update"])
    finally:
        shutil.rmtree(root, ignore_errors=True)
    mib = 1 << 20
    return {
        "preset": preset,
        "own_mib": round(own / mib),
        "adamw_in_memory_mib": round(memory / mib),
        "adamw_on_drive_mib": round(update / mib),
        "on_drive_over_own_mib": round((update - own) / mib),
        "engine": buffers,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", required=True, help="directory on the drive")
    parser.add_argument("--presets", nargs="+", default=["small", "medium"])
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seq-len", type=int, default=64)
    options = parser.parse_args()
    for preset in options.presets:
        print(json.dumps(measure_preset(preset, options)), flush=True)
