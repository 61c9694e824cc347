"""The memory, processors and devices of the machine, and how JAX uses them.

In: files of the system, environment variables. Out: numbers, settings of JAX and malloc, or an
error that names the missing resource. Imports errors and files.
"""

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

CGROUPS = pathlib.Path('/sys/fs/cgroup')
OWN_GROUPS = pathlib.Path('/proc/self/cgroup')
# The files of control groups that have the limits of a container, a Slurm job or a systemd slice.
# The key '' stands for version 2. In version 1 each controller has its own folder.
CPU_QUOTAS = {'': ('cpu.max',), 'cpu': ('cpu.cfs_quota_us', 'cpu.cfs_period_us')}
MEMORY_LIMITS = {
    '': ('memory.max', 'memory.current', 'inactive_file'),
    'memory': ('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file'),
}


def available_memory() -> int:
    """Bytes of memory that this process may still use, within the limits of its control groups."""
    available = psutil.virtual_memory().available
    for group, (limit_file, used_file, cached_field) in _control_groups(MEMORY_LIMITS):
        # There is no limit if the files are missing or contain 'max'.
        with contextlib.suppress(OSError, ValueError, KeyError):
            limit = int((group / limit_file).read_text())
            used = int((group / used_file).read_text())
            words = (group / 'memory.stat').read_text().split()
            statistics = dict(zip(words[::2], words[1::2], strict=True))
            cached = int(statistics[cached_field])  # the kernel can drop it
            available = max(min(available, limit - used + cached), 0)
    return available


def _control_groups(files):
    """Yields (folder, names of its files) of the control groups of this process, innermost first.

    A container sees its own group as the outermost group, without the host's path to it.
    """
    paths = _own_group_paths()
    for controller, names in files.items():
        outermost = CGROUPS / controller
        own = outermost / paths.get(controller, '').lstrip('/')
        for folder in (own, *own.parents):
            if folder.is_relative_to(outermost):
                yield folder, names


def _own_group_paths():
    """The path of the control group of this process for each controller."""
    paths: dict[str, str] = {}
    if not OWN_GROUPS.exists():
        return paths
    for line in OWN_GROUPS.read_text().splitlines():
        _, controllers, path = line.split(':', 2)
        for controller in controllers.split(','):
            paths[controller] = path
    return paths


def check_address_space(needed: float) -> None:
    """Raises UserError if the limit on address space (ulimit -v) is too low.

    JAX and TensorFlow abort or hang when they reach the limit.

    Args:
      needed: bytes beyond those that the process has mapped, on a machine with two cores. With 1.7
        GB after the imports, JAX aborts; with 3.3 GB, training a small model aborts.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return
    # Each core has a few threads, and each thread maps its stack and an arena of malloc.
    needed += psutil.Process().memory_info().vms + 200e6 * ((os.cpu_count() or 1) - 2)
    if limit < needed:
        raise UserError(
            f'this command needs at least {needed / 1e9:.1f} GB of address space, and '
            f'the limit is {limit / 1e9:.3g} GB: raise it, for example with ulimit -v unlimited',
            kind='resource',
            value=limit,
        )


# Options of glibc's malloc.h and the values that keep all memory: nothing returns to the system,
# nothing comes from mmap, and all threads share the free memory.
_KEEP = {'M_TRIM_THRESHOLD': (-1, -1), 'M_MMAP_MAX': (-4, 0), 'M_ARENA_MAX': (-8, 1)}
# The defaults of glibc for two of these options.
_GIVE_BACK = {'M_TRIM_THRESHOLD': (-1, 128 * 1024), 'M_MMAP_MAX': (-4, 65536)}
# When the CPU acts as several devices, another program may keep the core of one device busy, and
# that device falls far behind. XLA would complain after 20 s and abort after 60 s.
_PATIENT = (
    '--xla_cpu_collective_call_warn_stuck_timeout_seconds=3600',
    '--xla_cpu_collective_call_terminate_timeout_seconds=86400',
)
TPUS = ('/dev/accel*', '/dev/vfio/[0-9]*')
GPUS = ('/dev/nvidia[0-9]*', '/dev/kfd')
CPUINFO = pathlib.Path('/proc/cpuinfo')


def keep_memory() -> None:
    """Makes malloc keep freed memory for the next steps when JAX computes on the CPU.

    Otherwise the buffers of a step return to the system, which clears them page by page for the
    next step. This takes a fifth of the processor time of training Ti/16. Call this function before
    JAX starts its threads. It has no effect on a host with a GPU or TPU, or without glibc.
    """
    for parameter, value in _KEEP.values():
        _set_malloc(parameter, value)


def give_memory_back() -> None:
    """Reverts `keep_memory`: malloc returns freed memory and uses mmap again.

    Steps that need most of the memory leave no room for kept buffers.
    """
    for parameter, value in _GIVE_BACK.values():
        _set_malloc(parameter, value)


def _set_malloc(parameter, value):
    """Sets an option of glibc's malloc if the CPU is the only device."""
    library = ctypes.CDLL(None)
    if _only_cpu() and hasattr(library, 'gnu_get_libc_version'):
        library.mallopt(parameter, value)


