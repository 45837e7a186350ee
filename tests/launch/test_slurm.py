"""The batch script: what it asks of Slurm, and what it does with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from offline_diffusion.config import make_options
from offline_diffusion.errors import ConfigError, JobError
from offline_diffusion.launch.slurm import SlurmArray, render_script, submit_script, time_limit_s

ROOT = Path(__file__).resolve().parents[2]

END = "2030-01-01T00:00:00Z"
NASTY = "a 'b' \"c\" \\d $(touch pwned) `touch pwned` ; touch pwned # $HOME"


def make_array(**changes: Any) -> SlurmArray:
    values = {"job_file": Path("job.yaml"), "logs": Path("out/logs"), "array": 4, "job_name": "job"}
    spelling = {name: f"--{name}" for name in SlurmArray.model_fields}
    return make_options(SlurmArray, values | changes, spelling=spelling)


def directives(script: str) -> list[str]:
    """What sbatch reads: it stops at the first line that is neither blank nor a comment."""
    found = []
    for line in script.splitlines():
        if line.startswith("#SBATCH "):
            found.append(line.removeprefix("#SBATCH --"))
        elif line and not line.startswith("#"):
            break
    return found


# --- directives ------------------------------------------------------------------------------


def test_what_every_array_asks_for() -> None:
    assert directives(render_script(make_array())) == [
        "job-name=job", "array=0-3", "output=out/logs/%A_%a.log", "open-mode=append", "requeue",
        "signal=B:USR1@120", "nodes=1", "ntasks=1",
    ]  # fmt: skip


def test_what_was_asked_for_is_passed_on() -> None:
    array = make_array(
        max_parallel=2, time="1-00:00:00", partition="gpu", account="lab", gpus_per_task=2, gres="gpu:h200:2",
        cpus_per_task=8, mem="64G",
    )  # fmt: skip
    assert {
        "array=0-3%2", "time=1-00:00:00", "partition=gpu", "account=lab", "gpus-per-task=2",
        "gres=gpu:h200:2", "cpus-per-task=8", "mem=64G",
    } <= set(directives(render_script(array)))  # fmt: skip


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("1:30", 90), ("2:00:00", 7200), ("1-0", 86_400), ("1-2:03", 93_780), ("0-0:0:7", 7)],
)
def test_time_limits_are_read_as_slurm_reads_them(time: str, seconds: int) -> None:
    assert time_limit_s(time) == seconds


@pytest.mark.parametrize(("time", "lead"), [(None, 120), ("4:00:00", 120), ("4:00", 60), ("1", 15)])
def test_a_short_limit_is_told_of_in_its_last_quarter(time: str | None, lead: int) -> None:
    assert make_array(time=time).lead_s == lead


@pytest.mark.parametrize(
    "changes",
    [
        {name: f"a{end}#SBATCH --nodelist=b"}
        for end in ("\n", "\r", "\x0b", "\x85", "\u2028")
        for name in ("job_name", "partition", "account", "gres", "mem", "container")
    ]
    + [
        {"job_file": Path("a\nb")}, {"logs": Path("a\nb")}, {"setup": ("a\nb",)}, {"job_name": "a\0b"},
        {"job_name": " "}, {"container": "a 'b"}, {"array": 0}, {"max_parallel": 0}, {"gpus_per_task": 0},
        {"time": "soon"}, {"time": "0"}, {"time": "1-"}, {"time": "1:2:3:4"}, {"time": "-1"},
    ],
)  # fmt: skip
def test_what_cannot_stand_in_a_script_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^--{next(iter(changes))}"):
        make_array(**changes)


@pytest.mark.parametrize("option", ["job_name", "partition", "account", "gres", "mem"])
def test_no_value_adds_a_directive_or_a_command(option: str) -> None:
    plain, nasty = (render_script(make_array(**{option: value})) for value in ("x", NASTY))
    different = [
        pair for pair in zip(plain.splitlines(), nasty.splitlines(), strict=True) if len({*pair}) > 1
    ]
    (line,) = (theirs for _, theirs in different)
    assert line.startswith("#SBATCH --")


# --- what the script does -----------------------------------------------------------------------


class Node:
    """A folder as working directory, with stand-ins for ``offdiff`` and Slurm's commands on the PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.environ = {
            "PATH": f"{self.bin}:{os.defpath}",
            "SLURM_ARRAY_JOB_ID": "70",
            "SLURM_ARRAY_TASK_ID": "2",
            "SLURM_JOB_ID": "72",
        }
        self.program(
            "squeue", f'[[ "$*" = *%T* ]] && echo RUNNING || date --date={END} +"$SLURM_TIME_FORMAT"'
        )
        self.program("scontrol", 'echo "$@" >> requeued')

    def program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def start(self, array: SlurmArray) -> subprocess.Popen[str]:
        (self.folder / "array.sbatch").write_text(render_script(array))
        return subprocess.Popen(
            ["/bin/bash", "array.sbatch"], cwd=self.folder, env=self.environ, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, **changes: Any) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of the script."""
        process = self.start(make_array(**changes))
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err

    @property
    def requeued(self) -> list[str]:
        path = self.folder / "requeued"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("code", [0, 1, 3])
def test_other_exit_codes_are_passed_through(node: Node, code: int) -> None:
    node.program("offdiff", f"exit {code}")
    assert node.run() == (code, "", "")
    assert node.requeued == []


def test_a_killed_worker_is_no_stop_in_good_order(node: Node) -> None:
    node.program("offdiff", "kill -9 $$")
    code, _, _ = node.run()
    assert code == 128 + 9
    assert node.requeued == []


def test_75_requeues_this_task_alone(node: Node) -> None:
    node.program("offdiff", "exit 75")
    code, _, err = node.run()
    assert (code, node.requeued) == (75, ["requeue 70_2"])
    assert "submit again" not in err


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "REQUEUED", ""])
def test_a_task_that_slurm_is_ending_is_left_alone(node: Node, state: str) -> None:
    node.program("offdiff", "exit 75")
    node.program("squeue", f"echo {state}")
    code, _, err = node.run()
    assert (code, node.requeued) == (75, [])
    assert "task 70_2: work is left; unless Slurm starts it again, submit again" in err


@pytest.mark.parametrize(("restarts", "times"), [("99", 1), ("100", 0)])
def test_the_number_of_returns_is_bounded(node: Node, restarts: str, times: int) -> None:
    node.program("offdiff", "exit 75")
    node.environ["SLURM_RESTART_COUNT"] = restarts
    code, _, err = node.run()
    assert (code, len(node.requeued)) == (75, times)
    assert ("submit again" in err) == (not times)


def test_a_refused_requeue_is_said(node: Node) -> None:
    node.program("offdiff", "exit 75")
    node.program("scontrol", "echo 'disabled' >&2; exit 1")
    code, _, err = node.run()
    assert code == 75
    assert "disabled" in err
    assert "submit again" in err


def test_without_slurms_commands_work_is_done_and_a_stop_is_said(node: Node) -> None:
    for name in ("squeue", "scontrol"):
        (node.bin / name).unlink()
    node.environ["PATH"] = f"{node.bin}:/bin-of-nothing"
    node.program("offdiff", 'echo "end: ${SLURM_JOB_END_TIME-none}"; exit 75')
    code, out, err = node.run()
    assert (code, out) == (75, "end: none\n")
    assert "submit again" in err


def test_the_end_time_is_told_where_slurm_does_not(node: Node) -> None:
    node.program("offdiff", 'echo "$SLURM_JOB_END_TIME"')
    assert node.run()[1] == "1893456000\n"  # END, counted from 1970
    node.environ["SLURM_JOB_END_TIME"] = "12"
    assert node.run()[1] == "12\n"


@pytest.mark.parametrize("answer", ["N/A", "NONE", ""])
def test_no_end_is_no_end_time(node: Node, answer: str) -> None:
    node.program("squeue", f"echo {answer}")
    node.program("offdiff", 'echo "${SLURM_JOB_END_TIME-unset}"')
    assert node.run()[1] == "unset\n"


_LISTENER = """
exec python3 -c '
import os, signal, sys, time
def hear(number, frame):
    os.write(1, signal.Signals(number).name.encode() + b"\\n")  # print() may be at work on the line below
    time.sleep(0.3)  # what it does then takes a while
    sys.exit(75)
