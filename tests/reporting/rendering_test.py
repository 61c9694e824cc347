import base64
import hashlib
import re

from tests.support.errors import refused
from tests.support.pages import Read, made
from vit_jax.reporting import page, rendering


def test_policy_names_the_scripts():
    source = page.of_one(made())
    read = Read(source)
    policy = read.of('meta', **{'http-equiv': 'Content-Security-Policy'})[0]['content']
    for script in read.scripts[1:]:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_colours_have_contrast_in_light_and_dark_mode():
    """Contrast of text of at least 4.5, of lines of charts at least 3 (WCAG 2.2, 1.4.3, 1.4.11)."""
    day, night = (
        dict(re.findall(r'--(\w+): (#[0-9a-f]+);', block))
        for block in re.findall(
            r':root \{(.*?)\}', (rendering.HERE / 'report.css').read_text(), re.S
        )
    )

    def luminance(colour):
        digits = colour[1:] if len(colour) == 7 else ''.join(2 * x for x in colour[1:])
        rgb = [int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
        return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    assert day.keys() == night.keys()
    for colours in (day, night):
        for name, least in [(f'c{k}', 3) for k in range(8)] + [
            (name, 4.5) for name in ('ink', 'muted', 'accent', 'bad', 'good')
        ]:
            for behind in ('card', 'bg', 'soft') if least > 3 else ('card',):
                high, low = sorted((luminance(colours[x]) for x in (name, behind)), reverse=True)
                assert (high + 0.05) / (low + 0.05) >= least, (name, behind)


def test_numbers_as_text():
    assert [rendering.percent(0.98611), rendering.percent(None), rendering.percent(1, 1)] == [
        '98.61\xa0%',
        '–',
        '100.0\xa0%',
    ]
    assert [rendering.duration(x) for x in (4.4, 106, 6400)] == ['4 s', '1 min 46 s', '1 h 46 min']
    assert [rendering.value(x) for x in ([1, 2], '', None, False, 1e-4)] == [
        '1, 2',
        '–',
        '–',
        'False',
        '0.0001',
    ]


def test_missing_chart_library_is_refused(monkeypatch, tmp_path):
    rendering.library_code.cache_clear()
    (tmp_path / 'vl_convert.py').write_text('raise ImportError("no wheel for this machine")')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    with refused('missing') as error:
        page.of_one(made())
    assert 'no wheel for this machine): install it with pip install -e' in str(error.value)
    rendering.library_code.cache_clear()
