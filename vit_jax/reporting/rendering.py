"""One HTML file from a template and its values, with everything that the page needs."""

import base64
import datetime
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jinja2
from markupsafe import Markup

from vit_jax.errors import UserError

HERE = pathlib.Path(__file__).parent
# The browser enforces it: no requests, and no scripts except the scripts of this page.
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {}; "
    "base-uri 'none'; form-action 'none'"
)


def render(
    template: str,
    values: Mapping[str, Any],
    title: str,
    subtitle: str,
    sections: Mapping[str, str],
    data: Mapping[str, Any],
) -> str:
    """Returns a page.

    Args:
      template: the name of a template in this package that extends base.html.j2.
      values: the values of the template.
      title: the title of the page.
      subtitle: the text below the title.
      sections: the titles of the sections by the id of their elements.
      data: for the script of the page: `charts`, the specifications by id, and `explorer`, the
        data of the attention explorer, or None.
    """
    library = library_code()
    script = (HERE / 'report.js').read_text()
    hashes = []
    for code in (library, script):
        digest = hashlib.sha256(code.encode()).digest()
        hashes.append(f"'sha256-{base64.b64encode(digest).decode()}'")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        'percent': percent,
        'count': '{:,}'.format,
        'value': value,
        'quote': shlex.quote,
    }
    return environment.get_template(template).render(
        **values,
        title=title,
        subtitle=subtitle,
        sections=list(sections.items()),
        policy=POLICY.format(' '.join(hashes)),
        css=Markup((HERE / 'report.css').read_text()),
        library=Markup(library),
        script=Markup(script),
        version=importlib.metadata.version('vit_jax'),
        data=Markup(json.dumps(data, allow_nan=False).replace('<', '\\u003c')),
        made=f'{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC',
    )


@functools.cache
def library_code() -> str:
    """Returns Vega, Vega-Lite and Vega-Embed in one script, from vl-convert, without a network.

    A separate process runs vl-convert: its JavaScript engine ends the process if memory is scarce.

    Raises:
      UserError: if vl-convert is missing or fails.
    """
    code = (
        'import sys, vl_convert; sys.stdout.write(vl_convert.javascript_bundle(vl_version="6.4"))'
    )
    result = subprocess.run(
        [sys.executable, '-c', code],
        capture_output=True,
        text=True,
        encoding='utf-8',
        timeout=120,
        check=False,
    )
    if result.returncode == 0 and result.stdout:
        return result.stdout
    if result.returncode in (0, 1):
        reason = ''
        if result.stderr.strip():
            reason = result.stderr.strip().splitlines()[-1]
        raise UserError(
            f"the charts' library cannot be read ({reason}): install it with pip install -e "
            "'.[train]'.",
            kind='missing',
        )
    raise UserError(
        f"the charts' library ended with exit code {result.returncode}: it needs memory and much "
        'address space (ulimit -v unlimited).',
        kind='resource',
    )


def percent(share: float | None, digits: int = 2) -> str:
    """Returns 0.9861 as '98.61 %' with a no-break space, and None as '–'."""
    if share is None:
        return '–'
    return f'{100 * share:.{digits}f}\xa0%'


def duration(seconds: float) -> str:
    """Returns a time as '1 h 46 min', '3 min 5 s' or '12 s'."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    if hours:
        return f'{hours:,} h {minutes} min'
    if minutes:
        return f'{minutes} min {seconds} s'
    return f'{seconds} s'


def value(x: Any) -> str:
    """Returns a value of a config as on the command line; '–' for None, '' and []."""
    if x in (None, '', []):
        return '–'
    if isinstance(x, list):
        return ', '.join(map(str, x))
    return str(x)


def short(number):
    """Returns 1234567 as '1.2 M'."""
    for size, unit in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if number >= size:
            return f'{number / size:.1f} {unit}'
    return str(number)
