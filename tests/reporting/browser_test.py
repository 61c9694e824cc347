"""Pages in Chromium: drawing, requests, mouse, keyboard, dark mode and a narrow screen."""

import json
import re

import numpy as np
import pytest

from tests.support.browser import browser
from tests.support.pages import made, read_sheet, write_workdir
from vit_jax import reporting
from vit_jax.files import write_text
from vit_jax.reporting import page

pytestmark = pytest.mark.slow
WIDTH = 'document.documentElement.scrollWidth'


@pytest.fixture(scope='module')
def chromium():
    with browser() as started:
        yield started


@pytest.fixture(scope='module')
def pages(tmp_path_factory):
    """Writes pages: one run, a run with 1,000 classes, several runs, and a sweep of 19 runs."""
    folder = tmp_path_factory.mktemp('pages')
    longer = made(names=[f'a kind of plant with a longer name, {k}' for k in range(12)])
    for name, html in (
        ('one', page.of_one(longer)),
        ('classes', page.of_one(made(num_classes=1000))),
        ('several', page.of_several([made(workdir=f'runs/{k}') for k in 'abc'])),
    ):
        write_text(str(folder / f'{name}.html'), html)
    notes = {
        str(write_workdir(folder / f'lr=0.0{k}', accuracies=[k / 20] if k < 19 else [])): note
        for k, note in enumerate([*[''] * 17, 'the best', 'diverges'], 1)
    }
    reporting.conclude_all(str(folder), notes)
    (folder / 'report.html').rename(folder / 'sweep.html')
    return folder


@pytest.mark.parametrize('name', ['one', 'classes', 'several', 'sweep'])
@pytest.mark.parametrize(('width', 'dark'), [(1280, False), (390, True)])
def test_everything_is_drawn_without_requests(name, width, dark, chromium, pages):
    chromium.requests.clear()
    chromium.open(pages / f'{name}.html', width=width, dark=dark, touch=width < 500)
    pictures = chromium.evaluate('[...document.images].map((i) => i.complete && i.naturalWidth)')
    assert all(pictures)
    charts = chromium.evaluate(
        "[...document.querySelectorAll('[data-chart]')].map((e) => e.querySelectorAll('svg path, "
        "svg rect, svg line').length)"
    )
    assert charts
    assert min(charts) > 5
    assert chromium.evaluate(WIDTH) <= width  # the page itself does not scroll sideways
    assert {url for url in chromium.requests if not url.startswith('data:')} == {
        f'file://{pages}/{name}.html'
    }
    assert (chromium.messages, chromium.errors) == ([], [])


def test_dark_mode_has_other_colours(chromium, pages):
    found = {}
    for dark in (False, True):
        chromium.open(pages / 'one.html', dark=dark)
        found[dark] = chromium.evaluate(
            "['body', '[data-chart] .mark-line path', '[data-chart] .role-axis-label text']"
            '.map((name) => getComputedStyle(document.querySelector(name)))'
            '.map((s, k) => [s.backgroundColor, s.stroke, s.fill][k])'
        )
    assert all(a != b and re.match('rgb', a) for a, b in zip(*found.values(), strict=True))
    chromium.open(pages / 'one.html', dark=False)  # charts follow a change without a new drawing
    chromium.media(dark=True)
    assert (
        chromium.evaluate(
            "getComputedStyle(document.querySelector('[data-chart] .mark-line path')).stroke"
        )
        == found[True][1]
    )


@pytest.mark.parametrize('dark', [False, True])
def test_nineteen_runs_have_different_colours(dark, chromium, pages):
    """The lines have the colours of the legend."""
    chromium.open(pages / 'sweep.html', dark=dark)
    legend = chromium.evaluate(
        "[...document.querySelectorAll('.legend li')].map("
        "(e) => getComputedStyle(e, '::before').backgroundColor)"
    )
    assert len(set(legend)) == 19
    points = chromium.evaluate(
        "[...document.querySelectorAll('#curve-0 .mark-symbol path')].map("
        '(e) => getComputedStyle(e).fill)'
    )
    assert points == legend[:18]  # the last run has no line


def test_policy_blocks_requests_and_scripts(chromium, pages):
    chromium.open(pages / 'one.html')
    blocked = chromium.evaluate("""new Promise((done) => {
        const found = [];
        document.addEventListener('securitypolicyviolation', (event) => {
            found.push(event.effectiveDirective);
            if (found.length === 3) done(found.sort());
        });
        fetch('http://127.0.0.1:9/').catch(() => {});
        new Image().src = 'http://127.0.0.1:9/x.png';
        const script = document.createElement('script');
        script.text = 'window.hacked = 1';
        document.head.append(script);
    })""")
    assert blocked == ['connect-src', 'img-src', 'script-src-elem']
    assert chromium.evaluate('window.hacked') is None
    chromium.errors.clear()


def labels(chromium):
    return chromium.evaluate(
        "[...document.querySelectorAll('.heads canvas')].map((c) => c.getAttribute('aria-label'))"
    )


def expected(photo, layer, query):
    """Returns the expected label of each head, from the picture of the layer."""
    rows, columns = photo['keys']
    maps = read_sheet(photo['layers'][layer - 1], 1 + rows * columns, 3, (rows, columns))[:, query]
    found = []
    for head, values in enumerate(maps, 1):
        row, column = np.unravel_index(values.argmax(), values.shape)
        found.append(
            f'Head {head} attends most to row {row + 1}, column {column + 1}: '
            f'{100 * values.max():.1f} %'
        )
    return found


