import importlib.util
import os
import pathlib
import resource
import signal
import subprocess
import sys
import types

import jax
import psutil
import pytest

from tests.support.errors import refused
from vit_jax import machine

HUGE_PAGES = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')


@pytest.mark.parametrize('error', [AssertionError(), RuntimeError("Unable to initialize 'cuda'")])
def test_missing_devices_are_refused(error, monkeypatch):
    """JAX raises RuntimeError without a GPU, and AssertionError without the plugin."""

    def devices():
        raise error

    monkeypatch.setattr(jax, 'devices', devices)
    with refused(kind='resource', field='JAX_PLATFORMS', value='cpu') as caught:
        machine.start_backend()
    assert str(caught.value).startswith("JAX cannot start with JAX_PLATFORMS='cpu': ")
    assert "pip install -e '.[gpu]'" in str(caught.value)


def test_too_little_address_space_is_refused(monkeypatch):
    """Mapped memory counts as used, and each core has threads with their own memory."""
    mapped = types.SimpleNamespace(vms=500_000_000)
    monkeypatch.setattr(resource, 'getrlimit', lambda _: (3_500_000_000, resource.RLIM_INFINITY))
    monkeypatch.setattr(
        psutil, 'Process', lambda: types.SimpleNamespace(memory_info=lambda: mapped)
    )
    monkeypatch.setattr(os, 'cpu_count', lambda: 2)
    machine.check_address_space(2.9e9)
    with refused(kind='resource', value=3_500_000_000) as caught:
        machine.check_address_space(3.2e9)
    assert str(caught.value) == (
        'this command needs at least 3.7 GB of address space, and the limit is 3.5 GB: raise it, '
        'for example with ulimit -v unlimited'
    )
    monkeypatch.setattr(os, 'cpu_count', lambda: 10)
    with refused(kind='resource') as caught:
        machine.check_address_space(2.4e9)
    assert 'at least 4.5 GB' in str(caught.value)


@pytest.fixture
def own_groups(tmp_path, monkeypatch):
    """The file that lists the control groups of a process; the groups are in tmp_path."""
    monkeypatch.setattr(machine, 'CGROUPS', tmp_path)
    monkeypatch.setattr(machine, 'OWN_GROUPS', tmp_path / 'self')
    return tmp_path / 'self'


def limit_memory(folder, version, limit):
    """Writes a control group that uses 700 bytes, 100 of them for the file cache."""
    limit_file, used_file, cached = machine.MEMORY_LIMITS['memory' if version == 1 else '']
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        (limit_file, limit),
        (used_file, '700'),
        ('memory.stat', f'anon 600\n{cached} 100\n'),
    ):
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ('version', 'limit', 'expected'),
    [(1, '1000', 400), (2, '1000', 400), (2, '500', 0), (2, 'max', 10**6), (1, str(2**63), 10**6)],
)
@pytest.mark.parametrize('own', ['', '9:name=systemd:/\n4:cpu,memory:/seen/from:outside\n0::/seen'])
def test_memory_of_a_container(version, limit, expected, own, own_groups, tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, 'virtual_memory', lambda: types.SimpleNamespace(available=10**6))
    own_groups.write_text(own)
    assert machine.available_memory() == 10**6
    limit_memory(tmp_path / 'memory' if version == 1 else tmp_path, version, limit)
    assert machine.available_memory() == expected


@pytest.mark.parametrize(
    ('version', 'controller', 'own'),
    [(1, 'memory', '4:cpu,memory:/slurm/job:7\n0::/\n'), (2, '', '0::/slurm/job:7\n')],
)
def test_memory_of_a_job_is_the_least_of_its_groups(
    version, controller, own, own_groups, tmp_path, monkeypatch
):
    """The group of the process and each group around it may have the lowest limit."""
    monkeypatch.setattr(psutil, 'virtual_memory', lambda: types.SimpleNamespace(available=10**6))
    own_groups.write_text(own)
    for folder, limit, expected in (
        ('.', '9000', 8400),
        ('slurm/job:7', '5000', 4400),
        ('slurm', '1000', 400),
        ('other', '700', 400),
    ):
        limit_memory(tmp_path / controller / folder, version, limit)
        assert machine.available_memory() == expected


