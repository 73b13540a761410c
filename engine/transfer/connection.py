"""One authenticated connection between two engines: whole frames, on an event loop. Both ends know the fleet's key.

The server sends a nonce, the client another one and a proof, the server a proof. A frame is two lengths (4 bytes each,
big-endian), a msgpack message, a payload, and an HMAC-SHA256 of all that under a key of the connection and the
direction. The HMAC also covers the number of the frame, so none can be repeated, left out or moved. No message is
decoded before its HMAC is checked. The payload is the content of blocks, one after the other, of any kind: attention,
windows, states. Waits are bounded by the callers.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import struct
from typing import NamedTuple

import msgspec

from engine.transfer.messages import Answer, Bytes, Question, TransferError

CONNECT_S_MAX = 2.0
"""Seconds to look a name up, again for a connection, and again for its greeting."""
MESSAGE_BYTES_MAX = 16 << 20
"""Bytes of a message without its payload: the hashes of a prompt of a million blocks fit."""
GREETING = b"blockcast-kv-02\n"
"""First bytes of a connection, from the server. Another version of the protocol has another number."""
NONCE_BYTES = 32
MAC_BYTES = 32
_LENGTHS = struct.Struct(">II")
_FRAME_NUMBER = struct.Struct(">Q")


def encode_lengths(message: Bytes, payload: Bytes) -> bytes:
    """Return the first bytes of a frame: the sizes of its message and of its payload."""
    return _LENGTHS.pack(len(message), len(payload))


def decode_lengths(data: Bytes, payload_bytes_max: int) -> tuple[int, int]:
    """Return the bytes of a frame's message and of its payload. Raises TransferError if the reader has no room."""
    message_bytes, payload_bytes = _LENGTHS.unpack(data)
    if message_bytes > MESSAGE_BYTES_MAX or payload_bytes > payload_bytes_max:
        raise TransferError("malformed", f"a frame of {message_bytes} and {payload_bytes} bytes")
    return message_bytes, payload_bytes


class FrameSigner:
    """Signs or checks the frames that go one way over a connection, by HMACs that cover the frames' numbers.

    So no frame can be forged, repeated, left out or moved.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._frame_count = 0

    def sign(self, message: Bytes, payload: Bytes) -> bytes:
        """Return the HMAC of the next frame."""
        mac = hmac.new(self._key, _FRAME_NUMBER.pack(self._frame_count), "sha256")
        self._frame_count += 1
        for part in (encode_lengths(message, payload), message, payload):
            mac.update(part)
        return mac.digest()

    def check(self, mac: Bytes, message: Bytes, payload: Bytes) -> None:
        """Check the HMAC of the next frame. Raises TransferError if it is wrong."""
        if not hmac.compare_digest(mac, self.sign(message, payload)):
            raise TransferError("malformed", "a frame whose HMAC is wrong")


class ConnectionKeys(NamedTuple):
    """Proofs and keys that both ends of a connection derive from the fleet's key and their nonces."""

    client_proof: bytes
    server_proof: bytes
    client_frame_key: bytes
    server_frame_key: bytes

    @staticmethod
    def derive(fleet_key: bytes, server_nonce: Bytes, client_nonce: Bytes) -> ConnectionKeys:
        nonces = bytes(server_nonce) + bytes(client_nonce)
        labels = (b"client proof", b"server proof", b"client frames", b"server frames")
        return ConnectionKeys(*(hmac.digest(fleet_key, label + b"\0" + nonces, "sha256") for label in labels))


class Connection:
    """Sends and receives frames over a connected, non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
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
        """Prove to a server that this end knows the fleet's key, and check that the server does.

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
        lengths = await self._receive_bytes(_LENGTHS.size)
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
