"""JSON schemas that clients send: what they say of types and values. Knows no markup and no compiler. Pure."""
