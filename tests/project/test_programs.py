"""What runs Python programs in forks runs them as a shell would."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.programs import python_in_forks

WAITS = """
import pathlib, signal, sys
def end(*_):
    pathlib.Path(sys.argv[1]).write_text("ended")
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("begun", flush=True)
signal.pause()
"""


def test_a_program_ends_with_the_command_that_started_it(tmp_path: Path) -> None:
    marker = tmp_path / "seen"
    with subprocess.Popen([python_in_forks(), "-c", WAITS, marker], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert "begun\n" == command.stdout.readline()
        command.send_signal(signal.SIGTERM)
        assert "" == command.stdout.read()  # the program has closed it too
    assert "ended" == marker.read_text()


def test_a_program_gives_the_command_its_exit_code() -> None:
    for code in (0, 3):
        assert code == subprocess.run([python_in_forks(), "-c", f"import sys; sys.exit({code})"]).returncode
    assert sys.executable != str(python_in_forks())
