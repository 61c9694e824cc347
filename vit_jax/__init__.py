"""The Vision Transformer (arXiv 2010.11929) on JAX and Flax."""

import gc
import signal
import sys

# So it is while Python looks for the module of `python -m vit_jax.COMMAND`. A sixth of the time
# that imports take is the search for garbage in them, and Ctrl-C would show where they are;
# machine.as_usual puts both right when the command begins.
if sys.argv[:1] == ['-m']:
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
