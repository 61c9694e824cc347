"""The table of a GPU (benchmarks/gpu.py, docs/lab-notes/gpu-speed.md)."""

import argparse
import contextlib
import json
import subprocess
import sys
import time

import jax
import psutil
import pytest

from benchmarks import gpu
from tests.support.errors import refused
from vit_jax.errors import UserError


def subject(rate, **shares):
    return dict(images_per_second=rate, slowest=0.9 * rate, fastest=1.1 * rate) | shares


def test_a_report_gives_a_row_for_each_part():
    """The last column counts 17.58 billion multiplications and additions, of 989 TFLOP/s."""
    shares = dict(share_of_matmul=0.5, share_of_data_sheet=0.384)
    report = dict(
        device='NVIDIA H200',
        batch_size=512,
        subjects={
            'train': subject(4000, **shares),
            'train by timm': subject(3200),
            'inference': subject(12000, **shares),
            'inference by timm': subject(10000),
        },
    )
    assert list(gpu.rows_of(report, 'b16,jft')) == [
        '| b16,jft | 512 | train | 4,000 (3,600 - 4,400) | 3,200 (2,880 - 3,520) | **1.25** '
        '| 50.0% | 38.4% | 42.7% |',
        '| b16,jft | 512 | inference | 12,000 (10,800 - 13,200) | 10,000 (9,000 - 11,000) '
        '| **1.20** | 50.0% | 38.4% | 42.7% |',
    ]


def test_cells_of_a_failed_timm_are_empty(capsys, caplog, monkeypatch, tmp_path):
    shares = dict(share_of_matmul=0.5, share_of_data_sheet=0.25)
    report = dict(
        device='NVIDIA H200',
        batch_size=4,
        subjects={part: subject(2.0, **shares) for part in ('train', 'inference')},
    )
    monkeypatch.setattr(gpu, 'measure', lambda *_: report)
    assert gpu.main(['--rows', 'ti16=4', f'--out={tmp_path}/reports.jsonl']) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        f'| ti16 | 4 | {part} | 2 (1.8 - 2.2) | - | - | 50.0% | 25.0% |'
        for part in ('train', 'inference')
    ]
    assert 'These rows are missing: ti16 by timm, see the error above.' in caplog.text
    saved = json.loads((tmp_path / 'reports.jsonl').read_text())
    assert saved['subjects'] == report['subjects']
    assert saved['versions']['jax'] == jax.__version__


@pytest.fixture
def hanging(tmp_path):
    """A program that waits for a child, and writes the child's process number to a file."""
    program = tmp_path / 'python'
    program.write_text(f'#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/peer\nwait\n')
    program.chmod(0o755)
    return str(program)


def wait_until(condition):
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + 60
        time.sleep(0.05)


def has_ended(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    return True


def test_a_row_that_hangs_ends_with_all_its_processes(hanging, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, 'executable', hanging)
    options = argparse.Namespace(rounds=1, seconds=1.0, timeout=5)
    with refused(kind='resource', field='--timeout', value=5):
        gpu.measure('b16', 8, options)
    peer = int((tmp_path / 'peer').read_text())
    wait_until(lambda: has_ended(peer))


def test_a_signal_ends_all_processes(hanging, tmp_path):
    program = f"""
import runpy, sys
sys.executable, sys.argv = {hanging!r}, ['gpu', '--rows', 'b16=8']
runpy.run_module('benchmarks.gpu', run_name='__main__')"""
    process = subprocess.Popen([sys.executable, '-c', program])
    file = tmp_path / 'peer'
    wait_until(lambda: file.exists() and file.read_text().endswith('\n'))
    process.terminate()
    assert process.wait(timeout=60) == 130
    peer = int(file.read_text())
    wait_until(lambda: has_ended(peer))


@pytest.mark.parametrize('output', ['', 'no JSON', '{"cut": '])
def test_a_row_without_a_report_is_an_error(output, tmp_path, monkeypatch):
    program = tmp_path / 'python'
    program.write_text(f"#!/bin/sh\necho '{output}'\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, 'executable', str(program))
    with refused(kind='other', value=3) as error:
        gpu.measure('b16', 8, argparse.Namespace(rounds=1, seconds=1.0, timeout=9))
    message = str(error.value)
    assert message.startswith('exit code 3 of -m vit_jax.benchmark --config=configs/vit.py:b16')


@pytest.mark.parametrize('row', ['b16', 'b16=', 'b16=many'])
def test_a_row_without_a_batch_is_refused(row):
    with pytest.raises(argparse.ArgumentTypeError, match='expected RECIPE=BATCH, as in b16,jft='):
        gpu.recipe_and_batch(row)
    assert gpu.recipe_and_batch('b16,jft=512') == ('b16,jft', 512)


def test_an_impossible_output_is_refused_before_measuring(caplog, monkeypatch):
    monkeypatch.setattr(gpu, 'measure', lambda *args: pytest.fail('measured'))
    assert gpu.main(['--out=missing/reports.jsonl']) == 1
    assert 'there is no directory missing' in caplog.text


def test_a_failed_row_is_reported_and_the_others_are_measured(capsys, caplog, monkeypatch):
    report = dict(
        device='NVIDIA H200',
        batch_size=4,
        subjects={
            name: subject(2.0, share_of_matmul=0.5, share_of_data_sheet=0.25)
            for name in ('train', 'train by timm', 'inference', 'inference by timm')
        },
    )

    def measure(recipe, batch, options):
        if recipe == 'b16':
            raise UserError('no memory')
        return report

    monkeypatch.setattr(gpu, 'measure', measure)
    assert gpu.main(['--rows', 'b16=8', 'ti16=4']) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        f'| ti16 | 4 | {part} | 2 (1.8 - 2.2) | 2 (1.8 - 2.2) | **1.00** | 50.0% | 25.0% |'
        for part in ('train', 'inference')
    ]
    assert 'These rows are missing: b16: no memory.' in caplog.text