@pytest.mark.parametrize(
    ('files', 'expected'),
    [
        ({}, 8),
        ({'cpu.max': 'max 100000'}, 8),
        ({'cpu.max': '250000 100000'}, 2),
        ({'cpu.max': '50000 100000'}, 1),
        ({'cpu.max': '900000 100000'}, 8),
        ({'cpu/cpu.cfs_quota_us': '-1', 'cpu/cpu.cfs_period_us': '100000'}, 8),
        ({'cpu/cpu.cfs_quota_us': '400000', 'cpu/cpu.cfs_period_us': '100000'}, 4),
    ],
)
def test_cores_of_a_container(files, expected, own_groups, tmp_path, monkeypatch):
    """On eight cores `docker run --cpus=2.5` leaves two."""
    monkeypatch.setattr(
        psutil, 'Process', lambda: types.SimpleNamespace(cpu_affinity=lambda: list(range(8)))
    )
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'{text}\n')
    assert machine.cores() == expected
    if files:  # the same limits in the group of a job
        own_groups.write_text('3:cpu,cpuacct:/job\n0::/job\n')
        for name in files:
            path = tmp_path / name
            (path.parent / 'job').mkdir(exist_ok=True)
            path.rename(path.parent / 'job' / path.name)
        assert machine.cores() == expected


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='needs libtpu')
def test_libtpu_without_chips_is_quiet():
    """A process prints nothing at its start, and nothing when SIGTERM ends it."""
    code = (
        'import os; from vit_jax import machine; machine.start_backend();os.kill(os.getpid(), 15)'
    )
    variables = {name: value for name, value in os.environ.items() if name != 'JAX_PLATFORMS'}
    result = subprocess.run(
        [sys.executable, '-c', code], text=True, capture_output=True, env=variables, check=False
    )
    assert (result.returncode, result.stderr) == (-signal.SIGTERM, '')


@pytest.mark.parametrize(
    ('setting', 'keeps'),
    [
        ('', False),
        ('machine.keep_memory()', True),
        ('machine.keep_memory(); machine.give_memory_back()', False),
    ],
)
def test_freed_memory_is_kept_for_the_next_step(setting, keeps):
    """The next allocation of 400 MB causes no page faults, because malloc kept the memory."""
    program = f"""
import resource, threading
from vit_jax import machine

def faults():
    thread = threading.Thread(target=lambda: b'x' * 400_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread.start(), thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

{setting}
faults()
print(faults())
"""
    out = subprocess.run(
        [sys.executable, '-c', program],
        check=True,
        text=True,
        timeout=60,
        stdout=subprocess.PIPE,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
    ).stdout
    assert (int(out) < 1000) == keeps


# An entry of /proc/cpuinfo: number, current frequency and further flags of a processor.
PROCESSORS = """processor\t: {0}
model name\t: AMD EPYC
cpu MHz\t\t: {1}
flags\t\t: fpu avx2{2} bmi1
bogomips\t: {1}
"""


@pytest.fixture(params=['cuda', 'cpu'])
def new_start(request, monkeypatch, tmp_path):
    """JAX before its start on a GPU or the CPU, with no folder for compiled programs set."""
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    monkeypatch.setattr(machine.glob, 'glob', lambda pattern: [pattern])
    monkeypatch.setattr(machine, 'CPUINFO', tmp_path / 'cpuinfo')
    machine.CPUINFO.write_text(PROCESSORS.format(0, 2445.4, ''))
    before = {
        name: getattr(jax.config, name)
        for name in ('jax_platforms', 'jax_compilation_cache_dir', 'jax_logging_level')
    }
    jax.config.update('jax_platforms', request.param)
    jax.config.update('jax_compilation_cache_dir', None)
    yield request.param
    for name, value in before.items():
        jax.config.update(name, value)


