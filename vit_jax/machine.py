"""What the machine lacks is said before JAX or TensorFlow stumble over it."""

import resource

import jax

from vit_jax.errors import UserError


def check_address_space(needed: float) -> None:
    """Raises UserError under a limit (ulimit -v) with which JAX or TensorFlow would abort or hang.

    Measured on 2 cores: 1.6 GB with JAX, 3.3 GB when a small model is trained.
    """
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if resource.RLIM_INFINITY != limit < needed:
        raise UserError(f'this command needs at least {needed / 1e9:.0f} GB of address space, and '
                        f'the limit is {limit / 1e9:.3g} GB: raise it, as in ulimit -v unlimited')


def check_backend() -> None:
    """Raises UserError if JAX cannot use the kind of device that it was told to use.

    To be called before anything else uses JAX, whose errors would be taken for those of a file.
    """
    check_address_space(2e9)
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # the first where a plugin is not installed
        asked = jax.config.jax_platforms or ''
        reason = str(error).partition('\n')[0] or f'no device of JAX_PLATFORMS={asked} is there'
        raise UserError(
            f'JAX cannot start with JAX_PLATFORMS={asked!r}: {reason}. Without JAX_PLATFORMS it '
            'takes the best device there is; for a GPU see that nvidia-smi shows one and '
            "pip install -e '.[gpu]', for a TPU pip install -e '.[tpu]'.") from error
