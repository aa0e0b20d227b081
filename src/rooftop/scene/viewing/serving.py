"""Serve the viewer's page and its pictures over HTTP.

Only a page that this server has sent may make requests. Three checks enforce this. First, each request must carry the
token of the printed address. The page sends the token in a header; pages of other origins would need a CORS permission
for that, which the server never gives. Second, the Host header must name this machine, not a domain that an attacker
could point at it. Third, the Origin header, if present, must be this server.
"""

from __future__ import annotations

import errno
import hmac
import io
import ipaddress
import json
import secrets
import socket
import sys
import time
import traceback
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from PIL import Image

from rooftop.errors import InputError, RooftopError
from rooftop.scene.viewing.asking import MOST_PIXELS, Asked, asked, content_of
from rooftop.scene.viewing.drawing import Drawing, Drawn, DroppedError
from rooftop.scene.viewing.modes import MODES, legend_of, modes_of
from rooftop.scene.viewing.recorded_paths import RecordedPath

MOST_BODY = {"/frame": 1 << 16, "/point": 1 << 16, "/path": 1 << 26}  # bytes
LEFT_UNREAD = 1 << 16  # bytes; if a request is refused, a longer body is left unread
IDLE_S = 60.0  # seconds after which a connection without requests is closed
SHARP = 90  # from this quality on, JPEG does not subsample colours, so that edges of false colours stay sharp
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address contains the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Viewer(ThreadingHTTPServer):
    """Serve one scene to any number of tabs, each with its own camera. When used as a context manager, the viewer stops
    the server at the end of the `with` block.

    Args:
        drawing: the drawing thread, which the server does not stop.
        host, port: address to listen on; port 0 chooses a free port.

    Attributes:
        token: token that each request must carry.

    Raises:
        InputError: the server cannot listen on the address.
    """

    daemon_threads = True

    def __init__(self, drawing: Drawing, host: str = "127.0.0.1", port: int = 0) -> None:
        self.drawing, self.token, self.host = drawing, secrets.token_urlsafe(24), host
        if not host:
            raise InputError("host is '': expected an address or a name of this machine, such as 127.0.0.1 or 0.0.0.0")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "expected a port from 0 to 65535"
            foreign = isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
            remedy = "--host takes an address or a name of this machine" if foreign else "try another --port, or 0"
            raise InputError(f"cannot listen at {host}, port {port}: {reason}; {remedy}") from None

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The URL of the viewer's web page, with the token."""
        name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self.host, self.host)
        return f"http://{f'[{name}]' if ':' in name else name}:{self.port}/?token={self.token}"

    def server_bind(self) -> None:
        """Bind as socketserver does. (http.server would also look up the machine's name, which may take seconds.)"""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of closed connections, because the viewer's web page cancels pictures that it no longer
        needs."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def is_named(self, host: str | None) -> bool:
        """Whether a Host header names this server.

        Any port is accepted, since a tunnel has its own port. "localhost" and loopback addresses are accepted. If the
        server does not listen on loopback only, this machine's names and all numeric addresses are accepted too. An
        attacker's DNS server can redirect neither: it does not resolve this machine's names, and addresses need no DNS.
        """
        beyond = not is_loopback(self.host)
        try:
            name = urlsplit(f"//{host or ''}").hostname or ""
        except ValueError:
            return False
        if name == "localhost" or (beyond and name in {self.host.lower(), *_names_of_this_machine()}):
            return True
        try:
            number = ipaddress.ip_address(name)
        except ValueError:
            return False
        return beyond or number.is_loopback


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on this host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@cache
def _names_of_this_machine() -> frozenset[str]:
    return frozenset(name.lower() for name in (socket.gethostname(), socket.getfqdn()))


def facts_of(drawing: Drawing) -> dict[str, Any]:
    """Data about the scene that the viewer's web page shows, as an object for JSON."""
    world, device = drawing.world, drawing.renderer.device
    return {
        "files": [mesh.path.name for mesh in world.meshes],
        "bytes": sum(mesh.size_bytes for mesh in world.meshes),
        "page_bytes": sum(int(mesh.page_lengths.sum()) for mesh in world.meshes),
        "pages": sum(mesh.pages for mesh in world.meshes),
        "streamed": drawing.renderer.pool_bytes is not None,
        "clusters": sum(int(mesh.meta["clusters"]) for mesh in world.meshes),
        "instances": len(world),
        "triangles": sum(int(mesh.meta["triangles"]) for mesh in world.meshes),
        "instanced_triangles": world.triangles,
        "levels": max(len(mesh.meta["levels"]) for mesh in world.meshes),
        "bounds": world.bounds().tolist(),
        "size": drawing.scene_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "kernels": drawing.renderer.kernels,
        "pixel_error": drawing.usual_error,  # not the renderer's current values, which the last picture has set
        "light": list(drawing.usual_light),
        "most_pixels": MOST_PIXELS,
        "modes": [
            {"name": name, "label": MODES[name].label, "meaning": MODES[name].meaning, "legend": legend_of(name)}
            for name in modes_of(world)
        ],
    }


def page(nonce: str) -> str:
    """Build the viewer's complete web page. Its style and script are inline; the Content-Security-Policy allows them by
    `nonce`."""
    files = resources.files("rooftop.scene.viewing") / "page_files"
    text = (files / "page.html").read_text(encoding="utf-8")
    for name in ("page.css", "page.js"):
        text = text.replace(f"{{{{ {name} }}}}", (files / name).read_text(encoding="utf-8"))
    return text.replace("{{ nonce }}", nonce)