signal.signal(signal.SIGUSR1, hear)
signal.signal(signal.SIGTERM, hear)
print(os.getpid(), flush=True)
time.sleep(30)
'
"""
"""Says its process id, and each signal that it hears."""


def test_the_time_limit_is_handed_on_once_and_the_exit_code_comes_back(node: Node) -> None:
    node.program("offdiff", _LISTENER)
    with node.start(make_array()) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip().isdecimal()
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)  # ends a wait early once more
        assert process.stdout.read() == "SIGUSR1\n"
        assert process.wait(30) == 75
    assert node.requeued == ["requeue 70_2"]


def test_the_shell_waits_for_a_worker_that_slurm_has_told_itself(node: Node) -> None:
    node.program("offdiff", _LISTENER)
    with node.start(make_array()) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        os.kill(worker, signal.SIGKILL)
        assert process.stdout.read() == "", "SIGTERM is not handed on: a second one means stop now"
        assert process.wait(30) == 128 + 9


def test_words_reach_offdiff_as_they_are(node: Node) -> None:
    job_file = Path(NASTY.replace("/", "")) / "job.yaml"
    node.program("offdiff", "printf '%s\\n' \"$@\"")
    node.program("within", 'echo "in $1"; shift; "$@"')
    container = f"within {shlex.quote(NASTY)}"
    code, out, err = node.run(job_file=job_file, container=container, setup=("echo 'set up'", "#SBATCH --x"))
    assert (code, err) == (0, "")
    assert out.splitlines() == ["set up", f"in {NASTY}", "run", "--job", str(job_file)]
    assert not (node.folder / "pwned").exists()


# --- submission -----------------------------------------------------------------------------


def test_sbatch_gets_the_script_and_says_the_id(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", node.environ["PATH"])
    monkeypatch.chdir(node.folder)
    node.program("sbatch", '[ "$*" = --parsable ] && cat > got && echo "123;cluster"')
    assert submit_script("#!/bin/bash\n") == "123"
    assert Path("got").read_text() == "#!/bin/bash\n"


def test_no_sbatch_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin-of-nothing")
    with pytest.raises(JobError, match="no sbatch on this machine") as caught:
        submit_script("")
    assert "-o job.sbatch" in (caught.value.hint or "")


def test_what_sbatch_refuses(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", node.environ["PATH"])
    node.program("sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(JobError, match="sbatch refused the script: sbatch: error: invalid partition"):
        submit_script("")
