"""Raw bytes to both sides of a feature server, as somebody sends them who has no token and no manners."""

import contextlib
import http.client
import json
import socket
import threading
from urllib.parse import urlsplit

import zmq

from modelopt_eagle.errors import StreamError
from modelopt_eagle.features.stream.target_server import TargetServer

AUX = (1, 3, 4)


@contextlib.contextmanager
def serving(target, **options):
    """A server in a thread of this process."""
    server = TargetServer(target, AUX, **options)

    def serve():
        with contextlib.suppress(StreamError):  # its mailbox has ended
            server.serve_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


def send_frames(port, frames, wait=2.0):
    """One ZeroMQ message; the first frame of the answer as an object, None if there is none in time."""
    with zmq.Context.instance().socket(zmq.DEALER) as socket_:
        socket_.setsockopt(zmq.LINGER, 0)
        socket_.connect(f"tcp://127.0.0.1:{port}")
        socket_.send_multipart(frames)
        return json.loads(socket_.recv_multipart()[0]) if socket_.poll(wait * 1000) else None


def connect(url):
    """A TCP connection to a server's HTTP side."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=30)


def ask(url, method="GET", path="/health", body=None, headers=None):
    """Status and answer of one request."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def send_bytes(url, content, wait=10.0):
    """What comes back on a connection that sends some bytes and then nothing more."""
    with connect(url) as client:
        client.sendall(content)
        client.settimeout(wait)
        answer = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while part := client.recv(65536):
                answer += part
                if b"\r\n\r\n" in answer:
                    break
        return answer
