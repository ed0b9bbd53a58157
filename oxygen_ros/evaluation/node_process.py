"""NodeProcess: a ROS node of ours in a process of its own, started, watched and always ended.

Owns the process and its log. Knows nothing of topics; the demo and the evaluations call it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

STOP_TIMEOUT_S = 15.0
_PR_SET_PDEATHSIG = 1


class NodeProcess:
    def __init__(
        self,
        parameters: Mapping[str, str | bool | int],
        log_path: Path,
        module: str = 'oxygen_ros.node',
    ) -> None:
        """Start a module, with these ROS parameters, everything it prints going to `log_path`."""
        command = [sys.executable, '-m', module, '--ros-args']
        for name, value in parameters.items():
            # ROS reads the value as YAML, and JSON is YAML with nothing left to guess.
            command += ['-p', f'{name}:={json.dumps(value)}']
        self.log_path = log_path
        with log_path.open('wb') as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is for the demo, which then ends the node in its turn.
                start_new_session=True,
                env={**os.environ, 'PYTHONUNBUFFERED': '1'},
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def children(self) -> list[int]:
        """Return the ids of the processes that it has started and that live (Linux)."""
        tasks = Path(f'/proc/{self.pid}/task').glob('*/children')
        return [int(number) for task in tasks for number in task.read_text().split()]

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative if a signal ended it."""
        return self._process.poll()

    def stop(self) -> int:
        """Ask it to end (SIGINT), insist after STOP_TIMEOUT_S; return its exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """End it at once."""
        self._process.kill()
        return self._process.wait()

    def log_tail(self, num_lines: int) -> list[str]:
        """Return the last lines it printed."""
        lines = self.log_path.read_text(encoding='utf-8', errors='replace').splitlines()
        return [line for line in lines if line.strip()][-num_lines:]


def _die_with_parent() -> None:
    """Runs in the child: if the demo is killed outright, the kernel ends the node."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