def keep_compiled() -> None:
    """Makes JAX keep programs that took longer than a second to compile, for the next start.

    The programs are in $XDG_CACHE_HOME/vit_jax/compiled, by default ~/.cache/vit_jax/compiled, in
    one folder per kind of processor, because different machines may share a home directory. The
    user may delete them at any time. JAX_COMPILATION_CACHE_DIR names another folder, and
    JAX_ENABLE_COMPILATION_CACHE=false disables the cache. The function has no effect if the folder
    cannot be written, on systems other than Linux, and for several processes on the CPU.
    """
    cache_dir = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]  # set at import
    if cache_dir is not None:
        return
    if _only_cpu() and jax.distributed.is_initialized():
        return
    with contextlib.suppress(OSError, UserError):  # UserError: the user has no home directory
        # ARM has only the last two fields.
        fields = ('model', 'cpu family', 'flags', 'CPU ', 'Features')
        lines = {line for line in CPUINFO.read_text().splitlines() if line.startswith(fields)}
        processor = hashlib.sha256('\n'.join(sorted(lines)).encode()).hexdigest()[:16]
        folder = cache_folder('compiled', processor)
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            jax.config.update('jax_compilation_cache_dir', str(folder))
            if _only_cpu() and any(' avx512f' in line for line in lines):
                _mute_xla()


def _mute_xla():
    """Stops XLA from logging errors, unless the user has set the log level of JAX.

    When jaxlib 0.10 reads a cached program for AVX-512, it logs that the program is for another
    processor, because it confuses compiler preferences with processor features
    (github.com/jax-ml/jax/issues/38445). Failures still raise. The messages that several processes
    receive about each other are only logged, so keep_compiled returns before this for them.
    """
    if jax.config.jax_logging_level == 'NOTSET':
        jax.config.update('jax_logging_level', 'CRITICAL')
        logging.getLogger('jax').setLevel(logging.WARNING)  # JAX's own Python messages stay


def _only_cpu():
    return jax.config.jax_platforms == 'cpu' or not any(map(glob.glob, TPUS + GPUS))


def cores() -> int:
    """Number of processors that this process may use; a quota of 2.5 processors counts as 2."""
    process = psutil.Process()
    if hasattr(process, 'cpu_affinity'):  # not on macOS
        number = len(process.cpu_affinity())
    else:
        number = os.cpu_count() or 1
    for group, files in _control_groups(CPU_QUOTAS):
        # There is no quota if the files are missing or contain 'max' or -1.
        with contextlib.suppress(OSError, ValueError):
            text = ' '.join((group / file).read_text() for file in files)
            quota, period = map(int, text.split())
            if quota > 0:
                number = max(min(number, quota // period), 1)
    return number


def is_fast_in_bfloat16() -> bool:
    """Whether the CPU trains faster in bfloat16 than in float32: it has AMX or is made by AMD.

    Processors with AMX or by AMD train S/16 1.6 to 2 times as fast in bfloat16. An Intel processor
    with bfloat16 instructions (avx512_bf16) but without AMX is slower in bfloat16 (0.83 times as
    fast). Returns False for processors that were not measured.
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
    """Makes JAX treat the CPU as several devices, if JAX computes on the CPU.

    If the environment sets the number of devices (JAX_NUM_CPU_DEVICES, XLA_FLAGS), only the
    timeouts between devices change. After JAX has started, as in a notebook, the function affects
    only processes that this one starts.
    """
    flags = os.environ.get('XLA_FLAGS', '')
    number = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]  # set at import
    is_set_by_user = number >= 0 or 'host_platform_device_count' in flags
    if not _only_cpu() or not (is_set_by_user or devices > 1):
        return
    with contextlib.suppress(RuntimeError):
        if not is_set_by_user:
            jax.config.update('jax_num_cpu_devices', devices)
        new_flags = [flag for flag in _PATIENT if flag not in flags]
        # XLA uses the last value of a flag, so the user's flags come last.
        os.environ['XLA_FLAGS'] = ' '.join([*new_flags, flags]).strip()


def start_backend(host_devices: int = 1) -> None:
    """Starts JAX so that it keeps memory and compiled programs.

    Call this function before anything else uses JAX, because an error of JAX could otherwise look
    like an error in a file.

    Args:
      host_devices: number of devices that the CPU acts as, see `use_cpu_as`.

    Raises:
      UserError: the address space is too small, or JAX cannot use the selected devices.
    """
    check_address_space(2.2e9)
    keep_memory()
    keep_compiled()
    use_cpu_as(host_devices)
    with quiet_libtpu(), same_sigterm():
        check_devices()


def check_devices() -> None:
    """Raises UserError if JAX cannot use the devices that JAX_PLATFORMS selects."""
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # AssertionError: the plugin is not installed
        selected = jax.config.jax_platforms  # type: ignore[attr-defined]  # set at import
        platforms = selected or ''
        reason = str(error).partition('\n')[0] or f'no device for JAX_PLATFORMS={platforms} exists'
        raise UserError(
            f'JAX cannot start with JAX_PLATFORMS={platforms!r}: {reason}. Without JAX_PLATFORMS '
            'it uses the best available device. For a GPU, check that nvidia-smi shows one and '
            "pip install -e '.[gpu]'; for a TPU, pip install -e '.[tpu]'.",
            kind='resource',
            field='JAX_PLATFORMS',
            value=platforms,
        ) from error


@contextlib.contextmanager
def same_sigterm():
    """Restores the handler of SIGTERM: libtpu installs one that prints all threads."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # TypeError: the handler was not installed by Python. ValueError: not the main thread.
        with contextlib.suppress(TypeError, ValueError):
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def quiet_libtpu():
    """Keeps libtpu, which is installed for plans, from logging that there is no TPU."""
    variables = {'TPU_ACCELERATOR_TYPE': 'v5litepod-1', 'TPU_WORKER_HOSTNAMES': 'localhost'}
    has_tpu = any(map(glob.glob, TPUS))
    if has_tpu or not variables.keys().isdisjoint(os.environ):
        variables = {}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
