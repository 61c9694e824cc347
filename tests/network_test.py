"""Commands use the network only on request; these tests block all sockets."""

import socket

import pytest
from huggingface_hub import constants

from tests.support.datasets import write_images
from tests.support.errors import refused
from tests.support.runs import TINY
from vit_jax import convert, predict, weights


@pytest.fixture
def attempts(monkeypatch):
    """The addresses of all attempted connections, which fail."""
    addresses = []

    def refuse(*arguments, **_):
        addresses.append(arguments[-1])
        raise OSError('the network is blocked by the test')

    for name in ('connect', 'connect_ex', 'sendto'):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ('create_connection', 'create_server', 'getaddrinfo', 'gethostbyname'):
        monkeypatch.setattr(socket, name, refuse)
    return addresses


@pytest.mark.slow
def test_train_predict_and_convert_without_a_network(attempts, run_main, tmp_path):
    workdir = tmp_path / 'run'
    result = run_main(workdir, fields=TINY | {'num_steps': 6, 'eval_every': 6})
    assert result.returncode == 0, result.stderr
    write_images(tmp_path / 'images', ['ant'], 1)
    assert predict.main([f'--workdir={workdir}', '--json', str(tmp_path / 'images')]) == 0
    assert convert.main([str(workdir), str(tmp_path / 'x.safetensors'), '--to=vit_jax']) == 0
    assert weights.load(str(tmp_path / 'x.safetensors')).num_classes == 10
    assert not attempts


def test_offline_mode_of_the_hub_makes_no_connection(attempts, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    with refused('unreadable', file='hf:someone/flowers'):
        weights.load('hf:someone/flowers')
    assert not attempts
