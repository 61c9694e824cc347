"""Names, lists and uploads of repositories; the Hub is replaced, and nothing is sent."""

import os

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from tests.support.errors import refused
from vit_jax.publishing import repository

NAME = 'my-lab/flowers'


class Hub:
    """Stands for huggingface_hub.HfApi, and keeps what it is asked for."""

    calls = []
    files = ['.gitattributes']
    error = None

    def __init__(self, token):
        self.calls.append(('token', token))

    def create_repo(self, name, exist_ok):
        self.calls.append(('create', name, exist_ok))
        if self.error:
            raise self.error
        return f'https://hub/{name}'

    def list_repo_files(self, name):
        return self.files

    def upload_folder(self, *, repo_id, folder_path, commit_message, delete_patterns):
        assert set(delete_patterns) == set(repository.FILES)
        self.calls.append(('upload', repo_id, folder_path, sorted(os.listdir(folder_path))))


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(Hub, 'calls', [])
    monkeypatch.setattr(huggingface_hub, 'HfApi', Hub)
    monkeypatch.setattr(huggingface_hub, 'get_token', lambda: 'secret')
    return Hub


@pytest.fixture
def folder(tmp_path):
    for name in ('README.md', 'config.json', 'model.safetensors'):
        (tmp_path / name).write_text(name)
    return str(tmp_path)


def test_the_folder_goes_to_the_repository(hub, folder):
    assert repository.upload(folder, NAME, overwrite=False) == f'https://hub/{NAME}'
    assert hub.calls == [
        ('token', 'secret'),
        ('create', NAME, True),
        ('upload', NAME, folder, ['README.md', 'config.json', 'model.safetensors']),
    ]


@pytest.mark.parametrize('file', ['README.md', 'preprocessor_config.json'])
def test_files_of_the_repository_are_replaced_only_on_request(file, hub, folder, monkeypatch):
    monkeypatch.setattr(hub, 'files', ['.gitattributes', file])
    with refused('conflict', field='--push', file=folder, value=NAME) as error:
        repository.upload(folder, NAME, overwrite=False)
    assert f'has {file} already' in str(error.value)
    assert [call[0] for call in hub.calls] == ['token', 'create']
    repository.upload(folder, NAME, overwrite=True)
    assert hub.calls[-1][0] == 'upload'


def test_without_a_token_the_error_says_how_to_get_one(hub, folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub, 'get_token', lambda: None)
    with refused('missing', field='HF_TOKEN', file=folder) as error:
        repository.upload(folder, NAME, overwrite=False)
    assert 'hf auth login' in str(error.value)
    assert f'hf upload {NAME} {folder} .' in str(error.value)
    assert not hub.calls


class Response:
    """What the message of an HTTP error needs."""

    def __init__(self, status_code):
        self.status_code = status_code
        self.headers = {}
        self.request = None


@pytest.mark.parametrize('status', [401, 403])
def test_a_token_that_may_not_write_is_an_error_about_the_token(status, hub, folder, monkeypatch):
    error = errors.HfHubHTTPError('Forbidden\nmore', response=Response(status))
    monkeypatch.setattr(hub, 'error', error)
    with refused('value', field='HF_TOKEN', file=folder, value=NAME) as caught:
        repository.upload(folder, NAME, overwrite=False)
    assert 'write access to my-lab' in str(caught.value)


@pytest.mark.parametrize(
    'error',
    [
        OSError('no route to host'),
        errors.HTTPError('no route to host'),
        errors.OfflineModeIsEnabled('no route to host'),
        errors.HfHubHTTPError('no route to host', response=Response(500)),
    ],
    ids=['system', 'http', 'offline', 'server'],
)
def test_a_failed_upload_is_one_message_and_the_folder_stays(error, hub, folder, monkeypatch):
    monkeypatch.setattr(hub, 'error', error)
    before = sorted(os.listdir(folder))
    with refused('resource', field='--push', file=folder, value=NAME) as caught:
        repository.upload(folder, NAME, overwrite=False)
    assert 'failed (no route to host)' in str(caught.value)
    assert f'The folder {folder} is written and ready' in str(caught.value)
    assert sorted(os.listdir(folder)) == before


def test_offline_mode_of_the_library_is_such_an_error(folder, monkeypatch):
    """With the library's own code, which makes no connection."""
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr(huggingface_hub, 'get_token', lambda: 'secret')
    with refused('resource', field='--push', file=folder, value=NAME):
        repository.upload(folder, NAME, overwrite=False)


@pytest.mark.parametrize('name', [NAME, 'a/b.c_d-1'])
def test_valid_names_are_accepted(name):
    repository.check_name(name)


@pytest.mark.parametrize(
    'name', ['flowers', '', '/flowers', 'my-lab/', 'a/b/c', 'my lab/x', 'a/b--c', 'a/x.git', 'ä/b']
)
def test_invalid_names_are_refused(name):
    with refused('value', field='--push', value=name):
        repository.check_name(name)


def test_the_list_has_each_file_with_its_size_and_address(folder):
    lines = repository.listing(folder, NAME).splitlines()
    assert [line.split() for line in lines] == [
        [name, str(len(name)), 'bytes', huggingface_hub.hf_hub_url(NAME, name)]
        for name in ('README.md', 'config.json', 'model.safetensors')
    ]
