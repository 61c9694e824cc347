"""Chromium without a window, driven over two pipes by its own protocol: no package is needed.

What a page does is observed: requests, messages of the console, errors. What a user does is real
input: a click goes through the same path as that of a mouse.
"""

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

import pytest

from vit_jax.web import runtime

NAMES = ('chromium', 'chromium-browser', 'google-chrome')
FLAGS = (
    '--headless',
    '--no-sandbox',
    '--disable-gpu',
    '--disable-quic',
    '--no-first-run',
    '--disable-background-networking',
    '--disable-component-update',
    '--disable-sync',
    '--disable-dev-shm-usage',
    '--hide-scrollbars',
    '--remote-debugging-pipe',
)
# Becomes the browser, which reads from 3 and writes to 4.
START = """import os, sys
ends = [os.dup(int(x)) for x in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
    os.set_inheritable(number, True)  # where it is that already, nothing was done
os.execv(sys.argv[3], sys.argv[3:])"""


def find():
    """The path of Chromium; the test is skipped without one, and fails where VIT_JAX_CI is set."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        (pytest.fail if os.environ.get('VIT_JAX_CI') else pytest.skip)(
            'needs Chromium: apt-get install chromium'
        )
    return path


def require_runtime():
    """onnxruntime-web is kept on this machine; else the test is skipped, and fails in CI."""
    if not runtime.kept_at().exists():
        (pytest.fail if os.environ.get('VIT_JAX_CI') else pytest.skip)(
            'needs onnxruntime-web: make .venv/onnxruntime-web'
        )


class Browser:
    """One page in a browser of its own; `requests`, `messages` and `errors` are what it did."""

    def __init__(self, process, to, back):
        self._process, self._to, self._back = process, to, back
        self._buffer, self._number = b'', 0
        self.requests, self.messages, self.errors, self._session = [], [], [], None
        target = self._call('Target.createTarget', url='about:blank')['targetId']
        self._session = self._call('Target.attachToTarget', targetId=target, flatten=True)[
            'sessionId'
        ]
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            self._call(f'{domain}.enable')
        # Workers wait until their requests are observed, too.
        self._call(
            'Target.setAutoAttach', autoAttach=True, waitForDebuggerOnStart=True, flatten=True
        )

    def open(self, address, width=1280, height=900, dark=False, touch=False):
        """Opens a file or a URL in a window of this size, and waits until all charts are drawn."""
        self._call(
            'Emulation.setDeviceMetricsOverride',
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=touch,
        )
        self.media(dark)
        url = address if '://' in str(address) else f'file://{address}'
        self._call('Page.navigate', url=url)
        self.until(
            "document.readyState === 'complete' && !document.querySelector("
            "'[data-chart]:not([data-drawn])')"
        )

    def media(self, dark):
        """Day or night."""
        self._call(
            'Emulation.setEmulatedMedia',
            features=[{'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}],
        )

    def evaluate(self, expression):
        """The value of an expression, a promise's when it is kept."""
        result = self._call(
            'Runtime.evaluate', expression=expression, returnByValue=True, awaitPromise=True
        )
        assert 'exceptionDetails' not in result, result['exceptionDetails']
        return result['result'].get('value')

    def until(self, expression, seconds=60):
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(f'Boolean({expression})'):
            assert time.monotonic() < end, (
                f'{expression} is not true after {seconds} s',
                self.errors,
                self.messages,
            )
            time.sleep(0.02)

    def place(self, selector, across=0.5, down=0.5):
        """Scrolls an element to the middle; where a share of its width and height is."""
        return self.evaluate(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: 'center', behavior: 'instant'}});
            const box = element.getBoundingClientRect();
            return [box.left + {across} * box.width, box.top + {down} * box.height];
        }})()""")

    def move(self, x, y):
        self._call('Input.dispatchMouseEvent', type='mouseMoved', x=x, y=y)

    def click(self, x, y):
        for kind in ('mousePressed', 'mouseReleased'):
            self._call('Input.dispatchMouseEvent', type=kind, x=x, y=y, button='left', clickCount=1)

    def press(self, key):
        code = {'Tab': 9, 'Enter': 13, 'ArrowRight': 39, 'ArrowDown': 40}[key]
        text = {'text': '\r'} if key == 'Enter' else {}
        for kind in ('keyDown', 'keyUp'):
            self._call(
                'Input.dispatchKeyEvent',
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **(text if kind == 'keyDown' else {}),
            )

    def choose(self, selector, path):
        """Chooses a file, as the window of a file input does."""
        found = self._call(
            'Runtime.evaluate', expression=f'document.querySelector({json.dumps(selector)})'
        )
        self._call('DOM.setFileInputFiles', files=[str(path)], objectId=found['result']['objectId'])

    def drop(self, x, y, path):
        """Drags a file from another window and drops it."""
        data = {'items': [], 'files': [str(path)], 'dragOperationsMask': 1}
        for kind in ('dragEnter', 'dragOver', 'drop'):
            self._call('Input.dispatchDragEvent', type=kind, x=x, y=y, data=data)

    def screenshot(self, path, whole=True):
        found = self._call('Page.captureScreenshot', format='png', captureBeyondViewport=whole)
        with open(path, 'wb') as file:
            file.write(base64.b64decode(found['data']))

    def _call(self, method, **params):
        number = self._send(method, params, self._session)
        while True:
            found = self._receive()
            if found.get('id') == number:
                assert 'error' not in found, (method, found['error'])
                return found['result']
            self._note(found)

    def _send(self, method, params, session):
        self._number += 1
        message = {'id': self._number, 'method': method, 'params': params}
        os.write(
            self._to,
            json.dumps(message | ({'sessionId': session} if session else {})).encode() + b'\0',
        )
        return self._number

    def _receive(self):
        while b'\0' not in self._buffer:
            part = os.read(self._back, 1 << 20)
            assert part, f'the browser ended with {self._process.wait()}'
            self._buffer += part
        message, self._buffer = self._buffer.split(b'\0', 1)
        return json.loads(message)

    def _note(self, event):
        params = event.get('params', {})
        if event.get('method') == 'Target.attachedToTarget':
            for method in ('Network.enable', 'Runtime.enable', 'Runtime.runIfWaitingForDebugger'):
                self._send(method, {}, params['sessionId'])  # the answers are not waited for
        elif event.get('method') == 'Network.requestWillBeSent':
            self.requests.append(params['request']['url'])
        elif event.get('method') == 'Runtime.consoleAPICalled':
            self.messages.append(
                (params['type'], [x.get('value', x.get('description')) for x in params['args']])
            )
        elif event.get('method') == 'Runtime.exceptionThrown':
            self.errors.append(params['exceptionDetails'])
        elif event.get('method') == 'Log.entryAdded' and params['entry']['level'] == 'error':
            self.errors.append(params['entry']['text'])


@contextlib.contextmanager
def served(folder):
    """The address of a folder while `python -m http.server` serves it."""
    process = subprocess.Popen(
        [
            sys.executable,
            '-u',
            '-m',
            'http.server',
            '0',
            '--bind',
            '127.0.0.1',
            '--directory',
            str(folder),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield re.search(r'http://[\d.:]+/', process.stdout.readline())[0]
    finally:
        process.terminate()
        process.wait(timeout=20)
        process.stdout.close()


@contextlib.contextmanager
def browser():
    """A Browser with an empty profile, which ends with the context."""
    path = find()
    (to_read, to), (back, back_write) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                sys.executable,
                '-c',
                START,
                str(to_read),
                str(back_write),
                path,
                *FLAGS,
                f'--user-data-dir={profile}',
            ],
            pass_fds=(to_read, back_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_read, back_write):
            os.close(end)
        try:
            yield Browser(process, to, back)
        finally:
            process.terminate()
            process.wait(timeout=20)
            os.close(to)
            os.close(back)
