"""The programs in benchmarks/ report their measurements, and refuse impossible options early."""

import re

import pytest

from benchmarks import certificate, choices, scaling
from tests.support.runs import ROOT
from vit_jax.measuring.workloads import Workload

QUICKSTART = (f'--config={ROOT}/configs/quickstart.py', '--rounds=1', '--seconds=0.001')


def test_choices_are_compared_by_images_per_second(monkeypatch, capsys):
    """A step with eight times the images and twice the time is four times as fast."""
    seconds = {4: 0.01, 32: 0.02}

    def workload(config, part):
        assert part == 'inference'
        return Workload(lambda steps: steps * seconds[config.batch_size], config.batch_size)

    monkeypatch.setattr(choices, 'workload', workload)
    assert choices.main([*QUICKSTART, '--config.batch_size=4,32', '--part=inference']) == 0
    assert re.findall(r'^(\S+) +(\S+) .* (\S+) times$', capsys.readouterr().out, re.M) == [
        ('batch_size=4', '400', '1.00'),
        ('batch_size=32', '1,600', '4.00'),
    ]


@pytest.mark.parametrize(
    ('option', 'message'),
    [
        ('--out=picture.txt', 'picture.txt cannot be written: expected a name that ends in .png'),
        ('--out=missing/picture.png', 'there is no directory missing'),
        ('--only=depth,height', "--only is 'height'"),
    ],
)
def test_scaling_refuses_before_it_measures(option, message, monkeypatch, caplog):
    monkeypatch.setattr(scaling, 'measure', lambda *args: pytest.fail('measured'))
    assert scaling.main([*QUICKSTART, option]) == 1
    assert message in caplog.text


@pytest.mark.parametrize(
    ('option', 'message'),
    [
        ('--recipes=vit,foo', "--recipes has 'foo': expected some of vit,vit21k"),
        ('--recipes=', "--recipes has ''"),
        ('--steps=3', '--steps is 3: expected 10 or more'),
        ('--mu_dtype=foo', "--mu_dtype is 'foo': expected float32 or bfloat16"),
    ],
)
def test_a_certificate_refuses_before_it_trains(option, message, monkeypatch, capsys):
    monkeypatch.setattr(certificate, 'compare', lambda *args: pytest.fail('trained'))
    monkeypatch.setattr('sys.argv', ['certificate', option])
    with pytest.raises(SystemExit, match='2'):
        certificate.main()
    assert message in capsys.readouterr().err
