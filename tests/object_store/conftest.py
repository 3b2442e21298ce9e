"""An S3-compatible server in this process: moto's, behind a place for faults."""

import os
import threading
from collections.abc import Callable

import pytest

server = pytest.importorskip("moto.server", reason="expected moto (test-object-store)")
serving = pytest.importorskip("werkzeug.serving")


class Faults:
    """A WSGI application in front of moto's; `fault` may answer in its place.

    Attributes:
      fault: called with the environment of each request; returns a status and a body
        to answer with, or None to pass it on.
      requests: method and path of each request.
    """

    def __init__(self, app):
        self._app = app
        self.fault: Callable | None = None
        self.requests: list[tuple[str, str]] = []

    def __call__(self, environ, start_response):
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        answer = self.fault and self.fault(environ)
        if not answer:
            return self._app(environ, start_response)
        status, body = answer
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        headers = [("Content-Length", str(len(body))), ("ETag", '"0"')]
        start_response(status, headers)
        return [body]


@pytest.fixture(scope="session")
def s3():
    """The server; the environment leads to it, with a bucket named ``bucket``."""
    app = Faults(server.DomainDispatcherApplication(server.create_backend_app))
    http = serving.make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    held = dict(os.environ)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{http.server_port}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "AKIAOFTHETEST",
        "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    boto3 = pytest.importorskip("boto3")
    boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"]).create_bucket(
        Bucket="bucket"
    )
    yield app
    http.shutdown()
    http.server_close()
    os.environ.clear()
    os.environ |= held


@pytest.fixture(autouse=True)
def no_fault(s3):
    s3.fault = None
    s3.requests.clear()
    yield
    s3.fault = None
