import json

import pytest

from vit_jax.errors import UserError
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
def test_what_is_not_a_row_is_named(content, tmp_path):
    (tmp_path / 'metrics.jsonl').write_text(content)
    with pytest.raises(
        UserError,
        match=r'metrics.jsonl, line 1 is not a row: .*, expected '
        r'{"step": NUMBER, "NAME": NUMBER, ...}. Mend or remove that line.',
    ):
        opened(tmp_path, 9)


def test_what_is_no_text_is_named(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(bytes(range(256)))
    message = (
        'metrics.jsonl cannot be read .* expected one JSON object per line: restore the '
        'file, or move it away'
    )
    with pytest.raises(UserError, match=message):
        metrics.read(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=message):
        metrics.read(tmp_path)


def test_rows_without_room_are_written_with_the_next_checkpoint(tmp_path, limited_files, caplog):
    log = opened(tmp_path, 0)
    with limited_files(40):
        for step in range(1, 5):
            log.write(step, {'train/loss': 1 / 3})
        with pytest.raises(
            UserError,
            match=r'metrics.jsonl cannot be written \(File too large\). '
            'Mend that and run the same command again.',
        ):
            log.sync()
    assert caplog.text.count('metrics.jsonl cannot be written') == 1
    log.write(5, {'train/loss': 1 / 3})
    log.sync()
    log.close()
    assert metrics.read(tmp_path) == [{'step': k, 'train/loss': 1 / 3} for k in range(1, 6)]


def test_half_written_last_line_is_dropped_and_another_is_an_error(tmp_path, caplog):
    path = tmp_path / 'metrics.jsonl'
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    assert opened(tmp_path, 9).rows == [{'step': 1, 'a': 1.0}]
    assert 'metrics.jsonl ends within line 2, and that row is left out: \'{"step' in caplog.text
    path.write_text('{"step": 1, "a"\n{"step": 2, "a": 1.0}\n')
    with pytest.raises(UserError, match='metrics.jsonl, line 1 is not a row'):
        metrics.read(tmp_path)


def test_values_survive_exactly(tmp_path):
    value = 0.1 + 0.2
    log = opened(tmp_path, 0)
    log.write(1, {'x': value})
    log.sync()
    log.close()
    assert metrics.read(tmp_path)[0]['x'] == value


def test_a_run_that_goes_on_without_its_rows_says_so(tmp_path, caplog):
    opened(tmp_path, 0).close()
    assert not caplog.messages
    opened(tmp_path, 8).close()
    assert f'{tmp_path}/metrics.jsonl has no row up to step 8: the curves begin' in caplog.text


def test_a_changed_row_is_said_when_the_run_goes_on(tmp_path, caplog):
    """A flipped bit of a digit leaves a row that is as good as any."""
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
        assert ('metrics.jsonl differs from what this run had written' in caplog.text) == differs
    log.compare(None)  # an older checkpoint


def test_the_best_is_the_highest_and_of_losses_the_lowest():
    values = {3: 0.5, 6: 0.8, 9: 0.8, 12: 0.1, 15: float('nan')}
    assert (
        metrics.best(values, range(20), assumed('fewshot/5shot')) == 9
    )  # of equal ones the newest
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
    """One that is equal to the best is no better."""
    by_step = {10 * k: value for k, value in enumerate(values)}
    assert metrics.since_best(dict(reversed(by_step.items())), assumed(name)) == expected
