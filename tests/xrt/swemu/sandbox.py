"""Runs users of XRT's emulation in a process session and a directory of their own.

XRT ends the whole process group when a device dies, leaves sockets and run directories
behind, and can wait for ever. Invariant: after `Sandbox.close` no process and no file
of the sandbox is left, whatever happened inside.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 5.0
"""Time for processes to end by themselves after the one that started them."""

# Places that XRT has compiled in: /tmp/$USER/ holds the sockets.
TMP = Path("/tmp")


@dataclass(frozen=True)
class Finished:
    """The end of a program."""

    status: int  # or minus the number of the signal that ended it
    timed_out: bool
    output: str


class Sandbox:
    """A directory for sockets and runs, and the processes that were started with it."""

    def __init__(self, runtime, within=TMP):
        """Makes the directory; another sandbox that it is in finds its leftovers."""
        self._runtime = runtime
        self._directory = Path(tempfile.mkdtemp(prefix="jaxinf-xrt-", dir=within))
        self._run_directory = self._directory / "run"
        self._run_directory.mkdir()
        self._sessions: set[int] = set()

    @property
    def environment(self):
        """Returns further variables for a process that uses the emulation."""
        paths = [str(self._runtime.python), os.environ.get("PYTHONPATH", "")]
        return {
            "XCL_EMULATION_MODE": "sw_emu",
            "XILINX_XRT": str(self._runtime.prefix),
            "XILINX_VITIS": str(self._runtime.vitis),
            "EMCONFIG_PATH": str(self._runtime.directory),
            "SDACCEL_EM_RUN_DIR": str(self._run_directory),
            "VITIS_SW_EMU_ENABLE_SINGLE_MMAP": "1",
            # The place of XRT's sockets.
            "USER": str(self._directory.relative_to(TMP)),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }

    def run(self, command, *, limit_s=60, during=None, **environment):
        """Runs a program in a session of its own, and waits for it, or kills it.

        `during` is called with the process when it has started.
        """
        # A leftover process would keep a pipe open, so output goes to a file.
        with tempfile.TemporaryFile(dir=self._directory) as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment, **environment},
                start_new_session=True,
            )
            self._sessions.add(process.pid)
            try:
                if during is not None:
                    during(process)
                process.wait(limit_s)
                timed_out = False
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            log.seek(0)
            output = log.read().decode(errors="replace")
        return Finished(process.returncode, timed_out, output)

    def processes(self):
        """Returns running processes of the sandbox's sessions, or in its directory."""
        marker = f"\0SDACCEL_EM_RUN_DIR={self._directory}/".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                # Behind the name, which is any: state, parent, group, session.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                marked = marker in b"\0" + (entry / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has ended, or is not ours
            if fields[0] != "Z" and (int(fields[3]) in self._sessions or marked):
                found.append(int(entry.name))
        return found

    def close(self):
        """Waits for processes to end, kills those that do not, removes all files.

        Returns the command lines of those that were killed.
        """
        if not self._directory.exists():
            return []
        deadline = time.monotonic() + GRACE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.01)
        lines = [_kill(process) for process in left]
        while self.processes():
            time.sleep(0.01)
        shutil.rmtree(self._directory)
        return lines


def _kill(process):
    """Kills a process, and returns its command line."""
    try:
        line = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ")
        os.kill(process, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return f"process {process}, ended meanwhile"
    return line.decode(errors="replace").strip()
