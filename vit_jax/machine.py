"""What the machine has, and what it lacks before JAX or TensorFlow stumble over it."""

import contextlib
import ctypes
import glob
import hashlib
import logging
import os
import pathlib
import resource
import signal

import jax
import psutil

from vit_jax.errors import UserError
from vit_jax.files import cache_folder

CGROUPS, OWN_GROUPS = pathlib.Path('/sys/fs/cgroup'), pathlib.Path('/proc/self/cgroup')
# What a container, a Slurm job or a slice of systemd may use: files of control groups, of version 2
# and of version 1, where the controller has a folder of its own.
CPU_QUOTAS = {'': ('cpu.max',), 'cpu': ('cpu.cfs_quota_us', 'cpu.cfs_period_us')}
MEMORY_LIMITS = {
    '': ('memory.max', 'memory.current', 'inactive_file'),
    'memory': ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'),
}


def available_memory() -> int:
    """Bytes that this process may still take: free ones, within limits of its control groups."""
    available = psutil.virtual_memory().available
    for group, (limit, used, cached) in _control_groups(MEMORY_LIMITS):
        # Without the files, or with 'max' in them, there is no limit.
        with contextlib.suppress(OSError, ValueError, KeyError):
            room = int((group / limit).read_text()) - int((group / used).read_text())
            stat = (group / 'memory.stat').read_text().split()
            room += int(dict(zip(stat[::2], stat[1::2], strict=True))[cached])  # can be dropped
            available = max(min(available, room), 0)
    return available


def _control_groups(files):
    """(folder, its files) of the control groups of this process, from its own to the outermost.

    A container sees its own as the outermost, and not the path by which the machine knows it.
    """
    lines = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []
    paths = {
        controller: path
        for _, controllers, path in (line.split(':', 2) for line in lines)
        for controller in controllers.split(',')
    }
    for controller, names in files.items():
        outermost = CGROUPS / controller
        own = outermost / paths.get(controller, '').lstrip('/')
        for folder in (own, *own.parents):
            if folder.is_relative_to(outermost):
                yield folder, names


def check_address_space(needed: float) -> None:
    """Raises UserError under a limit (ulimit -v) with which JAX or TensorFlow would abort or hang.

    Args:
      needed: bytes beyond those that the process has mapped, on a machine of two cores. Measured
        after the imports: aborts with 1.7 GB for JAX, and 3.3 GB when a small model is trained.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    # A thread, of which there are some for each core, maps its stack and an arena of malloc.
    needed += psutil.Process().memory_info().vms + 200e6 * ((os.cpu_count() or 1) - 2)
    if limit < needed:
        raise UserError(
            f'this command needs at least {needed / 1e9:.1f} GB of address space, and '
            f'the limit is {limit / 1e9:.3g} GB: raise it, as in ulimit -v unlimited'
        )


# Of glibc's malloc.h, with the values that keep everything: no memory goes back to the system, none
# comes from mmap, and all threads share what is free.
_KEEP = {'M_TRIM_THRESHOLD': (-1, -1), 'M_MMAP_MAX': (-4, 0), 'M_ARENA_MAX': (-8, 1)}
# Two of them as glibc has them at the start.
_GIVE_BACK = {'M_TRIM_THRESHOLD': (-1, 128 * 1024), 'M_MMAP_MAX': (-4, 65536)}
# Of devices that the CPU is shown as, one may be far behind the others where another program keeps
# its core busy. XLA would complain of that after 20 s, and abort after 60.
_PATIENT = (
    '--xla_cpu_collective_call_warn_stuck_timeout_seconds=3600',
    '--xla_cpu_collective_call_terminate_timeout_seconds=86400',
)
TPUS = ('/dev/accel*', '/dev/vfio/[0-9]*')
GPUS = ('/dev/nvidia[0-9]*', '/dev/kfd')
CPUINFO = pathlib.Path('/proc/cpuinfo')


def keep_memory() -> None:
    """Lets malloc keep what is freed, where JAX computes on the CPU, for the steps to come.

    Otherwise the buffers of a step go back to the system, which clears them page by page for the
    next step: a fifth of the processor time of training Ti/16. The function is called before JAX
    starts its threads. It has no effect beside a GPU or TPU, whose hosts have many threads, and
    where the C library is not glibc.
    """
    for parameter, value in _KEEP.values():
        _set_malloc(parameter, value)


def give_memory_back() -> None:
    """Ends what `keep_memory` has begun: malloc gives back what is freed, and takes more by mmap.

    For steps that take so much of the memory that nothing may be kept beside them.
    """
    for parameter, value in _GIVE_BACK.values():
        _set_malloc(parameter, value)


def _set_malloc(parameter, value):
    """Sets one of the options of glibc's malloc, on a machine whose only device is the CPU."""
    library = ctypes.CDLL(None)
    if _only_cpu() and hasattr(library, 'gnu_get_libc_version'):
        library.mallopt(parameter, value)


