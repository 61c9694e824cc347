"""Chromium without a window, controlled by its own protocol over two pipes, without a package.

The Browser records the requests, console messages and errors of a page. It sends real input: a
click takes the same path as a click with the mouse.
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
# This process becomes the browser, which reads from descriptor 3 and writes to 4.
START = """import os, sys
ends = [os.dup(int(x)) for x in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
    os.set_inheritable(number, True)  # dup2 does nothing if the numbers are equal
os.execv(sys.argv[3], sys.argv[3:])"""


def find():
    """The path of Chromium. Without it, the test is skipped, or fails if VIT_JAX_CI is set."""
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    return _skip_or_fail('needs Chromium: apt-get install chromium')


def require_runtime():
    """Skips the test without onnxruntime-web, or fails it if VIT_JAX_CI is set."""
    if not runtime.kept_at().exists():
        _skip_or_fail('needs onnxruntime-web: make .venv/onnxruntime-web')


def _skip_or_fail(reason):
    if os.environ.get('VIT_JAX_CI'):
        pytest.fail(reason)
    pytest.skip(reason)


class Browser:
    """A browser with one page, which records its `requests`, console `messages` and `errors`."""

    def __init__(self, process, to, back):
        self._process = process
        self._to = to
        self._back = back
        self._buffer = b''
        self._number = 0
        self._session = None
        self.requests = []
        self.messages = []
        self.errors = []
        target = self._call('Target.createTarget', url='about:blank')['targetId']
        answer = self._call('Target.attachToTarget', targetId=target, flatten=True)
        self._session = answer['sessionId']
        for domain in ('Page', 'Runtime', 'Log', 'Network'):
            self._call(f'{domain}.enable')
        # Workers start only after the recording of their requests.
        self._call(
            'Target.setAutoAttach', autoAttach=True, waitForDebuggerOnStart=True, flatten=True
        )

    def open(self, address, width=1280, height=900, dark=False, touch=False):
        """Opens a file or a URL in a window of this size and waits for all charts."""
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
        """Sets the light or the dark colour scheme."""
        self._call(
            'Emulation.setEmulatedMedia',
            features=[{'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}],
        )

    def evaluate(self, expression):
        """The value of an expression; waits for the value of a promise."""
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
        """Scrolls an element to the middle and returns [x, y] of a point in it.

        Args:
          selector: of the element.
          across: the share of its width.
          down: the share of its height.
        """
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
        """Chooses a file in a file input."""
        answer = self._call(
            'Runtime.evaluate', expression=f'document.querySelector({json.dumps(selector)})'
        )
        element = answer['result']['objectId']
        self._call('DOM.setFileInputFiles', files=[str(path)], objectId=element)

    def drop(self, x, y, path):
        """Drags a file from another window and drops it."""
        data = {'items': [], 'files': [str(path)], 'dragOperationsMask': 1}
        for kind in ('dragEnter', 'dragOver', 'drop'):
            self._call('Input.dispatchDragEvent', type=kind, x=x, y=y, data=data)

    def screenshot(self, path, whole=True):
        answer = self._call('Page.captureScreenshot', format='png', captureBeyondViewport=whole)
        with open(path, 'wb') as file:
            file.write(base64.b64decode(answer['data']))

    def _call(self, method, **params):
        number = self._send(method, params, self._session)
        while True:
            message = self._receive()
            if message.get('id') == number:
                assert 'error' not in message, (method, message['error'])
                return message['result']
            self._record(message)

    def _send(self, method, params, session):
        self._number += 1
        message = {'id': self._number, 'method': method, 'params': params}
        if session:
            message['sessionId'] = session
        os.write(self._to, json.dumps(message).encode() + b'\0')
        return self._number

    def _receive(self):
        while b'\0' not in self._buffer:
            part = os.read(self._back, 1 << 20)
            assert part, f'the browser ended with {self._process.wait()}'
            self._buffer += part
        message, self._buffer = self._buffer.split(b'\0', 1)
        return json.loads(message)

    def _record(self, event):
        params = event.get('params', {})
        if event.get('method') == 'Target.attachedToTarget':
            for method in ('Network.enable', 'Runtime.enable', 'Runtime.runIfWaitingForDebugger'):
                self._send(method, {}, params['sessionId'])  # without waiting for the answer
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
    to_read, to = os.pipe()
    back, back_write = os.pipe()
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
