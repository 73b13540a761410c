"""One authenticated connection between two engines: whole frames, on an event loop. Both ends know the fleet's key.

The server sends a nonce, the client another one and a proof, the server a proof. No message is decoded before its HMAC
is checked. Waits are bounded by the callers.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket

import msgspec

from engine.transfer.messages import (
    GREETING,
    LENGTHS_BYTES,
    MAC_BYTES,
    NONCE_BYTES,
    Answer,
    Bytes,
    ConnectionKeys,
    FrameSigner,
    Question,
    TransferError,
    decode_lengths,
    encode_lengths,
)

CONNECT_S_MAX = 2.0
"""Seconds to look a name up, again for a connection, and again for its greeting."""


class Connection:
    """Sends and receives frames over a connected, non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._send_signer = self._receive_signer = FrameSigner(b"")

    async def greet_as_server(self, fleet_key: bytes) -> None:
        """Prove to a client that this end knows the fleet's key, and check that the client does.

        Raises TransferError if the client does not know the key, OSError if it leaves.
        """
        server_nonce = os.urandom(NONCE_BYTES)
        await self._send_bytes(GREETING + server_nonce)
        reply = await self._receive_bytes(NONCE_BYTES + MAC_BYTES)
        keys = ConnectionKeys.derive(fleet_key, server_nonce, reply[:NONCE_BYTES])
        if not hmac.compare_digest(reply[NONCE_BYTES:], keys.client_proof):
            raise TransferError("unauthenticated", "the client does not know the fleet's key")
        await self._send_bytes(keys.server_proof)
        self._send_signer = FrameSigner(keys.server_frame_key)
        self._receive_signer = FrameSigner(keys.client_frame_key)

    async def greet_as_client(self, fleet_key: bytes) -> None:
        """Authenticate both ends of a new connection by the fleet's key, as the client, without sending the key.

        The server sends a greeting with a nonce, this end a nonce and a proof of the key, and the server its proof.
        Raises TransferError if the server does not know the key, refuses ours, or speaks another protocol.
        """
        greeting = await self._receive_bytes(len(GREETING) + NONCE_BYTES)
        if not greeting.startswith(GREETING):
            raise TransferError("incompatible", "the source speaks another version of the protocol, or another one")
        server_nonce, client_nonce = greeting[len(GREETING) :], os.urandom(NONCE_BYTES)
        keys = ConnectionKeys.derive(fleet_key, server_nonce, client_nonce)
        await self._send_bytes(client_nonce + keys.client_proof)
        try:
            server_proof = await self._receive_bytes(MAC_BYTES)
        except ConnectionError as error:
            raise TransferError("unauthenticated", "the source refuses this engine's key") from error
        if not hmac.compare_digest(server_proof, keys.server_proof):
            raise TransferError("unauthenticated", "the source does not know the fleet's key")
        self._send_signer = FrameSigner(keys.client_frame_key)
        self._receive_signer = FrameSigner(keys.server_frame_key)

    async def send(self, message: Question | Answer, payload: Bytes = b"") -> None:
        """Send one frame."""
        data = msgspec.msgpack.encode(message)
        mac = self._send_signer.sign(data, payload)
        await self._send_bytes(encode_lengths(data, payload) + data)
        if payload:
            await self._send_bytes(payload)
        await self._send_bytes(mac)

    async def receive(self, payload_bytes_max: int) -> tuple[bytearray, bytearray]:
        """Return the message, not decoded, and the payload of the next frame. Raises TransferError, ConnectionError."""
        lengths = await self._receive_bytes(LENGTHS_BYTES)
        message_bytes, payload_bytes = decode_lengths(lengths, payload_bytes_max)
        data = await self._receive_bytes(message_bytes)
        payload = await self._receive_bytes(payload_bytes)
        self._receive_signer.check(await self._receive_bytes(MAC_BYTES), data, payload)
        return data, payload

    def close(self) -> None:
        self._sock.close()

    async def _send_bytes(self, data: Bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def _receive_bytes(self, count: int) -> bytearray:
        """Receive exactly `count` bytes. Raises ConnectionError if the other end closes before."""
        data = bytearray(count)
        received_view = memoryview(data)
        loop = asyncio.get_running_loop()
        while received_view:
            received_count = await loop.sock_recv_into(self._sock, received_view)
            if not received_count:
                raise ConnectionError("the other end has closed the connection")
            received_view = received_view[received_count:]
        return data
