"""JSON schemas that clients send: what they say of types and values, and what of them a compiler can follow."""
