import json

import pytest

from tests.support.errors import refused
from vit_jax.workdir import metrics
from vit_jax.workdir.descriptions import assumed


def opened(workdir, start_step):
    log = metrics.MetricsLog(str(workdir))
    log.open(start_step)
    return log


def test_rows_after_the_restored_step_are_cut(tmp_path):
    log = opened(tmp_path, 0)
    for step in range(1, 6):
        log.write(step, {'train/loss': 1 / step})
    log.write(4, {'eval/loss': 0.5})
    log.close()
    log = opened(tmp_path, 3)
    assert log.rows == [{'step': k, 'train/loss': 1 / k} for k in range(1, 4)]
    log.write(4, {'train/loss': 0.25})
    log.close()
    rows = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert rows == [{'step': k, 'train/loss': 1 / k} for k in range(1, 5)]


@pytest.mark.parametrize(
    'content',
    [
        'null',
        '[1, 2]',
        '3',
        '{}',
        '{"step": "1"}',
        '[' * 10**5,
        '{"step": 1, "a": []}',
        '{"step": 1, "a"\n',
    ],
)
def test_line_that_is_not_a_row_is_refused(content, tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_text(content)
    line = content.rstrip('\n')[:80]
    with refused(kind='content', file=path, value=line) as error:
        opened(tmp_path, 9)
    assert str(error.value) == (
        f'{path}, line 1 is {line!r}: expected {{"step": NUMBER, "NAME": NUMBER, ...}}. '
        'Fix or remove that line.'
    )


def test_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(bytes(range(256)))
    with refused(kind='unreadable', file=path):
        metrics.read(tmp_path)
    path.unlink()
    path.mkdir()
    with refused(kind='unreadable', file=path):
        metrics.read(tmp_path)


def test_rows_for_a_full_disk_are_written_with_the_next_checkpoint(tmp_path, limited_files, caplog):
    log = opened(tmp_path, 0)
    with limited_files(40):
        for step in range(1, 5):
            log.write(step, {'train/loss': 1 / 3})
        with refused(kind='unwritable', file=tmp_path / 'metrics.jsonl'):
            log.sync()
    assert caplog.text.count('metrics.jsonl cannot be written') == 1
    log.write(5, {'train/loss': 1 / 3})
    log.sync()
    log.close()
    assert metrics.read(tmp_path) == [{'step': k, 'train/loss': 1 / 3} for k in range(1, 6)]


def test_incomplete_line_is_dropped_at_the_end_and_refused_elsewhere(tmp_path, caplog):
    path = tmp_path / 'metrics.jsonl'
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    assert opened(tmp_path, 9).rows == [{'step': 1, 'a': 1.0}]
    assert 'metrics.jsonl ends within line 2: dropping that row, \'{"step' in caplog.text
    path.write_text('{"step": 1, "a"\n{"step": 2, "a": 1.0}\n')
    with refused(kind='content', file=path, value='{"step": 1, "a"'):
        metrics.read(tmp_path)


def test_values_survive_exactly(tmp_path):
    value = 0.1 + 0.2
    log = opened(tmp_path, 0)
    log.write(1, {'x': value})
    log.sync()
    log.close()
    assert metrics.read(tmp_path)[0]['x'] == value


def test_resumed_run_without_its_rows_logs_a_warning(tmp_path, caplog):
    opened(tmp_path, 0).close()
    assert not caplog.messages
    opened(tmp_path, 8).close()
    assert f'{tmp_path}/metrics.jsonl has no row up to step 8: the curves begin' in caplog.text


def test_resumed_run_warns_of_changed_rows(tmp_path, caplog):
    """A flipped bit in a digit may leave a valid row."""
    log = opened(tmp_path, 0)
    for step in range(1, 4):
        log.write(step, {'train/loss': 1 / step})
    summary = log.summary()
    log.write(4, {'train/loss': 0.25})  # after the checkpoint
    log.close()
    path = tmp_path / 'metrics.jsonl'
    for text, differs in [
        (path.read_text(), False),
        (path.read_text().replace('0.5', '0.7'), True),
        (path.read_text().partition('\n')[2], True),
        (2 * path.read_text(), True),
    ]:
        path.write_text(text)
        caplog.clear()
        log = opened(tmp_path, 3)
        log.compare(summary)
        log.close()
        assert ('metrics.jsonl has changed since this run saved' in caplog.text) == differs
    log.compare(None)  # an older checkpoint


def test_best_is_the_highest_accuracy_or_the_lowest_loss():
    """Ties go to the newest step."""
    values = {3: 0.5, 6: 0.8, 9: 0.8, 12: 0.1, 15: float('nan')}
    assert metrics.best(values, range(20), assumed('fewshot/5shot')) == 9
    assert metrics.best(values, [3, 12, 15], assumed('eval/accuracy')) == 3
    assert metrics.best(values, range(20), assumed('eval/loss')) == 12
    assert metrics.best(values, [1, 2], assumed('eval/loss')) is None


@pytest.mark.parametrize(
    ('values', 'name', 'expected'),
    [
        ([], 'eval/accuracy', 0),
        ([0.5], 'eval/accuracy', 0),
        ([0.5, 0.4, 0.6], 'eval/accuracy', 0),
        ([0.5, 0.6, 0.6, 0.6], 'eval/accuracy', 2),
        ([0.5, 0.6, 0.6, 0.6], 'eval/loss', 3),
        ([0.5, 0.6, float('nan')], 'eval/accuracy', 1),
        ([float('nan'), 0.6], 'eval/loss', 0),
    ],
)
def test_values_since_the_best_are_counted(values, name, expected):
    """A value equal to the best is no improvement."""
    by_step = {10 * k: value for k, value in enumerate(values)}
    assert metrics.since_best(dict(reversed(by_step.items())), assumed(name)) == expected