def new_cache_folder():
    """The folder for compiled programs that a new start on this machine chooses, or None."""
    jax.config.update('jax_compilation_cache_dir', None)
    machine.keep_compiled()
    folder = jax.config.jax_compilation_cache_dir
    return None if folder is None else pathlib.Path(folder)


def test_compiled_programs_are_in_the_cache_folder(new_start, tmp_path, monkeypatch):
    folder = new_cache_folder()
    assert folder.is_dir()
    assert folder.parent == tmp_path / 'home/.cache/vit_jax/compiled'
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'other'))
    machine.keep_compiled()  # a folder that is set already stays
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert new_cache_folder() == tmp_path / 'other/vit_jax/compiled' / folder.name


def test_each_kind_of_processor_keeps_its_own_programs(new_start):
    folder = new_cache_folder()
    machine.CPUINFO.write_text(PROCESSORS.format(0, 3001.2, '') + PROCESSORS.format(1, 1500.0, ''))
    assert new_cache_folder() == folder
    assert jax.config.jax_logging_level == 'NOTSET'
    machine.CPUINFO.write_text(PROCESSORS.format(0, 3001.2, ' avx512f'))
    other = new_cache_folder()
    assert other.parent == folder.parent
    assert other != folder
    assert jax.config.jax_logging_level == ('CRITICAL' if new_start == 'cpu' else 'NOTSET')


def test_log_level_that_the_user_has_set_stays(new_start):
    machine.CPUINFO.write_text(PROCESSORS.format(0, 3001.2, ' avx512f'))
    jax.config.update('jax_logging_level', 'ERROR')
    assert new_cache_folder() is not None
    assert jax.config.jax_logging_level == 'ERROR'


@pytest.mark.parametrize('home', ['/proc/nobody', '/dev/null'])
def test_no_compiled_programs_are_kept_without_a_writable_folder(home, new_start, monkeypatch):
    monkeypatch.setenv('HOME', home)
    assert new_cache_folder() is None


def test_no_compiled_programs_are_kept_for_an_unknown_processor(new_start):
    machine.CPUINFO.unlink()
    assert new_cache_folder() is None


def test_several_processes_on_the_cpu_keep_no_compiled_programs(new_start, monkeypatch):
    monkeypatch.setattr(jax.distributed, 'is_initialized', lambda: True)
    assert (new_cache_folder() is None) == (new_start == 'cpu')


@pytest.mark.parametrize(
    ('vendor', 'flags', 'expected'),
    [
        ('GenuineIntel', 'avx512f avx512_bf16', False),
        ('GenuineIntel', 'avx512f avx512_bf16 amx_bf16', True),
        ('AuthenticAMD', 'avx512f avx512_bf16', True),
        ('AuthenticAMD', 'avx512f', False),
        ('GenuineIntel', 'avx2', False),
    ],
)
def test_processors_that_are_fast_in_bfloat16(vendor, flags, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, 'CPUINFO', tmp_path / 'cpuinfo')
    entry = f'processor\t: 0\nvendor_id\t: {vendor}\nmodel\t\t: 1\nflags\t\t: fpu {flags}\n\n'
    machine.CPUINFO.write_text(2 * entry)
    assert machine.is_fast_in_bfloat16() == expected


@pytest.mark.parametrize('text', ['Features\t: fp asimd bf16\n', None])
def test_unknown_processors_are_not_fast_in_bfloat16(text, tmp_path, monkeypatch):
    """ARM has other fields, and other systems than Linux do not have the file."""
    monkeypatch.setattr(machine, 'CPUINFO', tmp_path / 'cpuinfo')
    if text:
        machine.CPUINFO.write_text(text)
    assert not machine.is_fast_in_bfloat16()