def test_explorer_answers_a_click_within_100_ms(chromium, pages):
    """The maps of the clicked patch are on the screen within 100 ms."""
    chromium.open(pages / 'one.html')
    data = json.loads(chromium.evaluate("document.getElementById('data').textContent"))
    photo = data['explorer']['photos'][0]
    assert labels(chromium) == expected(photo, 1, 1 + 2 * 6 + 3)  # the middle patch comes first
    chromium.evaluate("""void ['click', 'input'].forEach((kind) => addEventListener(kind, () => {
        const begin = performance.now();
        window.waited = null;
        requestAnimationFrame(() => setTimeout(() => {
            window.waited = performance.now() - begin;
        }));
    }, true))""")
    waits = []
    drawings = set()
    for row, column in ((0, 0), (3, 5), (1, 2), (2, 4), (3, 0)):
        chromium.click(*chromium.place('.stage', (column + 0.5) / 6, (row + 0.5) / 4))
        chromium.until('window.waited')
        waits.append(chromium.evaluate('window.waited'))
        assert labels(chromium) == expected(photo, 1, 1 + row * 6 + column)
        drawings.add(chromium.evaluate("document.querySelector('.heads canvas').toDataURL()"))
    assert sorted(waits)[len(waits) // 2] < 100, waits
    assert len(drawings) == 5
    assert 'Layer 1, query the patch in row 4, column 1. It attends most to: head 1: row' in (
        chromium.evaluate("document.querySelector('.spoken').textContent")
    )
    chromium.click(*chromium.place('.photos button:nth-of-type(2)'))
    assert labels(chromium) == expected(data['explorer']['photos'][1], 1, 1 + 3 * 6)
    chromium.click(*chromium.place('.token'))
    assert labels(chromium) == expected(data['explorer']['photos'][1], 1, 0)
    assert chromium.evaluate("document.querySelector('.patch').hidden")


def test_explorer_works_with_the_keyboard(chromium, pages):
    chromium.open(pages / 'one.html')
    data = json.loads(chromium.evaluate("document.getElementById('data').textContent"))
    photo = data['explorer']['photos'][0]
    chromium.press('Tab')
    assert chromium.evaluate('document.activeElement.textContent') == 'Skip to the content'
    for _ in range(200):
        chromium.press('Tab')
        if chromium.evaluate("document.activeElement.classList.contains('stage')"):
            break
    assert chromium.evaluate('getComputedStyle(document.activeElement).outlineStyle') == 'solid'
    for key in ('ArrowRight', 'ArrowDown', 'ArrowDown', 'ArrowDown'):  # the last row is the limit
        chromium.press(key)
    assert labels(chromium) == expected(photo, 1, 1 + 3 * 6 + 4)
    chromium.press('Tab')
    assert chromium.evaluate('document.activeElement.id') == 'layer'
    chromium.press('ArrowRight')
    assert labels(chromium) == expected(photo, 2, 1 + 3 * 6 + 4)
    assert chromium.evaluate("document.querySelector('.number').textContent") == '2'


def test_tooltip_of_a_curve_has_its_values(chromium, pages):
    chromium.open(pages / 'one.html')
    chromium.move(*chromium.place('#curve-0', 0.5, 0.5))
    chromium.move(*chromium.place('#curve-0', 0.97, 0.5))
    chromium.until("document.querySelector('#vg-tooltip-element.visible')")
    text = chromium.evaluate("document.querySelector('#vg-tooltip-element').innerText")
    assert re.split(r'\s+', text.strip()) == [
        'step',
        '20',
        'training',
        '0.5000',
        'evaluation',
        '0.4321',
    ]


def test_headers_sort_tables(chromium, pages):
    chromium.open(pages / 'classes.html')
    column = (
        "[...document.querySelectorAll('#predictions > .tall tbody tr')]"
        '.map((row) => row.cells[{}].textContent)'
    )
    header = '#predictions > .tall th:nth-of-type({}) button'
    chromium.click(*chromium.place(header.format(3)))
    numbers = [int(x) for x in chromium.evaluate(column.format(2))]
    assert numbers == sorted(numbers)
    chromium.evaluate(f"document.querySelector('{header.format(3)}').focus()")
    chromium.press('Enter')
    numbers = [int(x) for x in chromium.evaluate(column.format(2))]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[-1]
    sort = chromium.evaluate(
        "[...document.querySelectorAll('#predictions > .tall th[aria-sort]')]"
        '.map((th) => [th.innerText, th.ariaSort])'
    )
    assert [(name.split()[0], way) for name, way in sort] == [('evaluated', 'descending')]


def test_names_cannot_run_scripts(chromium, tmp_path):
    evil = [
        '<script>window.hacked = 1</script>',
        '"><img src=x onerror="window.hacked = 1">',
        "'-window.hacked=1-'",
    ]
    write_text(str(tmp_path / 'evil.html'), page.of_one(made(names=evil, name=evil[1])))
    chromium.open(tmp_path / 'evil.html')
    assert chromium.evaluate('window.hacked') is None
    assert chromium.evaluate("document.querySelector('h1').textContent") == evil[1]
    assert chromium.errors == []
