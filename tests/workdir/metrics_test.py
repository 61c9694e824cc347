import json

import pytest

from vit_jax.errors import UserError
from vit_jax.workdir import metrics


def test_rows_after_the_restored_step_are_cut(tmp_path):
    log = metrics.MetricsLog(str(tmp_path), 0)
    for step in range(1, 6):
        log.write(step, {'train/loss': 1 / step})
    log.write(4, {'eval/loss': 0.5})
    log.close()
    log = metrics.MetricsLog(str(tmp_path), 3)
    assert log.rows == [{'step': k, 'train/loss': 1 / k} for k in range(1, 4)]
    log.write(4, {'train/loss': 0.25})
    log.close()
    rows = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert rows == [{'step': k, 'train/loss': 1 / k} for k in range(1, 5)]


def test_half_written_last_line_is_dropped_and_another_is_an_error(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    assert metrics.MetricsLog(str(tmp_path), 9).rows == [{'step': 1, 'a': 1.0}]
    path.write_text('{"step": 1, "a"\n{"step": 2, "a": 1.0}\n')
    with pytest.raises(UserError, match='metrics.jsonl, line 1 is not JSON'):
        metrics.read(tmp_path)


def test_values_survive_exactly(tmp_path):
    value = 0.1 + 0.2
    log = metrics.MetricsLog(str(tmp_path), 0)
    log.write(1, {'x': value})
    log.sync()
    log.close()
    assert metrics.read(tmp_path)[0]['x'] == value