def keep_compiled() -> None:
    """Lets JAX keep what took longer than a second to compile, for the next start.

    It lies in vit_jax/compiled of $XDG_CACHE_HOME, else of ~/.cache, in a folder for this kind of
    processor, as machines of several kinds may share a home. It may be deleted at any time.
    JAX_COMPILATION_CACHE_DIR names another folder, JAX_ENABLE_COMPILATION_CACHE=false keeps
    nothing. Without effect where the folder cannot be written, on other systems than Linux, and for
    several processes on the CPU.
    """
    several = _only_cpu() and jax.distributed.is_initialized()
    given = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]  # set at import
    if several or given is not None:
        return
    with contextlib.suppress(OSError, UserError):  # the second without a home
        kind = ('model', 'cpu family', 'flags', 'CPU ', 'Features')  # of x86; of ARM the last two
        lines = {x for x in CPUINFO.read_text().splitlines() if x.startswith(kind)}
        processor = hashlib.sha256('\n'.join(sorted(lines)).encode()).hexdigest()[:16]
        folder = cache_folder('compiled', processor)
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            jax.config.update('jax_compilation_cache_dir', str(folder))
            if _only_cpu() and any(' avx512f' in line for line in lines):
                _mute_xla()


def _mute_xla():
    """Keeps XLA from logging errors, unless the user has said what JAX should log.

    Of every program that it reads for AVX-512 jaxlib 0.10 logs that it is for another processor: it
    takes preferences of the compiler for features (github.com/jax-ml/jax/issues/38445). Failures
    are raised all the same; what several processes hear of one another is only logged.
    """
    if jax.config.jax_logging_level == 'NOTSET':
        jax.config.update('jax_logging_level', 'CRITICAL')
        logging.getLogger('jax').setLevel(logging.WARNING)  # what JAX itself logs, it still does


def _only_cpu():
    return jax.config.jax_platforms == 'cpu' or not any(map(glob.glob, TPUS + GPUS))


def cores() -> int:
    """Number of processors that this process may use, whole ones of a quota of processor time."""
    process, found = psutil.Process(), os.cpu_count() or 1
    if hasattr(process, 'cpu_affinity'):  # not on macOS
        found = len(process.cpu_affinity())
    for group, files in _control_groups(CPU_QUOTAS):
        # Without the files, or with 'max' or -1 in them, there is no quota.
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, ' '.join((group / file).read_text() for file in files).split())
            if quota > 0:
                found = max(min(found, quota // period), 1)
    return found


def is_fast_in_bfloat16() -> bool:
    """Whether a CPU trains faster in bfloat16 than in float32: with AMX, or if AMD made it.

    S/16 is trained 1.6 to 2 times as fast by these, and 0.83 times by an Intel processor that has
    instructions for bfloat16 (avx512_bf16) and no AMX. False for all that are not measured.
    """
    try:
        text = CPUINFO.read_text()
    except OSError:  # not on Linux
        return False
    lines = [line.partition(':') for line in text.splitlines()]
    values = {name.strip(): value.split() for name, _, value in lines}
    flags = values.get('flags', [])
    is_amd = values.get('vendor_id') == ['AuthenticAMD']
    return 'amx_bf16' in flags or (is_amd and 'avx512_bf16' in flags)


def use_cpu_as(devices: int) -> None:
    """Lets JAX take the CPU, where it computes on that, for several devices.

    Where the environment says how many (JAX_NUM_CPU_DEVICES, XLA_FLAGS), these only become patient.
    After JAX has started, as in a notebook, nothing changes but for processes that it starts.
    """
    flags = os.environ.get('XLA_FLAGS', '')
    number = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]  # set at import
    given = number >= 0 or 'host_platform_device_count' in flags
    if not _only_cpu() or not (given or devices > 1):
        return
    with contextlib.suppress(RuntimeError):
        if not given:
            jax.config.update('jax_num_cpu_devices', devices)
        patient = [flag for flag in _PATIENT if flag not in flags]
        os.environ['XLA_FLAGS'] = ' '.join([*patient, flags]).strip()  # the last one counts


def start_backend(host_devices: int = 1) -> None:
    """Starts JAX, which keeps memory and compiled programs and shows the CPU as several devices.

    To be called before anything else uses JAX, whose errors would be taken for those of a file.

    Args:
      host_devices: what `use_cpu_as` is told.

    Raises UserError if there is not enough address space, or as `check_devices`.
    """
    check_address_space(2.2e9)
    keep_memory()
    keep_compiled()
    use_cpu_as(host_devices)
    with quiet_libtpu(), same_sigterm():
        check_devices()


def check_devices() -> None:
    """Raises UserError if JAX cannot use the kind of device that it was told to use."""
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # the first where a plugin is not installed
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]  # set at import
        asked = platforms or ''
        reason = str(error).partition('\n')[0] or f'no device of JAX_PLATFORMS={asked} is there'
        raise UserError(
            f'JAX cannot start with JAX_PLATFORMS={asked!r}: {reason}. Without JAX_PLATFORMS it '
            'takes the best device there is; for a GPU see that nvidia-smi shows one and '
            "pip install -e '.[gpu]', for a TPU pip install -e '.[tpu]'."
        ) from error


@contextlib.contextmanager
def same_sigterm():
    """Restores the handler of SIGTERM, for which libtpu sets one that prints all threads."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with contextlib.suppress(TypeError, ValueError):  # no handler of Python's; another thread
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def quiet_libtpu():
    """While JAX starts: no complaint of libtpu, installed for plans, that there is no TPU."""
    answers = {'TPU_ACCELERATOR_TYPE': 'v5litepod-1', 'TPU_WORKER_HOSTNAMES': 'localhost'}
    if any(map(glob.glob, TPUS)) or not answers.keys().isdisjoint(os.environ):
        answers = {}
    os.environ.update(answers)
    try:
        yield
    finally:
        for name in answers:
            del os.environ[name]
