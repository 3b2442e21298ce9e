"""The sandbox finds, names and removes leftovers."""

import os
import signal
import sys
from pathlib import Path

import pytest
from swemu import sandbox as module


def test_a_program_that_ends_well(sandbox):
    program = "import os; print(os.getsid(0) == os.getpid(), os.environ['USER'])"
    finished = sandbox.run([sys.executable, "-c", program], USER="other")
    assert finished == module.Finished(0, False, "True other\n")
    assert sandbox.directory.is_dir()
    assert sandbox.close() == module.Leftovers((), ())
    assert not sandbox.directory.exists()


@pytest.mark.parametrize("new_session", [False, True])
def test_a_process_is_left(sandbox, monkeypatch, new_session):
    monkeypatch.setattr(module, "GRACE_S", 0.2)
    program = (
        "import subprocess as s; "
        f"print(s.Popen(['sleep', '1000'], start_new_session={new_session}).pid)"
    )
    child = int(sandbox.run([sys.executable, "-c", program]).output)
    assert sandbox.processes() == [child]
    assert sandbox.close().processes == ("sleep 1000",)
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_file_is_left(sandbox):
    sandbox.run(["touch", sandbox.directory / "device0_1_2"])
    assert sandbox.close().files == ("device0_1_2",)
    assert not sandbox.directory.exists()


def test_what_is_left_in_a_sandbox_within(sandbox, runtime, monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.2)
    inner = module.Sandbox(runtime, within=sandbox.directory)
    assert inner.environment["USER"] == str(inner.directory)[len("/tmp/") :]
    program = "import subprocess as s; s.Popen(['sleep', '1000'])"
    inner.run([sys.executable, "-c", program])
    left = sandbox.close()
    assert left == module.Leftovers(("sleep 1000",), (inner.directory.name,))


def test_a_program_that_hangs(sandbox, monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.2)
    finished = sandbox.run(["sh", "-c", "echo begun; sleep 1000"], limit_s=0.5)
    assert finished == module.Finished(-signal.SIGKILL, True, "begun\n")
    assert sandbox.close().processes == ("sleep 1000",)


@pytest.mark.filterwarnings("ignore:.*fork")  # JAX's, if it runs in this process
def test_calls_in_a_fork(sandbox, tmp_path):
    def write():
        text = f"{os.getsid(0) == os.getpid()} {os.environ['XCL_EMULATION_MODE']}"
        (tmp_path / "file").write_text(text)

    assert sandbox.call(write, limit_s=10) == module.Finished(0, False)
    assert (tmp_path / "file").read_text() == "True sw_emu"
    finished = sandbox.call(lambda: signal.raise_signal(signal.SIGTERM), limit_s=10)
    assert finished == module.Finished(-signal.SIGTERM, False)
    finished = sandbox.call(lambda: signal.pause(), limit_s=0.2)
    assert finished == module.Finished(-signal.SIGKILL, True)
