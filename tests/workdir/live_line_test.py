import os
import pty
import re
import threading

import pytest

from tests.support.forked import Forked
from tests.support.runs import TINY, arguments


@pytest.mark.slow
def test_one_live_line_on_a_terminal(tmp_path):
    """A real run on a pseudo-terminal without a size, like the terminal of `script`."""
    master, slave = pty.openpty()
    written = []

    def read():
        while True:
            try:
                written.append(os.read(master, 65536))
            except OSError:  # the run has ended
                return

    fields = TINY | {'num_steps': 12, 'log_every': 12, 'eval_every': 6, 'checkpoint_every': 12}
    process = Forked(arguments(tmp_path, fields=fields), os.ttyname(slave), optimized=False)
    reader = threading.Thread(target=read)
    reader.start()
    code = process.wait(300)
    os.close(slave)
    reader.join(20)
    os.close(master)
    text = b''.join(written).decode()
    assert code == 0, text
    for line in (
        'compiling the training step',
        'reading the first batch',
        r'0/12 0%  waiting for the first step',
        r'6/12 50%  loss 2\.\d{4}  accuracy \S+ %  [\d,]+ images/s  ETA \S+',
        'evaluating after step 12',
    ):
        assert re.search(rf'\r{line}', text), text
    assert 'lr ' not in text  # only train.log contains training rows and parameters
    log = (tmp_path / 'train.log').read_text()
    assert re.search(r'DEBUG step 12/12  loss 2.*lr ', log), log
    assert 'blocks/mlp/dense1/kernel' in log
    assert 'blocks/mlp' not in text
    assert re.search(
        r'[\r\n]done: 12 steps in 00:\S+, eval accuracy \S+ %, worst class .*\r?\n', text
    ), text
