"""The decision, pure: messages in, instructions out. No socket, clock or asyncio; of the index, the protocol only."""
