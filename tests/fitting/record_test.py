"""What a fit has decided stays, and belongs to its settings."""

from tests.support.errors import refused
from vit_jax.fitting.record import Record


def test_a_stage_is_there_when_the_fit_resumes(tmp_path):
    record = Record(str(tmp_path), {'minutes': 3})
    record.write('plan', {'steps': 5})
    resumed = Record(str(tmp_path), {'minutes': 3})
    assert resumed.has('plan')
    assert not resumed.has('outcome')
    assert resumed['plan'] == {'steps': 5}


def test_other_settings_are_refused(tmp_path):
    Record(str(tmp_path), {'minutes': 3, 'seed': 0}).write('plan', {})
    with refused('conflict', field='seed', file=tmp_path / 'fit.json', value=1):
        Record(str(tmp_path), {'minutes': 3, 'seed': 1})