@pytest.mark.slow
def test_second_start_reads_the_compiled_programs_of_the_first(tmp_path):
    program = """
import jax
from vit_jax import machine
machine.start_backend()
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name.endswith('cache_hits')))
compiled = jax.jit(lambda x: jax.numpy.tanh(x @ x) @ x).lower(jax.numpy.ones((64, 64))).compile()
print(sum(hits))
"""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ('JAX_COMPILATION_CACHE_DIR', 'TF_CPP_MIN_LOG_LEVEL')
    }
    variables |= {
        'JAX_PLATFORMS': 'cpu',
        'XDG_CACHE_HOME': str(tmp_path),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }

    def start():
        done = subprocess.run(
            [sys.executable, '-c', program],
            check=True,
            text=True,
            timeout=60,
            capture_output=True,
            env=variables,
        )
        return int(done.stdout) > 0, done.stderr

    assert start() == (False, '')
    assert start() == (True, '')
    for path in tmp_path.rglob('jit_*'):  # half of each file is lost
        os.truncate(path, path.stat().st_size // 2)
    has_hits, stderr = start()
    assert not has_hits
    assert "Error reading persistent compilation cache entry for 'jit__lambda'" in stderr


@pytest.mark.parametrize(
    ('variables', 'expected'),
    [
        ({}, 2),
        ({'JAX_NUM_CPU_DEVICES': '3'}, 3),
        ({'XLA_FLAGS': '--xla_force_host_platform_device_count=4'}, 4),
    ],
)
def test_environment_overrides_the_number_of_cpu_devices(variables, expected):
    """In every case the devices wait for each other for up to a day."""
    program = (
        'import jax, os; from vit_jax import machine;'
        'machine.use_cpu_as(0); machine.start_backend(2);'
        'print(jax.device_count()); machine.start_backend(5); print(jax.device_count());'
        'print(os.environ["XLA_FLAGS"].count("terminate_timeout_seconds=86400"))'
    )
    result = subprocess.run(
        [sys.executable, '-c', program],
        text=True,
        capture_output=True,
        check=True,
        env=os.environ | {'XLA_FLAGS': ''} | variables,
    )
    assert result.stdout.split() == [str(expected), str(expected), '1']


@pytest.mark.parametrize(
    'arguments', [['-m', 'vit_jax.convert', '--help'], ['-c', 'import vit_jax']]
)
def test_imports_change_neither_the_garbage_collector_nor_signals(tmp_path, arguments):
    result = watched(
        tmp_path,
        arguments,
        'states.append((gc.isenabled(), signal.getsignal(signal.SIGINT)))',
        """
before = gc.isenabled(), signal.getsignal(signal.SIGINT)
def show():
    states.append((gc.isenabled(), signal.getsignal(signal.SIGINT)))
    print(set(states) == {before})
atexit.register(show)
""",
    )
    assert result.stdout.splitlines()[-1] == 'True'


def test_ctrl_c_during_the_imports_ends_a_command(tmp_path):
    """The command ends with a traceback, like any Python program during its imports."""
    result = watched(tmp_path, ['-m', 'vit_jax.convert'], 'os.kill(os.getpid(), signal.SIGINT)')
    assert (result.returncode, result.stdout) == (-signal.SIGINT, '')
    assert result.stderr.splitlines()[-1] == 'KeyboardInterrupt'


def watched(folder, arguments, action, more=''):
    """Runs a Python process that executes `action` when it imports psutil."""
    (folder / 'sitecustomize.py').write_text(f"""
import atexit, gc, os, signal, sys
states = []
def watch(event, arguments):
    if event == 'import' and arguments[0] == 'psutil':
        {action}
sys.addaudithook(watch)
{more}""")
    return subprocess.run(
        [sys.executable, *arguments],
        text=True,
        capture_output=True,
        check=False,
        env=os.environ | {'PYTHONPATH': str(folder)},
    )
