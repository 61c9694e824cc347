"""The launch files: their syntax, and the scripts with stubs of Slurm and Python."""

import functools
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import yaml

from tests.support.processes import Processes, started
from tests.support.runs import ROOT, TINY, command

LAUNCH = ROOT / 'launch'
SCRIPTS = sorted(path for path in LAUNCH.iterdir() if path.suffix in ('.sh', '.sbatch'))


@pytest.mark.parametrize('path', SCRIPTS, ids=lambda path: path.name)
def test_shell_script_is_valid(path):
    subprocess.run(['bash', '-n', path], check=True)
    shellcheck = pathlib.Path(sys.executable).with_name('shellcheck')
    result = subprocess.run([shellcheck, path], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_job_set_is_consistent():
    """Hosts, chips and topology agree. A failed host ends the job, so that all hosts restart."""
    (job,) = yaml.safe_load((LAUNCH / 'gke_jobset.yaml').read_text())['spec']['replicatedJobs']
    job = job['template']['spec']
    pod = job['template']['spec']
    (container,) = pod['containers']
    x, y, z = map(int, pod['nodeSelector']['cloud.google.com/gke-tpu-topology'].split('x'))
    chips = container['resources']['limits']['google.com/tpu']
    assert job['parallelism'] == job['completions'] == x * y * z // chips
    assert (job['backoffLimit'], pod['restartPolicy']) == (0, 'Never')
    assert container['command'] == ['python', '-m', 'vit_jax.main']


@pytest.fixture
def slurm(tmp_path):
    """Starts the batch script with stubs of Slurm's commands, which record their calls."""
    commands = {
        'srun': 'trap "exit 143" TERM; touch started; for i in $(seq 100); do sleep 0.1; done',
        'scancel': 'pkill -TERM -f "$PWD/srun"',
        'scontrol': 'true',
    }
    for name, body in commands.items():
        path = tmp_path / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> calls\n{body}\n')
        path.chmod(0o755)

    def start(srun=None):
        if srun:
            (tmp_path / 'srun').write_text(f'#!/usr/bin/env bash\ntouch started\n{srun}\n')
        process = subprocess.Popen(
            ['bash', LAUNCH / 'slurm.sbatch', '--workdir=run'],
            cwd=tmp_path,
            env=os.environ
            | {
                'PATH': f'{tmp_path}:{os.environ["PATH"]}',
                'SLURM_JOB_ID': '7',
                'SLURM_CPUS_PER_TASK': '12',
            },
        )
        while not (tmp_path / 'started').exists():
            time.sleep(0.01)
        return process

    return start, lambda: (tmp_path / 'calls').read_text().splitlines()


def test_slurm_time_limit_saves_and_requeues(slurm):
    start, calls = slurm
    process = start()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == 143
    assert calls() == [
        'srun --cpus-per-task=12 --wait=120 .venv/bin/python -m vit_jax.main --workdir=run',
        'scancel --signal=TERM 7',
        'scontrol requeue 7',
    ]


@pytest.mark.parametrize('code', [0, 1])
def test_slurm_job_ends_with_the_code_of_the_run_and_is_not_requeued(slurm, code):
    start, calls = slurm
    assert start(f'echo srun >> calls; exit {code}').wait(20) == code
    assert calls() == ['srun']


def test_slurm_preemption_waits_for_the_processes(slurm):
    """Slurm sends SIGTERM to the processes and the script, and requeues the job itself."""
    start, _ = slurm
    process = start('trap "sleep 1; exit 143" TERM; for i in $(seq 100); do sleep 0.1; done')
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    subprocess.run(['pkill', '-TERM', '-P', str(process.pid)], check=True)
    assert process.wait(20) == 143


# A stub of Python for launch/local.sh: $1 is -c when the script chooses the port, otherwise -m.
STUB = """#!/usr/bin/env bash
[ "$1" = -c ] && exec {python} "$@"
for last; do :; done
trap 'exit 143' TERM
trap 'exit 130' INT
echo "up $last $3"
[ $last = --process_id={failing} ] && {end}
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize(
    ('failing', 'signum', 'code'),
    [(1, None, 7), (-1, signal.SIGTERM, 143), (-1, signal.SIGINT, 130)],
)
def test_local_launcher_passes_signals_and_exit_codes(failing, signum, code, tmp_path):
    stub = tmp_path / 'python'
    stub.write_text(STUB.format(python=sys.executable, failing=failing, end='exit 7'))
    stub.chmod(0o755)
    script = [str(ROOT / 'launch' / 'local.sh'), '3', '--config=x y']
    start = functools.partial(started, script, PYTHON=str(stub), GRACE='1')
    with Processes(tmp_path, [start]) as run:
        for i in range(3):
            run.wait_for(f'up --process_id={i} --config=x y')
        if signum:
            run.all[0].send_signal(signum)
        run.wait([code], timeout=60)


@pytest.mark.parametrize(
    ('trap', 'grace', 'last_line'),
    [
        (
            'sleep 0.5 && kill -6 $$',
            '60',
            'process 0 of 2 was ended by JAX, as another process was lost.',
        ),
        (':', '1', 'process 0 of 2 was killed: it had not stopped 1 s after another one.'),
    ],
)
def test_local_launcher_names_a_killed_process(trap, grace, last_line, tmp_path):
    """The killed process prints nothing, and the others only report that they lost one."""
    stub = tmp_path / 'python'
    stub.write_text(
        STUB.format(
            python=sys.executable, failing=1, end=f'touch {tmp_path}/lost && kill -9 $$'
        ).replace('sleep 0.1', f'sleep 0.1; [ -e {tmp_path}/lost ] && {trap}')
    )
    stub.chmod(0o755)
    result = subprocess.run(
        [str(ROOT / 'launch' / 'local.sh'), '2', '--config=x'],
        text=True,
        capture_output=True,
        check=False,
        timeout=60,
        env=os.environ | {'PYTHON': str(stub), 'GRACE': grace},
    )
    assert result.returncode == 137
    assert [line for line in result.stderr.splitlines() if line.startswith('process')] == [
        'process 1 of 2 was killed by SIGKILL. If nobody did that, the machine had too little '
        'memory for 2: see dmesg. The others stop.',
        last_line,
    ]


def test_local_launcher_without_a_number_prints_its_usage():
    result = subprocess.run(
        [str(ROOT / 'launch' / 'local.sh'), '--config=x'],
        text=True,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 2
    assert 'usage: ' in result.stderr


@pytest.mark.slow
def test_local_launcher_trains(tmp_path):
    flags = command(tmp_path / 'run', fields=TINY | {'num_steps': 8})[3:]
    start = functools.partial(
        started,
        [str(ROOT / 'launch' / 'local.sh'), '2', *flags],
        PYTHON=sys.executable,
        JAX_DISABLE_MOST_OPTIMIZATIONS='1',
    )
    with Processes(tmp_path, [start]) as run:
        assert 'done: 8 steps' in run.wait([0])[0]
