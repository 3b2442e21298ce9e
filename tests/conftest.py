"""Fixtures that every part of the suite uses."""

import gc
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis
import jax
import pytest
import small_stores
from families import LONG, is_in_part
from golden_stores import golden
from jax._src import compiler
from raw_stores import memory_directory
from store_driver import Driver

import jaxinf

# The time of an example depends on the machine's other work.
hypothesis.settings.register_profile("jaxinf", deadline=None)
hypothesis.settings.load_profile("jaxinf")

# Programs that tests start import the installed package, not the checkout in their
# working directory.
os.environ["PYTHONSAFEPATH"] = "1"

# They find shared test helpers like the tests, by `pythonpath` of pyproject.toml.
ROOT = Path(__file__).parents[1]
ROOMS = ("support", "programs", "accelerators", "distributed", "faults", "xrt")
PLACES = (*(f"tests/{room}" for room in ROOMS), "scripts", "scripts/repro")
SHARED = [str(ROOT / place) for place in PLACES]
os.environ["PYTHONPATH"] = os.pathsep.join(SHARED)


def pytest_collection_modifyitems(config, items):
    """Takes the part of the tests that `JAXINF_TEST_PART` asks for; sorts them.

    In a file, tests whose programs are compiled alike come together: to change that
    discards all that JAX has compiled.
    """
    if part := os.environ.get("JAXINF_TEST_PART"):
        config.hook.pytest_deselected(
            items=[item for item in items if not is_in_part(item.nodeid, part)]
        )
        items[:] = [item for item in items if is_in_part(item.nodeid, part)]
    files = {path: n for n, path in enumerate(dict.fromkeys(x.path for x in items))}
    items.sort(key=lambda item: (files[item.path], is_quick(item)))


@pytest.fixture(scope="session", autouse=True)
def keeps_what_is_compiled(tmp_path_factory):
    """Compiles a program that several tests of this process run only once.

    Programs that tests start have no such cache: some are killed while they write.
    """
    cache = tmp_path_factory.mktemp("compiled")
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def is_quick(item):
    """Whether programs of a test are compiled without most optimizations.

    Not in modules marked `optimized`, which compare bits with those of a fused program;
    of those marked `optimized("long")`, only the long tests do.
    """
    mark = item.get_closest_marker("optimized")
    is_short = not LONG and item.get_closest_marker("long") is None
    return mark is None or (mark.args == ("long",) and is_short)


FLAGS = os.environ.get("XLA_FLAGS", "").split()
WITHOUT_EMITTERS = "--xla_cpu_use_fusion_emitters=false"


@pytest.fixture(scope="session", autouse=True)
def fuses_by_llvm_alone():
    """Leaves out XLA's emitters of fusions where most optimizations are left out.

    Compilation on a CPU then takes a third of the time.
    """
    options_of = compiler.get_compile_options

    def quicker(*args, **kwargs):
        options = options_of(*args, **kwargs)
        if jax.config.read("jax_disable_most_optimizations"):
            name, _ = WITHOUT_EMITTERS.removeprefix("--").split("=")
            options.env_option_overrides += [(name, False)]
        return options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", quicker)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Has XLA leave most optimizations out, in programs that tests start as well.

    A hook: a fixture of the session that runs a program is set up before any fixture
    of the first module that asks for it.
    """
    quick = is_quick(item)
    if quick != jax.config.read("jax_disable_most_optimizations"):
        jax.devices()  # this process has read the flags of XLA
        jax.config.update("jax_disable_most_optimizations", quick)
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quick))
        os.environ["XLA_FLAGS"] = " ".join([*FLAGS, *[WITHOUT_EMITTERS] * quick])
        jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def older_objects_are_not_searched_for_garbage():
    """Freezes modules, tests and caches, so that a collection takes milliseconds.

    Each step that is planned collects garbage, which took longer than its compilation.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def sizes_are_as_ever():
    yield
    small_stores.reset()


@pytest.fixture
def place():
    """A directory, in memory if there is such a file system."""
    with memory_directory() as path:
        yield path


@pytest.fixture
def open_store(place):
    """Opens stores in memory; closes them at the end."""
    stores: list[jaxinf.Store] = []

    def open_one(name="store", **options):
        stores.append(small_stores.open_store(place / name, **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def golden_store(tmp_path):
    """Copies a golden store to write to: at step 3, with a checkpoint of step 2."""

    def copied(name="store"):
        return shutil.copytree(golden(name), tmp_path / "store", symlinks=True)

    return copied


@pytest.fixture
def drive(place):
    """Makes drivers of stores in memory, see `Driver`; closes them at the end."""
    drivers: list[Driver] = []

    def make(name="store", **options):
        drivers.append(Driver(place / name, **options))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.engine.close()


@pytest.fixture
def pythons_handler():
    """Sets Python's handler of SIGINT, which a process in the background lacks."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run_python():
    """Runs a program in a Python of its own and checks that it succeeds."""

    def run(program, *arguments, check=True, limit_s=240, **environment):
        words = [program] if isinstance(program, Path) else ["-c", program]
        result = subprocess.run(
            [sys.executable, *words, *map(str, arguments)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        if check and result.returncode:
            pytest.fail(f"exit {result.returncode}\n{result.stdout}\n{result.stderr}")
        return result

    return run