def encoded(drawn: Drawn, format: str, quality: int) -> bytes:
    """Encode a picture as an image file."""
    file = io.BytesIO()
    image = Image.fromarray(drawn.image)
    if format == "jpeg":
        image.save(file, "JPEG", quality=quality, subsampling=0 if quality >= SHARP else 2)
    else:
        image.save(file, "PNG")
    return file.getvalue()


class _RefusedError(Exception):
    """Raised to refuse a request, with an HTTP status and an error message."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    server: Viewer
    protocol_version = "HTTP/1.1"  # keep-alive: a connection serves several pictures, one after another
    server_version, sys_version = "rooftop", ""
    timeout = IDLE_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer({"/": self._send_page, "/scene": self._send_facts})

    def do_POST(self) -> None:
        self._answer({"/frame": self._send_frame, "/point": self._send_point, "/path": self._send_path})

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because the address contains the token."""

    def _answer(self, routes: dict[str, Any]) -> None:
        self._unread = self.command == "POST"
        try:
            path, _, query = self.path.partition("?")
            self._check_sender(parse_qs(query).get("token", [""])[0] if path == "/" else None)
            if path not in routes:
                known = " or ".join(routes)
                raise _RefusedError(HTTPStatus.NOT_FOUND, f"there is no {self.command} {path!r:.80}: expected {known}")
            self._most_body = MOST_BODY.get(path, 0)
            routes[path]()
        except _RefusedError as error:
            self._send_error(error.status, str(error))
        except DroppedError:
            self._send(HTTPStatus.NO_CONTENT, "text/plain", b"")
        except InputError as error:
            self._send_error(HTTPStatus.BAD_REQUEST, str(error))
        except RooftopError as error:
            self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the browser has closed the connection, or sends or reads nothing any more
        except Exception as error:
            traceback.print_exc()
            self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")

    def _check_sender(self, token: str | None) -> None:
        """Raise _RefusedError unless the request comes from a page of this server, or from a person who has the
        server's address.

        Args:
            token: the token from the address; None if the Authorization header carries it.
        """
        host, origin = self.headers.get("Host"), self.headers.get("Origin")
        if not self.server.is_named(host):
            sentence = f"the Host header is {host!r:.80}: expected localhost or 127.0.0.1, as in the printed address"
            raise _RefusedError(HTTPStatus.FORBIDDEN, sentence)
        if origin is not None and origin != f"http://{host}":
            raise _RefusedError(
                HTTPStatus.FORBIDDEN, f"the Origin header is {origin!r:.80}: requests from other pages are refused"
            )
        if token is None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            sentence = "the token is missing or wrong: open the whole address that `rooftop scene view` has printed"
            raise _RefusedError(HTTPStatus.FORBIDDEN, sentence)

    def _content(self) -> Any:
        """Read and parse the JSON of a request's body."""
        length = self._body_bytes()
        if not 0 <= length <= self._most_body:
            given = self.headers.get("Content-Length", "")
            raise InputError(f"Content-Length is {given!r:.40}: expected a body of at most {self._most_body:,} bytes")
        self._unread = False
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionResetError
        return content_of(body)

    def _body_bytes(self) -> int:
        """The length of the body that the request states; -1 if the request states no valid length."""
        length = self.headers.get("Content-Length", "")
        return int(length) if length.isascii() and length.isdecimal() and len(length) < 16 else -1

    def _asked(self) -> Asked:
        return asked(self._content(), modes_of(self.server.drawing.world))

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data: blob:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", page(nonce).encode(), {"Content-Security-Policy": policy})

    def _send_facts(self) -> None:
        self._send_json(HTTPStatus.OK, facts_of(self.server.drawing))

    def _send_frame(self) -> None:
        wanted = self._asked()
        drawn = self.server.drawing.picture(wanted)
        began = time.perf_counter()
        file = encoded(drawn, wanted.format, wanted.quality)
        about = {
            "view": drawn.view.plain(),
            "size": wanted.size,
            "stats": drawn.stats,
            "ms": drawn.ms | {wanted.format: 1e3 * (time.perf_counter() - began)},
            "memory_bytes": drawn.memory_bytes,
        }
        self._send(HTTPStatus.OK, f"image/{wanted.format}", file, {"Rooftop-Frame": json.dumps(about)})

    def _send_point(self) -> None:
        point, view = self.server.drawing.point(self._asked())
        self._send_json(HTTPStatus.OK, {"point": point, "view": view.plain()})

    def _send_path(self) -> None:
        """Check a camera path that the user opened in the web page, as `rooftop scene render --path` does. Send the
        path back, with defaults filled in."""
        self._send_json(HTTPStatus.OK, RecordedPath.of_plain(self._content()).plain())

    def _send_json(self, status: HTTPStatus, content: Any) -> None:
        self._send(status, "application/json", json.dumps(content).encode())

    def _send_error(self, status: HTTPStatus, sentence: str) -> None:
        if self._unread:  # read the body first: a client that is still sending would not read the answer
            length = self._body_bytes()
            self.rfile.read(length if 0 < length <= LEFT_UNREAD else 0)
            self.close_connection = True
        self._send_json(status, {"error": sentence})

    def _send(self, status: HTTPStatus, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        try:
            self.send_response(status)
            for name, value in (HEADERS | (headers or {})).items():
                self.send_header(name, value)
            if status != HTTPStatus.NO_CONTENT:
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
