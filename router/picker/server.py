"""gRPC server of the picker: ports, streams and health checks, on the event loop of the process.

grpc.aio on uvloop took 0.37 ms of CPU for a request of three messages, and threads of grpc 0.63 ms.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from options.addresses import bracket_host
from options.background_tasks import BackgroundTasks
from options.tls import ServerPem
from router.picker.ext_proc_stream import Phase, UnexpectedMessage
from router.picker.picker_client import Picker, PickerClient

log = logging.getLogger("router")

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
ALIVE = ("liveness",)
READY = ("", "readiness", "inference-extension", SERVICE)
"""Names of the health checks that tell whether the picker is ready."""
KEEPALIVE_MS = 20_000
STREAMS_MAX = 100_000
ENVELOPE_BYTES = 1 << 20
"""Room in a message besides the body of the request: for headers and for the framing of gRPC."""


class PickerServer:
    """gRPC server that answers Envoy's question which worker a request goes to, and health checks.

    Call `bind`, `start`, `refresh` a few times a second, and `stop`.
    """

    def __init__(self, picker: Picker, *, find_unready_reason: Callable[[], str | None]) -> None:
        """`find_unready_reason` returns why the router is not ready for requests; None if it is ready."""
        self._picker = picker
        self._find_unready_reason = find_unready_reason
        self._servers: list[grpc.aio.Server] = []
        self._health = health_aio.HealthServicer()
        self._is_reported_ready: bool | None = None
        """State of the health checks; None before the first report."""
        self._health_updates = BackgroundTasks()
        self._has_warned = False
        """Whether an unexpected message was logged: only the first one is."""
        self.port = 0
        self.open_stream_count = 0

    def bind(self, host: str, port: int, health_port: int, get_pem: Callable[[], ServerPem] | None) -> None:
        """Bind both ports; no request is answered until `start`. Raises OSError.

        `get_pem` is called at each TLS handshake, from any thread; None for no TLS.
        """
        picker_server = self._make_picker_server()
        health_server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        self.port = _bind(picker_server, host, port, get_pem, "--port")
        bound_health_port = _bind(health_server, host, health_port, None, "--health-port")
        self._servers = [picker_server, health_server]
        for server in self._servers:  # Envoy may ask for the health on either port
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        log.info("gRPC health checks on %s:%d", host, bound_health_port)

    def _make_picker_server(self) -> grpc.aio.Server:
        """Return the gRPC server that Envoy asks for workers. `_serve_stream` serves each of its streams."""
        message_bytes_max = self._picker.proxy.config.limits.body_bytes_max + ENVELOPE_BYTES
        options = (
            ("grpc.max_receive_message_length", min(message_bytes_max, 2**31 - 1)),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.http2.max_concurrent_streams", STREAMS_MAX),
            ("grpc.so_reuseport", 0),
        )
        server = grpc.aio.server(options=options)
        process_handler = grpc.stream_stream_rpc_method_handler(
            self._serve_stream, pb.ProcessingRequest.FromString, pb.ProcessingResponse.SerializeToString
        )
        service = grpc.method_handlers_generic_handler(SERVICE, {"Process": process_handler})
        server.add_generic_rpc_handlers((service,))
        return server

    async def start(self) -> None:
        """Start to answer requests."""
        for server in self._servers:
            await server.start()
        for name in ALIVE:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self.refresh(0.0)

    def refresh(self, now: float) -> None:
        """Update the health checks and the resolved host names. Call a few times a second."""
        self._picker.endpoints.refresh(now)
        is_ready = self._find_unready_reason() is None
        if is_ready is not self._is_reported_ready:
            self._is_reported_ready = is_ready
            self._health_updates.start(self._set_health(is_ready=is_ready))

    async def stop(self, grace_s: float) -> None:
        """Stop the server. Open streams have `grace_s` to end."""
        await self._set_health(is_ready=False)
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    async def _set_health(self, *, is_ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in READY:
            await self._health.set(name, status)

    async def _serve_stream(self, _request_iterator: Any, context: Any) -> None:
        """Serve one gRPC stream of Envoy, which opens one for each HTTP request that it asks about.

        An error ends this stream alone. The first argument is gRPC's: `context.read` reads messages faster.
        """
        client = PickerClient(self._picker, context.peer())
        self.open_stream_count += 1
        try:
            await _answer_messages(client, context)
        except (UnexpectedMessage, DecodeError) as error:
            self._picker.proxy.metrics.http_errors["400"] += 1
            if not self._has_warned:
                self._has_warned = True
                log.warning("the gateway sent an unexpected message: %s (only the first is logged)", error)
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            context.set_details(str(error))
        except Exception as error:  # noqa: BLE001  a fault in one request must not end the server
            self._picker.proxy.metrics.record_crash("picker", error)
            context.set_code(grpc.StatusCode.INTERNAL)
        finally:
            self.open_stream_count -= 1
            client.close()


async def _answer_messages(client: PickerClient, context: Any) -> None:
    """Read Envoy's messages about one request (its head, body and answer) one by one, and reply to each.

    Once the request is complete, the reply waits until the router has chosen a worker.
    """
    stream = client.stream
    while stream.phase is not Phase.OVER and not client.is_aborted:
        message = await context.read()
        if message is grpc.aio.EOF:
            return
        client.receive(message)
        if stream.phase is Phase.CHOOSING:
            await client.decision_made
        for response in stream.pop_responses():
            await context.write(response)


def _bind(server: grpc.aio.Server, host: str, port: int, get_pem: Callable[[], ServerPem] | None, flag: str) -> int:
    """Bind a server to an address and return the port. Raises OSError, which names the flag of the address."""
    address = f"{bracket_host(host)}:{port}"
    try:
        if get_pem is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, _make_credentials(get_pem)))
    except RuntimeError as error:
        raise OSError(f"{flag} {address}: cannot be used: {error}") from error


def _make_credentials(get_pem: Callable[[], ServerPem]) -> grpc.ServerCredentials:
    """Return TLS credentials whose files are read at each handshake. With authorities, clients need a certificate."""

    def get_configuration() -> grpc.ServerCertificateConfiguration:
        chain, key, client_ca = get_pem()
        return grpc.ssl_server_certificate_configuration([(key, chain)], client_ca)

    return grpc.dynamic_ssl_server_credentials(
        get_configuration(), get_configuration, require_client_authentication=get_pem().client_ca is not None
    )
